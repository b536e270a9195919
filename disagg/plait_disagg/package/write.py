"""Packaging a model: from a module and its inputs to the folder that plait serves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import nn

from plait_disagg.graph.capture import Captured, capture
from plait_disagg.graph.costs import Cuttable, cuttable, measured_problem
from plait_disagg.graph.cutters import CUTTERS
from plait_disagg.graph.edit import live
from plait_disagg.graph.errors import BadProgram
from plait_disagg.graph.execute import run_reference
from plait_disagg.graph.inputs import OFFSETS, WEIGHTS, Bag, Dense, Ids, Input, check_bags, range_of
from plait_disagg.graph.program import LOOKUP, USER_OF, Ref
from plait_disagg.graph.sample_inputs import collate, id_sources, sample
from plait_disagg.graph.small_tables import rows_name
from plait_disagg.graph.split import Halves, split
from plait_disagg.graph.store import dump_program, load_program
from plait_disagg.graph.tile import keeps_bits
from plait_disagg.graph.verify import ReturnsNan, module_outputs, verify_halves
from plait_disagg.messages.layout import layout_of_crossing, layouts_of
from plait_disagg.messages.wire import VERSION, card_payload
from plait_disagg.package.items import Items, owner_of, save_tensors, write_items
from plait_disagg.package.manifest import (
    CN,
    CONSTANTS,
    HN,
    ITEM_NAMES,
    ITEMS,
    NAME,
    TABLES,
    WHOLE,
    CutFacts,
    Manifest,
    PackageError,
    new_folder,
    sha256_of,
    write_manifest,
)
from plait_disagg.package.memory import check_cn, check_hn
from plait_disagg.package.read import Package
from plait_disagg.tables.fused import FusedTables
from plait_disagg.tables.protocols import LookupRequest
from plait_disagg.tables.reference import SeparateTables
from plait_disagg.tables.storage import open_tables, write_tables
from plait_disagg.tables.values import OutOfRange, RowFormat
from plait_disagg.values import ModelCard
from plait_fabric import FrameTooLarge, MessageLimits
from plait_fabric.layouts import LayoutError
from plait_fabric.rpc.fields import greeting
from plait_fabric.transport.frames import encode_header

_SAMPLES = 8

_SHOWN = 8
"""Numbers of an input in a message."""


@dataclass(frozen=True, kw_only=True)
class PackageOptions:
    """How a model is packaged. `row_format` and `out_of_range`: for all tables, or by table name.

    `tile`: compute user-side values once per request; if off, the scores are bit-exact. The cut is made for a
    request of `candidates` with `ids_per_bag` ids in a row of each bag (1 for a bag that is not named). A request
    may have at most `largest_candidates`.
    """

    version: str = "1"
    row_format: RowFormat | Mapping[str, RowFormat] = "float32"
    out_of_range: OutOfRange | Mapping[str, OutOfRange] = "error"
    cutter: str = "mincut"
    tile: bool = True
    candidates: int = 64
    ids_per_bag: Mapping[str, int] = field(default_factory=dict)
    largest_candidates: int = 10_000


def write_package(
    folder: Path,
    module: nn.Module,
    inputs: Sequence[Input],
    *,
    name: str,
    items: Items | None = None,
    options: PackageOptions | None = None,
) -> Manifest:
    """Capture, cut and store a model (in evaluation mode) in a new folder, which appears complete or not at all.

    Raises `UnsupportedOperator` (an operator that cannot be cut), `PackageError` (the folder exists, the name is
    invalid, or the halves do not compute what the module computes), ValueError (inputs or items that do not fit).
    """
    options = options or PackageOptions()
    if not NAME.fullmatch(name):
        raise PackageError(f"the name {name!r} must match {NAME.pattern}")
    if not NAME.fullmatch(options.version):
        raise PackageError(f"the version {options.version!r} must match {NAME.pattern}")
    if options.cutter not in CUTTERS:
        raise PackageError(f"there is no cutter {options.cutter!r}; there are {', '.join(CUTTERS)}")
    check_bags(inputs, options.ids_per_bag)
    if folder.exists():
        raise PackageError(f"{folder} exists already")
    with new_folder(folder) as draft:
        return _write(draft, module, inputs, name=name, items=items, options=options)


def _write(
    folder: Path, module: nn.Module, inputs: Sequence[Input], *, name: str, items: Items | None, options: PackageOptions
) -> Manifest:
    captured = capture(module, inputs)
    _check_numbers({**captured.tables, **captured.constants})
    policies, rows = options.out_of_range, {name: int(weight.shape[0]) for name, weight in captured.tables.items()}
    rejecting = {
        table: count
        for table, count in rows.items()
        if (policies if isinstance(policies, str) else policies.get(table, "error")) == "error"
    }
    bounds = _reject_from(captured, rejecting)
    count = None if items is None else write_items(folder / ITEMS, folder / ITEM_NAMES, items, captured.inputs, bounds)
    if items is not None:
        _check_items(captured, rejecting, items.features)
    write_tables(folder / TABLES, captured.tables, formats=options.row_format, out_of_range=options.out_of_range)
    ready = cuttable(
        captured.program,
        captured.constants,
        captured.inputs,
        table_rows=rows,
        exact=not options.tile,
        may_move=rejecting,
    )
    tables = FusedTables(open_tables(folder / TABLES))
    _check_samples(module, ready, ids_per_bag=options.ids_per_bag)
    problem = measured_problem(ready, tables, candidates=options.candidates, ids_per_bag=options.ids_per_bag)
    halves = split(problem.program, CUTTERS[options.cutter](problem))
    at_hn = {port.name for port in halves.hn.constants}
    small = {rows_name(table): _as_stored(tables, table, rows[table]) for table in rows if rows_name(table) in at_hn}
    _verify(module, captured, halves, ready, options)
    for file, program in ((WHOLE, captured.program), (CN, halves.cn), (HN, halves.hn)):
        (folder / file).write_text(_readable(dump_program(program)), encoding="utf-8")
    held = {**captured.constants, **ready.constants, **small}
    save_tensors({key: tensor.detach().contiguous().clone() for key, tensor in held.items()}, folder / CONSTANTS)
    manifest = Manifest(
        name=name,
        version=options.version,
        inputs=captured.inputs,
        outputs={key: captured.program.values[ref.name].shape[1:] for key, ref in captured.program.outputs},
        bounds=bounds,
        cut=CutFacts(cutter=options.cutter, tiled=options.tile, candidates=options.candidates),
        largest_candidates=options.largest_candidates,
        items=count,
    )
    files = {path.name: sha256_of(path) for path in sorted(folder.iterdir())}
    manifest = replace(manifest, files=files)
    _check_memory(halves, manifest, captured)
    _check_greeting(halves, Package(folder=folder, manifest=manifest).card(mode="split"))
    write_manifest(folder, manifest)
    return manifest


def _reject_from(captured: Captured, rejecting: Mapping[str, int]) -> dict[str, int]:
    """Return for each input the least id that a table would reject for certain. `rejecting`: rows of those that do.

    Its ids index the table as they are, side by side with other inputs', or from where a field's rows begin.
    """
    bounds: dict[str, int] = {}
    for source in id_sources(captured.program, rejecting, captured.constants):
        first = source.rows - int(source.added.min())
        if source.is_id and first > 0:
            bounds[source.input] = min(first, bounds.get(source.input, first))
    return bounds


def _check_items(captured: Captured, rejecting: Mapping[str, int], features: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError for an item with which a table would be read outside its rows, whatever is computed of the
    item's inputs before. `rejecting`: rows of the tables that reject; `features`: those of all items (`Items`)."""
    program = captured.program
    for node in program.nodes:
        rows = rejecting.get(str(node.kwargs["table"])) if node.op == LOOKUP else None
        if rows is None:
            continue
        ids, offsets = node.args[:2]
        wanted = tuple((ref.name, ref) for ref in (ids, offsets) if isinstance(ref, Ref))
        needed = live(replace(program, outputs=wanted))
        read = {name for name, _ in wanted} | {name for one in needed.nodes for name in one.inputs}
        inputs = tuple(port for port in program.inputs if port.name in read)
        known = all(port.name in features for port in inputs) and all(one.op != LOOKUP for one in needed.nodes)
        if not known or not isinstance(ids, Ref):
            continue
        values = run_reference(replace(needed, inputs=inputs), captured.constants, None, features)
        made = values[ids.name]
        starts = offsets.name if isinstance(offsets, Ref) else ""
        bad = ((made < 0) | (made >= rows)).reshape(-1)
        if bad.any():
            place = int(bad.to(torch.uint8).argmax())
            by = " and ".join(port.name for port in inputs if port.name != starts)
            raise ValueError(
                f"items: {by} of item {owner_of(place, made, values.get(starts))} is id "
                f"{int(made.reshape(-1)[place])} of table {node.kwargs['table']}, which takes 0 to {rows - 1}"
            )


