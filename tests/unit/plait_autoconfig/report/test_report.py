"""The report of a tuning job: one page that opens offline and says the answer first, whatever the job is at."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest
from pydantic_core import to_jsonable_python

from plait_autoconfig.designers import maker_of
from plait_autoconfig.jobs.measurer import MeasurementKind
from plait_autoconfig.jobs.state import Interval
from plait_autoconfig.knobs import ChoiceKnob, IntKnob
from plait_autoconfig.objective import Goal, Objective
from plait_autoconfig.report import figures
from plait_autoconfig.report.compare import compare, comparison_rows
from plait_autoconfig.report.figures import knob_importance
from plait_autoconfig.report.formatting import change_text, gain_words, metric_title, with_unit
from plait_autoconfig.report.page import report_page
from plait_autoconfig.space import Space
from plait_autoconfig.values import FailureKind, Trial, TrialOutcome, cells_of
from plait_report.charts import NARROW, SMALL, WIDE
from plait_report.page import POLICY
from support.pages import assert_stands_alone
from support.tune_jobs import job
from support.tuned import played

SOURCE = {"command": "plait tune run demo.yaml", "made_by": "plait 0.1.0", "job_text": "name: demo  # <b>mine</b>\n"}
TRIALS = {"budget": {"trials": 12}}
JOBS = {
    "feasible": lambda: played(job(limits=["p99_ms <= 100"], **TRIALS)),
    "infeasible": lambda: played(job(limits=["p99_ms <= 5", "cost_per_hour <= 9"], **TRIALS)),
    "front": lambda: played(job(objective="max goodput_per_s, min cost_per_hour", **TRIALS)),
    "cheapest": lambda: played(job(objective="min cost at rate 20", **TRIALS)),
    "failures": lambda: played(job(**TRIALS), fail={"batch=8": "out_of_memory", "batch=2": "invalid"}),
    "broken": lambda: played(fail={"replicas=1": "refused_start"}),
    "nothing yet": lambda: played(most=0),
    "running": lambda: played(job(limits=["p99_ms <= 100"], **TRIALS), most=9),
}


@pytest.fixture(scope="module")
def states():
    """A job of each kind."""
    return {name: play() for name, play in JOBS.items()}


@pytest.fixture(scope="module")
def pages(states):
    """The report of each."""
    return {name: report_page(state, **SOURCE) for name, state in states.items()}


def headline(html):
    """What the page says first."""
    return re.search(r"<h1[^>]*>(.*?)</h1>", html)[1]


# ---- the page --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", JOBS)
def test_the_page_stands_alone(pages, name):
    """Well-formed, nothing fetched, one script of its own under a policy that allows no other, no NaN in a drawing."""
    assert_stands_alone(pages[name])
    assert "http://" not in pages[name].replace("http://127.0.0.1", "")
    assert pages[name].count("<script>") == 1
    assert POLICY in pages[name]


def test_the_answer_comes_first(states, pages):
    """How much better, that nothing is feasible, that the default stays, a choice, how far a running job is."""
    said = {name: headline(html) for name, html in pages.items()}
    gain = states["feasible"].recommendation.gain["goodput_per_cost"].value
    assert gain > 1.0
    assert said["feasible"] == gain_words(states["feasible"].spec.goal.goals[0], gain).capitalize()
    assert said["infeasible"] == "Nothing keeps the limits"
    assert said["broken"] == "The job failed"
    assert said["front"] == f"{len(states['front'].answers)} configurations to choose from"
    assert said["running"].startswith("Searching")
    assert said["nothing yet"] == "Searching"
    assert said["cheapest"] == "Keeps every limit; the default does not"
    alike = replace(states["feasible"].recommendation, gain={"goodput_per_cost": Interval(value=1.002)})
    assert (
        headline(report_page(replace(states["feasible"], answers=(alike,)), **SOURCE)) == "No better than the default"
    )


def test_the_page_tells_why_nothing_is_feasible(pages):
    """The limit that binds, by which trials; the other limit is kept."""
    html = pages["infeasible"]
    assert "p99_ms &lt;= 5 was missed by all" in html
    assert "0 of " in re.search(r"<th scope=\"row\">p99_ms &lt;= 5</th>(.*?)</tr>", html)[1]
    assert "kept" in re.search(r"<th scope=\"row\">cost_per_hour &lt;= 9</th>(.*?)</tr>", html)[1]


def test_every_measurement_is_in_the_table_with_its_reason(states, pages):
    """One row each; a rejected one says why, in the words of the job's state."""
    for name, state in states.items():
        for row in state.rows:
            assert f'<tr><th scope="row">{row.number}</th>' in pages[name]
            assert row.reason.replace("<", "&lt;").replace(">", "&gt;") in pages[name]


