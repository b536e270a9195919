"""The tuner's errors. A trial that fails is a `TrialOutcome`, never an exception.

* `TunerError`
  * `SpaceError`: the search space is ill-defined; the message names the knob or the constraint.
    * `EmptySpace`: no configuration satisfies all constraints; the message says what each of them leaves.
  * `OutsideSpace`: a configuration is not part of this space; the message names the knob.
  * `ObjectiveError`: the objective is wrong, or a measurement lacks a metric that it needs.
  * `DesignerError`: no such designer, or it cannot work with its input.
  * `Exhausted`: every cell was proposed; the search is over.
  * `TrialFailed`: raised by `sampler.report` inside a study's objective function, for Optuna to record a FAIL.
  * `LibraryError`: a file or store is not a library, or has a newer version.
  * `JobError`: base of those that concern a job as a whole.
    * `JobRefused`: the job file, the target or the scenario is wrong; nothing was measured. The user must change it.
    * `JobBroken`: measuring is not possible (the child does not start, the disk is full, another process tunes the live
      service of this job); resume once that is over.
      * `NothingValid`: the host was too busy to measure the reference.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection


class TunerError(Exception):
    """Base of all tuner errors; its text is one sentence for the person at the terminal."""


class SpaceError(TunerError):
    """The space must be defined differently."""


class EmptySpace(SpaceError):
    """The constraints contradict each other or the ranges of the knobs."""


class OutsideSpace(TunerError):
    """Either the configuration or the space must be changed."""


class ObjectiveError(TunerError):
    """The objective must be defined differently, or the trials must measure more."""


class DesignerError(TunerError):
    """Another designer, or different input for this one, is needed."""


class Exhausted(TunerError):
    """No cell is left to propose; earlier trials still count."""


class TrialFailed(TunerError):
    """The trial has no measurement; the search continues."""


class LibraryError(TunerError):
    """The library cannot be read or written."""


class JobError(TunerError):
    """Base of all job errors; its text is one sentence for the person at the terminal."""


class JobRefused(JobError):
    """The job must be specified differently."""


class JobBroken(JobError):
    """Whatever the message names must be repaired; then the job continues where it stopped."""


class NothingValid(JobBroken):
    """Every load test of the reference was invalid: the host was too busy to measure on."""


def hint(name: str, known: Collection[str]) -> str:
    """Return what somebody may have meant who gave a name that is not known."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else f"they are {', '.join(known)}"
