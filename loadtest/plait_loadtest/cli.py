"""``plait loadtest run`` and ``compare``. Data on stdout, progress on stderr.

Exit codes: 0 done, 1 failed (also: not one request succeeded), 2 wrong usage, 99 a threshold was missed or something got
worse, 130 interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from plait_loadtest.scenario import Scenario
    from plait_loadtest.session import Session

EXIT_FAILED, EXIT_USAGE, EXIT_THRESHOLD, EXIT_INTERRUPTED = 1, 2, 99, 130

app = typer.Typer(
    add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None, no_args_is_help=True,
    help="An honest load generator: open loop, latency from the scheduled time.",
)  # fmt: skip

Option = typer.Option


@app.command()
def run(
    scenario: Annotated[str | None, typer.Argument(help="a built-in scenario or a YAML file")] = None,
    *,
    url: Annotated[str | None, Option(help="the server: http://host:port")] = None,
    api: Annotated[str | None, Option(help="images, infer or raw")] = None,
    path: Annotated[str | None, Option(help="path of the request, where it is not the API's own")] = None,
    arrivals: Annotated[str | None, Option(help="constant, poisson, gamma, ramp, step, trace or closed")] = None,
    rate: Annotated[float | None, Option(help="requests per second")] = None,
    duration: Annotated[float | None, Option(help="seconds of the measured part")] = None,
    count: Annotated[int | None, Option(help="end after so many measured requests instead")] = None,
    seed: Annotated[int | None, Option(help="of arrivals and requests")] = None,
    processes: Annotated[int | None, Option(help="sending processes")] = None,
    threshold: Annotated[list[str] | None, Option(help='"p99_ms < 250"; may be repeated; exit 99 if missed')] = None,
    slo_ms: Annotated[float | None, Option(help="a response of any class is good within so many ms")] = None,
    settings: Annotated[list[str] | None, Option("--set", help="KEY=VALUE, dotted: mix.*.steps=10; repeatable")] = None,
    trace: Annotated[Path | None, Option(help="replay the arrivals of this CSV file")] = None,
    speed: Annotated[float | None, Option(help="of the trace; 2: twice as fast")] = None,
    timeout: Annotated[float | None, Option(help="seconds until a request is given up")] = None,
    header: Annotated[list[str] | None, Option(help='"Name: value" of every request; may be repeated')] = None,
    json: Annotated[str | None, Option(help="write the report as JSON; - is stdout, instead of the table")] = None,
    raw: Annotated[Path | None, Option(help="write one row a request: .csv, .jsonl or .npz")] = None,
    html: Annotated[Path | None, Option(help="write the report as one page that opens offline")] = None,
    locust: Annotated[Path | None, Option(help="write an equivalent locustfile")] = None,
    show_config: Annotated[bool, Option("--show-config", help="print every setting as YAML and end")] = False,
    find_capacity: Annotated[bool, Option("--find-capacity", help="search the highest rate that holds the SLO")] = False,
    confirm: Annotated[bool, Option("--confirm", help="then show too that 1.3 times that rate does not hold")] = False,
) -> None:
    """Sends a load and reports what it met. Flags win over the scenario."""
    from plait_loadtest.load import as_yaml, load_scenario

    flags: dict[str, object | None] = {
        "target.url": url, "target.api": api, "target.path": path, "target.timeout_s": timeout,
        "arrivals.kind": arrivals or (trace and "trace"), "arrivals.rate_per_s": rate,
        "arrivals.file": trace and str(trace.absolute()), "arrivals.speed": speed,
        "duration_s": duration, "count": count, "seed": seed, "processes": processes, "thresholds": threshold,
        "slo.latency_ms": slo_ms, "slos": None if slo_ms is None else {},
    }  # fmt: skip
    with _told_as_sentences():
        overrides = {key: value for key, value in flags.items() if value is not None}
        overrides |= dict(map(_setting, settings or ())) | dict(map(_header, header or ()))
        chosen = load_scenario(scenario or {}, overrides)
        outputs = _Outputs(json=json, raw=raw, html=html, locust=locust)
        if show_config:
            print(as_yaml(chosen), end="")
            return
        outputs.check()
        code = _search(chosen, outputs, confirm=confirm) if find_capacity else _run(chosen, outputs)
    raise typer.Exit(code)
