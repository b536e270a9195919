"""The one JSON document that ``plait bench NAME --json`` prints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from plait_bench.runner import Result

# Rates and ratios are good to three figures at best; six keep rounding out of the way of whoever computes with them.
_DIGITS = 6


def document(bench: str, commit: str, host: Mapping[str, Any], result: Result) -> dict[str, Any]:
    """``ratios`` are medians of pairwise ratios, their 20th and 80th percentiles are in ``ratio_spreads``."""
    return {
        "bench": bench,
        "commit": commit,
        "host": dict(host),
        "rows": [_rounded(asdict(row)) for row in result.rows],
        "ratios": {key: round(ratio.value, _DIGITS) for key, ratio in result.ratios.items()},
        "ratio_spreads": {
            key: _rounded({"p20": ratio.p20, "p80": ratio.p80, "n": ratio.n}) for key, ratio in result.ratios.items()
        },
        "left_out": dict(result.left_out),
    }


def _rounded(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {key: round(value, _DIGITS) if isinstance(value, float) else value for key, value in fields.items()}
