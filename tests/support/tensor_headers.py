"""Safetensors files of any size that are nothing but their header: the tensors take no room on the disk."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path


def write_header(path: Path, tensors: Mapping[str, int]) -> None:
    """A file of tensors in float16 by name and bytes; its folder is made."""
    ends = list(accumulate(tensors.values()))
    header = {
        name: {"dtype": "F16", "shape": [nbytes // 2], "data_offsets": [end - nbytes, end]}
        for (name, nbytes), end in zip(tensors.items(), ends, strict=True)
    }
    raw = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + ends[-1])
