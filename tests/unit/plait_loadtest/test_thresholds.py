"""Thresholds: what can be written, what holds, and that doubt never passes."""

from __future__ import annotations

import numpy as np
import pytest

from plait_loadtest.errors import ScenarioError
from plait_loadtest.measure import summarise
from plait_loadtest.scenario import ImageClass, LoadTarget, RawClass
from plait_loadtest.thresholds import OF_A_CLASS, OF_THE_RUN, check, parse, parse_all
from plait_loadtest.values import RequestOutcome
from support.loadtest_records import records, result, scenario

KINDS = ("images", "v1.5-big")


def judged(texts, rows, chosen=None, **about):
    chosen = chosen or scenario()
    kinds = [item.name for item in chosen.mix]
    return check(parse_all(texts, kinds=kinds), summarise(result(rows, **about), chosen))


@pytest.mark.parametrize(
    ("text", "kind", "metric", "sign", "bound"),
    [
        ("p99_ms < 250", None, "p99_ms", "<", 250.0),
        ("p99.9_ms<=1e3", None, "p99.9_ms", "<=", 1000.0),
        (" images.p95_ms  <  500 ", "images", "p95_ms", "<", 500.0),
        ("v1.5-big.p99.9_ms < 5", "v1.5-big", "p99.9_ms", "<", 5.0),
        ("goodput_per_s > 20", None, "goodput_per_s", ">", 20.0),
        ("send_lag_p99_ms >= 0", None, "send_lag_p99_ms", ">=", 0.0),
    ],
)
def test_what_can_be_written(text, kind, metric, sign, bound):
    """Metric, sign and number, with or without a class, also where names have dots."""
    found = parse(text, kinds=KINDS)
    assert (found.kind, found.metric, found.sign, found.bound) == (kind, metric, sign, bound)


@pytest.mark.parametrize("text", ["", "p99 < 3", "p99_ms = 3", "p99_ms < fast", "p99_ms < nan", "p97_ms < 3", "p99_ms"])
def test_what_can_not_be_written_is_told_with_all_names(text):
    """The message lists every metric."""
    with pytest.raises(ScenarioError) as error:
        parse(text, kinds=KINDS)
    assert all(name in str(error.value) for name in [*OF_A_CLASS, *OF_THE_RUN])


def test_unknown_classes_and_run_metrics_of_a_class_are_refused():
    """There is no class `images`, and no send lag of a class."""
    with pytest.raises(ScenarioError, match=r"pictures.*images, v1\.5-big"):
        parse("pictures.p95_ms < 3", kinds=KINDS)
    with pytest.raises(ScenarioError, match="whole run"):
        parse("images.send_lag_p99_ms < 3", kinds=KINDS)


def test_held_and_missed():
    """Each side of each sign, on a run where p50 is 20 ms and nothing fails."""
    rows = records(np.arange(1000) / 100.0, 20.0)
    texts = ["p50_ms < 25", "p50_ms < 15", "p50_ms > 15", "goodput_per_s >= 100", "error_rate <= 0", "requests > 1000"]
    assert [verdict.held for verdict in judged(texts, rows)] == [True, False, True, True, True, False]
    of_all_answers = judged(["latency_all_ms.p50 < 25", "images.latency_all_ms.p99.9 < 15"], rows)
    assert [verdict.held for verdict in of_all_answers] == [True, False]


@pytest.mark.parametrize(("metric", "needed"), [("p99_ms", 100), ("p95_ms", 20), ("p99.9_ms", 1000), ("p50_ms", 2)])
def test_few_successes_decide_nothing(metric, needed):
    """Neither that a percentile holds nor that it is missed; as many failures do not help."""
    rows = records(np.arange(2 * needed) / 10.0, 20.0)
    rows["outcome"][needed - 1 :] = RequestOutcome.HTTP_5XX
    long = scenario(duration_s=300.0)
    for text in (f"{metric} < 250", f"{metric} < 10"):
        verdict = judged([text], rows, long)[0]
        assert (verdict.held, verdict.why) == (None, f"{needed - 1} values are too few, {needed} are needed")
    rows["outcome"][needed - 1] = RequestOutcome.OK
    assert [verdict.held for verdict in judged([f"{metric} < 250", f"{metric} < 10"], rows, long)] == [True, False]


def test_each_percentile_counts_its_own_values():
    """1000 answers of which 3 were streamed: their first parts decide nothing."""
    rows = records(np.arange(1000) / 100.0, 20.0)
    rows["first_part_ns"][:3] = rows["done_ns"][:3]
    (verdict,) = judged(["first_part_p99_ms < 100"], rows)
    assert (verdict.held, verdict.why) == (None, "3 values are too few, 100 are needed")


def test_what_was_not_measured_has_no_verdict():
    """No images: no images/s. No request: no error rate."""
    raw = scenario(target=LoadTarget(api="raw"), mix=(RawClass(),))
    rows = records(np.arange(99) / 10.0, 20.0)
    images, error_rate = judged(["images_per_s > 0", "error_rate < 1"], rows, raw)
    assert (images.held, images.why) == (None, "nothing was measured")
    assert error_rate.held
    rows["warm_up"][:] = True
    assert judged(["error_rate < 1"], rows, raw)[0].held is None


def test_a_class_is_judged_by_itself():
    """The slow class misses what the quick one holds."""
    chosen = scenario(mix=(ImageClass(name="quick"), ImageClass(name="slow")))
    rows = records(np.arange(1000) / 100.0, np.where(np.arange(1000) % 2 == 0, 10.0, 80.0), kind=np.arange(1000) % 2)
    quick, slow = judged(["quick.p95_ms < 50", "slow.p95_ms < 50"], rows, chosen)
    assert (quick.held, slow.held) == (True, False)
