"""The jobs that plait ships, run as a user runs them, and what they recommend, tried by a load test that is not the
tuner's.

`plait tune run` works on the job in a process of its own. `plait tune apply` writes what it recommends into a
plait.yaml, `plait serve` serves that, and in each round `plait loadtest run` offers 0.9 and 1.1 times the rate that the
job promised. At 0.9 the SLO should hold, at 1.1 it need not: a promise that holds there as well was too modest.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from plait_autoconfig.jobs.state import Interval
from plait_bench.benchmark import Reading, ResultRow, Say, Subject, Workload, selected
from plait_bench.commands import PLAIT, run_command, serving_plait
from plait_bench.errors import BenchError, SystemFailed
from plait_bench.host import ROOT

JOBS = {"picks": "recommend", "images": "images"}
"""The shipped jobs that are to be relied on, and what each of them tunes."""

_EXAMPLES = ROOT / "serving/plait/tuning/examples"
_FACTORS = (0.9, 1.1)
_LOAD_S = 20.0
_SEED = 4711  # arrivals that the tuner did not see
_JOB_S, _COMMAND_S = 3600.0, 300.0


def promise_of(document: Mapping[str, Any]) -> tuple[float, str, Interval]:
    """Return from the JSON of `plait tune run` the rate per second that held when it was offered again, and the goal
    with the gain over the reference. Raises `SystemFailed` if the job recommends or promises nothing."""
    answers = document["answers"]
    if len(answers) != 1:
        raise SystemFailed(f"the job recommends nothing: {document['binding'] or document['reason']}")
    rate = (answers[0]["promise"] or {}).get("rate_per_s")
    if rate is None:
        raise SystemFailed(f"the job promises no rate: {answers[0]['sentence']}")
    goal, gain = next(iter(answers[0]["gain"].items()), ("", {"value": 1.0}))
    return rate, goal, Interval(**gain)


class TunedJob(Workload):
    """One shipped job. Its numbers are known once it has run; rounds are load tests of what it recommends."""

    systems = ("plait",)
    metrics: Mapping[str, str] = {
        **{f"held_at_{factor}": "share" for factor in _FACTORS}, "gain": "times", "promised_per_s": "1/s", "job_s": "s",
    }  # fmt: skip

    def __init__(self, name: str, app: str, *, command: Sequence[str] = PLAIT) -> None:
        self.name, self._app, self._command = name, app, tuple(command)
        self.job = _EXAMPLES / f"{name}.yaml"

    @contextmanager
    def session(self, say: Say) -> Iterator[None]:
        """Run the job, and write what it recommends into a plait.yaml. Raises `SystemFailed`."""
        with tempfile.TemporaryDirectory(prefix="plait-tuned-") as scratch:
            self.folder = Path(scratch)
            say(f"{self.name}: plait tune run {self.job}")
            done = self.plait("tune", "run", str(self.job), "--out", str(self.folder / "job"), "--json", limit_s=_JOB_S)
            document = json.loads(done)
            self.rate_per_s, self.goal, self.gain = promise_of(document)
            self.job_s = document["remaining"]["used_s"]
            say(f"{self.name}: {self.rate_per_s:.4g}/s, {self.gain.value:.2f} times the reference")
            other = "recommend" if self._app == "images" else "images"
            (self.folder / "plait.yaml").write_text(f"server: {{port: 0}}\n{other}: null\n", encoding="utf-8")
            self.plait("tune", "apply", str(self.folder / "job"), str(self.folder / "plait.yaml"), limit_s=_COMMAND_S)
            self.scenario = self._written_scenario()
            yield

    @contextmanager
    def open(self, system: str, layout: str) -> Iterator[Subject]:
        """Serve what was recommended. Raises `SystemFailed`."""
        with serving_plait(self.folder / "plait.yaml", command=self._command) as (_, url):
            # The first requests to a new server are slow: the promised rate warms it up.
            yield Subject(lambda number: self._offer(url, number), lambda: self._offered(url, 1.0, seed=_SEED))

    def conclude(self) -> Sequence[ResultRow]:
        """Return what the job found and what it took; the interval of the gain is the job's own."""
        low, high = (self.gain.value if bound is None else bound for bound in (self.gain.low, self.gain.high))
        return [
            replace(
                self.row("plait", "gain", self.gain.value), p20=low, p80=high,
                layout=f"{self.goal}; the interval is the job's, 95 %",
            ),
            self.row("plait", "promised_per_s", self.rate_per_s),
            self.row("plait", "job_s", self.job_s),
        ]  # fmt: skip

    def plait(self, *words: str, limit_s: float, fine: tuple[int, ...] = (0,)) -> str:
        """Return what a command of plait prints on stdout. Raises `SystemFailed`."""
        state = {"PLAIT_STATE_DIR": str(self.folder / "state")}
        return run_command([*self._command, *words], limit_s=limit_s, environ=state, fine=fine)

    def _offer(self, url: str, number: int) -> Sequence[Reading]:
        """Offer less and more than the promised rate."""
        found = {factor: self._offered(url, factor, seed=_SEED + number)["slo"]["met"] for factor in _FACTORS}
        return [Reading(metric=f"held_at_{factor}", value=float(bool(met))) for factor, met in found.items()]

    def _offered(self, url: str, factor: float, *, seed: int) -> Mapping[str, Any]:
        rate = factor * self.rate_per_s
        words = ("--url", url, "--rate", f"{rate:.6g}", "--duration", f"{_LOAD_S:g}", "--seed", str(seed))
        said = self.plait(
            "loadtest", "run", str(self.scenario), *words, "--json", "-", limit_s=_COMMAND_S, fine=(0, 1, 99)
        )
        try:
            report: Mapping[str, Any] = json.loads(said)
        except ValueError as error:
            raise BenchError(f"plait loadtest run printed no report: {said[:200]}") from error
        return report

    def _written_scenario(self) -> Path:
        """Write the job's own load to a file for the load tester."""
        from plait_autoconfig.jobs.job_file import parse_job

        spec = parse_job(self.job.read_text(encoding="utf-8"), folder=self.job.parent)
        path = self.folder / "scenario.yaml"
        path.write_text(json.dumps(spec.scenarios[0]), encoding="utf-8")  # JSON is YAML
        return path


def benchmark(*, only: Sequence[str] = ()) -> tuple[Workload, ...]:
    """Make the benchmark. Raises `BenchError` for an unknown workload."""
    return selected([TunedJob(name, app) for name, app in JOBS.items()], only)
