"""Stands for the `plait` command in a process: a job that promises a rate, and a server that holds some rates."""

from __future__ import annotations

import itertools
import json
import sys
import time
from pathlib import Path

CAPACITY_PER_S = 105.0
PROMISED_PER_S = 100.0


def main(words: list[str]) -> int:
    """Answer one command."""
    options = dict(itertools.pairwise(words))
    match words[:2]:
        case ["tune", "run"]:
            print(json.dumps(_document()))
        case ["tune", "apply"]:
            with Path(words[3]).open("a") as file:
                file.write("# applied\n")
        case ["serve", config]:
            assert "# applied" in Path(config).read_text()
            print("http://127.0.0.1:1", flush=True)
            time.sleep(600.0)
        case ["loadtest", "run"]:
            held = float(options["--rate"]) <= CAPACITY_PER_S
            print(json.dumps({"slo": {"met": held, "attainment": 1.0 if held else 0.4}}))
            return 0 if held else 99
    return 0


def _document() -> dict[str, object]:
    metrics = {"goodput_per_s": PROMISED_PER_S, "reserved_cores": 0.5, "cpu_cores": 1.5}
    gain = {"goodput_per_cost": {"value": 1.4, "low": 1.3, "high": 1.5}}
    capacity = {"value": 105.0, "low": 90.0, "high": 120.0}
    promise = {"rate_per_s": PROMISED_PER_S, "runs": 3, "tried": 4, "lowest_per_s": PROMISED_PER_S}
    row = {"kind": "trial", "restarted": [], "duration_s": 21.5, "load_s": 20.0}
    return {
        "answers": [{"metrics": metrics, "gain": gain, "capacity": capacity, "promise": promise}],
        "binding": "",
        "reason": "",
        "rows": [row],
        "remaining": {"used_s": 300.0, "load_s": 250.0},
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
