"""`python -m tests.faults run|fairness|neighbours|refusals|steady`. Data on stdout, progress on stderr.

Exit codes: 0 passed, 1 not passed, 99 a threshold was missed, 130 interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from faults.attacks import ALL, ATTACKS
from faults.crowds import CROWDS, crowd_text
from faults.fairness import FairnessPlan, fairness_configuration, fairness_run, fairness_text
from faults.neighbours import NeighboursPlan, neighbours_configuration, neighbours_run, neighbours_text
from faults.recording import (
    PATH,
    Recorder,
    crowd_rows,
    fairness_rows,
    fault_rows,
    neighbour_rows,
    refusal_rows,
    steady_rows,
)
from faults.refusals import RefusalsPlan, refusals_run, refusals_text
from faults.reporting import fault_text
from faults.run import FaultPlan, RunFailed, fault_run
from faults.server import RunningServer, attached, started
from faults.steady import SteadyPlan, steady_run, steady_text
from plait_bench.errors import RecordError

__all__ = ["main"]

_ATTACKS = (*ATTACKS, ALL, *CROWDS)
_DESCRIPTORS = 1 << 16
_MISSED = 99
"""The exit code of a run that missed what is promised, as of `plait` itself."""


def main(arguments: Sequence[str]) -> int:
    """Run a command; return its exit code."""
    options = _parser().parse_args(arguments)
    # The server is a session of its own: it must not outlive whoever stops this command.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        code: int = options.command(options)
    except (RunFailed, RecordError, LookupError, AssertionError) as error:
        print(f"faults: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    commands = parser.add_subparsers(required=True)
    run = _command(commands, "run", _run, "kill every kind of process in turn while answers are compared")
    run.add_argument("--seconds", type=float, default=60.0, help="each kind dies once, however long it takes")
    run.add_argument("--requests", type=int, default=500, help="in that time; the pace goes on until the end")
    run.add_argument("--kinds", default="", help="whose processes die: ingress,engine,...; all that there are if empty")
    run.add_argument("--pauses", action="store_true", help="after each kind died, stop and continue processes too")
    run.add_argument("--disconnects", type=float, default=0.05, help="the share of clients that leave in the middle")
    run.add_argument("--hung-s", type=float, default=180.0, help="a request that has not ended then is hung")
    run.add_argument("--recovery-s", type=float, default=180.0, help="how long a recovery may take")
    run.add_argument("--port", type=int, help="attach to the plait serve of this user on that port")
    fair = _command(commands, "fairness", _fairness, "what one tenant gets while another one floods")
    fair.add_argument("--seconds", type=float, default=30.0, help="of each round")
    fair.add_argument("--rounds", type=int, default=3)
    fair.add_argument("--connections", type=int, default=64, help="of the tenant who floods")
    fair.add_argument("--queued", type=int, default=1000, help="requests in the queue when a single image is asked for")
    fair.add_argument("--share", type=float, default=0.5, help="of the capacity that the other tenant offers")
    beside = _command(commands, "neighbours", _neighbours, "what attacks, and many models or files, cost the others")
    beside.add_argument("--attacks", default=",".join(_ATTACKS), help="each on a server of its own")
    beside.add_argument("--seconds", type=float, default=120.0, help="of each round")
    beside.add_argument("--rounds", type=int, default=2, help="without and with each attack, in turn")
    beside.add_argument("--share", type=float, default=0.15, help="of the capacity that the neighbour asks for")
    run.add_argument("--warm-rounds", type=int, default=12, help="of load before the first fault, at most")
    refusals = _command(commands, "refusals", _refusals, "how quickly a full server refuses")
    refusals.add_argument("--seconds", type=float, default=30.0)
    refusals.add_argument("--connections", type=int, nargs="+", default=[100, 500])
    refusals.add_argument("--queue-limit", type=int, default=8)
    steady = _command(commands, "steady", _steady, "what grows under a steady load")
    steady.add_argument("--minutes", type=float, default=30.0)
    steady.add_argument("--share", type=float, default=0.7, help="of the capacity that is offered")
    steady.add_argument("--port", type=int, help="attach to the plait serve of this user on that port")
    return parser


def _command(commands: Any, name: str, function: Callable[..., int], says: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=says, description=says)
    parser.set_defaults(command=function)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--set", dest="settings", action="append", default=[], help="path=value, for plait serve")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--record", action="store_true", help=f"append rows to {PATH.name}; needs a clean checkout")
    parser.add_argument("--results", type=Path, default=PATH, help="where --record appends")
    return parser


def _run(options: argparse.Namespace) -> int:
    plan = FaultPlan(
        requests=options.requests,
        seconds=options.seconds,
        seed=options.seed,
        kinds=tuple(filter(None, options.kinds.split(","))),
        pauses=options.pauses,
        disconnects=options.disconnects,
        hung_s=options.hung_s,
        recovery_s=options.recovery_s,
        warm_rounds=options.warm_rounds,
    )
    recorder = Recorder(options.results) if options.record else None
    report = _with_server(options, _server(options), lambda server: fault_run(server, plan, _say))
    _print(options, report.to_json(), fault_text(report))
    if recorder is not None:
        recorder.write(fault_rows(report))
    return 1 if report.problems else 0


def _fairness(options: argparse.Namespace) -> int:
    plan = FairnessPlan(
        seconds=options.seconds,
        rounds=options.rounds,
        connections=options.connections,
        queued=options.queued,
        share=options.share,
        seed=options.seed,
    )
    recorder = Recorder(options.results) if options.record else None
    _raise_descriptor_limit()
    server = started(*options.settings, config=fairness_configuration())
    report = _with_server(options, server, lambda server: fairness_run(server, plan, _say))
    _print(options, report.to_json(), fairness_text(report))
    if recorder is not None:
        recorder.write(fairness_rows(report))
    return _MISSED if report.misses else 0


def _neighbours(options: argparse.Namespace) -> int:
    plan = NeighboursPlan(seconds=options.seconds, rounds=options.rounds, share=options.share, seed=options.seed)
    names = options.attacks.split(",")
    if unknown := set(names) - set(_ATTACKS):
        raise LookupError(f"there is no attack {', '.join(sorted(unknown))}; there are {', '.join(_ATTACKS)}")
    recorder = Recorder(options.results) if options.record else None
    _raise_descriptor_limit()
    reports = []
    for name in names:
        with tempfile.TemporaryDirectory(prefix="pf-") as folder:
            report, text, rows = _attacked(options, name, Path(folder), plan)
        reports.append(report)
        if not options.json:
            print(text, flush=True)
        if recorder is not None:
            recorder.write(rows)
    if options.json:
        print(json.dumps([report.to_json() for report in reports], indent=1))
    return _MISSED if any(report.misses for report in reports) else 0


def _attacked(options: argparse.Namespace, name: str, folder: Path, plan: NeighboursPlan) -> tuple[Any, str, Any]:
    """Return the report of an attack or a crowd, its table and its rows."""
    if name in CROWDS:
        crowd = CROWDS[name]
        server = started(*options.settings, config=crowd.prepare(folder))
        found = _with_server(options, server, lambda server: crowd.run(server, folder, _say))
        return found, crowd_text(found), crowd_rows(found)
    server = started(*options.settings, config=neighbours_configuration(folder))
    report = _with_server(options, server, lambda server: neighbours_run(server, name, plan, _say))
    return report, neighbours_text(report), neighbour_rows(report)


def _refusals(options: argparse.Namespace) -> int:
    plan = RefusalsPlan(
        seconds=options.seconds, connections=tuple(options.connections), queue_limit=options.queue_limit
    )
    recorder = Recorder(options.results) if options.record else None
    _raise_descriptor_limit()
    limit = f"images.knobs.queue_limit={plan.queue_limit}"
    server = started("recommend=null", limit, *options.settings)
    reports = _with_server(options, server, lambda server: refusals_run(server, plan, _say))
    _print(options, [report.to_json() for report in reports], refusals_text(reports))
    if recorder is not None:
        recorder.write(refusal_rows(reports))
    return _MISSED if any(report.misses for report in reports) else 0


def _steady(options: argparse.Namespace) -> int:
    plan = SteadyPlan(minutes=options.minutes, share=options.share, seed=options.seed)
    recorder = Recorder(options.results) if options.record else None
    report = _with_server(options, _server(options), lambda server: steady_run(server, plan, _say))
    _print(options, report.to_json(), steady_text(report))
    if recorder is not None:
        recorder.write(steady_rows(report))
    return 1 if report.problems else 0


def _server(options: argparse.Namespace) -> AbstractContextManager[RunningServer]:
    return started(*options.settings) if options.port is None else attached(options.port)


def _with_server(
    options: argparse.Namespace, server: AbstractContextManager[RunningServer], run: Callable[[RunningServer], Any]
) -> Any:
    """Run against the server; it is stopped when this returns."""
    _say("starting plait serve" if getattr(options, "port", None) is None else f"attaching to port {options.port}")
    with server as running:
        _say(f"{running.url}: {dict(running.kinds())}")
        return asyncio.run(run(running))


def _print(options: argparse.Namespace, document: Any, text: str) -> None:
    print(json.dumps(document, indent=1) if options.json else text)


def _say(line: str) -> None:
    print(f"faults: {line}", file=sys.stderr, flush=True)


def _raise_descriptor_limit() -> None:
    """A thousand connections need as many descriptors, here and in the server, which inherits the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
