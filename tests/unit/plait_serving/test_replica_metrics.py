"""Several replicas' metrics as one text, and the account of tenants that outlives them."""

from __future__ import annotations

import pickle

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.parser import text_string_to_metric_families

from plait_serving.replica_metrics import (
    IMAGE_COUNTS,
    RANK_COUNTS,
    Account,
    ReplicaMetrics,
    exposition,
    family,
    tenant_families,
)
from support.names import ODD_NAMES
from support.prometheus import found, total


def labelled(replica: str, families: list[Metric]) -> list[Metric]:
    """What /metrics has of a replica's."""
    return ReplicaMetrics(replica=replica, families=families).labelled()


def http_metrics(answers: int, seconds: float, in_flight: int) -> list[Metric]:
    """What an ingress counts."""
    registry = CollectorRegistry()
    counter = Counter("plait_requests", "Answers.", ["route", "outcome"], registry=registry)
    counter.labels(route='/v1/"x y"', outcome="ok").inc(answers)
    Histogram("plait_seconds", "Time.", buckets=(0.1, 1.0), registry=registry).observe(seconds)
    Gauge("plait_in_flight", "Now.", registry=registry).set(in_flight)
    return list(registry.collect())


def test_every_series_names_its_replica_and_families_are_whole() -> None:
    """Each counted its own requests; the series of one that ends do not change another's."""
    both = [*labelled("a", http_metrics(3, 0.05, 1)), *labelled("b", http_metrics(4, 5.0, 2))]
    text = exposition(both)
    for name, values in {
        "plait_requests_total": [3, 4],
        "plait_seconds_count": [1, 1],
        "plait_seconds_sum": [0.05, 5.0],
        "plait_in_flight": [1, 2],
    }.items():
        assert [total(text, name, replica=replica) for replica in "ab"] == values
    assert total(text, "plait_seconds_bucket", le="0.1", replica="a") == 1
    assert len(list(text_string_to_metric_families(text))) == text.count("# TYPE ") == text.count("# HELP ") == 3
    assert exposition(labelled("a", both)) == text  # whoever has a name keeps it


def test_families_cross_between_processes() -> None:
    """As Serve carries them."""
    made = [*http_metrics(3, 0.05, 1), family("plait_x_total", "X", {("a", "b"): 2, ("c", "d"): 3.5}, "model", "part")]
    told = ReplicaMetrics(replica="r", families=made, account={("r", "anyone", "images"): 3}, at={"node": 0.5})
    came = pickle.loads(pickle.dumps(told))
    assert (came.replica, came.account, came.at) == (told.replica, told.account, told.at)
    assert exposition(came.families) == exposition(made)
    assert found(made, "plait_x_total", model="c", part="d") == [3.5]
    assert found([family("plait_y", "Y", 0.25)], "plait_y") == [0.25]
    assert family("plait_x_total", "X", {}, "model").type == "counter"
    assert family("plait_y", "Y", 1).type == "gauge"


def test_what_a_replica_of_many_models_counts_is_a_small_answer() -> None:
    """Far below the 100 KB from which on Ray would keep it in shared memory."""
    counts = {(f"model-{i}", f"{y}"): float(i * y) for i in range(99) for y in range(20)}
    made = [family(f"plait_x{x}_total", "X", counts, "model", "le") for x in range(5)]
    assert len(pickle.dumps(made)) > 400_000
    assert len(pickle.dumps(ReplicaMetrics(replica="r", families=made))) < 60_000


def test_names_of_models_are_labels_as_they_are() -> None:
    """Quotes, braces, spaces, other scripts, and what ends a line elsewhere: Prometheus' own parser reads the name."""
    names = [*ODD_NAMES, "a\u2028b", "a\\nb", "a\nb", "plait_x{"]
    made = [family("plait_x", "X", {(name,): i for i, name in enumerate(names)}, "model")]
    assert [total(labelled("r", made), "plait_x", model=name) for name in names] == list(range(len(names)))


def used(replica: str, **images: float) -> dict[tuple[str, str, str], float]:
    """What a replica says of its tenants."""
    return {(replica, tenant, "images"): count for tenant, count in images.items()}


def test_an_account_keeps_what_replicas_counted_that_are_gone() -> None:
    """And counts none of them twice: neither one that was silent, nor what another ingress knew, older or newer."""
    one, other = Account(), Account()
    one.learn({**used("a", acme=5, blue=1), **used("b", acme=2)})
    one.learn(used("b", acme=3))  # a is silent, or gone
    assert one.by_tenant() == {"acme": {"images": 8}, "blue": {"images": 1}}
    other.learn(used("a", acme=6))  # it came back, and was asked by somebody else
    other.learn(one.sums)
    assert other.by_tenant() == {"acme": {"images": 9}, "blue": {"images": 1}}
    one.learn(other.sums)
    one.learn(used("a", acme=4))  # an answer that was late
    assert one.by_tenant() == other.by_tenant()


def test_an_account_is_of_whole_numbers_and_of_seconds() -> None:
    """By the name of what was counted."""
    account = Account()
    account.learn({("r", "a", "image_compute_seconds"): 1.5, **used("r", a=3.0)})
    assert account.by_tenant() == {"a": {"images": 3, "image_compute_seconds": 1.5}}
    assert type(account.by_tenant()["a"]["images"]) is int
    assert account.knows(IMAGE_COUNTS)
    assert not account.knows(RANK_COUNTS)


def test_what_tenants_used_is_shown_of_those_who_counted_it() -> None:
    """An ingress knows more than it counted, and a replica that is gone is shown no more."""
    ingress = ReplicaMetrics(replica="i", families=(), account={**used("gone", a=9), ("i", "a", "rankings"): 2})
    shown = tenant_families([ingress, ReplicaMetrics(replica="e", families=(), account=used("e", a=3))])
    assert found(shown, "plait_tenant_images_total", tenant="a") == [3]
    assert found(shown, "plait_tenant_rankings_total", replica="i", tenant="a") == [2]
