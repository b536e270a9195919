"""One thin Ray Serve class per deployment."""

INGRESS, ENGINE, CONTROLNET_PREFIX = "ingress", "engine", "controlnet-"
"""The names of the deployments in Serve's status, in logs and in a Serve YAML; `worker_name` makes the others."""


def worker_name(model: str, role: str) -> str:
    """Return the name of the deployment of a recommendation model's workers with this role: cn, hn, whole or that of a
    shard."""
    return f"{role}-{model}"
