"""The deployments of ranking models: their workers, how these scale, and how the ingress calls them."""
