"""The diffusion engine. It imports neither Ray nor FastAPI, so it runs equally in a script, a test or a replica."""
