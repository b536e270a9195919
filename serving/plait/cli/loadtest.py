"""``plait loadtest``: the load tester's own command, which needs nothing else of plait."""

from __future__ import annotations

from plait_loadtest.cli import app

__all__ = ["app"]
