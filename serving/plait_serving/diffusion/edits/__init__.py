"""Requests that start from an image: what the VAE has to encode, where the steps begin, and what stays."""
