"""`python -m plait.tuning.service.job_process FOLDER`: work on the job in a folder until it is over, for `job_queue`.

Its standard input is held open by the process that started it; when that process ends, for whatever reason, the job
is stopped in an orderly way (and continues when it is started again).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from plait.tuning.service.job_view import write_progress
from plait_autoconfig.jobs.measurer import MeasurerSource

_RAYS_OWN = ("RAY_", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
"""Variables that Ray set for the process that starts us, and that its own server must not inherit."""
_KEPT = ("RAY_USAGE_STATS_ENABLED", "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S")


def start_job(folder: Path, source: MeasurerSource) -> subprocess.Popen[bytes]:
    """Start the job's process in a new session, with its output appended to `logs/process.log`."""
    kept = (name for name in os.environ if name in _KEPT or not name.startswith(_RAYS_OWN))
    command = [sys.executable, "-m", __name__, str(folder), source.factory, json.dumps(dict(source.arguments))]
    (folder / "logs").mkdir(exist_ok=True)
    with (folder / "logs" / "process.log").open("ab") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env={name: os.environ[name] for name in kept},
            start_new_session=True,
        )


def main(arguments: list[str]) -> int:
    """Run with the arguments `FOLDER FACTORY ARGUMENTS`: where the job is, and what measures it (`MeasurerSource`)."""
    from plait.server.state import state_root
    from plait.tuning.job.local_run import reported
    from plait.tuning.measure.live import recover_all
    from plait_autoconfig.errors import TunerError
    from plait_autoconfig.jobs.loop import run_job
    from plait_autoconfig.jobs.store import JobStore

    folder = Path(arguments[0])
    stop = _stopped()
    recover_all(state_root(os.environ), say=_say)
    store = JobStore.open(folder)
    source = MeasurerSource(factory=arguments[1], arguments=json.loads(arguments[2]))
    try:
        with reported(store):
            run_job(store, source, on_event=partial(write_progress, folder), stop=stop)
    except TunerError as error:
        _say(str(error))
        return 1
    return 0


def _stopped() -> Callable[[], bool]:
    """Return a function that is true after SIGTERM or SIGINT, or once our standard input is closed."""
    stopping = threading.Event()

    def wait_for_the_end() -> None:
        while os.read(0, 1):  # not sys.stdin: a thread that waits in it would break the end of the interpreter
            pass
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    threading.Thread(target=wait_for_the_end, daemon=True).start()
    return stopping.is_set


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
