"""Recommendation models: packaged from a user's function that builds one; cut, as a report that can be printed and
drawn; and updated: with what differs in a retrained module, published to a running server, folded in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import quote

from torch import nn

from plait.errors import PlaitError, told
from plait.targets import load_target
from plait_disagg.graph.capture import capture, obstacles
from plait_disagg.graph.costs import Cuttable, cuttable, measured_problem, offered
from plait_disagg.graph.cutters import CUTTERS
from plait_disagg.graph.errors import GraphError, UnsupportedOperator
from plait_disagg.graph.inputs import Bag, Dense, Ids, Input, check_bags
from plait_disagg.graph.program import Program
from plait_disagg.graph.report import CANDIDATES, CutReport, advice, cut_report
from plait_disagg.graph.small_tables import placed
from plait_disagg.graph.store import load_program
from plait_disagg.models.configs import CONFIGS, build
from plait_disagg.models.configs import ids_per_bag as ids_per_bag_of
from plait_disagg.package.items import Items
from plait_disagg.package.manifest import CN, Manifest, PackageError
from plait_disagg.package.read import Package, open_package
from plait_disagg.package.sharding import Sharding, plan_of
from plait_disagg.package.write import PackageOptions, write_package
from plait_disagg.refresh.errors import RefreshError
from plait_disagg.refresh.fold import fold_updates
from plait_disagg.refresh.make import make_update
from plait_disagg.refresh.update import UpdateManifest, write_update
from plait_disagg.tables.fused import FusedTables
from plait_disagg.tables.protocols import Tables
from plait_disagg.tables.reference import SeparateTables

_RETURNS = "must return (module, inputs) or (module, inputs, items)"
_TIMEOUT_S = 900.0
"""Longer than the server's own max wait for its workers."""

SHOWN = 64
"""The number of candidates in the request whose bytes the drawing shows."""

# Bytes and what runs where do not depend on the tables' rows, and 100 GB of random rows would not fit here.
_ROWS_SCALE = 1e-4
_DEFAULT_CUTTER = "mincut"

_Cut: TypeAlias = tuple[str, Program, frozenset[str]]
"""A title, the program, and the nodes of its side with the tables."""


@dataclass(frozen=True, kw_only=True)
class UserModel:
    """The result of a user's function."""

    module: nn.Module
    inputs: tuple[Input, ...]
    items: Items | None = None


def make(target: str, *, out: Path | None = None) -> UserModel:
    """Call the function behind `module:function` or `file.py:function`, which may take minutes. Raises `PlaitError` if
    it does not exist or returns something else, or `out`, where its model is to go, is taken; exceptions of the
    function itself pass through to the user."""
    if out is not None and out.exists():
        raise PlaitError(f"{out} exists already")
    returned = load_target(target)()
    if not isinstance(returned, tuple) or len(returned) not in (2, 3):
        raise PlaitError(f"{target}: {_RETURNS}, not {type(returned).__name__}")
    module, inputs, *rest = returned
    items = rest[0] if rest else None
    if not isinstance(module, nn.Module):
        raise PlaitError(f"{target}: {_RETURNS}; the module is no torch.nn.Module but {type(module).__name__}")
    if not isinstance(inputs, Sequence) or not all(isinstance(item, Dense | Ids | Bag) for item in inputs):
        raise PlaitError(f"{target}: {_RETURNS}; inputs must be a list of Dense, Ids and Bag")
    if items is not None and not isinstance(items, Items):
        raise PlaitError(f"{target}: {_RETURNS}; items must be plait_disagg.package.items.Items")
    return UserModel(module=module.eval(), inputs=tuple(inputs), items=items)


@told(ValueError)
def explain(made: UserModel) -> tuple[UnsupportedOperator, ...]:
    """Return all obstacles of a model, in one pass. Raises `PlaitError` for an invalid declaration."""
    return obstacles(made.module, made.inputs)


def package(made: UserModel, folder: Path, *, name: str, options: PackageOptions) -> Manifest:
    """Write the folder. Raises `PlaitError`, naming the operator or the input, if the model cannot be packaged."""
    with told(GraphError, PackageError, ValueError, file=folder):
        return write_package(folder, made.module, made.inputs, name=name, items=made.items, options=options)


def advised(folder: Path, options: PackageOptions) -> tuple[str, ...]:
    """Return what the author of a model that was just packaged should know about its cut."""
    cn = load_program((folder / CN).read_text(encoding="utf-8"))
    return advice(cn, candidates=options.candidates, ids_per_bag=options.ids_per_bag)


# ---- cutting ---------------------------------------------------------------------------------------------------------


def dealt_tables(folder: Path, shards: int) -> list[dict[str, Any]]:
    """Return, for each of so many shards of the tables of a packaged model's folder, the bytes that it would hold,
    about how many of them a request would read, and the pieces. Raises `PlaitError`."""
    if not folder.is_dir():
        raise PlaitError(f"{folder} is no folder of a packaged model, and only a package's tables are dealt to shards")
    with told(PackageError):
        plan = plan_of(open_package(folder), Sharding(shards=shards))
    pieces = ([piece.name for piece in plan.of_shard(number)] for number in range(plan.shards))
    dealt = zip(plan.held_bytes, plan.read_bytes, pieces, strict=True)
    return [{"held_bytes": held, "read_bytes": read, "pieces": names} for held, read, names in dealt]


