"""The JSON document that `plait bench NAME --json` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from plait_bench.runner import BenchResult

# Rates and ratios are good to three figures at best; six keep rounding out of the way of whoever computes with them.
_DIGITS = 6


def document(bench: str, commit: str, host: Mapping[str, Any], result: BenchResult) -> dict[str, Any]:
    """Make the document of a result.

    `ratios` are medians of pairwise ratios; their 20th and 80th percentiles are in `ratio_spreads`, those of each
    round in `ratio_rounds`. `layouts`: the layout chosen for each system, and the readings of all its trials.
    """
    return {
        "bench": bench,
        "commit": commit,
        "host": dict(host),
        "rows": [_rounded(asdict(row)) for row in result.rows],
        "ratios": {key: round(ratio.value, _DIGITS) for key, ratio in result.ratios.items()},
        "ratio_spreads": {
            key: _rounded({"p20": ratio.p20, "p80": ratio.p80, "n": ratio.n}) for key, ratio in result.ratios.items()
        },
        "ratio_rounds": {key: _rounded(ratio.rounds) for key, ratio in result.ratios.items()},
        "layouts": [_rounded(asdict(choice)) for choice in result.choices],
        "left_out": dict(result.left_out),
    }


def _rounded(value: Any) -> Any:
    """Return the value with all its floats rounded; tuples become lists."""
    if isinstance(value, float):
        return round(value, _DIGITS)
    if isinstance(value, Mapping):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_rounded(each) for each in value]
    return value
