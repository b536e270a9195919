"""Errors of the benchmarks.

BenchError
├── Unavailable   a system can not run here (a library or model is missing); the other systems go on
├── SystemFailed  a system failed or its process died; the run ends
├── Disagreement  two systems made different pictures of the same request: nothing they take may be compared
└── RecordError   the results file already has rows with the same key, or can not be read
"""

from __future__ import annotations


class BenchError(Exception):
    """Base; the message is one sentence for the person at the terminal."""


class SystemUnavailable(BenchError):
    """A system can not run here; the other systems go on."""


class SystemFailed(BenchError):
    """A system failed or its process died."""


class Disagreement(BenchError):
    """Two systems made different results of the same request."""


class RecordError(BenchError):
    """The results file has rows with the same key, or can not be read."""
