"""The interface of the ranking workload: service protocol, configuration, codec."""
