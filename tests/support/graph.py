"""What the tests of graphs share: captured models, random cut problems and what a cut of them costs."""

from __future__ import annotations

from functools import cache

import torch
from hypothesis import strategies as st

from plait_disagg.graph.capture import Captured, capture
from plait_disagg.graph.costs import CutProblem
from plait_disagg.graph.edit import live
from plait_disagg.graph.program import LOOKUP, ROWS, USER_OF, Node, Port, Program, Ref
from plait_disagg.graph.split import check_cut, crossing_values
from plait_disagg.models.configs import build
from support.graph_models import Small, Weighted, Zoo

OWN = {"small": Small, "zoo": Zoo, "weighted": Weighted}

SMALL_ROWS = 1e-5
"""Row scale of the published configurations in tests."""


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
        value_bytes={name: draw(st.integers(1, 60)) for name in names},
        cn_s={node.name: draw(micros) * 1e-6 for node in nodes},
        hn_s={node.name: draw(micros) * 1e-6 for node in nodes},
        link_bytes_per_s=1e6,
    )


def cost_s(problem: CutProblem, cn_nodes: frozenset[str]) -> float:
    """What one cut costs, as `graph.costs` says. Raises `BadCut` if it is not allowed."""
    check_cut(problem.program, cn_nodes)
    computing_s = sum(problem.cn_s[name] for name in cn_nodes)
    computing_s += sum(problem.hn_s[name] for name in problem.hn_s.keys() - cn_nodes)
    crossing_bytes = sum(problem.value_bytes[name] for name in crossing_values(problem.program, cn_nodes))
    return computing_s + crossing_bytes / problem.link_bytes_per_s
