"""Several replicas' metrics as one text."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from plait_serving.replica_metrics import label, merge
from support.names import ODD_NAMES


def samples(text: str) -> dict[tuple[str, ...], float]:
    """The samples by name and labels."""
    families = text_string_to_metric_families(text)
    return {(s.name, *sorted(s.labels.values())): s.value for family in families for s in family.samples}


def http_text(answers: int, seconds: float, in_flight: int) -> str:
    """What an ingress counts."""
    registry = CollectorRegistry()
    counter = Counter("plait_requests", "Answers.", ["route", "outcome"], registry=registry)
    counter.labels(route='/v1/"x y"', outcome="ok").inc(answers)
    Histogram("plait_seconds", "Time.", buckets=(0.1, 1.0), registry=registry).observe(seconds)
    Gauge("plait_in_flight", "Now.", registry=registry).set(in_flight)
    return generate_latest(registry).decode()


def test_counters_histograms_and_gauges_of_two_replicas_add_up() -> None:
    """Each counted its own requests; whoever asks either of them gets all of them."""
    merged = samples(merge([http_text(3, 0.05, 1), http_text(4, 5.0, 2)]))
    assert merged[("plait_requests_total", '/v1/"x y"', "ok")] == 7
    assert merged[("plait_seconds_count",)] == 2
    assert merged[("plait_seconds_sum",)] == 5.05
    assert merged[("plait_seconds_bucket", "0.1")] == 1
    assert merged[("plait_seconds_bucket", "+Inf")] == 2
    assert merged[("plait_in_flight",)] == 3


def test_the_moment_of_creation_is_the_first_ones() -> None:
    """It is a moment, and the sum of two moments is none."""
    texts = [f"# TYPE plait_x_created gauge\nplait_x_created {moment}\n" for moment in (1.79e9, 1.78e9)]
    assert samples(merge(texts)) == {("plait_x_created",): 1.78e9}


def test_a_series_of_one_replica_only_is_kept() -> None:
    """A route that only one of them was asked for, with the comments once."""
    first = '# HELP a A thing.\n# TYPE a counter\na_total{x="1"} 1\n'
    second = '# HELP a A thing.\n# TYPE a counter\na_total{x="2"} 5\nb 3\n'
    merged = merge([first, second])
    assert merged == '# HELP a A thing.\n# TYPE a counter\na_total{x="1"} 1\na_total{x="2"} 5\nb 3\n'


def test_what_replicas_share_is_not_added_up() -> None:
    """Two engines on one host do not double its cores; two ingresses see the same workers."""
    text = "# TYPE plait_host_cores gauge\nplait_host_cores 2\n"
    text += '# TYPE plait_engine_prepared gauge\nplait_engine_prepared{part="unet"} 1\n'
    text += '# TYPE plait_ranker_workers untyped\nplait_ranker_workers{model="m"} 2.0\n'
    text += '# TYPE plait_ranker_worker_rows_total untyped\nplait_ranker_worker_rows_total{model="m"} 8.0\n'
    text += '# TYPE plait_ranker_sent_total untyped\nplait_ranker_sent_total{model="m"} 4.0\n'
    merged = samples(merge([text, text.replace("8.0", "9.0")]))
    assert merged[("plait_host_cores",)] == 2
    assert merged[("plait_engine_prepared", "unet")] == 1
    assert merged[("plait_ranker_workers", "m")] == 2
    assert merged[("plait_ranker_worker_rows_total", "m")] == 9
    assert merged[("plait_ranker_sent_total", "m")] == 8


def test_one_replicas_text_is_left_alone_and_none_is_empty() -> None:
    """With one replica the answer is what it said, to the letter."""
    text = http_text(3, 0.05, 1) + "plait_odd NaN\nplait_endless +Inf\n"
    assert merge([text]) == text
    assert merge([]) == ""
    doubled = merge([text, text])
    assert "plait_endless +Inf\n" in doubled
    assert "plait_odd NaN\n" in doubled


def test_names_of_models_are_labels_as_they_are() -> None:
    """Quotes, braces, spaces, other scripts, and what ends a line elsewhere: Prometheus' own parser reads the name."""
    names = [*ODD_NAMES, "a\u2028b", "a\\nb", "a\nb", "plait_x{"]
    text = "# TYPE plait_x gauge\n" + "".join(f"plait_x{{model={label(name)}}} {i}\n" for i, name in enumerate(names))
    assert samples(text) == {("plait_x", name): i for i, name in enumerate(names)}
    assert samples(merge([text, text])) == {("plait_x", name): 2 * i for i, name in enumerate(names)}
