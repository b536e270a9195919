"""`python -m tests.faults`, from the repository's root."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where pytest finds the same modules
    from faults.command import main

    sys.exit(main(sys.argv[1:]))
