"""What can go wrong between a module and its two halves.

GraphError
├── Refused      the model holds something that can not be cut; its author must change it
├── BadProgram   a stored program is not one; whoever made the file must make it again
└── BadCut       the chosen nodes can not be a CN half; the cutter is wrong
"""

from __future__ import annotations

__all__ = ["BadCut", "BadProgram", "GraphError", "UnsupportedOperator"]


class GraphError(Exception):
    """The base of all."""


class UnsupportedOperator(GraphError):
    """``operator`` in the author's line ``where`` (file:line: code; may be empty) can not be served, and ``why``."""

    def __init__(self, operator: str, why: str, where: str = "") -> None:
        super().__init__(f"{operator}: {why}" + (f"\n    at {where}" if where else ""))
        self.operator = operator
        self.why = why
        self.where = where


class BadProgram(GraphError):
    """The data is not a program that may run here."""


class BadCut(GraphError):
    """A value would have to flow back from the HN to the CN, or a lookup would run on the HN."""
