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
"""

from __future__ import annotations


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
