"""`plait serve` around the fake engine: the real ingress, handles, processes and signals, without torch.

Run as ``python -m fakes.serve PORT [--set path=value ...]``.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from fakes.images import FakeImageService
from plait_kernels.heartbeat import Stuck
from plait_serving.diffusion.errors import NumericalError
from plait_serving.diffusion.knobs import EngineKnobs
from plait_serving.images.routing import ReplicaState
from plait_serving.images.service import Catalog


class FakeHosted(FakeImageService):
    """A HostedImages of fake images. Its LoRAs are the files of a folder, if it has one, followed as an engine's
    are."""

    def __init__(self, step_s: float, loras: Path | None = None) -> None:
        super().__init__(step_s=step_s, failures={"nan": NumericalError("row 0 is NaN")}, slow={"slow": 0.2})
        self._cards: Any = None
        if loras is not None:
            from plait_serving.deployments.images.lora_cards import LoraCards  # needs torch
            from plait_serving.diffusion.lora.source import FolderSource

            self._cards = LoraCards(FolderSource(loras), lambda: "sd1")
        self.knobs: list[EngineKnobs] = []
        self.engine = self
        self.alive = True
        self.stuck: Stuck | None = None

    async def catalog(self, *, anew: bool = False) -> Catalog:
        """Return the fixed catalog, with the LoRAs of now."""
        offers = await super().catalog(anew=anew)
        return offers if self._cards is None else replace(offers, loras=self._cards.cards())

    def check_progress(self) -> None:
        """Raises what a test has set."""
        if self.stuck is not None:
            raise self.stuck

    def pressure(self) -> float:
        return 0.5

    def routing_state(self) -> ReplicaState:
        return ReplicaState()

    def reconfigure(self, knobs: EngineKnobs) -> None:
        """Remembers."""
        self.knobs.append(knobs)

    def stop(self, *, drain_s: float) -> None:
        """Waits as the real one does."""
        until_s = time.monotonic() + drain_s
        while len(self.submitted) > len(self.finished) + len(self.cancelled) and time.monotonic() < until_s:
            time.sleep(0.02)


@dataclass(frozen=True)
class FakeSource:
    """The recipe."""

    step_s: float = 0.05
    loras: Path | None = None

    def __call__(self, controlnets: Mapping[str, Any]) -> FakeHosted:
        """What an engine's replica makes."""
        return FakeHosted(self.step_s, self.loras)


def main(source: FakeSource = FakeSource()) -> int:
    """Serves until a signal. ``FAKE_LORAS`` of the environment is for those who have a folder of LoRAs."""
    if loras := os.environ.get("FAKE_LORAS"):
        source = replace(source, loras=Path(loras))
    from plait.config import load_config
    from plait.deployments import deployments
    from plait.errors import PlaitError
    from plait.server.supervise import serve

    overrides = [f"server.port={sys.argv[1]}", "images.controlnets={}", "recommend=null", *sys.argv[2:]]
    config = load_config(overrides=overrides)
    try:
        return serve(
            config,
            compose=partial(deployments, engine=source),
            num_cpus=2,
        )
    except PlaitError as error:
        sys.stderr.write(f"{error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