def _check_numbers(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise `PackageError` for NaN. Infinite numbers may be intended, as in masks."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and bool(tensor.isnan().any()):
            raise PackageError(f"{name} has a number that is NaN")


def _readable(text: str) -> str:
    """Return `text` if it can be loaded: what could not be served is not packaged, such as an output without a name."""
    try:
        load_program(text)
    except BadProgram as error:
        raise PackageError(f"the model cannot be stored: {error}") from error
    return text


def _check_memory(halves: Halves, manifest: Manifest, captured: Captured) -> None:
    """Raise `PackageError` for a model that readers would refuse because of the memory that it needs."""
    try:
        check_cn(halves.cn, manifest, {name: int(weight.shape[1]) for name, weight in captured.tables.items()})
        check_hn(halves.hn, halves.cn, manifest)
    except BadProgram as error:
        largest = manifest.largest_candidates
        raise PackageError(f"the model cannot be served with largest_candidates={largest}: {error}") from error


def _check_greeting(halves: Halves, card: ModelCard) -> None:
    """Raise `PackageError` for a model that its workers could not tell each other of when they greet."""
    crossing = [port for port in halves.hn.inputs if port.name != USER_OF]
    try:
        layouts_of(card)
        welcome = greeting("welcome", VERSION, card_payload(card, layout_of_crossing(crossing, card.inputs)))
        MessageLimits().check(header_bytes=len(encode_header(welcome)), buffers=0, message_bytes=0)
    except (FrameTooLarge, LayoutError) as error:
        how = 'features of one kind can be one input, as Ids("features", shape=(50,)) is'
        raise PackageError(f"the model cannot be served with {len(card.inputs)} inputs: {error}; {how}") from error


def _verify(module: nn.Module, captured: Captured, halves: Halves, ready: Cuttable, options: PackageOptions) -> None:
    """Verify both halves against the module on random requests, with the module's own rows: row formats come later."""
    try:
        failures = verify_halves(
            module,
            captured.inputs,
            halves,
            constants={**{rows_name(table): rows for table, rows in captured.tables.items()}, **ready.constants},
            tables=SeparateTables(captured.tables),
            bounds=ready.bounds,
            bits_promised=not options.tile and captured.keeps_bits and keeps_bits(ready.program),
            ids_per_bag=options.ids_per_bag,
        )
    except ReturnsNan as nan:
        raise PackageError(_blamed(module, ready, nan.batch, nan)) from nan
    if failures:
        raise PackageError(f"the halves do not make what the model makes: {'; '.join(failures)}")


def _as_stored(tables: FusedTables, name: str, rows: int) -> torch.Tensor:
    """Return all rows of a table as a lookup would."""
    return tables.lookup([LookupRequest(table=name, mode="rows", ids=torch.arange(rows))])[0]


# Does the module take the requests that it is checked with? If not, which input is to blame?


def _check_samples(module: nn.Module, ready: Cuttable, *, ids_per_bag: Mapping[str, int]) -> None:
    """Run the module on random requests. Raises `PackageError`, naming the input that caused it, if that raises or
    returns NaN."""
    for seed in range(_SAMPLES):
        count = 2 + seed
        request = sample(ready.inputs, ready.bounds, candidates=count, ids_per_bag=ids_per_bag, seed=seed)
        batch = collate(ready.inputs, [request], [count])
        error = _fault(module, ready, batch)
        if error is not None:
            raise PackageError(_blamed(module, ready, batch, error)) from error


def _blamed(module: nn.Module, ready: Cuttable, batch: Mapping[str, torch.Tensor], error: Exception) -> str:
    """Return what the module did with a random batch (`collate`), with the input whose numbers make the difference."""
    nan = error.row if isinstance(error, ReturnsNan) else None
    said = " ".join(str(error).split())[:200]
    for item in ready.inputs:
        is_open = _is_open(item, ready)
        hint = f"; {_declaration(item)}" if is_open else ""
        for number in (1, 0, 2) if is_open or nan is not None else ():
            if _fault(module, ready, {**batch, **_filled(item, batch, number)}) is not None:
                continue
            if nan is not None:
                return f"the model itself returns NaN for a random {_shown(item, batch, nan)}{hint}"
            return f"the module raises on a random {item.name} ({said}){hint}"
    if nan is not None:
        every = ", ".join(_shown(item, batch, nan) for item in ready.inputs)
        return f"the model itself returns NaN for a random request: {every}"
    return f"the module raises on a random request: {said}"


def _is_open(item: Input, ready: Cuttable) -> bool:
    """Return whether neither a table nor a declaration says which numbers an input has."""
    return isinstance(item, Ids | Dense) and range_of(item) == (None, None) and item.name not in ready.bounds


def _declaration(item: Input) -> str:
    declared = "low=0, high=1" if isinstance(item, Dense) else "min=1, max=50"
    return f'declare which numbers it takes, as in {type(item).__name__}("{item.name}", {declared})'


def _filled(item: Input, batch: Mapping[str, torch.Tensor], number: int) -> dict[str, torch.Tensor]:
    """Return the tensors of an input that is `number` throughout; a bag has one id in each row."""
    if not isinstance(item, Bag):
        return {item.name: torch.full_like(batch[item.name], number)}
    rows = len(batch[item.name + OFFSETS]) - 1
    made = {item.name: torch.zeros(rows, dtype=torch.int64), item.name + OFFSETS: torch.arange(rows + 1)}
    return made | ({item.name + WEIGHTS: torch.full((rows,), float(number))} if item.weighted else {})


def _shown(item: Input, batch: Mapping[str, torch.Tensor], candidate: int) -> str:
    """Return what an input is for one candidate, for people to read."""
    row = candidate if item.side == "item" else int(batch[USER_OF][candidate])
    if isinstance(item, Bag):
        first, last = batch[item.name + OFFSETS][row : row + 2].tolist()
        numbers = batch[item.name][first:last]
    else:
        numbers = batch[item.name][row].reshape(-1)
    shown = ", ".join(f"{number:.4g}" for number in numbers[:_SHOWN].tolist())
    return f"{item.name} [{shown}{', ...' if len(numbers) > _SHOWN else ''}]"


def _fault(module: nn.Module, ready: Cuttable, batch: Mapping[str, torch.Tensor]) -> Exception | None:
    """Return what the module raises, or that it returns NaN; None if neither."""
    try:
        module_outputs(module, ready.inputs, batch)
    except Exception as error:  # whatever the module says
        return error
    return None
