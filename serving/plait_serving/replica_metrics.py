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
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace

from prometheus_client import Metric, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.samples import Sample

IMAGE_COUNTS: Mapping[str, str] = {
    "image_requests_finished": "Requests whose images were made",
    "image_requests_failed": "Requests that ended in an error",
    "image_requests_cancelled": "Requests whose client went away",
    "image_requests_rejected": "Requests that were refused",
    "images": "Images delivered",
    "image_pixels": "Pixels of images delivered",
    "image_steps": "Denoising steps of images",
    "image_compute_seconds": "Seconds of compute, of requests that failed or were cancelled too",
}
"""What engines count of each tenant, and ingresses of requests that they refuse, with what it is, for people."""

RANK_COUNTS: Mapping[str, str] = {"rankings": "Rankings answered.", "candidates": "Candidates ranked."}
"""What ingresses count."""

REPLICA = "replica"
"""The label that names the replica."""

disable_created_metrics()  # type: ignore[no-untyped-call]  # they would be half of all series, and nobody reads them

Labelled = Mapping[tuple[str], float] | Mapping[tuple[str, str], float] | Mapping[tuple[str, ...], float]
"""Values by those of their labels."""

Sums = Mapping[tuple[str, str, str], float]
"""What a replica counted of a tenant, by replica, tenant and name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaMetrics:
    """What one replica counts, its name, what it knows of all replicas' tenants, itself included, and where it is (what
    `plait_deploy.on_ray` reads of that)."""

    replica: str
    families: Sequence[Metric]
    account: Sums = field(default_factory=dict)
    at: Mapping[str, float] = field(default_factory=dict)

    def labelled(self) -> list[Metric]:
        """Return the families with the replica's name in every series that has none."""
        found = []
        for each in self.families:
            found.append(Metric(each.name, each.documentation, each.type))
            found[-1].samples = [it._replace(labels={REPLICA: self.replica, **it.labels}) for it in each.samples]
        return found

    def __reduce__(self) -> tuple[Callable[[bytes], ReplicaMetrics], tuple[bytes]]:
        """Be a small answer. Ray keeps one of 100 KB and more in shared memory, and when such a one comes that nobody
        waits for any more, its core aborts the whole process (`CoreWorker::GetOwnerAddressOrDie`, Ray 2.60)."""
        said = [self.replica, self.families, [[*key, value] for key, value in self.account.items()], dict(self.at)]
        encoded = json.dumps(said, default=lambda it: [it.name, it.documentation, it.type, it.samples])
        return _unpacked, (zlib.compress(encoded.encode(), 1),)


def _unpacked(packed: bytes) -> ReplicaMetrics:
    replica, counted, account, at = json.loads(zlib.decompress(packed))
    families = []
    for name, said, kind, samples in counted:
        families.append(Metric(name, said, kind))
        families[-1].samples = [Sample(*each) for each in samples]
    return ReplicaMetrics(
        replica=replica,
        families=families,
        account={(of, tenant, what): value for of, tenant, what, value in account},
        at=at,
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


def tenant_families(answers: Iterable[ReplicaMetrics]) -> list[Metric]:
    """Return what replicas counted themselves of each tenant."""
    own = [(key, value) for it in answers for key, value in it.account.items() if key[0] == it.replica]
    return [
        family(
            f"plait_tenant_{name}_total",
            said,
            {(replica, tenant): value for (replica, tenant, of), value in own if of == name},
            REPLICA,
            "tenant",
        )
        for name, said in {**IMAGE_COUNTS, **RANK_COUNTS}.items()
    ]


def exposition(families: Iterable[Metric]) -> str:
    """Return the families as Prometheus' text; those of one name together, as the format requires."""
    joined: dict[str, Metric] = {}
    for each in families:
        known = joined.setdefault(each.name, Metric(each.name, each.documentation, each.type))
        known.samples.extend(each.samples)
    return generate_latest(SimpleNamespace(collect=joined.values)).decode()


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

    def knows(self, names: Collection[str]) -> bool:
        """Return whether any of these was ever counted."""
        return any(name in names for _, _, name in self._sums)

    def by_tenant(self) -> dict[str, dict[str, float]]:
        """Return the sums over all replicas by tenant and name, whole numbers but for seconds."""
        found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for (_, tenant, name), value in self._sums.items():
            found[tenant][name] += value
        return {
            tenant: {name: value if name.endswith("seconds") else int(value) for name, value in sums.items()}
            for tenant, sums in found.items()
        }
