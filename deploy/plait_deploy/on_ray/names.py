"""The names of deployments that stand for a model on nodes of one class."""

from __future__ import annotations

from plait_deploy.placement.errors import PlacementError

_AT = "@"
LABEL = "plait-class"
"""The label of Ray's nodes whose value is their class: `ray start --labels plait-class=l40s`."""


def name_at(name: str, node_class: str) -> str:
    """Return the deployment of `name` on nodes of a class: `engine@l40s`."""
    return f"{name}{_AT}{node_class}"


def split_name(deployment: str) -> tuple[str, str] | None:
    """Return name and class of a deployment that `name_at` named, None for any other."""
    name, at, node_class = deployment.rpartition(_AT)
    return (name, node_class) if at and name and node_class else None


def check_names(names: tuple[str, ...], classes: tuple[str, ...]) -> None:
    """Raise `PlacementError` for names that could not be told apart, and where there is no class."""
    if not classes:
        raise PlacementError("there is no class of nodes; name at least one")
    for each in (*names, *classes):
        if _AT in each or not each:
            raise PlacementError(f"{each!r} names no deployment and no class of nodes: {_AT} parts the two")
    for each in classes:
        if not _is_label(each):
            raise PlacementError(
                f"class {each} cannot be a label's value in Ray: up to 63 letters, digits, '-', '_' and '.', "
                "the first and the last a letter or digit"
            )


def _is_label(text: str) -> bool:
    inner = text.replace("-", "").replace("_", "").replace(".", "")
    return len(text) <= 63 and inner.isascii() and inner.isalnum() and text[0].isalnum() and text[-1].isalnum()
