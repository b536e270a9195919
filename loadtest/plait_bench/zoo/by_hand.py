"""What a cut made by hand sends for 100 candidates: behind the tables, every row and every number that the dense part
reads, the user's once.

The dense part also reads ids where it masks what is padding. A row of width 8 is 32 bytes, an id 8, a number 4.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["BY_HAND"]

_ROWS = 101
"""A row for each candidate and one for the user."""

_DEEPCTR = {
    **dict.fromkeys(
        ["deepfm", "wdl", "xdeepfm", "dcn", "dcnmix", "autoint", "nfm", "fibinet", "ifm", "difm", "afn"],
        _ROWS * (3 * 32 + 3 * 4 + 4),  # three fields of either side, their weights in the wide part, a number
    ),
    "mlr": _ROWS * (4 * 3 * 4 + 4),  # four wide parts
    **dict.fromkeys(("ccpm", "afm"), _ROWS * (3 * 32 + 3 * 4)),
    "onn": _ROWS * (15 * 32 + 3 * 4),  # six fields in 15 pairs, a row of either field for each
    **dict.fromkeys(["pnn", "esmm", "mmoe", "ple", "sharedbottom"], _ROWS * (3 * 32 + 4)),
    "din": _ROWS * (3 * 32 + 4) + 20 * 2 * 32 + 8,  # 20 steps of two fields, and their number
}
_HISTORY = 20 * 2 * 32
_IDS = 20 * 2 * 8
_RECHUB = {
    **dict.fromkeys(["widedeep", "deepfm", "dcn", "dcnv2", "autoint", "mmoe", "sharedbottom"], _ROWS * (2 * 32 + 4)),
    **dict.fromkeys(["edcn", "fibinet"], _ROWS * 2 * 32),
    "din": _ROWS * 2 * 32 + _HISTORY,
    "bst": _ROWS * 2 * 32 + _HISTORY + _IDS,
    "pooled": _ROWS * (2 * 32 + 4) + _HISTORY + _IDS,
    "dssm": _ROWS * 2 * 32 + _HISTORY + _IDS,
}
_STEPS = 20 * 256
_RECBOLE = {
    **dict.fromkeys(["deepfm", "autoint", "xdeepfm", "fm"], _ROWS * (2 * 40 + 2 * 4 + 4)),  # rows of width 10
    "pnn": _ROWS * (2 * 40 + 4),
    **dict.fromkeys(["gru4rec", "stamp"], 100 * 256 + _STEPS + 8),  # rows of width 64, the number of steps
    **dict.fromkeys(["sasrec", "narm"], 100 * 256 + _STEPS + 8 + 20 * 8),
    "caser": _ROWS * 256 + _STEPS,
}
_POOLED = _ROWS * 2 * 64  # two pooled rows of width 16 of either side
_TORCHREC = dict.fromkeys(["dlrm", "dlrm-mean", "dlrm-dcn", "dlrm-projection", "deepfm", "weighted"], _POOLED + 5 * 4)

BY_HAND: Mapping[str, int] = {
    **{f"deepctr-{name}": count for name, count in _DEEPCTR.items()},
    **{f"rechub-{name}": count for name, count in _RECHUB.items()},
    **{f"recbole-{name}": count for name, count in _RECBOLE.items()},
    **{f"torchrec-{name}": count for name, count in _TORCHREC.items()},
}
"""Bytes by the name of the variant."""
