"""Disaggregated serving: graph cut, embedding tables, packages, queues and workers."""
