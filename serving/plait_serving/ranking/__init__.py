"""The seam of the ranking workload: service protocol, configuration, codec."""
