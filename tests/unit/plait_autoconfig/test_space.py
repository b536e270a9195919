"""The search space: knobs, conditions, constraints, cells, and clear words for everything that is wrong."""

from __future__ import annotations

import pytest
from optuna.distributions import FloatDistribution, IntDistribution

from plait_autoconfig import space as module
from plait_autoconfig.constraints import Constraint
from plait_autoconfig.errors import EmptySpace, OutsideSpace, SpaceError
from plait_autoconfig.knobs import ChoiceKnob, FloatKnob, IntKnob
from plait_autoconfig.space import Space

DEVICE = ChoiceKnob(name="device", values=("cpu", "small", "large"))
SHARE = FloatKnob(name="share", low=0.1, high=0.3, step=0.1, unit="GPU", when={"device": ("small", "large")})
CPU = IntKnob(name="cpu", low=1, high=4, unit="cores")
SPACE = Space((DEVICE, SHARE, CPU), ("cpu <= 2 or device == 'cpu'",))


def test_all_cells_in_a_fixed_order():
    """Conditional knobs appear only where they have a meaning; the first knob varies slowest."""
    cells = SPACE.cells()
    assert list(cells[0].items()) == [("device", "cpu"), ("cpu", 1)]
    assert list(cells[4].items()) == [("device", "small"), ("share", 0.1), ("cpu", 1)]
    assert [cell["share"] for cell in cells[4::2]] == [0.1, 0.2, 0.3] * 2
    assert SPACE.exhaustive


def test_what_does_not_count_makes_no_configuration_of_its_own():
    """Knobs come in the space's order and values in its own form. A knob that is inactive is left out, whatever its
    value: two that differ in it alone are one."""
    config = SPACE.check({"cpu": 2, "share": 0.30000004, "device": "large"})
    assert list(config.items()) == [("device", "large"), ("share", 0.3), ("cpu", 2)]
    found = [SPACE.check({"device": "cpu", "cpu": 2, **more}) for more in ({}, {"share": 0.1}, {"share": 99})]
    assert found == [{"device": "cpu", "cpu": 2}] * 3
    listed = Space(SPACE.knobs, (), tuple({"device": "cpu", "cpu": 2, "share": share} for share in (0.1, 0.2)))
    assert listed.cells() == ({"device": "cpu", "cpu": 2},)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"device": "cpu"}, "cpu is missing"),
        ({"device": "cpu", "cpu": 5}, r"cpu is 5, but must be a whole number from 1 to 4 \(cores\)"),
        ({"device": "cpu", "cpu": True}, "cpu is True"),
        ({"device": "cpu", "cpu": 2.0}, "cpu is 2.0"),
        ({"device": "gpu", "cpu": 1}, "device is 'gpu', but must be one of 'cpu', 'small', 'large'"),
        ({"device": "small", "share": 0.15, "cpu": 1}, r"share is 0.15, but must be .* in steps of 0.1 \(GPU\)"),
        ({"device": "small", "share": "0.1", "cpu": 1}, "share is '0.1'"),
        ({"device": "cpu", "cpus": 1}, "cpus is no knob of this space; did you mean cpu?"),
        ({"device": "large", "share": 0.1, "cpu": 3}, "`cpu <= 2 or device == 'cpu'` does not hold for cpu = 3, dev"),
    ],
)
def test_values_outside_are_named(config, said):
    """Whatever is wrong with a configuration, the message names the knob or the constraint."""
    with pytest.raises(OutsideSpace, match=said):
        SPACE.check(config)


@pytest.mark.parametrize(
    ("knobs", "constraints", "said"),
    [
        ((), (), "no knob"),
        ((CPU, CPU), (), "cpu is the name of two knobs"),
        ((IntKnob(name="a b", low=1, high=2),), (), "'a b' cannot be the name"),
        ((SHARE, DEVICE), (), "share: depends on device, which is no knob before it"),
        ((DEVICE, IntKnob(name="x", low=0, high=1, when={"device": ("gpu",)})), (), "x: its condition can never hold"),
        ((CPU,), ("cpus <= 2",), "names cpus, which is no knob; did you mean cpu?"),
        ((CPU,), ("cpu <=",), "cannot be read"),
        ((CPU,), ("cpu + 1",), "is no condition"),
        ((CPU,), ("1 <= 2",), "names no knob"),
        ((CPU,), ("cpu <= 'a'",), "cannot be computed for cpu = 1"),
        ((CPU,), ("cpu * 'a' == 'a'",), "cannot be computed for cpu = 1: arithmetic needs numbers"),
        ((CPU,), ("1 / (cpu - 1) < 2",), "cannot be computed for cpu = 1"),
        ((CPU,), ("cpu < 2 and " * 60 + "cpu < 2",), "more than 500"),
    ],
)
def test_wrong_spaces_are_named(knobs, constraints, said):
    """A space that is written wrongly is refused when it is made."""
    with pytest.raises(SpaceError, match=said):
        Space(knobs, constraints)


