"""FLUX.1: dev, schnell, Kontext."""
