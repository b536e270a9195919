"""The interface of the image workload: service protocol, configuration, codec."""
