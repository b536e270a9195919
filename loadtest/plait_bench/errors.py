"""Errors of the benchmarks.

BenchError
├── SystemUnavailable  a system cannot run here (a library or model is missing); the other systems go on
├── SystemFailed       a system failed or its process died; the run ends
└── Disagreement       two systems gave different results for the same request: they are not comparable
"""

from __future__ import annotations


class BenchError(Exception):
    """Base class; the message is one sentence for the person at the terminal."""


class SystemUnavailable(BenchError):
    """A system cannot run here; the other systems go on."""


class SystemFailed(BenchError):
    """A system failed or its process died."""


class Disagreement(BenchError):
    """Two systems gave different results for the same request."""
