"""Which threads keep OpenMP workers. In processes of their own: workers of other tests must not be counted."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from plait_kernels.threads import lower_priority, run_on_own_thread

linux = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads in /proc")

# Threads that Python did not start are OpenMP's workers, and whatever importing torch started, counted before;
# tokenizers would start some of their own. A thread that was told to end is given a while.
ENGINE = """
import os, sys, threading, time
from pathlib import Path
os.environ["TOKENIZERS_PARALLELISM"] = "false"
import torch
from plait_kernels.threads import set_threads
from plait_serving.diffusion.assemble import EngineSettings, build_engine, warm_up
from plait_serving.diffusion.knobs import EngineKnobs, ExecutorName
import plait_serving.diffusion.families.unet.family  # as for torch: what libraries start when they are imported
def foreign(expected=None):
    until_s = time.monotonic() + 60
    while True:
        count = len(os.listdir("/proc/self/task")) - threading.active_count()
        if expected is None or count == expected or time.monotonic() > until_s:
            return count
        time.sleep(0.01)
set_threads(2)
before = foreign()
knobs = EngineKnobs(threads=2)
model = Path(sys.argv[1])
it = build_engine(EngineSettings(model=model, dtype="float32", knobs=knobs, executor=ExecutorName.TORCH))
built = foreign(before)
warm_up(it)
print(built - before, foreign() - before)
it.stop(drain_s=0.0)
"""


def test_apart_raises_what_the_function_raises() -> None:
    """With its type and text."""
    with pytest.raises(ZeroDivisionError, match="by zero"):
        run_on_own_thread(lambda: 1 / 0)


@linux
def test_a_thread_that_gives_way_does_so_alone() -> None:
    """Its own niceness rises, and once only; that of its process and of threads after it does not."""

    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def given_way() -> int:
        lower_priority()
        lower_priority()
        return niceness()

    before = niceness()
    assert run_on_own_thread(given_way) == max(10, before)
    assert niceness() == before
    assert run_on_own_thread(niceness) == before


@linux
def test_building_an_engine_leaves_its_compute_thread_alone_with_workers(tiny_sd_folder: Path) -> None:
    """After building and an image there is one team of torch's: the compute thread and one worker."""
    command = [sys.executable, "-c", ENGINE, str(tiny_sd_folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    built, ran = map(int, done.stdout.split())
    assert built == 0
    assert ran <= 1
