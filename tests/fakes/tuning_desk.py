"""A desk for tuning jobs in this process: jobs are measured by the fake measurer, in a thread."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fakes.measurer import fake_measurer
from plait.tuning.service.job_queue import JobQueueSettings, TuningJobQueue
from plait.tuning.service.job_view import write_progress
from plait_autoconfig.errors import TunerError
from plait_autoconfig.jobs.loop import run_job
from plait_autoconfig.jobs.measurer import MeasurerSource
from plait_autoconfig.jobs.store import JobStore
from support.tune_jobs import DirectRunner, fake_source

CONFIG = "images: {knobs: {threads: 1}}\n"


class Thread:
    """A job that is worked on, with what the desk asks of a process."""

    def __init__(self, folder: Path, arguments: Mapping[str, Any], *, dies: bool) -> None:
        self._folder, self._arguments = folder, arguments
        self._code = -9 if dies else 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def poll(self) -> int | None:
        """See `subprocess.Popen`."""
        return None if self._thread.is_alive() else self._code

    def wait(self, timeout: float) -> None:
        """See `subprocess.Popen`."""
        self._thread.join(timeout)

    def _run(self) -> None:
        if self._code:
            return
        store = JobStore.open(self._folder)
        runner = DirectRunner(fake_measurer(folder=self._folder, **self._arguments), store.spec)
        try:
            run_job(store, fake_source(), runner=runner, on_event=lambda event: write_progress(self._folder, event))
        except TunerError:
            self._code = 1


class Threads:
    """Starts them. ``arguments``: the fake measurer's. ``deaths``: so many processes end before they did anything."""

    def __init__(self, *, deaths: int = 0, **arguments: Any) -> None:
        self.deaths, self.arguments = deaths, arguments
        self.started: list[tuple[str, bool]] = []

    def __call__(self, folder: Path, source: MeasurerSource) -> Any:
        """See `StartJob`."""
        self.started.append((folder.name, source.arguments["live"]))
        return Thread(folder, self.arguments, dies=len(self.started) <= self.deaths)


class LocalTuningService:
    """In place of `ActorTuningService`, over a desk in this process."""

    def __init__(self, desk: TuningJobQueue) -> None:
        self.desk = desk
        self._count = 0

    async def submit(self, text: str, tenant: str) -> dict[str, Any]:
        """See `ActorTuningService`."""
        self._count += 1
        return self.desk.submit(text, tenant, f"{self._count:04}")

    async def call(self, method: str, *arguments: Any) -> Any:
        """See `ActorTuningService`."""
        return getattr(self.desk, method)(*arguments)


def desk_in(folder: Path, runner: Threads, *, live: bool = False) -> TuningJobQueue:
    """A desk that has not begun to work."""
    return TuningJobQueue(JobQueueSettings(folder=folder, config=CONFIG, live=live), runner)
