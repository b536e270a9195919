"""A window of the trace on replicas in virtual time. The policies are the server's own; time is in steps of one image.

A replica has one compute thread, which runs a request to its end, and memory for some models, all of one size; a load
runs beside it. `plait` sends a request where it begins first and switches by `residents/policy.py`. `lru` is what
servers do that load what the next request wants: the shortest queue, first come first served, and the model that was
used least lately makes room.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from plait_bench.models.trace import TracedRequest
from plait_serving.diffusion.residents.policy import ModelDemand, Switch, next_switch
from plait_serving.images.routing import ReplicaState, begins_in_s

__all__ = ["ModelFleet", "PlayedWindow", "replay"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFleet:
    """`room`: the models that each replica has memory for; `load`: what loading one takes."""

    replicas: int
    room: int
    load: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedWindow:
    """The latency of each request with its work, the loads of all replicas, and when the last request ended."""

    latencies: tuple[tuple[float, float], ...]
    loads: int
    ended: float


@dataclass(slots=True)
class _Replica:
    """What both kinds have. `latencies` are those of the requests that ended."""

    fleet: ModelFleet
    now: float = 0.0
    waiting: list[TracedRequest] = field(default_factory=list)
    running: tuple[TracedRequest, float] | None = None
    resident: dict[str, float] = field(default_factory=dict)
    latencies: list[tuple[float, float]] = field(default_factory=list)
    loads: int = 0

    @property
    def queued(self) -> float:
        """The work that waits or runs."""
        left = 0.0 if self.running is None else self.running[1] - self.now
        return left + sum(asked.work for asked in self.waiting)

    def run_until(self, until: float) -> None:
        """Play what happens before a time."""
        while (event := self.next_event()) <= until:
            self.now = event
            self.take()
        self.now = max(self.now, until)

    def next_event(self) -> float:
        """Return when something ends next."""
        return float("inf") if self.running is None else self.running[1]

    def take(self) -> None:
        """Take in what has ended, and begin what may begin."""
        raise NotImplementedError

    def _end(self) -> None:
        if self.running is not None and self.running[1] <= self.now:
            asked = self.running[0]
            self.latencies.append((self.now - asked.at, asked.work))
            self.resident[asked.model] = self.now
            self.running = None


class _Lru(_Replica):
    def take(self) -> None:
        """Run the oldest request; load its model first if it is not here."""
        self._end()
        if self.running is not None or not self.waiting:
            return
        asked, seconds = self.waiting.pop(0), 0.0
        if asked.model not in self.resident:
            if len(self.resident) >= self.fleet.room:
                del self.resident[min(self.resident, key=lambda model: self.resident[model])]
            seconds, self.loads = self.fleet.load, self.loads + 1
        self.resident[asked.model] = self.now
        self.running = asked, self.now + seconds + asked.work


@dataclass(slots=True)
class _Plait(_Replica):
    loading: tuple[str, float] | None = None
    switch: Switch | None = None
    overtaken: dict[str, float] = field(default_factory=dict)

    def next_event(self) -> float:
        """Return when a request or a load ends."""
        ends = [event[1] for event in (self.running, self.loading) if event is not None]
        return min(ends, default=float("inf"))

    def take(self) -> None:
        """Switch if that is due, and run the oldest request whose model is here."""
        self._end()
        if self.loading is not None and self.loading[1] <= self.now:
            self.resident[self.loading[0]] = self.now
            self.overtaken.pop(self.loading[0], None)
            self.loading = self.switch = None
        if self.switch is None:
            self.switch = next_switch(self._demands(), budget_bytes=self.fleet.room, now_s=self.now)
        if self.switch is not None and self.loading is None:
            self._begin_load(self.switch)
        leaves = self.switch.leave if self.switch is not None else ()
        runnable = [asked for asked in self.waiting if asked.model in self.resident and asked.model not in leaves]
        if self.running is None and runnable:
            self._run(runnable[0])

    def state(self) -> ReplicaState:
        """Return what the replica would say."""
        wanted = {asked.model for asked in self.waiting}
        absent = wanted - self.resident.keys()
        return ReplicaState(
            queued_s=self.queued + self.fleet.load * len(absent), models=frozenset(wanted | self.resident.keys())
        )

    def _begin_load(self, switch: Switch) -> None:
        busy = None if self.running is None else self.running[0].model
        if busy in switch.leave:
            return  # a request in work ends before its model leaves
        for name in switch.leave:
            self.resident.pop(name, None)
        self.loading, self.loads = (switch.load, self.now + self.fleet.load), self.loads + 1

    def _run(self, asked: TracedRequest) -> None:
        self.waiting.remove(asked)
        self.running = asked, self.now + asked.work
        for name in {other.model for other in self.waiting if other.model not in self.resident and other.at < asked.at}:
            self.overtaken[name] = self.overtaken.get(name, 0.0) + asked.work

    def _demands(self) -> list[ModelDemand]:
        jobs = [*([] if self.running is None else [self.running[0]]), *self.waiting]
        oldest: dict[str, float] = {}
        for asked in jobs:
            oldest.setdefault(asked.model, asked.at)
        return [
            ModelDemand(
                name=name,
                nbytes=1,
                load_s=self.fleet.load,
                is_resident=name in self.resident,
                oldest_s=oldest.get(name),
                overtaken_s=self.overtaken.get(name, 0.0),
                used_s=self.resident.get(name, 0.0),
            )
            for name in sorted(oldest.keys() | self.resident.keys())
        ]


def replay(system: str, asked: Sequence[TracedRequest], fleet: ModelFleet) -> PlayedWindow:
    """Play a window with a system, `plait` or `lru`."""
    replicas: list[_Replica] = [_Plait(fleet) if system == "plait" else _Lru(fleet) for _ in range(fleet.replicas)]
    for one in asked:
        for replica in replicas:
            replica.run_until(one.at)
        chosen = min(replicas, key=_cost_of(one, fleet))
        chosen.waiting.append(one)
        chosen.take()
    for replica in replicas:
        while replica.running is not None or replica.waiting:
            replica.run_until(replica.next_event())
    return PlayedWindow(
        latencies=tuple(latency for replica in replicas for latency in replica.latencies),
        loads=sum(replica.loads for replica in replicas),
        ended=max(replica.now for replica in replicas),
    )


def _cost_of(asked: TracedRequest, fleet: ModelFleet) -> Callable[[_Replica], float]:
    def cost(replica: _Replica) -> float:
        if isinstance(replica, _Plait):
            state = replica.state()
            return begins_in_s(
                ReplicaState(queued_s=state.queued_s, models=state.models, load_s={asked.model: fleet.load}),
                asked.model,
                (),
            )
        return replica.queued

    return cost
