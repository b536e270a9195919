"""Disaggregated serving: the fabric, the graph cut, the tables, the workers and the simulator."""
