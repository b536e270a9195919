"""The entry point: `run` starts the workers and the echo at a common time and collects their progress and results."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import fields
from multiprocessing.connection import Connection as Pipe
from multiprocessing.connection import wait

import numpy as np

from plait_loadtest.errors import LoadtestError
from plait_loadtest.failures import FailureLog, joined, sentences
from plait_loadtest.plan import RequestPlan, Share, shares
from plait_loadtest.run import worker
from plait_loadtest.run.echo import EchoClock
from plait_loadtest.run.ledger import Ledger
from plait_loadtest.run.processes import ended_by_signal, started, told
from plait_loadtest.run.worker import WorkerProgress, WorkerResult
from plait_loadtest.scenario import Scenario
from plait_loadtest.values import (
    RECORD,
    WHOLE,
    HostPart,
    OnProgress,
    Records,
    RequestCounts,
    RunProgress,
    RunResult,
    StopWhen,
)
from plait_loadtest.wire.answers import judge_of

# From "all are ready" to the common start: the word must have reached every worker, which opens its connections then.
# A search for the capacity pays it with every run.
_HEAD_START_NS = 100_000_000
_LOOK_S = 0.25
_JOIN_S = 5.0


def run(
    plan: RequestPlan,
    scenario: Scenario,
    *,
    host: HostPart = WHOLE,
    start_unix_s: float | None = None,
    on_progress: OnProgress = lambda _: None,
    stop_when: StopWhen = lambda _: None,
) -> RunResult:
    """Run a host's part of the plan and return its records, in order of index; all requests of the part are among them.
    It starts as soon as it can, or at `start_unix_s`; what is not ready by then is a problem.

    Always uses separate processes, even if only one: drawing progress must not delay what is sent. So `plan.mix`
    must be picklable, and scripts need `if __name__ == "__main__"`. Ctrl-C ends the run early and returns the
    results so far. A worker that dies leaves its requests `INTERRUPTED`, and an entry in `problems`. Raises
    `LoadtestError` if a request cannot be built, or if no worker survives. `stop_when`: see `StopWhen`; the run then
    counts as interrupted, and `abandoned` says why.
    """
    given = shares(plan, scenario, host)
    planned = None if scenario.callers else sum(len(share.scheduled_ns) for share in given)
    with ExitStack() as stack:
        echo = stack.enter_context(closing(EchoClock()))
        crew = _Crew(given)
        stack.callback(crew.close)
        with ended_by_signal(crew.stop):
            while crew.is_preparing:
                crew.wait(_LOOK_S)
                if crew.is_preparing:
                    on_progress(crew.progress(planned, time.perf_counter_ns() + _HEAD_START_NS))
            echo.wait_ready()
            crew.await_start(start_unix_s)
            start_ns, started_unix_s = time.perf_counter_ns() + _HEAD_START_NS, time.time() + _HEAD_START_NS / 1e9
            crew.tell(start_ns)
            echo.start(start_ns)
            while not crew.wait(_LOOK_S):
                progress = crew.progress(planned, start_ns)
                on_progress(progress)
                if not crew.is_stopped and (why := stop_when(progress)):
                    crew.abandon(why)
            wall_s = max(0.0, (time.perf_counter_ns() - start_ns) / 1e9)
            on_progress(crew.progress(planned, start_ns))
            seen = echo.stop()
        records, whys = crew.records(scenario)
        return RunResult(
            records=records,
            echo=seen,
            started_unix_s=started_unix_s,
            wall_s=wall_s,
            cpu_s=sum(left.cpu_s for left in crew.left),
            interrupted=crew.is_stopped,
            reconnects=sum(left.reconnects for left in crew.left),
            limits=sentences(sum((Counter(left.limits) for left in crew.left), Counter()), scenario.limits),
            problems=tuple(crew.problems),
            abandoned=crew.abandoned,
            whys=whys,
        )


class _Crew:
    """The worker processes and their known state."""

    def __init__(self, given: Sequence[Share]) -> None:
        self.is_stopped = False
        self.abandoned = ""
        self.problems: list[str] = []
        self._members = [_Member(share) for share in given]

    @property
    def left(self) -> list[WorkerResult]:
        """The results of the workers that are done."""
        return [member.left for member in self._members if member.left is not None]

    @property
    def is_preparing(self) -> bool:
        """Whether a live worker is still preparing its requests."""
        return any(member.is_preparing for member in self._members)

    def tell(self, word: int | str) -> None:
        """Send to all live workers."""
        for member in self._members:
            if member.is_alive:
                told(member.pipe, word)

    def await_start(self, start_unix_s: float | None) -> None:
        """Wait until the workers are to be told of a start at that time; note it as a problem if it is too late."""
        if start_unix_s is None:
            return
        left_s = start_unix_s - time.time() - _HEAD_START_NS / 1e9
        if left_s < 0:
            self.problems.append(f"it was ready {-left_s:.1f} s after the agreed start")
        while left_s > 0 and not self.is_stopped:
            time.sleep(min(left_s, _LOOK_S))
            left_s = start_unix_s - time.time() - _HEAD_START_NS / 1e9

    def stop(self) -> None:
        """End the load; workers return what they have."""
        self.is_stopped = True
        self.tell(worker.STOP)

    def abandon(self, why: str) -> None:
        """End the load, as there is no use in continuing."""
        self.abandoned = why
        self.stop()

    def wait(self, timeout_s: float) -> bool:
        """Receive messages for at most this long; return True if none will follow. Raises `LoadtestError`."""
        pipes = {member.pipe: member for member in self._members if member.is_alive}
        for pipe in wait(list(pipes), timeout_s) if pipes else ():
            assert isinstance(pipe, Pipe)
            problem = pipes[pipe].hear()
            if problem:
                self.problems.append(problem)
        return not any(member.is_alive for member in self._members)

    def progress(self, planned: int | None, start_ns: int) -> RunProgress:
        """Return the sum of the workers' latest progress."""
        reports = [member.reported for member in self._members if member.reported is not None]
        recent_ms = np.array([ns for one in reports for ns in one.recent_ns]) / 1e6
        p50_ms, p95_ms = np.percentile(recent_ms, (50, 95)).tolist() if len(recent_ms) else (None, None)
        return RunProgress(
            elapsed_s=(time.perf_counter_ns() - start_ns) / 1e9,
            planned=planned,
            recent_p50_ms=p50_ms,
            recent_p95_ms=p95_ms,
            **{each.name: sum(getattr(one, each.name) for one in reports) for each in fields(RequestCounts)},
        )

    def records(self, scenario: Scenario) -> tuple[Records, tuple[str, ...]]:
        """Return all records in order of index, and what their `why` counts. Raises `LoadtestError` if no worker
        returned any."""
        if not self.left:
            raise LoadtestError("; ".join(self.problems) or "no worker process left any results")
        records, whys = joined(
            [
                (_lost(member.share), ("",))
                if member.left is None
                else (np.frombuffer(member.left.records, dtype=RECORD), member.left.whys)
                for member in self._members
            ]
        )
        if scenario.callers:
            # Without a schedule nobody knows which requests come before the measured part.
            records["warm_up"] = records["scheduled_ns"] < scenario.warm_up_s * 1e9
        return records, whys

    def close(self) -> None:
        """End all processes. Idempotent."""
        for member in self._members:
            member.close()