def test_names_as_people_write_them():
    """Hyphens and dots in names; in a constraint they belong to the knob that has that name, and to no subtraction. So
    do words of Python's own."""
    knobs = (
        IntKnob(name="max-num-seqs", low=1, high=4), IntKnob(name="max", low=1, high=4),
        ChoiceKnob(name="kv.dtype", values=("fp-8", "max-num-seqs")), IntKnob(name="lambda", low=1, high=4),
    )  # fmt: skip
    asked = ("max-num-seqs * 2 <= 4", "max - 1 <= 2", "kv.dtype != 'max-num-seqs'", "lambda in (1, 2) and max >= 1")
    space = Space(knobs, asked)
    assert len(space.cells()) == 2 * 3 * 2
    with pytest.raises(OutsideSpace, match="max-num-seqs = 3"):
        space.check({"max-num-seqs": 3, "max": 1, "kv.dtype": "fp-8", "lambda": 1})
    with pytest.raises(SpaceError, match="names num, which is no knob"):
        Space(knobs, ("num <= 2",))


def test_candidates_are_what_is_proposed_and_no_more_than_that():
    """In their order and each once; any other configuration of the space is still known to it."""
    listed = ({"cpu": 3}, {"cpu": 1}, {"cpu": 3})
    space = Space((CPU,), (), listed)
    assert space.cells() == ({"cpu": 3}, {"cpu": 1})
    assert space.exhaustive
    assert space.check({"cpu": 2}) == {"cpu": 2}
    with pytest.raises(OutsideSpace, match="candidate 2 is outside of the space: cpu is 99"):
        Space((CPU,), (), ({"cpu": 1}, {"cpu": 99}))


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true') == 0",
        "cpu.__class__ == 1",
        "(lambda: cpu)() == 1",
        "cpu ** 99999 > 1",
        "cpu is 1",
        "print(cpu) == 1",
        "min() == cpu",
        "cpu[0] == 1",
        "(cpu := 2) == 2",
    ],
)
def test_constraints_are_not_programs(text):
    """Only arithmetic and comparisons are translated."""
    with pytest.raises(SpaceError, match="not allowed"):
        Constraint.parse(text, ("cpu",))


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("cpu * share <= 1", True),
        ("2 < cpu < 3", False),
        ("cpu in (1, 2)", True),
        ("cpu not in [1, 2]", False),
        ("not cpu == 2", False),
        ("max(cpu, 3) - min(cpu, 1) == 2", True),
        ("abs(-cpu) // 2 == 1 and cpu % 2 == 0", True),
        ("flag", True),
        ("flag and device == 'small'", True),
        ("other > 5", True),
    ],
)
def test_constraints_compute(text, holds):
    """What the language has, computes as in Python; a constraint on an inactive knob does not apply."""
    config = {"cpu": 2, "share": 0.5, "flag": True, "device": "small"}
    assert Constraint.parse(text, (*config, "other")).holds(config) is holds


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: IntKnob(name="n", low=3, high=2), "n: has an empty range: low 3 is above high 2"),
        (lambda: IntKnob(name="n", low=0, high=2, log=True), "n: log needs a low above 0"),
        (lambda: IntKnob(name="n", low=1, high=9, log=True, step=2), "n: log needs step 1"),
        (lambda: IntKnob(name="n", low=1, high=9, step=0), "n: step is 0"),
        (lambda: FloatKnob(name="x", low=0.0, high=float("inf")), "x: has no finite range"),
        (lambda: FloatKnob(name="x", low=1.0, high=2.0, log=True, step=0.1), "x: log and step exclude each other"),
        (lambda: ChoiceKnob(name="c", values=()), "c: has no values"),
        (lambda: ChoiceKnob(name="c", values=(1, True)), "c: has the value True twice"),
    ],
)
def test_wrong_knobs_are_named(make, said):
    """A knob that is written wrongly is refused when it is made."""
    with pytest.raises(SpaceError, match=said):
        make()


