"""What can go wrong between a module and its two halves.

GraphError
├── UnsupportedOperator  the model uses something that cannot be cut; its author must change it
├── BadProgram           a stored program is invalid; whoever made the file must make it again
└── BadCut               the chosen nodes cannot be a CN half; the cutter is wrong
"""

from __future__ import annotations


class GraphError(Exception):
    """Base class of all errors of this package."""


class UnsupportedOperator(GraphError):
    """The operator `operator` cannot be served, for the reason `why`.

    `where` is the author's line (file:line: code; may be empty).
    """

    def __init__(self, operator: str, why: str, where: str = "") -> None:
        super().__init__(f"{operator}: {why}" + (f"\n    at {where}" if where else ""))
        self.operator = operator
        self.why = why
        self.where = where


class BadProgram(GraphError):
    """The data is not a program that may run here."""


class BadCut(GraphError):
    """A value would have to flow back from the HN to the CN, or a lookup would run on the HN."""
