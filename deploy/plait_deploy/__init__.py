"""Manifests (Serve YAML now; KubeRay and placement later) rendered from a plait configuration."""
