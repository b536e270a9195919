"""A measurer for tests and demonstrations: a simulated service that replies at once, fails on demand, and drifts.

Its cost is the sum of all numeric knob values; its goodput grows with their product, up to 40 a second. A rate that is
offered is held if the goodput of that measurement reaches it.
Everything is a function of the configuration and the number of measurements so far.
"""

from __future__ import annotations

import math
import os
import resource
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plait_autoconfig.errors import JobRefused
from plait_autoconfig.jobs.measurer import Measured, MeasurementTask, Samples, Say
from plait_autoconfig.jobs.promised_rate import SLO_MET
from plait_autoconfig.jobs.spec import JobSpec
from plait_autoconfig.values import Config, FailureKind, Hardware, TrialOutcome, TuningSubject


def service(config: Config) -> dict[str, float]:
    """Return the simulated service's metrics without noise: goodput_per_s, p99_ms, cost_per_hour, goodput_per_cost."""
    numbers = [float(value) for value in config.values() if isinstance(value, int | float)]
    power = math.prod(max(number, 0.1) for number in numbers)
    cost = 0.1 * sum(numbers)
    goodput = 40.0 * (1.0 - math.exp(-power / 10.0))
    return {
        "goodput_per_s": goodput,
        "p99_ms": 10.0 + 400.0 / (1.0 + power),
        "cost_per_hour": cost,
        "goodput_per_cost": goodput / cost,
    }


class FakeMeasurer:
    """A simulated measurer. It appends a line to `measured.log` in the job's folder when a task begins and when it ends
    without a failure."""

    def __init__(
        self,
        *,
        folder: Path,
        seconds: float = 0.0,
        drift: float = 0.0,
        fail: Mapping[str, str] | None = None,
        knobs: list[str] | None = None,
        hangs_after: int | None = None,
    ) -> None:
        """`seconds`: per measurement. `drift`: how much slower the host gets with each measurement, relative. `fail`:
        maps `"knob=value"` to what happens then: hang, memory, kill, raise, refuse, invalid. `knobs`: those that exist
        (any, if omitted). `hangs_after`: so many of its measurements end, the next one
        does not."""
        self._folder, self._seconds, self._drift, self._fail, self._knobs = folder, seconds, drift, fail or {}, knobs
        self._hangs_after, self._ended = hangs_after, 0

    def check(self, spec: JobSpec) -> TuningSubject:
        """Check that the knobs of the job exist."""
        for knob in spec.settings(spec.default):
            if self._knobs is not None and knob not in self._knobs:
                msg = f"there is no knob {knob}; there are {', '.join(self._knobs)}"
                raise JobRefused(msg)
        return TuningSubject(
            service="fake", workload={"rate_per_s": 1.0}, hardware=Hardware(cpus=1), versions={"fake": "1"}
        )

    def measure(self, task: MeasurementTask, say: Say) -> Measured:
        """Return the metrics of `service` with drift, or the failure configured for the configuration."""
        say("applying")
        self._note("begin", task)
        for setting in settings_of(task.config):
            if setting in self._fail:
                return self._failed(self._fail[setting])
        if self._ended == self._hangs_after:
            return self._failed("hang")
        self._wait(say)
        slower = (1.0 + self._drift) ** self._count("end")
        metrics = service(task.config)
        for name in ("goodput_per_s", "goodput_per_cost"):
            metrics[name] /= slower
        metrics["p99_ms"] *= slower
        if task.rate_per_s:
            metrics[SLO_MET] = float(task.rate_per_s <= metrics["goodput_per_s"])
        self._note("end", task)
        self._ended += 1
        return Measured(outcome=TrialOutcome(metrics=metrics), samples=Samples(cpu_cores=1.0, memory_bytes=1 << 20))

    def apply(self, config: Config) -> None:
        """Log that the configuration was applied."""
        self._write(f"apply {sorted(config.items())}")

    def restore(self) -> None:
        """Log that the original configuration was restored."""
        self._write("restore")

    def close(self) -> None:
        """Log that the measurer was closed."""
        self._write("close")

    def _wait(self, say: Say) -> None:
        until = time.monotonic() + self._seconds
        while (left := until - time.monotonic()) > 0.0:
            say(f"load test, {left:.1f} s left")
            time.sleep(min(left, 0.05))  # more often than who waits looks up

    def _failed(self, how: str) -> Measured:
        kinds = {"refuse": FailureKind.REFUSED_START, "invalid": FailureKind.INVALID}
        if how in kinds:
            return Measured(outcome=TrialOutcome.failed(kinds[how], "as told"))
        acts: dict[str, Any] = {
            "hang": lambda: time.sleep(3600.0),
            "memory": _run_out_of_memory,
            "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
        }
        acts.get(how, _raise)()
        raise AssertionError(f"{how} did nothing")

    def _note(self, what: str, task: MeasurementTask) -> None:
        self._write(f"{what} {task.number} {task.kind} {sorted(task.config.items())}")

    def _write(self, line: str) -> None:
        with (self._folder / "measured.log").open("a", encoding="utf-8") as log:
            log.write(f"{line}\n")

    def _count(self, what: str) -> int:
        log = self._folder / "measured.log"
        return sum(line.startswith(what) for line in log.read_text(encoding="utf-8").splitlines())


fake_measurer = FakeMeasurer


def cloned_measurer(*, folder: Path, live: bool = False, commands: bool = False) -> FakeMeasurer:
    """Return the same with the arguments that `plait tune` gives to plait's own."""
    assert commands
    assert not live
    return FakeMeasurer(folder=folder)


def stuck_measurer(*, folder: Path) -> FakeMeasurer:
    """Return one that cannot restore as long as a file `stuck` is in the folder."""
    made = FakeMeasurer(folder=folder)
    if (folder / "stuck").exists():
        made.restore = _raise
    return made


def settings_of(config: Config) -> list[str]:
    """Return `knob=value` for each."""
    return [f"{name}={value}" for name, value in config.items()]


def _run_out_of_memory() -> None:
    limit = 4 << 30
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    bytearray(2 * limit)


def _raise() -> None:
    raise RuntimeError("as told")
