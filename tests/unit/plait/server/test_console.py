"""Where the words of `plait serve` go."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import os, sys
from pathlib import Path
from plait.server.supervise import Console

console = Console.divert(Path(sys.argv[1]))
os.write(1, b"of others\\n")
os.write(2, b"of others, too\\n")
console.data("an address")
console.progress("how it goes")
console.restore()
print("why it ended", file=sys.stderr)
"""


def test_our_words_reach_the_terminal_and_those_of_others_the_log(tmp_path):
    """While diverted only our lines come out; after restore the last sentence does, too."""
    log = tmp_path / "log"
    done = subprocess.run([sys.executable, "-c", CODE, str(log)], capture_output=True, text=True, check=True)
    assert done.stdout == "an address\n"
    assert done.stderr == "how it goes\nwhy it ended\n"
    assert log.read_text() == "of others\nof others, too\n"
