"""Detects that weights changed: what was computed from them is then stale."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn


def parameter_version(*modules: nn.Module) -> Callable[[], int]:
    """Return a function that returns a number which grows with every in-place write to a parameter, except writes
    through `.data`.

    The returned function raises RuntimeError if a parameter was made in inference mode: such tensors do not count
    writes.
    """
    tensors = [parameter for module in modules for parameter in module.parameters()]
    return lambda: sum(tensor._version for tensor in tensors)
