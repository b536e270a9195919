"""Ways to divide a workload among processes. Pure; every way gives each index to exactly one process.

Costs are in any unit; shares are as even as the method allows.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from plait_bench.fleet.values import Item

Cost = Callable[[Item], float]
Group = Callable[[Item], Hashable]


def evenly(items: Sequence[Item], processes: int, *, cost: Cost) -> list[list[int]]:
    """Assign the dearest item first to the least loaded process; each share is in arrival order.

    For systems that gain nothing from order. At most 4/3 of the best possible makespan (Graham 1969).
    """
    costs = [cost(item) for item in items]
    shares: list[list[int]] = [[] for _ in range(processes)]
    loads = [0.0] * processes
    for i in sorted(range(len(items)), key=lambda i: (-costs[i], i)):
        lightest = loads.index(min(loads))
        shares[lightest].append(i)
        loads[lightest] += costs[i]
    return [sorted(share) for share in shares]


def in_runs(items: Sequence[Item], processes: int, *, cost: Cost, group: Group) -> list[list[int]]:
    """Sort by group (groups in order of first arrival) and cut where each process has an even part of the cost.

    For systems that pay for a change of group: a cut adds at most one change, and shares stay even.
    """
    order = [i for members in _groups(items, group) for i in members]
    total = sum(cost(item) for item in items)
    shares: list[list[int]] = [[] for _ in range(processes)]
    done = 0.0
    for i in order:
        middle = done + cost(items[i]) / 2
        shares[min(processes - 1, int(processes * middle / total))].append(i)
        done += cost(items[i])
    return shares


def _groups(items: Sequence[Item], group: Group) -> list[list[int]]:
    members: dict[Hashable, list[int]] = {}
    for i, item in enumerate(items):
        members.setdefault(group(item), []).append(i)
    return list(members.values())
