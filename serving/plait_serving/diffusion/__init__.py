"""The diffusion engine. Imports neither Ray nor FastAPI, so it runs in a script, a test or a replica alike."""