def test_the_page_says_what_to_change_and_how_to_run_it_again(states, pages):
    """Old and new values of each changed knob, the command, the job as it was given, the machine."""
    html = pages["feasible"]
    for name, (before, after) in states["feasible"].recommendation.changes.items():
        assert re.search(rf'>{name}</th><td class="quiet">{before}</td><td class="changed">{after}<', html)
    assert "plait tune run demo.yaml" in html
    assert "name: demo  # &lt;b&gt;mine&lt;/b&gt;" in html
    assert "a test&#x27;s machine, 2 cores, 8 GiB" in html


def test_the_page_escapes_what_it_shows(states):
    """Words from a job file, a machine or a failure cannot put markup into the page."""
    state = states["failures"]
    evil = "<img src=x>"
    rows = tuple(replace(row, reason=evil, note=evil) for row in state.rows)
    html = report_page(replace(state, rows=rows, reason=evil, warnings=(evil,)), **(SOURCE | {"command": evil}))
    assert "<img" not in html


def test_several_goals_show_the_front(states, pages):
    """The front of the page is the front of the state, as a stair through its corners; gains are told by goal."""
    state = states["front"]
    goals = state.spec.goal.goals
    line = figures.pareto_line(state, *goals)
    points = {(each.metrics["goodput_per_s"], each.metrics["cost_per_hour"]) for each in state.answers}
    assert len(points) > 1
    assert points <= set(line)
    assert all(set(each.gain) == {"goodput_per_s", "cost_per_hour"} for each in state.answers)
    assert [x for x, _ in line] == sorted(x for x, _ in line)
    for (x0, y0), (x1, y1) in itertools.pairwise(line):
        assert x0 == x1 or y0 == y1
    assert "What is traded for what" in pages["front"]


def test_the_stair_is_the_best_mean_so_far(states):
    """Naively: after each measurement, the best mean of a feasible configuration; its interval holds it."""
    state = states["feasible"]
    goal = state.spec.goal.goals[0]
    naive = {}
    trials = []
    for trial in figures.trials(state):
        trials.append(trial)
        best = state.spec.goal.best(trials)
        if best is not None:
            naive[trial.number] = best.outcome.metrics[goal.metric]
    steps = figures.best_over_time(state, goal)
    for number, value in naive.items():
        assert [best.value for at, best in steps if at <= number][-1] == pytest.approx(value)
    assert all(best.low < best.value < best.high for _, best in steps)


def test_a_default_outside_the_space_is_no_cell(states):
    """It is drawn as the default, but says nothing about which knob of the space matters."""
    state = states["feasible"]
    outside = {"replicas": 9, "batch": 4}
    rows = tuple(replace(row, config=outside) if row.kind is MeasurementKind.REFERENCE else row for row in state.rows)
    assert outside not in [cell.config for cell in figures.cells(replace(state, rows=rows))]


