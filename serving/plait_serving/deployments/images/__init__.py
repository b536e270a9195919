"""The deployments of image models: the engine, its ControlNets, and how the ingress calls them."""
