"""Metrics as families of prometheus_client, and those of several replicas as one text in Prometheus' format.

Every series names the replica that counted it. A sum over replicas would fall, and not to 0, when one of them is gone;
Prometheus would take that for a restart, and what the others counted in all their life for new. Sums are made of rates,
by who reads them (`deploy/dashboards`).
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from prometheus_client import Metric, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

TENANT_PREFIX = "plait_tenant_"
"""Counters of this name with the label `tenant` are the account of what each tenant used."""

REPLICA = "replica"
"""The label that names the replica."""

disable_created_metrics()  # type: ignore[no-untyped-call]  # they would be half of all series, and nobody reads them

Labelled = Mapping[tuple[str], float] | Mapping[tuple[str, ...], float]
"""Values by those of their labels."""

Sums = Mapping[tuple[str, str, str], float]
"""What a replica counted of a tenant, by replica, tenant and name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaMetrics:
    """What one replica counts, its name, and, of an ingress, what it knows of all replicas' tenants."""

    replica: str
    families: Sequence[Metric]
    account: Sums = field(default_factory=dict)

    def __reduce__(self) -> tuple[Callable[[bytes], ReplicaMetrics], tuple[bytes]]:
        """Be a small answer. Ray keeps one of 100 KB and more in shared memory, and when such a one comes that nobody
        waits for any more, its core aborts the whole process (`CoreWorker::GetOwnerAddressOrDie`, Ray 2.60)."""
        families = [
            [it.name, it.documentation, it.type, [[each.name, each.labels, each.value] for each in it.samples]]
            for it in self.families
        ]
        encoded = json.dumps([self.replica, families, [[*key, value] for key, value in self.account.items()]])
        return _unpacked, (zlib.compress(encoded.encode(), 1),)


def _unpacked(packed: bytes) -> ReplicaMetrics:
    replica, counted, account = json.loads(zlib.decompress(packed))
    families = []
    for name, said, kind, samples in counted:
        families.append(Metric(name, said, kind))
        families[-1].samples = [Sample(*each) for each in samples]
    return ReplicaMetrics(
        replica=replica,
        families=families,
        account={(of, tenant, what): value for of, tenant, what, value in account},
    )


@cache
def this_process() -> str:
    """Return a name that no other replica has, nor had before: process numbers come back."""
    return f"{socket.gethostname()}/{os.getpid()}-{secrets.token_hex(3)}"


def family(name: str, said: str, value: float | Labelled, *labels: str) -> Metric:
    """Return a metric with one value, or with one by the values of its `labels`. It is a counter if its name ends in
    `_total`, else a gauge. `said`: what it is, for people."""
    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    made = kind(name, said, labels=labels)
    for values, number in value.items() if isinstance(value, Mapping) else (((), value),):
        made.add_metric(values, number)
    return made


def labelled(replica: str, families: Iterable[Metric]) -> list[Metric]:
    """Return the families with the replica's name in every series that has none."""
    found = []
    for each in families:
        found.append(Metric(each.name, each.documentation, each.type))
        found[-1].samples = [it._replace(labels={REPLICA: replica, **it.labels}) for it in each.samples]
    return found


def exposition(families: Iterable[Metric]) -> str:
    """Return the families as Prometheus' text; those of one name together, as the format requires."""
    joined: dict[str, Metric] = {}
    for each in families:
        known = joined.setdefault(each.name, Metric(each.name, each.documentation, each.type))
        known.samples.extend(each.samples)
    return generate_latest(_Collected(joined.values())).decode()


class _Collected(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


class Account:
    """What every replica that ever answered counted of each tenant: sums survive the replica, and one that was silent
    goes on from its own. It holds some numbers for each replica and tenant."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str, str], float] = {}

    @property
    def sums(self) -> Sums:
        """A copy of what is known, for other ingresses."""
        return dict(self._sums)

    def learn(self, sums: Sums) -> None:
        """Take over what is more than was known: nothing of it ever falls."""
        for key, value in sums.items():
            self._sums[key] = max(value, self._sums.get(key, 0.0))

    def read(self, families: Iterable[Metric]) -> None:
        """Learn from families that name their replicas."""
        for each in families:
            if each.name.startswith(TENANT_PREFIX):
                name = each.name.removeprefix(TENANT_PREFIX)
                self.learn({(it.labels[REPLICA], it.labels["tenant"], name): it.value for it in each.samples})

    def by_tenant(self) -> dict[str, dict[str, float]]:
        """Return the sums over all replicas by tenant and name, whole numbers but for seconds."""
        found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for (_, tenant, name), value in self._sums.items():
            found[tenant][name] += value
        return {
            tenant: {name: value if name.endswith("seconds") else int(value) for name, value in sums.items()}
            for tenant, sums in found.items()
        }
