"""Embedding tables: how rows are stored, looked up, sharded and cached. Knows nothing of graphs or of the fabric."""
