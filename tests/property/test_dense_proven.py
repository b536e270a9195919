"""Every operator that OpenVINO may compute for a ranking model gives torch's numbers, and every other one stays with
torch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait_disagg.dense.prepared import DensePrograms
from plait_disagg.dense.proven import PROVEN, unproven
from plait_disagg.dense.trial import TOLERANCE, difference
from plait_disagg.graph.execute import Compiled, compile_program
from plait_disagg.graph.operators import SIZE, VOCABULARY
from plait_disagg.graph.program import ROWS, TILE, USER_OF, Node, Port, Program, Ref
from plait_kernels.executors import Computation, InputSpec
from plait_kernels.executors.openvino_executor import OpenVinoSettings

pytest.importorskip("openvino", reason="needs openvino")

from plait_kernels.executors.openvino_static import StaticPrograms  # after the skip

LARGEST = torch.finfo(torch.float32).max
ENDS = torch.tensor([0.0, -0.0, 1.0, -1.0, 0.1, 2.0**-126, 2.0**24 + 2, LARGEST, -LARGEST])
DIVISORS = torch.tensor([1.0, -3.0, 0.1, 25.0, 2.0**-126, -(2.0**126)])
NUMBERS = st.sampled_from([0, 2, -0.5, 0.1, LARGEST])
X, Y, C = Ref("x"), Ref("y"), Ref("c")


@dataclass
class Call:
    """An operator's arguments, and the values they name; `sized`: the name of the size of x's rows."""

    args: tuple
    inputs: dict[str, torch.Tensor]
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    sized: str = ""


class Draw:
    """Draws tensors and numbers of one example."""

    def __init__(self, draw: Callable) -> None:
        self.of = draw
        self.n, self.a, self.b = (draw(st.sampled_from([1, 2, 3, 5, 7])) for _ in range(3))

    def tensor(self, *shape: int, ends: bool = False) -> torch.Tensor:
        """Zeros, ties or noise, or with `ends` what is at the ends of float32."""
        chance = torch.Generator().manual_seed(self.of(st.integers(0, 2**16)))
        kind = self.of(st.sampled_from(["zeros", "ties", "noise", *(["ends"] if ends else [])]))
        if kind == "ends":
            return ENDS[torch.randint(len(ENDS), shape, generator=chance)]
        noise = torch.randn(shape, generator=chance)
        return {"zeros": torch.zeros(shape), "ties": noise.round(), "noise": noise}[kind]

    def x(self, *, ends: bool = False) -> dict[str, torch.Tensor]:
        """The input x `(n, a, b)`."""
        return {"x": self.tensor(self.n, self.a, self.b, ends=ends)}

    def dims(self) -> tuple[int, ...]:
        """Some of the dimensions behind the rows."""
        return self.of(st.sampled_from([(1,), (2,), (-1,), (1, 2), (-2, -1)]))


def unary(d: Draw) -> Call:
    return Call((X,), d.x(ends=True))


def with_number(d: Draw) -> Call:
    return Call((X, d.of(NUMBERS)), d.x(ends=True))


def with_tensor(d: Draw) -> Call:
    kind = d.of(st.sampled_from(["input", "row", "constant", "number"]))
    x = d.x(ends=True)
    if kind == "number":
        return with_number(d)
    if kind == "constant":
        return Call((X, C), x, {"c": d.tensor(d.of(st.sampled_from([1, d.b])), ends=True)})
    width = 1 if kind == "row" else d.b
    return Call((X, Y), x | {"y": d.tensor(d.n, d.a, width, ends=True)})


def divided(d: Draw) -> Call:
    return Call((X, d.of(st.sampled_from(DIVISORS.tolist()))), d.x(ends=True))


def divided_by_tensor(d: Draw) -> Call:
    if d.of(st.booleans()):
        return divided(d)
    at = torch.randint(len(DIVISORS), (d.b,), generator=torch.Generator().manual_seed(d.of(st.integers(0, 99))))
    return Call((X, C), d.x(ends=True), {"c": DIVISORS[at]})


def linear(d: Draw) -> Call:
    bias = d.of(st.booleans())
    constants = {"c": d.tensor(7, d.b), **({"bias": d.tensor(7)} if bias else {})}
    return Call((X, C, Ref("bias") if bias else None), d.x(), constants)


def addmm(d: Draw) -> Call:
    return Call((Ref("bias"), X, C), {"x": d.tensor(d.n, d.a)}, {"c": d.tensor(d.a, d.b), "bias": d.tensor(d.b)})


def cat(d: Draw) -> Call:
    dim = d.of(st.sampled_from([1, 2, -1]))
    shape = (d.n, 4, d.b) if dim == 1 else (d.n, d.a, 4)
    return Call(((X, Y, X), dim), d.x(ends=True) | {"y": d.tensor(*shape, ends=True)})


def stack(d: Draw) -> Call:
    both = d.x(ends=True) | {"y": d.tensor(d.n, d.a, d.b, ends=True)}
    return Call(((X, Y), d.of(st.sampled_from([1, 2, 3, -1]))), both)


def extreme(d: Draw) -> Call:
    return Call((X, d.dims(), d.of(st.booleans())), d.x(ends=True))


def total(d: Draw) -> Call:
    return Call((X, d.dims(), d.of(st.booleans())), d.x())


def reshaped(d: Draw) -> Call:
    shape = d.of(st.sampled_from([(-1, d.a * d.b), (-1, d.b, d.a), (Ref("rows"), -1), (Ref("rows"), 1, d.a * d.b)]))
    return Call((X, shape), d.x(ends=True), sized="rows")


def squeezed(*dims: object) -> Callable[[Draw], Call]:
    return lambda d: Call((X, d.of(st.sampled_from(dims))), {"x": d.tensor(d.n, 1, d.b, ends=True)})


def sliced(d: Draw) -> Call:
    dim, size = d.of(st.sampled_from([(1, d.a), (2, d.b), (-1, d.b)]))
    start = d.of(st.integers(-size, size - 1))
    end = d.of(st.sampled_from([2**63 - 1, None, size]))
    return Call((X, dim, start, end, d.of(st.integers(1, 3))), d.x(ends=True))


def selected(d: Draw) -> Call:
    dim, size = d.of(st.sampled_from([(1, d.a), (2, d.b), (-1, d.b)]))
    return Call((X, dim, d.of(st.integers(-size, size - 1))), d.x(ends=True))


def indexed(d: Draw) -> Call:
    kind = d.of(st.sampled_from(["columns", "pairs", "rows of a table"]))
    if kind == "rows of a table":
        ids = torch.tensor([d.of(st.integers(0, 4)) for _ in range(d.n)], dtype=torch.int32)
        return Call((C, (X,)), {"x": ids}, {"c": d.tensor(5, d.b, ends=True)})
    first = torch.tensor(d.of(st.lists(st.integers(0, d.a - 1), min_size=1, max_size=5)))
    if kind == "columns":
        return Call((X, (None, C)), d.x(ends=True), {"c": first})
    second = torch.tensor([d.of(st.integers(0, d.b - 1)) for _ in first])
    return Call((X, (None, C, Ref("second"))), d.x(ends=True), {"c": first, "second": second})


def tiled(d: Draw) -> Call:
    user_of = torch.arange(d.n).repeat_interleave(d.of(st.integers(1, 3)))
    return Call((X, Ref(USER_OF)), d.x(ends=True) | {USER_OF: user_of})


CASES: dict[str, Callable[[Draw], Call]] = {
    **{f"aten.{name}.default": unary for name in ("relu", "sigmoid", "tanh")},
    **{f"aten.{name}.Tensor": with_tensor for name in ("add", "sub", "mul")},
    **{f"aten.{name}.Scalar": with_number for name in ("add", "sub", "mul")},
    "aten.div.Tensor": divided_by_tensor,
    "aten.div.Scalar": divided,
    "aten.linear.default": linear,
    "aten.addmm.default": addmm,
    "aten.mm.default": lambda d: Call((X, C), {"x": d.tensor(d.n, d.a)}, {"c": d.tensor(d.a, d.b)}),
    "aten.bmm.default": lambda d: Call((X, Y), d.x() | {"y": d.tensor(d.n, d.b, 3)}),
    "aten.cat.default": cat,
    "aten.stack.default": stack,
    "aten.amax.default": extreme,
    "aten.amin.default": extreme,
    "aten.sum.dim_IntList": total,
    "aten.mean.dim": total,
    "aten.view.default": reshaped,
    "aten.reshape.default": reshaped,
    "aten.flatten.using_ints": lambda d: Call((X, 1, d.of(st.sampled_from([2, -1]))), d.x(ends=True)),
    "aten.unflatten.int": lambda d: Call((X, 1, (d.a, d.b)), {"x": d.tensor(d.n, d.a * d.b, ends=True)}),
    "aten.squeeze.dim": squeezed(1, 2, -1),
    "aten.squeeze.dims": squeezed((1, 2), (-1,), (1, -1)),
    "aten.unsqueeze.default": lambda d: Call((X, d.of(st.sampled_from([1, 2, 3, -1]))), d.x(ends=True)),
    "aten.transpose.int": lambda d: Call((X, 1, d.of(st.sampled_from([2, -1]))), d.x(ends=True)),
    "aten.permute.default": lambda d: Call((X, (0, 2, 1)), d.x(ends=True)),
    "aten.slice.Tensor": sliced,
    "aten.select.int": selected,
    "aten.index.Tensor": indexed,
    TILE: tiled,
}


def dtype_of(value: torch.Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def compiled_of(op: str, call: Call) -> Compiled:
    """A program of that operator alone."""

    def ports(values: dict[str, torch.Tensor], rows: str) -> tuple[Port, ...]:
        return tuple(
            Port(name=name, shape=(ROWS, *value.shape[1:]) if rows != "none" else tuple(value.shape),
                 dtype=dtype_of(value), rows=rows)
            for name, value in values.items()
        )  # fmt: skip

    sizes = (Node(name=call.sized, op=SIZE, args=(X, 0), dtype="int"),) if call.sized else ()
    program = Program(
        inputs=ports(call.inputs, "item"),
        constants=ports(call.constants, "none"),
        nodes=(*sizes, Node(name="made", op=op, args=call.args, rows="item")),
        outputs=(("score", Ref("made")),),
    )
    return compile_program(program, call.constants)


def by_openvino(compiled: Compiled, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What a program converted from other numbers of the same shapes computes."""
    example = {name: value if name == USER_OF else torch.zeros_like(value) for name, value in inputs.items()}
    specs = tuple(InputSpec(name=name, shape=tuple(v.shape), dtype=v.dtype) for name, v in inputs.items())
    computation = Computation(module=compiled.as_module(), inputs=specs, example=tuple(example.values()))
    shapes = [tuple(value.shape) for value in inputs.values()]
    program = StaticPrograms(computation).compile(shapes, OpenVinoSettings(threads=lambda: 1))
    return {"score": program.run(list(inputs.values()))[0]}


