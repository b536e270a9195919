"""`python -m starter_training.ranking picks|movielens`: train a ranking model; its figures on stdout as JSON.

`picks` writes the starter model's state, its films and the package that is served. `movielens` needs the recbole
wheel, which contains MovieLens-100k:

    pip download --no-deps --dest /tmp recbole==1.2.1
    python -m starter_training.ranking movielens /tmp/recbole-1.2.1-py3-none-any.whl
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from plait_disagg.package.manifest import PackageError
from plait_serving.starter.manifest import WEIGHTS, write_manifest
from plait_serving.starter.ranking.picks import FOLDER
from starter_training.ranking.movielens import MovieLensAuc, train_movielens
from starter_training.ranking.movielens_data import BadArchive
from starter_training.ranking.train import PicksAuc, package_picks, train_picks


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0 ok, 1 failed, 2 usage."""
    parser = argparse.ArgumentParser(
        prog="python -m starter_training.ranking",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    picks = commands.add_parser("picks", help="the starter model")
    picks.add_argument("--out", type=Path, default=FOLDER, help="where it goes")
    movielens = commands.add_parser("movielens", help="a model of MovieLens-100k")
    movielens.add_argument("wheel", type=Path, help="the recbole wheel")
    movielens.add_argument("--out", type=Path, help="a new folder for the package, to be served")
    options = parser.parse_args(argv)
    # One thread: the same recipe then gives the same bits wherever it runs.
    torch.set_num_threads(1)
    try:
        if options.command == "movielens":
            figures: PicksAuc | MovieLensAuc = train_movielens(options.wheel, options.out)
        else:
            figures = train_picks(options.out)
            package_picks(options.out)
            if options.out == FOLDER:
                write_manifest(WEIGHTS)
    except (BadArchive, PackageError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    json.dump(asdict(figures), sys.stdout, indent=1)
    sys.stdout.write("\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