def test_contradictory_constraints_are_counted(monkeypatch):
    """An empty space says what each constraint leaves, and which ones together leave nothing."""
    knobs = (CPU, IntKnob(name="replicas", low=1, high=4))
    with pytest.raises(EmptySpace) as caught:
        Space(knobs, ("cpu != 3", "cpu >= 3", "replicas > 1", "cpu * replicas <= 4"))
    assert str(caught.value) == (
        "the space is empty: of 16 configurations of its knobs, `cpu >= 3` leaves 8, `replicas > 1` leaves 12, "
        "`cpu * replicas <= 4` leaves 8, together they leave none"
    )
    with pytest.raises(EmptySpace, match=r"`cpu > 4` leaves 0$"):
        Space((CPU,), ("cpu > 4",))
    monkeypatch.setattr(module, "MAX_DRAWN", 1000)
    monkeypatch.setattr(module, "MAX_CELLS", 1000)
    with pytest.raises(EmptySpace, match=r"1000 configurations drawn from its knobs, `x > 2` leaves 0$"):
        Space((FloatKnob(name="x", low=0.0, high=1.0),), ("x > 2",))


def test_a_large_space_is_sampled(monkeypatch):
    """A space with too many cells is stood for by valid, different ones, the same in every process."""
    monkeypatch.setattr(module, "MAX_CELLS", 50)
    monkeypatch.setattr(module, "MAX_SAMPLED", 32)
    knobs = (IntKnob(name="a", low=1, high=100, log=True), FloatKnob(name="b", low=0.0, high=1.0), DEVICE, SHARE)
    spaces = [Space(knobs, ("a * b <= 20",)) for _ in range(2)]
    cells = spaces[0].cells()
    assert not spaces[0].exhaustive
    assert len({spaces[0].key(cell) for cell in cells}) == 32
    assert all(spaces[0].check(cell) == cell for cell in cells)
    assert cells == spaces[1].cells()
    assert {cell["device"] for cell in cells} == set(DEVICE.values)


def test_a_huge_space_with_few_cells_is_listed():
    """Constraints are tested as soon as their knobs have values, so that 10^12 combinations need not be visited."""
    knobs = tuple(IntKnob(name=name, low=1, high=100) for name in "abcdef")
    chain = tuple(f"{high} == {low} + 1" for low, high in zip("abcde", "bcdef", strict=True))
    space = Space(knobs, chain)
    assert space.exhaustive
    assert [cell["f"] for cell in space.cells()] == list(range(6, 101))


def test_cells_as_numbers():
    """Ranges and ordered choices lie on their scale, unordered ones have a column each, conditions one more."""
    batch = ChoiceKnob(name="batch", values=(1, 8, 64), ordered=True)
    log = IntKnob(name="queue", low=1, high=100, log=True)
    space = Space((DEVICE, SHARE, batch, log, ChoiceKnob(name="fused", values=(False, True))))
    # device=cpu, device=small, device=large, share, whether share is active, batch, queue, fused
    rows = space.encode(
        [
            {"device": "cpu", "batch": 8, "queue": 10, "fused": True},
            {"device": "large", "share": 0.1, "batch": 64, "queue": 1, "fused": False},
        ]
    )
    assert rows.tolist() == [[1, 0, 0, 0.5, 0, 0.5, 0.5, 1], [0, 0, 1, 0, 1, 1, 0, 0]]
    assert space.encode([]).shape == (0, 8)


def test_distributions_have_the_same_values():
    """Optuna sees the same ranges, steps and choices; a high that is no multiple of the step is lowered to one."""
    space = Space((IntKnob(name="n", low=1, high=10, step=4), FloatKnob(name="x", low=1, high=9, log=True)))
    assert space.distributions() == {"n": IntDistribution(1, 9, step=4), "x": FloatDistribution(1.0, 9.0, log=True)}
