"""`plait models cut`: where a recommendation model is cut, as a report that can be printed and drawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from plait.errors import PlaitError, told
from plait_disagg.graph.capture import capture
from plait_disagg.graph.cutters import CUTTERS
from plait_disagg.graph.errors import GraphError
from plait_disagg.graph.inputs import check_bags
from plait_disagg.graph.program import Program
from plait_disagg.graph.report import CANDIDATES, CutReport, cut_report
from plait_disagg.graph.small_tables import placed
from plait_disagg.models.configs import CONFIGS, build, ids_per_bag
from plait_disagg.package.costing import Cuttable, cut_problem, cuttable, offered
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


@dataclass(frozen=True, kw_only=True)
class CutQuestion:
    """What to cut, and how. `cutter` None: the packaged cut (mincut for a configuration). `ids_per_bag`: ids in a
    typical row of each bag; 1 for bags that are not named."""

    model: str
    cutter: str | None = None
    candidates: int = 64
    ids_per_bag: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A cut and its name."""

    title: str
    report: CutReport


@dataclass(frozen=True, slots=True, kw_only=True)
class DealtShard:
    """What one shard of a package's tables would hold, and about how much of it a request would read."""

    held_bytes: int
    read_bytes: float
    pieces: tuple[str, ...]


def dealt_tables(folder: Path, shards: int) -> list[DealtShard]:
    """Return how so many shards would hold the tables of a packaged model's folder. Raises `PlaitError`."""
    if not folder.is_dir():
        raise PlaitError(f"{folder} is no folder of a packaged model, and only a package's tables are dealt to shards")
    with told(PackageError):
        plan = plan_of(open_package(folder, ahead=False), Sharding(shards=shards))
    return [
        DealtShard(
            held_bytes=plan.held_bytes[number],
            read_bytes=plan.read_bytes[number],
            pieces=tuple(piece.name for piece in plan.of_shard(number)),
        )
        for number in range(plan.shards)
    ]


def inspect_cut(question: CutQuestion) -> Cut:
    """Return the cut of a packaged model's folder, or of a named configuration (`plait_disagg.models.configs`).

    Raises `PlaitError`.
    """
    folder = Path(question.model)
    with told(GraphError, PackageError, ValueError):
        if folder.is_dir():
            return _of_package(open_package(folder), question)
        if question.model in CONFIGS:
            return _of_configuration(question)
    known = ", ".join(CONFIGS)
    raise PlaitError(f"{question.model} is neither the folder of a packaged model nor one of: {known}")


def _of_package(package: Package, question: CutQuestion) -> Cut:
    manifest = package.manifest
    check_bags(manifest.inputs, question.ids_per_bag)
    cutter = question.cutter or manifest.cut.cutter
    ready = cuttable(
        package.whole,
        {port.name: package.constants[port.name] for port in package.whole.constants},  # as they were captured
        manifest.inputs,
        table_rows={table.name: table.rows for table in package.stored.tables},
        exact=not manifest.cut.tiled,
        may_move={table.name: table.rows for table in package.stored.tables if table.out_of_range == "error"},
    )
    if question.cutter is None:
        program = offered(ready, candidates=manifest.cut.candidates, ids_per_bag=question.ids_per_bag)
        names = {node.name for node in program.nodes}
        nodes = frozenset(node.name for node in package.cn.nodes if node.name in names)
        program = placed(program, nodes)
    else:
        program, nodes = _cut(ready, FusedTables(package.tables), question, question.ids_per_bag)
    report = _report(program, nodes, question, question.ids_per_bag)
    return Cut(title=f"{manifest.name}, cut by {cutter}", report=report)


def _of_configuration(question: CutQuestion) -> Cut:
    module, inputs = build(question.model, rows_scale=_ROWS_SCALE)
    check_bags(inputs, question.ids_per_bag)
    captured = capture(module, inputs)
    per_bag = {**ids_per_bag(question.model), **question.ids_per_bag}
    rows = {name: int(weight.shape[0]) for name, weight in captured.tables.items()}
    ready = cuttable(captured.program, captured.constants, inputs, table_rows=rows, exact=False)
    program, nodes = _cut(ready, SeparateTables(captured.tables), question, per_bag)
    title = f"{question.model}, cut by {question.cutter or _DEFAULT_CUTTER}"
    return Cut(title=title, report=_report(program, nodes, question, per_bag))


def _cut(
    ready: Cuttable, tables: Tables, question: CutQuestion, per_bag: Mapping[str, int]
) -> tuple[Program, frozenset[str]]:
    """Compute the cut, with times measured on this machine, and return it with the program."""
    problem = cut_problem(ready, tables, candidates=question.candidates, ids_per_bag=per_bag)
    nodes = CUTTERS[question.cutter or _DEFAULT_CUTTER](problem)
    program = placed(problem.program, nodes)
    return program, nodes & {node.name for node in program.nodes}


def _report(program: Program, nodes: frozenset[str], question: CutQuestion, per_bag: Mapping[str, int]) -> CutReport:
    return cut_report(program, nodes, ids_per_bag=per_bag, candidates=_sizes(question))


def _sizes(question: CutQuestion) -> tuple[int, ...]:
    """Return the sizes that every report shows, plus the requested one."""
    return tuple(sorted({*CANDIDATES, SHOWN, question.candidates}))
