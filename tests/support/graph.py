"""What the tests of graphs share: tables that look up one by one, captured models, random cut problems."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

import torch
import torch.nn.functional as F
from hypothesis import strategies as st

from plait_disagg.graph.capture import Captured, capture
from plait_disagg.graph.cut import CutProblem
from plait_disagg.graph.edit import live
from plait_disagg.graph.program import LOOKUP, ROWS, USER_OF, Node, Port, Program, Ref
from plait_disagg.models.configs import build
from plait_disagg.tables.protocols import LookupRequest
from support.graph_models import Small, Weighted, Zoo

OWN = {"small": Small, "zoo": Zoo, "weighted": Weighted}

SMALL_ROWS = 1e-5
"""Row scale of the published configurations in tests."""


class OneByOne:
    """`Tables` over plain tensors: every ask is one call of torch. Remembers how many asks each call had."""

    def __init__(self, tables: Mapping[str, torch.Tensor]) -> None:
        self.tables = tables
        self.calls: list[int] = []

    def lookup(self, asks: Sequence[LookupRequest]) -> list[torch.Tensor]:
        """See `Tables.lookup`."""
        self.calls.append(len(asks))
        return [self._one(ask) for ask in asks]

    def _one(self, ask: LookupRequest) -> torch.Tensor:
        table = self.tables[ask.lookup.table]
        if ask.lookup.mode == "rows":
            return F.embedding(ask.ids, table)
        return F.embedding_bag(
            ask.ids,
            table,
            ask.offsets,
            mode=ask.lookup.mode,
            per_sample_weights=ask.weights,
            include_last_offset=True,
        )


@cache
def model(name: str) -> tuple[torch.nn.Module, Captured]:
    """A module in evaluation mode and its capture: small, zoo, or a configuration. Do not change them."""
    if name in OWN:
        torch.manual_seed(3)
        made = OWN[name]()
        if isinstance(made, Zoo):
            made.batch_norm.running_mean.uniform_(-1, 1)
        module, inputs = made.eval(), made.inputs
    else:
        module, inputs = build(name, rows_scale=SMALL_ROWS)
    return module, capture(module, inputs)


def table_rows(captured: Captured) -> dict[str, int]:
    """Table to its number of rows."""
    return {name: table.shape[0] for name, table in captured.tables.items()}


@st.composite
def cut_problems(draw: st.DrawFn) -> CutProblem:
    """Random small programs: up to 3 inputs, up to 8 nodes (some lookups), random costs and sizes."""
    inputs = tuple(f"in{index}" for index in range(draw(st.integers(1, 3))))
    names: list[str] = list(inputs)
    nodes: list[Node] = []
    for index in range(draw(st.integers(1, 8))):
        read = draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True))
        name = f"n{index}"
        if draw(st.integers(0, 4)) == 0:
            kwargs = {"table": "t", "mode": "rows"}
            nodes.append(Node(name=name, op=LOOKUP, args=(Ref(read[0]), None, None), kwargs=kwargs, shape=(ROWS, 2)))
        else:
            refs = tuple(Ref(value) for value in read)
            op, args = draw(
                st.sampled_from([("aten.cat.default", (refs, 1)), ("aten.einsum.default", ("ab->ab", refs))])
            )
            nodes.append(Node(name=name, op=op, args=args, shape=(ROWS, 2), rows="item"))
        names.append(name)
    outputs = draw(st.lists(st.sampled_from([node.name for node in nodes]), min_size=1, max_size=2, unique=True))
    ports = tuple(Port(name=name, shape=(ROWS, 2), dtype="float32", rows="item") for name in (*inputs, USER_OF))
    program = Program(inputs=ports, constants=(), nodes=tuple(nodes), outputs=tuple((out, Ref(out)) for out in outputs))
    micros = st.integers(0, 40)
    return CutProblem(
        program=live(program),
        candidates=1,
        value_bytes={name: draw(st.integers(1, 60)) for name in names},
        cn_s={node.name: draw(micros) * 1e-6 for node in nodes},
        hn_s={node.name: draw(micros) * 1e-6 for node in nodes},
        link_bytes_per_s=1e6,
    )
