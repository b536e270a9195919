"""What can go wrong before and after the load. What goes wrong with a request is an `Outcome`, never an exception.

* `LoadtestError`
  * `ScenarioError`: the scenario can not be run as it is written; the message names the field.
  * `ReportError`: a report can not be read or compared.
"""

from __future__ import annotations


class LoadtestError(Exception):
    """Base of all; its text is one sentence for the person at the terminal."""


class ScenarioError(LoadtestError):
    """The scenario, a flag, a trace or a file it names is wrong."""


class ReportError(LoadtestError):
    """A file is not a report, or two reports can not be compared."""
