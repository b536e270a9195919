"""The demo's last part: a tuning job of three trials on a clone of the ranking service, with its report."""

from __future__ import annotations

import shutil
from pathlib import Path

from plait.errors import PlaitError
from plait.tuning.job.local_run import EXAMPLES, run
from plait_autoconfig.errors import NothingValid
from plait_autoconfig.jobs.state import JobState
from plait_autoconfig.jobs.store import holds_job

JOB = EXAMPLES / "demo.yaml"


def tune_ranking(folder: Path) -> str:
    """Run the job from scratch in `folder`, with progress on stderr; return its result and where the report is.

    On a host that is too busy to measure on the result is that, as an invalid load test's is.
    """
    if holds_job(folder):  # of an earlier demo
        shutil.rmtree(folder)
    try:
        state, _ = run(JOB, folder=folder)
    except PlaitError as error:
        if not isinstance(error.__cause__, NothingValid):
            raise
        return f"  {folder}  NOTHING TUNED: {error}"
    return result_lines(state, folder)


def result_lines(state: JobState, folder: Path) -> str:
    """Return two lines: where the report is, and the answer or why there is none."""
    answer = state.recommendation
    sentence = answer.sentence if answer is not None else state.binding or state.reason
    return f"  {folder / 'report.html'}  {state.remaining.used_trials} tuning trials\n  {sentence}"
