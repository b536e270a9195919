"""What a scenario must satisfy beyond the types of its fields: everything that can be checked before the run."""

from __future__ import annotations

import re
import ssl
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from plait_loadtest.arrivals import check_size, rate_profile
from plait_loadtest.errors import ScenarioError
from plait_loadtest.mix.images import MAX_CONTROLNETS, OWN_FIELDS, max_drawn, popularity
from plait_loadtest.scenario import (
    ClosedLoopCallers,
    ControlNets,
    Edits,
    ImageClass,
    InferClass,
    LoadTarget,
    Loras,
    RawClass,
    Scenario,
    StepArrivals,
    TraceArrivals,
)
from plait_loadtest.wire.dial import place_of

_SIZE = re.compile(r"[1-9]\d{0,4}x[1-9]\d{0,4}|auto")


def validate(scenario: Scenario) -> None:
    """Raise `ScenarioError`, one sentence that names the field, unless the scenario can be run."""
    _check_target(scenario.target)
    _check_arrivals(scenario)
    api = scenario.target.api
    names = Counter(spec.name for spec in scenario.mix)
    _require(len(scenario.mix) > 0, "mix", "has no class of requests")
    for position, spec in enumerate(scenario.mix):
        field = f"mix.{position}"
        _require(names[spec.name] == 1, f"{field}.name", f"{spec.name!r} is the name of another class too")
        _require(spec.api == api, f"{field}.api", f"is {spec.api}, but target.api is {api}")
        if isinstance(spec, ImageClass):
            _check_images(field, spec)
        elif isinstance(spec, InferClass):
            _check_infer(field, spec, scenario.target)
        else:
            _check_raw(field, spec)
    for name in scenario.slos:
        _require(name in names, f"slos.{name}", f"is no class of the mix, which has {', '.join(names)}")
    few = f"{scenario.limits.connections} are fewer than {scenario.processes} processes"
    _require(scenario.processes <= scenario.limits.connections, "limits.connections", few)


def _require(condition: bool, field: str, problem: str) -> None:
    if not condition:
        raise ScenarioError(f"{field}: {problem}")


def _check_target(target: LoadTarget) -> None:
    place_of(target.url)
    _check_path("target.path", target.path)
    _check_headers("target.headers", target.headers)
    _check_file("target.ca", target.ca)
    if target.ca is not None:
        _require(target.verify_tls, "target.ca", "has no use where verify_tls is false")
        try:
            ssl.create_default_context(cafile=target.ca)
        except OSError as error:
            raise ScenarioError(f"target.ca: {target.ca} holds no certificates in PEM: {error}") from error


def _check_headers(field: str, headers: Mapping[str, str]) -> None:
    for name, value in headers.items():
        _require(re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name) is not None, field, f"bad name {name!r}")
        _require(value.isprintable() and value.isascii(), f"{field}.{name}", "is not printable ASCII text")


def _check_path(field: str, path: str | None) -> None:
    printable = path is None or (path.isascii() and path.isprintable() and " " not in path)
    _require(path is None or path.startswith("/"), field, f"{path!r} does not start with /")
    _require(printable, field, f"{path!r} has characters that must be percent-encoded")


def _check_arrivals(scenario: Scenario) -> None:
    arrivals = scenario.arrivals
    if isinstance(arrivals, ClosedLoopCallers):
        for limit in ("connections", "in_flight"):
            max_count = getattr(scenario.limits, limit)
            fits = arrivals.concurrency <= max_count
            _require(fits, "arrivals.concurrency", f"{arrivals.concurrency} are more than limits.{limit}, {max_count}")
        return
    if isinstance(arrivals, TraceArrivals):
        _check_file("arrivals.file", arrivals.file)
        return
    if isinstance(arrivals, StepArrivals):
        _require(any(rate > 0 for _, rate in arrivals.stages), "arrivals.stages", "never has a rate above 0")
        whole_s, given_s = sum(seconds for seconds, _ in arrivals.stages), scenario.duration_s
        few = f"last {whole_s:g} s, longer than duration_s, {given_s:g}; change one, or leave duration_s out"
        _require(scenario.count is not None or whole_s <= given_s * (1 + 1e-9), "arrivals.stages", few)
    profile = rate_profile(arrivals, duration_s=scenario.duration_s, warm_up_s=scenario.warm_up_s)
    end_s = scenario.warm_up_s + (scenario.duration_s if scenario.count is None else 0.0)
    check_size(profile.expected(end_s) + (scenario.count or 0))


