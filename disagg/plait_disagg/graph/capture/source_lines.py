"""Where in the source of a model an operator stands."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import fx

_BATCH_FIRST = "give it batch_first=True: its rows are taken for tokens"
_INSTEAD: Mapping[str, str] = dict.fromkeys(
    ("MultiheadAttention", "TransformerEncoderLayer", "GRU", "LSTM", "RNN"), _BATCH_FIRST
)

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in [^\n]*\n?([^\n]*)')
TORCH = str(Path(torch.__file__).parent)


def source_line(node: fx.Node) -> str:
    """Return `file:line: code` of the model's author, or an empty string if the trace does not know it."""
    frames = _FRAME.findall(str(node.meta.get("stack_trace") or ""))
    own = [frame for frame in frames if not frame[0].startswith(TORCH)] or frames
    return f"{own[-1][0]}:{own[-1][1]}: {own[-1][2].strip()}" if own else ""


def module_hint(node: fx.Node) -> str:
    """Return what to use instead of a torch layer that cannot be served, if the operator is inside one."""
    for _, kind in reversed((node.meta.get("nn_module_stack") or {}).values()):
        name = str(kind if isinstance(kind, str) else kind.__name__).rpartition(".")[2]
        if name in _INSTEAD:
            return f" (inside nn.{name}: {_INSTEAD[name]})"
    return ""
