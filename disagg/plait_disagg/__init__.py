"""Disaggregated serving: fabric, graph cut, embedding tables, workers and simulator."""