def _check_images(field: str, spec: ImageClass) -> None:
    _check_file(f"{field}.prompts_file", spec.prompts_file)
    _require(spec.prompts_file is not None or len(spec.prompts) > 0, f"{field}.prompts", "is empty")
    for size in spec.size or ():
        _require(_SIZE.fullmatch(size) is not None, f"{field}.size", f"{size!r} is not WIDTHxHEIGHT")
    for name in spec.extra:
        _require(name not in OWN_FIELDS, f"{field}.extra", f"{name} is written by the generator itself")
    _check_add_ons(f"{field}.loras", spec.loras)
    _check_add_ons(f"{field}.controlnets", spec.controlnets)
    max_count = max_drawn(spec.controlnets.count)
    _require(max_count <= MAX_CONTROLNETS, f"{field}.controlnets.count", f"{max_count} is more than {MAX_CONTROLNETS}")
    for path in spec.controlnets.images:
        _check_file(f"{field}.controlnets.images", path)
    _check_headers(f"{field}.headers", spec.headers)
    _check_edits(f"{field}.edits", spec.edits)


def _check_edits(field: str, edits: Edits) -> None:
    _check_path(f"{field}.path", edits.path)
    for name in ("images", "masks"):
        for path in getattr(edits, name):
            _check_file(f"{field}.{name}", path)
    counts = f"{len(edits.masks)} for {len(edits.images)} images"
    if edits.masks or (edits.images and edits.masked > 0):  # a mask has the size of its image
        _require(len(edits.masks) == len(edits.images), f"{field}.masks", counts)


def _check_add_ons(field: str, spec: Loras | ControlNets) -> None:
    beside = spec.popularity is not None and bool(spec.names)
    _require(not beside, f"{field}.popularity", "is given beside names; one of them must go")
    _require(len(set(spec.names)) == len(spec.names), f"{field}.names", "has the same name twice")
    available = sum(weight > 0 for weight in popularity(spec)[1])
    max_count = max_drawn(spec.count)
    _require(
        available >= max_count,
        f"{field}.names",
        f"{available} are too few for the {max_count} that a request may carry",
    )


def _check_infer(field: str, spec: InferClass, target: LoadTarget) -> None:
    _require(target.model is not None or target.path is not None, "target.model", "must be given: it is in the path")
    ids, tables = len(spec.rows if spec.ids_per_table is None else spec.ids_per_table), len(spec.rows)
    _require(ids == tables, f"{field}.ids_per_table", f"has {ids} entries for {tables} tables")
    _check_headers(f"{field}.headers", spec.headers)
    _require(spec.dense > 0 or len(spec.rows) > 0, f"{field}.rows", "is empty, and so is dense: nothing to send")
    for position, item in enumerate(spec.inputs):
        where = f"{field}.inputs.{position}"
        _require((item.numbers is None) != (item.ids is None), where, "has numbers or ids, one of them")
        _require(item.bag is None or item.ids is not None, f"{where}.bag", "belongs to ids")


def _check_raw(field: str, spec: RawClass) -> None:
    _check_path(f"{field}.path", spec.path)
    _check_file(f"{field}.body_file", spec.body_file)
    _require(not (spec.body and spec.body_file), f"{field}.body_file", "is given beside body; one of them must go")
    _require(spec.content_type.isprintable(), f"{field}.content_type", "is not printable text")
    _check_headers(f"{field}.headers", spec.headers)


def _check_file(field: str, path: Path | None) -> None:
    _require(path is None or path.is_file(), field, f"there is no file {path}")
