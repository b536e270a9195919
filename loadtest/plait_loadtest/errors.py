"""Errors before and after the load. A request that fails is a `RequestOutcome`, never an exception.

* `LoadtestError`
  * `ScenarioError`: the scenario cannot be run as written; the message names the field.
  * `ReportError`: a report cannot be read or compared.
"""

from __future__ import annotations


class LoadtestError(Exception):
    """Base of all load test errors; its text is one sentence for the person at the terminal."""


class ScenarioError(LoadtestError):
    """The scenario, a flag, a trace or a file that it names is wrong."""


class ReportError(LoadtestError):
    """A file is not a report, or two reports cannot be compared."""
