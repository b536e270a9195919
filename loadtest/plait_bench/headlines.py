"""The few ratios that README.md opens with, from `loadtest/results`: `python -m plait_bench.headlines [--check]`.

They stand between `<!-- headlines -->` and `<!-- /headlines -->`. Each ratio in which plait is ahead is paired with
one in which it is not, so that the page promises no more than the tables show.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait_bench import host, records
from plait_bench.errors import BenchError
from plait_bench.tabulated import is_busy_row, latest_runs, load_of, spread_of

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
RESULTS = ROOT / "loadtest" / "results"
NOT_AHEAD = "**not ahead**: "
NOT_RECORDED = "Without a number, because none was recorded at a commit of this history:"
_BLOCK = re.compile(r"(?<=<!-- headlines -->\n).*?(?=<!-- /headlines -->)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """One ratio: its place in the results, and its text. `guide` is the document with the whole table."""

    bench: str
    workload: str
    metric: str
    systems: str
    says: str
    guide: str
    less_is_better: bool = False

    def is_row(self, row: Mapping[str, Any]) -> bool:
        """Return whether a recorded row is this ratio."""
        return (row["unit"], row["workload"], row["metric"], row["system"]) == (
            "ratio", self.workload, self.metric, self.systems,
        )  # fmt: skip

    def is_ahead(self, low: float, high: float) -> bool:
        """Return whether the whole spread lies on the good side of 1."""
        return high < 1.0 if self.less_is_better else low > 1.0


HEADLINES = (  # one for each pillar, and beside it what it does not win
    Headline(
        bench="images", workload="mixed16", metric="images_per_s", systems="plait/diffusers_fair", guide="serving",
        says="images/s against a fair diffusers server: sixteen starter-size requests at once, mixed LoRAs, "
        "ControlNets, steps and schedulers",
    ),
    Headline(
        bench="images", workload="same16", metric="images_per_s", systems="plait/diffusers_batched", guide="serving",
        says="images/s: sixteen equal requests, for which one batched diffusers call is enough",
    ),
    Headline(
        bench="disagg", workload="rm2-64", metric="goodput_per_s", systems="plait/pytorch", guide="disagg",
        says="rankings/s with p99 within 50 ms against PyTorch behind FastAPI: DeepRecSys' RM2, 64 candidates",
    ),
    Headline(
        bench="disagg", workload="one-by-one-64", metric="latency_p50_us", systems="plait_split/plait", guide="disagg",
        says="median latency of one ranking, cut in two against whole, in process (less is better): on one machine the "
        "cut costs time and brings nothing",
        less_is_better=True,
    ),
    Headline(
        bench="autoconfig", workload="falcon", metric="trials_to_5pct", systems="plait/optuna-tpe", guide="autoconfig",
        says="trials until within 5 % of the optimum against Optuna's TPE (less is better): replayed measurements, "
        "library of 29 other services",
        less_is_better=True,
    ),
    Headline(
        bench="autoconfig", workload="own-images", metric="trials_to_5pct", systems="plait/optuna-tpe",
        guide="autoconfig",
        says="the same on plait's own image engine, with a library of few, noisy runs",
        less_is_better=True,
    ),
)  # fmt: skip


def with_headlines(
    text: str, read: Callable[[str], Sequence[Mapping[str, Any]]], *, is_known: Callable[[str], bool]
) -> str:
    """Return `text` with its block filled.

    `read`: returns the rows of a benchmark; `is_known`: whether a commit is in the history; rows of others are not
    shown. Raises `BenchError` if there is no block.
    """
    if _BLOCK.search(text) is None:
        raise BenchError("there is no <!-- headlines --> block")
    block = "\n".join(_lines(read, is_known)) + "\n"
    return _BLOCK.sub(lambda _: block, text)


def _lines(read: Callable[[str], Sequence[Mapping[str, Any]]], is_known: Callable[[str], bool]) -> Iterator[str]:
    yield "| ratio | of what | recorded |"
    yield "| ---: | --- | --- |"
    hosts: dict[str, None] = {}
    missing: list[Headline] = []
    for headline in HEADLINES:
        found = [row for row in read(headline.bench) if headline.is_row(row) and is_known(str(row["commit"]))]
        if not found:
            missing.append(headline)
            continue
        runs = latest_runs(found)
        row, machine = runs[-1], runs[-1]["host"]
        value, low, high = spread_of(runs)
        hosts[f"{machine['cpu']}, {machine['cores']} cores, {machine['ram_gib']:.0f} GiB"] = None
        load = f"load {max(map(load_of, runs)):.1f}" + (" (busy)" if any(map(is_busy_row, runs)) else "")
        where = f"{machine['date'][:10]}, {load}, `{row['commit'][:7]}`"
        ahead = "" if headline.is_ahead(low, high) else NOT_AHEAD
        yield f"| **{value:.2f}** ({low:.2f} to {high:.2f}) | {ahead}{_what(headline)} | {where} |"
    yield ""
    yield f"Measured on {'; '.join(hosts) or 'no machine yet'}. Load: the load average when the run began."
    if missing:
        yield f"{NOT_RECORDED} {'; '.join(_what(headline) for headline in missing)}."


def _what(headline: Headline) -> str:
    return f"[`{headline.workload}`]({headline.guide}/README.md#benchmarks) `{headline.systems}`: {headline.says}"


def is_in_history(commit: str) -> bool:
    """Whether HEAD descends from it; a dirty tree (COMMIT+changes) is no commit."""
    return host.is_in_history(ROOT, commit)


def main(arguments: Sequence[str]) -> int:
    """Rewrite README.md, or with `--check` only report (exit code 1) whether it is up to date."""
    old = README.read_text(encoding="utf-8")
    new = with_headlines(old, lambda bench: records.read(RESULTS / f"{bench}.jsonl"), is_known=is_in_history)
    if "--check" in arguments:
        return int(new != old)
    if new != old:
        README.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
