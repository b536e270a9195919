"""Errors that concern a job as a whole. A trial that fails is a `TrialOutcome`, never an exception.

* `TunerError`
  * `JobError`: base of these.
    * `JobRefused`: the job file, the target or the scenario is wrong; nothing was measured. The user must change it.
    * `JobBroken`: measuring is no longer possible (the child does not start, the disk is full); resume once repaired.
      * `NothingValid`: the host was too busy to measure the reference.
    * `JobBusy`: another process holds what only one may hold: the live service of this job.
"""

from __future__ import annotations

from plait_autoconfig.errors import TunerError


class JobError(TunerError):
    """Base of all job errors; its text is one sentence for the person at the terminal."""


class JobRefused(JobError):
    """The job must be specified differently."""


class JobBroken(JobError):
    """Whatever the message names must be repaired; then the job continues where it stopped."""


class NothingValid(JobBroken):
    """Every load test of the reference was invalid: the host was too busy to measure on."""


class JobBusy(JobError):
    """Wait for the other process, or stop it."""
