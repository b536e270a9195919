"""Manifests for KubeRay: what a plait.yaml needs on Kubernetes."""
