"""Embedding tables: how rows are stored, looked up, sharded and cached. Independent of graphs and of the fabric."""
