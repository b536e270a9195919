"""What can go wrong in the tuner. A trial that fails is an `Outcome`, never an exception.

* `TunerError`
  * `SpaceError`: the search space is wrong as it is written; the message names the knob or the constraint.
    * `EmptySpace`: no configuration satisfies all constraints; the message says what each of them leaves.
  * `OutsideSpace`: a configuration is not of this space; the message names the knob.
  * `ObjectiveError`: the objective is wrong, or a measurement lacks a metric that it needs.
  * `DesignerError`: no such designer, or it can not work with what it was given.
  * `Exhausted`: every cell was proposed; the search is over.
  * `TrialFailed`: raised by `sampler.report` inside a study's objective function, for Optuna to record a FAIL.
  * `LibraryError`: a file or store is not a library, or of a newer version.
"""

from __future__ import annotations


class TunerError(Exception):
    """Base of all; its text is one sentence for the person at the terminal."""


class SpaceError(TunerError):
    """The space must be written differently."""


class EmptySpace(SpaceError):
    """The constraints contradict each other or the ranges of the knobs."""


class OutsideSpace(TunerError):
    """Whoever made the configuration must change it, or the space."""


class ObjectiveError(TunerError):
    """The objective must be written differently, or the trials must measure more."""


class DesignerError(TunerError):
    """Another designer, or another input for this one, is needed."""


class Exhausted(TunerError):
    """No cell is left to propose; what was told still counts."""


class TrialFailed(TunerError):
    """The trial has no measurement; the search goes on."""


class LibraryError(TunerError):
    """The library can not be read or written."""
