"""What the tests of the benchmarks share: a fleet on a virtual clock, a worker's fake system, tiny models."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from plait_bench.benchmark import Say, Workload
from plait_bench.errors import SystemUnavailable
from plait_bench.host import HostConditions
from plait_bench.images.fleet import (
    FleetWorker,
    Item,
    ItemList,
    ProcessLayout,
    System,
    peak_memory_of,
)
from plait_bench.runner import BenchResult, RunPlan, joined, run


class FakeFleet:
    """Takes ``seconds(layout, run number)`` of virtual time; notes in ``log`` what it was asked."""

    def __init__(
        self, name: str, layout: ProcessLayout, seconds: Callable[[ProcessLayout, int], float], log: list[str]
    ) -> None:
        self._name = name
        self._layout = layout
        self._seconds = seconds
        self._log = log
        self._runs = 0
        self.closed = False
        self.is_paused = False

    def peak_bytes(self) -> int:
        return 3 << 30

    def run(self, items: Sequence[Item], *, one_by_one: bool, keep: bool = False) -> tuple[float, list[Item]]:
        assert not self.is_paused
        self._log.append(f"{self._name} {'keep' if keep else len(items)}")
        seconds = self._seconds(self._layout, self._runs)
        self._runs += 1
        return seconds, [item["picture"] for item in items] if keep else []

    def pause(self) -> None:
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False

    def close(self) -> None:
        self.closed = True


def calm() -> HostConditions:
    """A host with nothing else to do."""
    return HostConditions(load=0.1, wake_us=10.0)


def measured(
    workloads: Sequence[Workload],
    plan: RunPlan,
    *,
    look: Callable[[], HostConditions] = calm,
    say: Say = lambda _: None,
) -> BenchResult:
    """The result of some workloads on a host with nothing else to do."""
    return joined(list(run(workloads, plan, say=say, look=look)))


def fake_systems(*names: str, **more: object) -> list[System]:
    """Systems called ``names``, the first ours."""
    share = lambda items, n: [list(range(len(items)))]  # noqa: E731
    return [System(name=name, factory="", settings={}, share=share, **more) for name in names]


def fake_workload(name: str = "work", items: int = 4, **more: object) -> ItemList:
    """``items`` items at once, and a warm-up of one."""
    item = {"picture": 1}
    return ItemList(name=name, items=(item,) * items, warm_up=(item,), **{"one_by_one": False, **more})


# ---- systems that worker processes build ----------------------------------------------------------------------------


class Echo(FleetWorker):
    """Returns each item with the layout it was given; fails, dies or chats when an item says so."""

    def __init__(self, settings: Mapping[str, object]) -> None:
        self._told = settings

    def run(self, items: Sequence[Item], *, one_by_one: bool, keep: bool) -> list[Item]:
        for item in items:
            if item.get("die"):
                raise SystemExit(3)
            if item.get("fail"):
                raise ValueError("no such thing")
            print("libraries print to stdout")
        return [{**item, **self._told, "one_by_one": one_by_one} for item in items] if keep else []


def absent(settings: Mapping[str, str]) -> FleetWorker:
    """A factory whose library is missing."""
    raise SystemUnavailable(f"{settings['greeting']} needs a library")


# ---- the image benchmark without processes --------------------------------------------------------------------------


class InProcessFleet:
    """One subject in this process: what `WorkerFleet` does, without the seconds that a process takes to load torch."""

    def __init__(self, system: System, layout: ProcessLayout) -> None:
        assert layout.processes == 1
        module, _, name = system.factory.partition(":")
        settings = {**system.settings, "threads": layout.threads, "variant": layout.variant}
        self._worker: FleetWorker = getattr(__import__(module, fromlist=[name]), name)(settings)

    def peak_bytes(self) -> int:
        return peak_memory_of([os.getpid()])

    def run(self, items: Sequence[Item], *, one_by_one: bool, keep: bool = False) -> tuple[float, list[Item]]:
        started_s = time.monotonic()
        made = self._worker.run(items, one_by_one=one_by_one, keep=keep)
        return time.monotonic() - started_s, made

    def pause(self) -> None:
        """Do nothing: it would pause the test."""

    def resume(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        self._worker.close()


def tiny_model_folder(root: Path) -> Path:
    """Tiny random models laid out as the starter's; one LoRA in kohya format, one that touches the text encoder."""
    from support.tiny import tiny_controlnet, tiny_lora, tiny_sd

    base = tiny_sd(root / "emoji")
    tiny_controlnet(root / "controlnets" / "edges", base, seed=1)
    tiny_controlnet(root / "controlnets" / "colors", base, seed=2)
    tiny_lora(root / "loras" / "noto.safetensors", base, with_text_encoder=True, conv=True, seed=3)
    tiny_lora(root / "loras" / "sketch.safetensors", base, fmt="kohya", seed=4)
    tiny_lora(root / "loras" / "pixel.safetensors", base, seed=5)
    return root
