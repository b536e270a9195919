"""The routes of the Open Inference Protocol v2, and /v1/recommend."""