@pytest.mark.parametrize("op", sorted(CASES))
@settings(max_examples=6)
@given(data=st.data())
def test_a_proven_operator_gives_torchs_numbers(op, data):
    """With zeros, ties, the ends of float32, and sizes 1 and odd."""
    call = CASES[op](Draw(data.draw))
    compiled = compiled_of(op, call)
    assert unproven(compiled) is None
    wanted = compiled(call.inputs)
    got = by_openvino(compiled, call.inputs)
    assert got["score"].shape == wanted["score"].shape
    assert difference(got, wanted) <= TOLERANCE


def test_all_that_is_proven_has_a_case():
    """A size is proven where a shape is made of it."""
    assert CASES.keys() | {SIZE} == PROVEN
    assert PROVEN - {TILE, SIZE} <= set(VOCABULARY)


@pytest.mark.parametrize("op", sorted(set(VOCABULARY) - PROVEN))
def test_any_other_operator_stays_with_torch_and_is_named_once(op, caplog):
    """Whatever its arguments are."""
    call = Call((X,), {"x": torch.ones(2, 3)})
    with caplog.at_level(logging.INFO, logger="plait_disagg.dense.prepared"):
        programs = DensePrograms(compiled_of(op, call))
        for _ in range(5):
            assert programs.run(call.inputs, 2, 2) is None
    assert [op in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize(
    ("op", "call"),
    {
        "integers": ("aten.add.Tensor", Call((X, 1), {"x": torch.ones(2, 3, dtype=torch.int64)})),
        "a number of rows": ("aten.mul.Tensor", Call((X, Ref("rows")), {"x": torch.ones(2, 3)}, sized="rows")),
        "a divisor that varies": ("aten.div.Tensor", Call((X, Y), {"x": torch.ones(2, 3), "y": torch.ones(2, 3)})),
        "a divisor of 0": ("aten.div.Tensor", Call((X, 0.0), {"x": torch.ones(2, 3)})),
        "a constant with a 0": ("aten.div.Tensor", Call((X, C), {"x": torch.ones(2, 2)}, {"c": torch.eye(2)})),
        "a divisor without a reciprocal": ("aten.div.Scalar", Call((X, 1e-40), {"x": torch.ones(2, 3)})),
        "a negative index": (
            "aten.index.Tensor", Call((X, (None, C)), {"x": torch.ones(2, 3)}, {"c": torch.tensor([-1])})
        ),
        "an index of a request": (
            "aten.index.Tensor", Call((X, (Y,)), {"x": torch.ones(2, 3), "y": torch.zeros(2, dtype=torch.int64)})
        ),
        "unchecked ids of a constant": (
            "aten.index.Tensor", Call((C, (X,)), {"x": torch.zeros(2, dtype=torch.int64)}, {"c": torch.ones(4, 2)})
        ),
    }.values(),
)  # fmt: skip
def test_arguments_beyond_what_is_proven_stay_with_torch(op, call):
    """The operator is on the list; what it is given is not."""
    assert unproven(compiled_of(op, call)) is not None
