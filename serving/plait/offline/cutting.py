"""`plait models cut`: where a recommendation model is cut, as a report that can be printed and drawn."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from plait.errors import PlaitError, told
from plait_disagg.graph.capture import capture
from plait_disagg.graph.costs import Cuttable, cuttable, measured_problem, offered
from plait_disagg.graph.cutters import CUTTERS
from plait_disagg.graph.errors import GraphError
from plait_disagg.graph.inputs import check_bags
from plait_disagg.graph.program import Program
from plait_disagg.graph.report import CANDIDATES, CutReport, cut_report
from plait_disagg.graph.small_tables import placed
from plait_disagg.models.configs import CONFIGS, build
from plait_disagg.models.configs import ids_per_bag as ids_per_bag_of
from plait_disagg.package.manifest import PackageError
from plait_disagg.package.read import Package, open_package
from plait_disagg.package.sharding import Sharding, plan_of
from plait_disagg.tables.fused import FusedTables
from plait_disagg.tables.protocols import Tables
from plait_disagg.tables.reference import SeparateTables

SHOWN = 64
"""The number of candidates in the request whose bytes the drawing shows."""

# Bytes and what runs where do not depend on the tables' rows, and 100 GB of random rows would not fit here.
_ROWS_SCALE = 1e-4
_DEFAULT_CUTTER = "mincut"

_Cut: TypeAlias = tuple[str, Program, frozenset[str]]
"""A title, the program, and the nodes of its side with the tables."""


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
