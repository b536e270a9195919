"""`plait loadtest`: the load tester's own command, which needs nothing else from plait."""

from __future__ import annotations

from plait_loadtest.cli import app

__all__ = ["app"]
