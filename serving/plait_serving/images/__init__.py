"""The seam of the image workload: service protocol, configuration, codec."""
