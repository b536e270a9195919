"""Thresholds: what can be written, what holds, and that doubt never passes."""

from __future__ import annotations

import numpy as np
import pytest

from plait_loadtest.errors import ScenarioError
from plait_loadtest.measure import summarise
from plait_loadtest.scenario import ImageClass
from plait_loadtest.thresholds import OF_A_CLASS, OF_THE_RUN, check, parse, parse_all
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


def test_an_invalid_run_passes_nothing():
    """A threshold that looks met on an invalid run is missed and says why; one that is missed stays missed."""
    rows = records(np.arange(1000) / 100.0, 20.0)
    looks_met, missed = judged(["p50_ms < 25", "p50_ms < 15"], rows, echo_ms=50.0)
    assert (looks_met.held, looks_met.why) == (False, "the run is invalid")
    assert (missed.held, missed.why) == (False, "")


def test_what_was_not_measured_passes_nothing():
    """No answers: no p99. No images known: no images/s. 99 answers: no p99 either, 100 make one."""
    few = records(np.arange(99) / 10.0, 20.0)
    p99, images, error_rate = judged(["p99_ms < 250", "images_per_s > 0", "error_rate < 1"], few)
    assert not p99.held
    assert "99 answers are too few" in p99.why
    assert (images.held, images.why) == (False, "nothing was measured")
    assert error_rate.held
    assert judged(["p99_ms < 250"], records(np.arange(100) / 10.0, 20.0))[0].held


def test_a_class_is_judged_by_itself():
    """The slow class misses what the quick one holds."""
    chosen = scenario(mix=(ImageClass(name="quick"), ImageClass(name="slow")))
    rows = records(np.arange(1000) / 100.0, np.where(np.arange(1000) % 2 == 0, 10.0, 80.0), kind=np.arange(1000) % 2)
    quick, slow = judged(["quick.p95_ms < 50", "slow.p95_ms < 50"], rows, chosen)
    assert (quick.held, slow.held) == (True, False)
