"""How a workload is cut among processes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from plait_bench.images import evenly, in_runs
from plait_bench.images.orders import ImageSpec, cost

orders = st.builds(
    ImageSpec,
    prompt=st.just("owl"),
    seed=st.just(0),
    steps=st.integers(1, 30),
    loras=st.integers(0, 4).map(lambda number: ((f"lora{number}", 1.0),)),
    control=st.sampled_from([None, ("edges", 0)]),
)
items = st.lists(orders, min_size=1, max_size=24)
WAYS = {"evenly": evenly, "in_runs": in_runs}


@given(items, st.integers(1, 4), st.sampled_from(sorted(WAYS)))
def test_every_item_goes_to_exactly_one_process(taken, processes, way):
    """Nothing is lost or done twice."""
    shares = WAYS[way](taken, processes)
    assert len(shares) == processes
    assert sorted(i for share in shares for i in share) == list(range(len(taken)))


@given(items, st.integers(1, 4))
def test_shares_differ_by_less_than_the_dearest_item(taken, processes):
    """Where items may be split freely."""
    loads = [sum(cost(taken[i]) for i in share) for share in evenly(taken, processes)]
    assert max(loads) - min(loads) <= max(map(cost, taken))


@given(items, st.integers(1, 4))
def test_runs_change_group_as_rarely_as_possible(taken, processes):
    """All processes together change group at most once per group, and once per cut."""
    changes = 0
    for share in in_runs(taken, processes):
        sets = [taken[i].loras for i in share]
        changes += sum(1 for i, one in enumerate(sets) if i == 0 or one != sets[i - 1])
    assert changes <= len({order.loras for order in taken}) + processes - 1
