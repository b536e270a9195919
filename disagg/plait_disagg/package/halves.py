"""The two halves of a packaged model, ready to run by `plait_disagg.workers`."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch

from plait_disagg.dense.prepared import DenseGraphs, DensePrograms, Trust
from plait_disagg.graph.execute import Compiled
from plait_disagg.graph.inputs import Input
from plait_disagg.graph.program import USER_OF
from plait_disagg.graph.small_tables import rows_name
from plait_disagg.queue.batch import join, user_of
from plait_disagg.tables.ids import ids_in_range
from plait_disagg.tables.protocols import LookupRequest, Tables
from plait_disagg.tables.values import Table
from plait_disagg.values import RankRequest
from plait_kernels.devices import is_gpu
from plait_kernels.executors.graphs import graph_memory

RowsByTable: TypeAlias = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
"""By table: ids (k,) int64 and their rows (k, D) float32."""


class CompiledSparse:
    """The `SparseHalf` that runs the CN program."""

    def __init__(
        self,
        program: Compiled,
        inputs: Sequence[Input],
        *,
        ids_program: Compiled,
        row_ports: Mapping[str, Table],
        tables: Tables,
    ) -> None:
        """`ids_program` is that of `read.without_rows`, `row_ports` what it makes ids for; `tables` has the rows."""
        self._program = program
        self._inputs = tuple(inputs)
        self._ids_program = ids_program
        self.row_ports = row_ports
        self._tables = tables
        self._needs_user_of = any(port.name == USER_OF for port in program.program.inputs)

    def run(self, requests: Sequence[RankRequest]) -> Mapping[str, torch.Tensor]:
        """Run the CN program on the requests. Raises `BadId` for an id that only its table can reject."""
        return self._run(self._program, requests)

    def run_ids(self, requests: Sequence[RankRequest]) -> Mapping[str, torch.Tensor]:
        """Run the CN program with ids in place of bare rows. Raises `BadId` as `run` does."""
        made = self._run(self._ids_program, requests)
        return made | {name: _in_range(made[name], table) for name, table in self.row_ports.items()}

    def rows(self, table: str, ids: torch.Tensor) -> torch.Tensor:
        """Return rows of `table` for `ids`."""
        return self._tables.lookup([LookupRequest(table=table, mode="rows", ids=ids)])[0]

    def with_constants(self, constants: Mapping[str, torch.Tensor]) -> CompiledSparse:
        """Return the same half with other constants (`Compiled.with_constants`); the tables are the same."""
        made = copy.copy(self)
        made._program = self._program.with_constants(constants)
        made._ids_program = self._ids_program.with_constants(constants)
        return made

    def _run(self, program: Compiled, requests: Sequence[RankRequest]) -> dict[str, torch.Tensor]:
        tensors = join(self._inputs, requests, separate=program.separate_bags)
        if self._needs_user_of:
            return program({**tensors, USER_OF: user_of([request.candidates for request in requests])})
        return program(tensors)


def _in_range(ids: torch.Tensor, table: Table) -> torch.Tensor:
    """Return int64 ids that are all inside the table."""
    return torch.from_numpy(ids_in_range(ids.to(torch.int64).numpy(), table))


class CompiledDense:
    """The `DenseHalf` that runs the HN program.

    With `prepares`, batches run on prepared programs where these are faster, and on a GPU as graphs
    (`plait_disagg.dense`), which moves bits.
    """

    def __init__(
        self,
        program: Compiled,
        device: torch.device | str = "cpu",
        *,
        prepares: bool = False,
        trust: Trust | None = None,
    ) -> None:
        """`trust`: that of the half that this one replaces."""
        self._program = program
        self._device = torch.device(device)
        self._prepares = prepares
        on_gpu = is_gpu(self._device)
        self.programs = DensePrograms(program, trust) if prepares and not on_gpu else None
        graphed = prepares and on_gpu
        self._graphs = DenseGraphs(program, self._device, graph_memory(self._device)) if graphed else None
        self.crossing = tuple(port for port in program.program.inputs if port.name != USER_OF)
        self._needs_user_of = len(self.crossing) < len(program.program.inputs)

    def metrics(self) -> Mapping[str, float]:
        """Return how many batches of prepared programs were audited, and how many of these differed from torch's."""
        if self.programs is None:
            return {}
        trust = self.programs.trust
        return {"audit_checked_total": trust.checked, "audit_drifted_total": trust.drifted}

    def updated(self, constants: Mapping[str, torch.Tensor], rows: RowsByTable) -> CompiledDense:
        """Return the same half with other constants (`Compiled.with_constants`), and with new rows in those that are
        small tables. It prepares its own programs."""
        held = dict(constants)
        for name, (ids, new) in rows.items():
            constant = rows_name(name)
            held[constant] = self._program.constant(constant).cpu().index_copy(0, ids, new)
        trust = None if self.programs is None else self.programs.trust
        return CompiledDense(self._program.with_constants(held), self._device, prepares=self._prepares, trust=trust)

    def run(self, crossing: Mapping[str, torch.Tensor], candidates: Sequence[int]) -> Mapping[str, torch.Tensor]:
        """Run the HN program (`DenseHalf`). Outputs are on the CPU."""
        given = dict(crossing)
        if self._needs_user_of:
            given[USER_OF] = user_of(candidates)
        if self._graphs is not None:
            return self._graphs.run(given, len(candidates), sum(candidates))
        if self.programs is not None:
            made = self.programs.run(given, len(candidates), sum(candidates))
            if made is not None:
                return made
        if not is_gpu(self._device):
            return self._program(given)
        outputs = self._program({name: tensor.to(self._device, non_blocking=True) for name, tensor in given.items()})
        return {name: tensor.cpu() for name, tensor in outputs.items()}
