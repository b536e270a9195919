"""The fake engine as an application that is tuned: its knobs have effects, and `compose` is what a measurer calls.

Run as ``python -m fakes.tuned_app PORT [--set path=value ...]`` it is a server to tune live.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fakes.serve import FakeHosted, FakeSource, main
from plait.config import PlaitConfig
from plait.deployments import Deployment, deployments
from plait_serving.diffusion.knobs import EngineKnobs

COMPOSE = "fakes.tuned_app:compose"
TARGET = {"app": "images", "settings": {"images.controlnets": {}, "recommend": None}}
STEP_S = 0.01

_log = logging.getLogger("plait_serving.fake")


class KnobbedHosted(FakeHosted):
    """A step takes ``batch_wait_ms`` longer."""

    def reconfigure(self, knobs: EngineKnobs) -> None:
        """Writes a line to the log."""
        super().reconfigure(knobs)
        self.step_s = STEP_S + knobs.batch_wait_ms / 1e3
        _log.info("knobs: threads=%s batch=%s wait=%s", knobs.threads, knobs.largest_batch, knobs.batch_wait_ms)


@dataclass(frozen=True)
class KnobbedSource(FakeSource):
    """The recipe."""

    def __call__(self, controlnets: Mapping[str, Any]) -> KnobbedHosted:
        """What an engine's replica makes."""
        return KnobbedHosted(STEP_S)


def compose(config: PlaitConfig) -> tuple[Deployment, ...]:
    """plait's deployments around the fake engine."""
    return deployments(config.model_copy(update={"recommend": None}), engine=KnobbedSource())


def job_text(**changes: Any) -> str:
    """A job of three trials with short loads. ``changes``: top-level settings over it."""
    job: dict[str, Any] = {
        "name": "fake",
        "target": TARGET,
        "knobs": {
            "threads": {"kind": "choice", "values": [1, 2, 4], "ordered": True, "sets": "engine.threads"},
            "batch": {"kind": "choice", "values": [4, 8], "sets": "engine.largest_batch"},
        },
        "scenarios": [
            {
                "target": {"api": "images"},
                "arrivals": {"kind": "constant", "rate_per_s": 20},
                "duration_s": 1.5,
                "mix": [{"steps": {2: 1}}],
                # A run is invalid whose generator was late by a twentieth of it, and other tests share the machine.
                "slo": {"latency_ms": 20_000},
            }
        ],
        "offered": "given",  # one short load a trial, at the rate that it has
        "limits": ["attainment >= 0.9"],
        "budget": {"trials": 3},
        "confirm": {"best": 0},
        "reference": {"config": {"threads": 4, "batch": 8}, "every": 0},
        "designer": {"name": "random"},
        "trial_limit_s": 60,
    }
    return yaml.safe_dump(job | changes)


def write_job(folder: Path, **changes: Any) -> Path:
    """The job as a file."""
    path = folder / "job.yaml"
    path.write_text(job_text(**changes))
    return path


if __name__ == "__main__":
    from fakes import tuned_app  # by the name that who tunes it knows: what is bound tells what restarts

    sys.exit(main(tuned_app.KnobbedSource()))