def inspect_cut(
    model: str, *, cutter: str | None, candidates: int, ids_per_bag: Mapping[str, int]
) -> tuple[str, CutReport]:
    """Return the cut of a packaged model's folder, or of a named configuration (`plait_disagg.models.configs`), with
    its title. `cutter` None: the packaged cut (mincut for a configuration). `ids_per_bag`: ids in a typical row of each
    bag; 1 for bags that are not named.

    Raises `PlaitError`.
    """
    folder = Path(model)
    with told(GraphError, PackageError, ValueError):
        if folder.is_dir():
            name, program, nodes = _of_package(open_package(folder), cutter, candidates, ids_per_bag)
        elif model in CONFIGS:
            ids_per_bag = {**ids_per_bag_of(model), **ids_per_bag}
            name, program, nodes = _of_configuration(model, cutter, candidates, ids_per_bag)
        else:
            raise PlaitError(f"{model} is neither the folder of a packaged model nor one of: {', '.join(CONFIGS)}")
        sizes = tuple(sorted({*CANDIDATES, SHOWN, candidates}))
        return name, cut_report(program, nodes, ids_per_bag=ids_per_bag, candidates=sizes)


def _of_package(package: Package, cutter: str | None, candidates: int, ids_per_bag: Mapping[str, int]) -> _Cut:
    manifest = package.manifest
    check_bags(manifest.inputs, ids_per_bag)
    title = f"{manifest.name}, cut by {cutter or manifest.cut.cutter}"
    ready = cuttable(
        package.whole,
        {port.name: package.constants[port.name] for port in package.whole.constants},  # as they were captured
        manifest.inputs,
        table_rows={table.name: table.rows for table in package.stored.tables},
        exact=not manifest.cut.tiled,
        may_move={table.name: table.rows for table in package.stored.tables if table.out_of_range == "error"},
    )
    if cutter is not None:
        return title, *_cut(ready, FusedTables(package.tables), cutter, candidates, ids_per_bag)
    program = offered(ready, candidates=manifest.cut.candidates, ids_per_bag=ids_per_bag)
    names = {node.name for node in program.nodes}
    nodes = frozenset(node.name for node in package.cn.nodes if node.name in names)
    return title, placed(program, nodes), nodes


def _of_configuration(model: str, cutter: str | None, candidates: int, ids_per_bag: Mapping[str, int]) -> _Cut:
    module, inputs = build(model, rows_scale=_ROWS_SCALE)
    check_bags(inputs, ids_per_bag)
    captured = capture(module, inputs)
    rows = {name: int(weight.shape[0]) for name, weight in captured.tables.items()}
    ready = cuttable(captured.program, captured.constants, inputs, table_rows=rows, exact=False)
    cutter = cutter or _DEFAULT_CUTTER
    tables = SeparateTables(captured.tables)
    return f"{model}, cut by {cutter}", *_cut(ready, tables, cutter, candidates, ids_per_bag)


def _cut(
    ready: Cuttable, tables: Tables, cutter: str, candidates: int, ids_per_bag: Mapping[str, int]
) -> tuple[Program, frozenset[str]]:
    """Compute the cut, with times measured on this machine, and return it with the program."""
    problem = measured_problem(ready, tables, candidates=candidates, ids_per_bag=ids_per_bag)
    nodes = CUTTERS[cutter](problem)
    program = placed(problem.program, nodes)
    return program, nodes & {node.name for node in program.nodes}


# ---- updates ---------------------------------------------------------------------------------------------------------


def update(module: nn.Module, package: Path, out: Path, *, version: str) -> UpdateManifest:
    """Write the update from the newest version of a package to a retrained module. Raises `PlaitError`."""
    with told(RefreshError, GraphError, PackageError, ValueError, file=out):
        return write_update(out, make_update(package, module, version=version))


def fold(package: Path, out: Path) -> Manifest:
    """Write a package with its updates folded in. Raises `PlaitError`."""
    with told(PackageError, file=out):
        return fold_updates(package, out)


def publish_over_http(url: str, model: str, folder: Path, *, api_key: str | None) -> str:
    """Publish an update on a running server, whose machine must see the folder under the same path; return the version
    that is then served. Raises `PlaitError` with the server's own message."""
    import httpx2

    if api_key and not (api_key.isascii() and api_key.isprintable()):
        raise PlaitError("--api-key (PLAIT_API_KEY) has a character that no header may have, as the end of a line")
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    body = {"parameters": {"update": str(folder.absolute())}}
    at = f"{url.rstrip('/')}/v2/repository/models/{quote(model, safe='')}/load"
    wrong = (httpx2.InvalidURL, httpx2.UnsupportedProtocol)
    with told(httpx2.HTTPError, about=url), told(*wrong, about=f"{url!r} is not http://HOST:PORT"):
        answer = httpx2.post(at, json=body, headers=headers, timeout=_TIMEOUT_S, trust_env=False)
    data: Any = None
    with suppress(ValueError):  # what stands before the server may answer with a page
        data = answer.json()
    said = data if isinstance(data, dict) else {}
    if answer.status_code == 200 and "version" in said:
        return str(said["version"])
    why = said.get("error")
    why = why if isinstance(why, str) else f"{url} answered {answer.status_code}"
    raise PlaitError(f"{why} (--api-key, or PLAIT_API_KEY)" if answer.status_code in (401, 403) else why)
