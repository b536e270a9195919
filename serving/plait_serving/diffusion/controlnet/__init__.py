"""ControlNets as a service: one protocol, an in-process client and one over the fabric."""