class _Member:
    """One worker process."""

    def __init__(self, share: Share) -> None:
        self.share = share
        self.reported: WorkerProgress | None = None
        self.left: WorkerResult | None = None
        self.is_preparing = True
        self.is_alive = True
        self.pipe, self._process = started(worker.main, share, f"loadtest-worker-{share.rank}")

    def hear(self) -> str:
        """Receive one message; return what is wrong, or an empty string. Raises `LoadtestError` sent by the worker."""
        try:
            message = self.pipe.recv()
        except (EOFError, OSError):
            return self._died()
        if isinstance(message, LoadtestError):
            raise message
        if isinstance(message, WorkerProgress):
            self.reported = message
        elif isinstance(message, WorkerResult):
            self.left = message
            self.is_alive = self.is_preparing = False
        else:
            self.is_preparing = False
        return ""

    def close(self) -> None:
        self.pipe.close()
        self._process.join(_JOIN_S if self.left is not None else 0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(_JOIN_S)

    def _died(self) -> str:
        self.is_alive = self.is_preparing = False
        self._process.join(_JOIN_S)
        died = f"worker process {self.share.rank} of {self.share.processes} died (exit code {self._process.exitcode})"
        killed = self._process.exitcode == -signal.SIGKILL
        return died + (": the system kills where memory runs out, so lower the rate or the processes" if killed else "")


def _lost(share: Share) -> Records:
    """Return what is known of a dead worker's requests: that they were planned."""
    scenario = share.scenario
    ledger = Ledger(judge_of(scenario), FailureLog(scenario), share.scheduled_ns.tolist(), share.mix.asked)
    return worker.records_of(ledger, share, 0)
