"""`--locust`: an equivalent locustfile that needs only Locust: the same requests, mix and mean rate.

The file itself states what Locust cannot do, so that nobody compares its percentiles with ours unawares.
"""

from __future__ import annotations

import base64
import json
from importlib import resources
from typing import Any

from plait_loadtest.mix import RequestMix
from plait_loadtest.plan import make_plan
from plait_loadtest.scenario import (
    ClosedLoopCallers,
    ConstantArrivals,
    GammaArrivals,
    PoissonArrivals,
    RampArrivals,
    Scenario,
    StepArrivals,
)
from plait_loadtest.values import PreparedRequest

_MAX_REQUESTS, _MAX_BYTES = 200, 4 << 20  # prepared requests that the file carries: the first of the plan
_USERS = 100

_TEMPLATE = resources.files(__package__).joinpath("locustfile.template").read_text("utf-8")


def locustfile(scenario: Scenario, *, file: str = "locustfile.py") -> str:
    """Return the text of the file. It contains no header values: they are read from the environment."""
    plan = make_plan(scenario)
    seconds = scenario.warm_up_s + scenario.duration_s
    if scenario.count is not None and plan.scheduled_ns.size:
        seconds = float(plan.scheduled_ns[-1]) / 1e9
    seconds = max(1.0, seconds)  # 0 would be without end
    rate_per_s, notes = _mean_rate(scenario, max(plan.scheduled_ns.size, 1) / seconds)
    if any(spec.headers for spec in scenario.mix):
        notes += "\nHeaders of single classes of requests are not in it: all users are one tenant."
    users = scenario.callers or _USERS
    wait_name, wait_s = ("constant", 0) if scenario.callers else ("poisson", rate_per_s / users)
    requests = _requests(scenario, plan.mix)
    return _TEMPLATE.format(
        name=_quoted(scenario.name),
        file=file,
        host=scenario.target.url,
        users=f"--users {users} --spawn-rate {users}",
        seconds=round(seconds),
        count=len(requests),
        rate=rate_per_s,
        notes=notes,
        wait_name=wait_name,
        wait=f"{wait_name}({wait_s!r})",
        timeout_s=scenario.target.timeout_s,
        headers=_headers(scenario),
        requests="\n".join(["[", ",\n".join(json.dumps(row) for row in requests), "]"]),
        check=_check(scenario),
    )


def _requests(scenario: Scenario, mix: RequestMix) -> list[list[Any]]:
    """Return `[class, method, path, headers, body]` of the plan's first requests; bodies as base64.

    A class's own headers are left out: they may be keys.
    """
    own = {spec.name: {header.lower() for header in spec.headers} for spec in scenario.mix}
    rows: list[list[Any]] = []
    size = 0
    while len(rows) < _MAX_REQUESTS and size < _MAX_BYTES:
        prepared: PreparedRequest = mix.build(len(rows))
        name = mix.kinds[mix.kind(len(rows))]
        body = base64.b64encode(prepared.body).decode("ascii")
        headers = [[key, value] for key, value in prepared.headers if key not in own[name]]
        rows.append([name, prepared.method, prepared.path, headers, body])
        size += len(body)
    return rows


def _mean_rate(scenario: Scenario, planned_per_s: float) -> tuple[float, str]:
    """Return the mean requests per second, by default those of the plan, and what that leaves out."""
    arrivals = scenario.arrivals
    if isinstance(arrivals, ConstantArrivals | PoissonArrivals):
        return arrivals.rate_per_s, ""
    if isinstance(arrivals, GammaArrivals):
        return arrivals.rate_per_s, "\nBursts of the original (gamma arrivals) are not in it."
    if isinstance(arrivals, ClosedLoopCallers):
        return 0.0, "\nThe original is a closed loop too: its users ask again at once."
    what = (
        "The change of the rate over time"
        if isinstance(arrivals, RampArrivals | StepArrivals)
        else "The trace's arrival times"
    )
    return planned_per_s, f"\n{what} is not in it, only the mean rate."


def _headers(scenario: Scenario) -> str:
    if not scenario.target.headers:
        return "HEADERS = {}"
    rows = [f"    {name!r}: os.environ[{_variable(name)!r}]," for name in scenario.target.headers]
    return "\n".join(["# Header values are secrets more often than not: they come from the environment.", "HEADERS = {",
                      *rows, "}"])  # fmt: skip


def _variable(name: str) -> str:
    return "LOCUST_HEADER_" + "".join(letter if letter.isalnum() else "_" for letter in name.upper())


def _check(scenario: Scenario) -> str:
    """Return the part of the response check that needs only the text; otherwise any 2xx counts."""
    contains, least = scenario.target.check.contains, scenario.target.check.least_bytes
    tests = ["200 <= response.status_code < 300"]
    if contains is not None:
        tests.append(f"{contains!r} in response.text")
    if least:
        tests.append(f"len(response.content) >= {least}")
    complaint = "response.failure(f'status {response.status_code}, or the check failed')"
    return f"if not ({' and '.join(tests)}):\n                {complaint}"


def _quoted(name: str) -> str:
    return name.replace("\\", "\\\\").replace('"""', "'''")