# ---- charts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("frame", [WIDE, NARROW, SMALL])
@pytest.mark.parametrize("values", [[], [5.0], [0.0, 0.0], [1.0, 2.0, 900.0], [-3.0, 4.0], [1e-9, 1e9]])
def test_drawings_stay_inside_their_frame(frame, values):
    """Whatever the numbers: no dot outside, no division by nothing."""
    dots = [figures.Dot(x=float(i), y=value, kind="ok", text="t") for i, value in enumerate(values)]
    dots.append(figures.Dot(x=0.0, y=None, kind="failed", text="t"))
    axes = figures.Axes(x="x", y="y", label="l")
    steps = [(0.0, Interval(value=value)) for value in values[:1]]
    for drawing in (
        figures.best_so_far(dots, steps, axes, default=None, frame=frame),
        figures.trade_off(dots, [], axes, limit=("p99", 3.0, True), frame=frame),
        figures.knob_slice(dots, axes, frame=frame),
        figures.drift([(0.0, 1.0, "t"), (2.0, 1.4, "t")], axes, bound=0.1, frame=frame),
    ):
        for circle in ElementTree.fromstring(drawing).iter("circle"):
            assert frame.left <= float(circle.get("cx")) <= frame.width
            assert 0.0 <= float(circle.get("cy")) <= frame.floor + 0.1


def test_a_chart_is_drawn_for_both_widths(pages):
    """So that text has its size on a phone: the same number of dots in both."""
    html = pages["feasible"]
    wide, narrow = (
        [part.count("<circle") for part in re.findall(rf'<div class="{name}">(.*?)</div>', html, flags=re.DOTALL)]
        for name in ("wide", "narrow")
    )
    assert wide == narrow
    assert sum(wide) > 0


# ---- importance ------------------------------------------------------------------------------------------------------

SPACE = Space((
    IntKnob(name="strong", low=1, high=6),
    ChoiceKnob(name="idle", values=(1, 2, 4, 8), ordered=True),
    ChoiceKnob(name="kind", values=("a", "b")),
    IntKnob(name="inner", low=0, high=1, when={"kind": ("a",)}),
))  # fmt: skip
GOOD = Objective((Goal("good", "max"),))


def measured(configs, outcome):
    """Cells of these configurations."""
    return cells_of(Trial(number=i, config=each, outcome=outcome(each)) for i, each in enumerate(configs))


def test_importance_of_too_little_is_not_told():
    """Few configurations, or all alike: nothing, instead of a number without meaning."""
    cells = measured(SPACE.cells(), lambda config: TrialOutcome.measured(good=config["strong"]))
    assert knob_importance(SPACE, GOOD, cells[:9]) == []
    assert knob_importance(SPACE, GOOD, measured(SPACE.cells(), lambda _: TrialOutcome.measured(good=1.0))) == []


TUNED = Space((
    ChoiceKnob(name="batch", values=(1, 2, 4, 8, 16, 32), ordered=True),
    IntKnob(name="threads", low=1, high=4),
    ChoiceKnob(name="wait_ms", values=(0, 2, 5, 10), ordered=True),
    ChoiceKnob(name="wire", values=("a", "b")),
))  # fmt: skip


def main_effects(loss):
    """The true shares: each knob's variance, of the loss that is averaged over all others."""
    cells = TUNED.cells()
    effects = {
        name: np.var([np.mean([loss(cell) for cell in cells if cell[name] == own]) for own in {c[name] for c in cells}])
        for name in TUNED.by_name
    }
    return {name: effect / sum(effects.values()) for name, effect in effects.items()}


@pytest.mark.parametrize("designer", ["plait", "random"])
@pytest.mark.parametrize(
    "loss",
    [
        lambda knobs: -np.log(1 + np.log2(knobs["batch"])) - 0.15 * np.log(knobs["threads"]),
        lambda knobs: 0.05 * np.log2(knobs["batch"]) - np.log(knobs["threads"]),
        lambda knobs: 0.6 * (knobs["wire"] == "a") - 0.1 * np.log2(knobs["batch"]),
    ],
)
def test_importance_is_that_of_the_known_surface(designer, loss):
    """From 14 trials with noise of 5 %, also of a search, whose trials soon agree in the knob that matters."""
    rng, asking, trials = np.random.default_rng(0), maker_of(designer)(TUNED, GOOD, seed=0), []
    for number in range(14):
        config = asking.ask()
        outcome = TrialOutcome.measured(good=float(np.exp(-loss(config) + 0.05 * rng.standard_normal())))
        trials.append(Trial(number=number, config=config, outcome=outcome))
        asking.tell(trials[-1])
    found = dict(knob_importance(TUNED, GOOD, cells_of(trials)))
    assert found == pytest.approx(main_effects(loss), abs=0.15)


