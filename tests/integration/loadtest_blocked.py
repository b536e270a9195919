"""``python loadtest_blocked.py NAMES ARGUMENTS...``: runs plait_loadtest's command where importing any of NAMES fails.

Worker processes are started anew from this very file (the "spawn" method runs a parent's main module again), so the
block holds in them too; they find the names in the environment.
"""

from __future__ import annotations

import os
import sys


class Blocker:
    """An import finder that refuses."""

    def __init__(self, names):
        self.names = names

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"{name} is blocked in this test", name=name)
        return


if __name__ == "__main__":
    os.environ["LOADTEST_BLOCKED"] = sys.argv[1]
sys.meta_path.insert(0, Blocker(os.environ["LOADTEST_BLOCKED"].split(",")))

if __name__ == "__main__":
    from plait_loadtest.cli import app

    app(args=sys.argv[2:], prog_name="plait loadtest")
