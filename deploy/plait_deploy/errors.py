"""What a renderer refuses."""

from __future__ import annotations


class DeployError(ValueError):
    """What is asked for cannot be deployed: one sentence that names the key to change."""