def test_importance_for_several_goals_is_the_mean_and_failures_say_nothing():
    """One goal depends on one knob, the other on another: half for each, and nothing for one that is often inactive."""
    two = Objective((Goal("good", "max"), Goal("quick", "max")))
    crash = TrialOutcome.failed(FailureKind.CRASH)
    cells = measured(
        SPACE.cells(),
        lambda knobs: crash if knobs["strong"] == 6
        else TrialOutcome.measured(good=float(knobs["strong"]), quick=float(knobs["idle"])),
    )  # fmt: skip
    found = knob_importance(SPACE, two, cells)
    assert {name for name, _ in found[:2]} == {"strong", "idle"}
    assert dict(found) == pytest.approx({"strong": 0.5, "idle": 0.5, "kind": 0.0, "inner": 0.0}, abs=0.1)


# ---- words -----------------------------------------------------------------------------------------------------------


def test_words():
    """Metrics with their units, gains in both directions, changes."""
    up, down = job(objective="max goodput_per_cost").goal.goals[0], job(objective="min p99").goal.goals[0]
    assert gain_words(up, 1.34) == "34 % higher goodput per cost"
    assert gain_words(up, 2.5) == "2.5 times the goodput per cost"
    assert gain_words(down, 1.25) == "20 % lower p99"
    assert gain_words(down, 0.8) == "25 % higher p99"
    assert (metric_title("goodput_per_s"), metric_title("memory_gib")) == ("goodput (/s)", "memory (GiB)")
    assert with_unit("p99_ms", 12.345) == "12.3 ms"
    assert (change_text(2.0, 1.0), change_text(2.0, 2.001), change_text(0.0, 1.0)) == ("−50 %", "0", "-")


# ---- comparison ------------------------------------------------------------------------------------------------------


def with_gain(state, value, low, high):
    """The state with another gain."""
    answer = replace(state.recommendation, gain={"goodput_per_cost": Interval(value=value, low=low, high=high)})
    return replace(state, answers=(answer,))


def test_jobs_side_by_side(states):
    """What each found, and a sentence that calls a difference one only if the intervals are apart."""
    state = states["feasible"]
    ahead = compare([with_gain(state, 1.2, 1.1, 1.3), with_gain(state, 1.6, 1.5, 1.7)])
    assert ahead.sentence.startswith("demo (2) found more than demo (1), 1.60 (1.50 to 1.70) against 1.20")
    same = compare([with_gain(state, 1.2, 1.1, 1.3), with_gain(state, 1.25, 1.15, 1.35)])
    assert same.sentence.startswith("no difference beyond noise")
    once = compare([with_gain(state, 1.2, None, None), with_gain(state, 1.6, None, None)])
    assert "measured too seldom" in once.sentence
    names, results, *rest = comparison_rows(ahead.jobs)
    assert names == ["", "demo (1)", "demo (2)"]
    assert results == ["result", ahead.jobs[0].headline, "60 % higher goodput per cost"]
    assert all(len(row) == 3 for row in rest)


def test_jobs_that_differ_in_what_they_ask_are_not_compared(states):
    """The sentence names what differs; the columns are there all the same, also of a job that found nothing."""
    found = compare([states["feasible"], states["infeasible"], states["nothing yet"]])
    assert found.sentence == "the gains cannot be compared: the jobs differ in limits"
    assert [each.config is None for each in found.jobs] == [False, True, True]
    document = json.loads(json.dumps(to_jsonable_python(found), allow_nan=False))
    assert document["differences"] == ["budget"]
