"""Random spaces: the pruned search against a naive product, and the ways between cells, keys and numbers."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from plait_autoconfig.errors import EmptySpace
from plait_autoconfig.knobs import ChoiceKnob, FloatKnob, IntKnob, Knob
from plait_autoconfig.space import Space, is_active

TESTS = {  # text of a constraint: its naive twin
    "a + b <= 5": lambda c: "a" not in c or "b" not in c or c["a"] + c["b"] <= 5,
    "a != 2": lambda c: "a" not in c or c["a"] != 2,
    "b * c >= 1 or b == 1": lambda c: "b" not in c or "c" not in c or c["b"] * c["c"] >= 1 or c["b"] == 1,
    "c < 2 < a": lambda c: "a" not in c or "c" not in c or c["c"] < 2 < c["a"],
}


@st.composite
def knobs(draw: st.DrawFn) -> tuple[Knob, ...]:
    """Three small knobs of any kind; later ones may depend on earlier ones."""
    made: list[Knob] = []
    for name in "abc":
        when = {}
        if made and draw(st.booleans()):
            parent = draw(st.sampled_from(made))
            count = parent.count or 1
            chosen = draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=count, unique=True))
            when = {parent.name: tuple(parent.value_at(index) for index in chosen)}
        match draw(st.sampled_from(["int", "float", "choice"])):
            case "int":
                low = draw(st.integers(-3, 3))
                high = low + draw(st.integers(0, 5))
                made.append(IntKnob(name=name, low=low, high=high, step=draw(st.integers(1, 3)), when=when))
            case "float":
                high = draw(st.sampled_from([0.1, 0.7, 1.0]))
                made.append(FloatKnob(name=name, low=0.1, high=high, step=draw(st.sampled_from([0.1, 0.3])), when=when))
            case _:
                values = draw(st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True))
                made.append(ChoiceKnob(name=name, values=tuple(values), ordered=draw(st.booleans()), when=when))
    return tuple(made)


def naive_cells(some: tuple[Knob, ...], constraints: tuple[str, ...]) -> set[tuple[object, ...]]:
    """All combinations, then inactive knobs taken out, then the constraints."""
    found = set()
    for values in itertools.product(*([knob.value_at(index) for index in range(knob.count or 0)] for knob in some)):
        config: dict[str, object] = {}
        for knob, value in zip(some, values, strict=True):
            if is_active(knob, config):
                config[knob.name] = value
        if all(TESTS[text](config) for text in constraints):
            found.add(tuple(config.get(knob.name) for knob in some))
    return found


@settings(max_examples=60)
@given(some=knobs(), constraints=st.lists(st.sampled_from(sorted(TESTS)), max_size=3, unique=True).map(tuple))
def test_cells_are_those_of_the_naive_product(some, constraints):
    """The pruned search finds exactly the valid combinations, each once; if there is none, the space is refused."""
    wanted = naive_cells(some, constraints)
    try:
        space = Space(some, constraints)
    except EmptySpace:
        assert wanted == set()
        return
    cells = space.cells()
    assert len(cells) == len(wanted)
    assert {space.key(cell) for cell in cells} == wanted
    assert all(space.check(cell) == cell for cell in cells)
    numbers = space.encode(cells)
    assert len(numbers) == len(cells)
    assert ((numbers >= 0.0) & (numbers <= 1.0)).all()
    assert len({tuple(row) for row in numbers.tolist()}) == len(cells)


@settings(max_examples=60)
@given(some=knobs(), point=st.tuples(*[st.floats(0.0, 1.0, exclude_max=True)] * 3))
def test_every_point_is_a_configuration(some, point):
    """Wherever a point of the cube lies, it stands for a configuration of the space."""
    space = Space(some)
    config = space.configuration_at(point)
    assert space.check(config) == config


@given(
    low=st.integers(1, 50), span=st.integers(0, 50), u=st.floats(0.0, 1.0, exclude_max=True), log=st.booleans()
)  # fmt: skip
def test_draws_stay_inside_and_grow(low, span, u, log):
    """A knob's values are drawn in their order: a larger number never gives a smaller value."""
    for knob in (
        IntKnob(name="n", low=low, high=low + span, log=log),
        FloatKnob(name="x", low=low, high=low + span, log=log),
    ):
        value = knob.draw(u)
        assert knob.canonical(value) == value
        assert low <= knob.draw(u / 2) <= value <= low + span
        assert 0.0 <= knob.place(value) <= 1.0
