"""The interface between a job and what it tunes. A `Measurer` lives in a child process of its own (`runner`).

A factory `module:function` makes it; everything that crosses is JSON. Whatever goes wrong in it (an exception, a
hang, being killed by the kernel) becomes the outcome of one trial, and the next trial gets a fresh child.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from plait_autoconfig.values import Config, TrialOutcome, TuningSubject

if TYPE_CHECKING:
    from plait_autoconfig.jobs.spec import JobSpec

Say: TypeAlias = Callable[[str], None]
"""Reports the progress inside a trial, for example `load test, 12 of 30 s`."""


class MeasurementKind(StrEnum):
    """The purpose of a measurement."""

    WARM_UP = "warm_up"  # its result is forgotten
    TRIAL = "trial"  # proposed by the designer
    REFERENCE = "reference"  # the default, again and again: shows how the host drifts
    CONFIRM = "confirm"  # one of the best, or the default in turn with it, before one is recommended
    CHECK = "check"  # what is recommended, at the rate that is to be promised

    @property
    def compares(self) -> bool:
        """Whether its metrics say how good the configuration is, beside those of others."""
        return self not in {MeasurementKind.WARM_UP, MeasurementKind.CHECK}


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementTask:
    """One measurement. `folder`: exists, for this task's artefacts only. `limit_s`: after which the child is killed.

    `expected_per_s`: the goodput that similar configurations reached, 0 if unknown. `to_beat`: the metric of the only
    goal that the best configuration so far would show now; a trial that surely stays behind it may end early. None for
    a measurement that is to be complete. `rate_per_s`: the rate to offer, in place of the scenario's or of a search for
    the highest; 0: none.
    """

    number: int
    kind: MeasurementKind
    config: Config
    seed: int
    limit_s: float
    folder: Path
    expected_per_s: float = 0.0
    to_beat: float | None = None
    rate_per_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """The application's resource use while the load ran."""

    cpu_cores: float = 0.0
    memory_bytes: int = 0
    gpu_memory_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The result of a task. `restarted`: deployments that had to be restarted. `artefacts`: files in the folder.

    `duration_s` is noted by who asked for it. `load_s`: the part of it that load tests took, warm-up included. `note`:
    a sentence for the table of trials, such as why the load test was aborted.
    """

    outcome: TrialOutcome
    duration_s: float = 0.0
    load_s: float = 0.0
    samples: Samples = field(default_factory=Samples)
    restarted: tuple[str, ...] = ()
    artefacts: tuple[str, ...] = ()
    note: str = ""


class Measurer(Protocol):
    """Applies configurations and measures them. Made by a factory in the child; used from one thread."""

    def check(self, spec: JobSpec) -> TuningSubject:
        """Check the job; called first, once per process. Raises `JobRefused` for what cannot be measured: a knob that
        the deployment does not have (listing those it has), a scenario that cannot reach its rate."""

    def measure(self, task: MeasurementTask, say: Say) -> Measured:
        """Apply `task.config`, warm up and measure. Failures that it understands are outcomes; whatever it raises
        becomes one: MemoryError and CUDA's out of memory as such, anything else as a crash."""

    def apply(self, config: Config) -> None:
        """Leave this configuration in the live application; only called for a live job, at its end.

        It counts as the original from then on: `restore` changes nothing any more.
        """

    def restore(self) -> None:
        """Restore the original configuration if the live application was changed; do nothing for a clone."""

    def close(self) -> None:
        """Remove the clone and anything else that is left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurerSource:
    """Where the measurer comes from: `factory` is `module:function`, `arguments` are JSON.

    The function is called with `folder`, the job's, and the arguments, and returns a `Measurer`. It must also clean
    up what an earlier process of the same job left behind when it was killed. And where trials change what others use,
    it must keep off whoever else is at that service: another job, or such a process that still gives it back. The job
    knows its own workers only.
    """

    factory: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
