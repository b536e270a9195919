"""ControlNets as a service: one protocol, with an in-process client and one over the fabric."""
