"""plait's serving layer: the diffusion engine, the HTTP API and the Ray Serve deployments."""
