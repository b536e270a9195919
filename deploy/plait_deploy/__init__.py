"""Manifests for Ray Serve and KubeRay, and where replicas go: in arithmetic, and on Ray Serve."""
