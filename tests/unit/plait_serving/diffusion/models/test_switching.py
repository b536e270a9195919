"""Which model is loaded next and which make room, in virtual time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait_serving.diffusion.models.switching import PATIENCE, ModelDemand, Switch, next_switch, surplus

LOAD_S = 3.0


def absent(name: str, **more) -> ModelDemand:
    return ModelDemand(**{"name": name, "nbytes": 1, "load_s": LOAD_S, "is_resident": False, **more})


def resident(name: str, **more) -> ModelDemand:
    return absent(name, **{"is_resident": True, **more})


def switch(*models: ModelDemand, room: int = 2, now_s: float = 100.0) -> Switch | None:
    return next_switch(models, budget_bytes=room, now_s=now_s)


def test_what_nobody_asks_for_is_not_loaded():
    """Memory that is free stays free."""
    assert switch(resident("a"), absent("b")) is None


def test_a_model_is_loaded_at_once_where_there_is_room():
    """Nobody makes room that need not."""
    assert switch(resident("a", oldest_s=1.0), absent("b", oldest_s=2.0)) == Switch(load="b", leave=())


@pytest.mark.parametrize(
    ("more", "leaves"),
    [({"used_s": 10.0}, "a"), ({"load_s": 100 * LOAD_S}, "b"), ({"nbytes": 2}, "a")],
    ids=["idle for longest", "slow to load", "large"],
)
def test_of_those_without_work_the_least_worth_makes_room(more, leaves):
    """What comes back late, loads fast and is large."""
    a, b = resident("a", **{"used_s": 90.0, **more}), resident("b", used_s=90.0)
    found = switch(a, b, absent("c", oldest_s=95.0), room=a.nbytes + b.nbytes)
    assert found == Switch(load="c", leave=(leaves,))


def test_work_that_arrived_before_is_done_first():
    """A model that is asked for later does not push out what has older requests, however long it waits."""
    busy = [resident(name, oldest_s=1.0) for name in "ab"]
    assert switch(*busy, absent("c", oldest_s=2.0, overtaken_s=1e9)) is None


def test_later_arrivals_overtake_for_a_bounded_time():
    """Then the model whose oldest request is the youngest makes room."""
    busy = [resident("a", oldest_s=3.0), resident("b", oldest_s=4.0)]
    waits = absent("c", oldest_s=2.0)
    there_and_back_s = 2 * LOAD_S
    assert switch(*busy, waits) is None
    assert switch(*busy, replace(waits, overtaken_s=0.99 * PATIENCE * there_and_back_s)) is None
    assert switch(*busy, replace(waits, overtaken_s=PATIENCE * there_and_back_s)) == Switch(load="c", leave=("b",))


def test_a_deadline_does_not_wait_for_its_turn():
    """Only one of a resident's own holds its model."""
    busy = [resident(name, oldest_s=1.0) for name in "ab"]
    short = absent("c", oldest_s=2.0, is_short=True)
    assert switch(*busy, short) == Switch(load="c", leave=("a",))
    assert switch(*(replace(each, is_short=True) for each in busy), short) is None


def test_several_make_room_for_a_large_one_and_none_that_need_not():
    """The small one that would have gone first stays if the others are enough."""
    here = [resident("small", used_s=1.0), resident("a", nbytes=4, used_s=2.0), resident("b", nbytes=4, used_s=3.0)]
    found = switch(*here, absent("large", nbytes=8, oldest_s=5.0), room=9)
    assert found is not None
    assert set(found.leave) == {"a", "b"}


def test_what_is_too_large_holds_up_nobody():
    """The next one in line is loaded."""
    found = switch(resident("a"), absent("large", nbytes=3, oldest_s=1.0), absent("b", oldest_s=2.0))
    assert found == Switch(load="b", leave=())


def test_what_holds_too_much_is_the_idle_one_that_is_worth_least():
    """One at a time; nobody who is in use, and never the only one."""
    here = [resident("a", nbytes=3, used_s=1.0), resident("b", nbytes=3, used_s=2.0), absent("c", nbytes=100)]

    def found(*models: ModelDemand, room: int, in_use: str = "") -> str | None:
        return surplus(models, in_use=in_use, budget_bytes=room, now_s=100.0)

    assert found(*here, room=6) is None
    assert found(*here, room=5) == "a"
    assert found(*here, room=5, in_use="a") == "b"
    assert found(*here, room=5, in_use="ab") is None
    assert found(*here[1:], room=1) is None
