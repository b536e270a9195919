"""What to recommend, whom to measure again before, and when it is clear enough."""

from __future__ import annotations

import numpy as np
import pytest

from plait_autoconfig.confidence import next_runs, verdict
from plait_autoconfig.objective import Goal, Limit, Objective
from plait_autoconfig.values import FailureKind, TrialOutcome

GOAL = Objective((Goal("x", "max"),))
LIMITED = Objective((Goal("x", "max"),), (Limit("ms", "at_most", 100.0),))
CRASH = TrialOutcome.failed(FailureKind.CRASH)


def group(*values, ms=()):
    """The outcomes of one candidate."""
    return [
        TrialOutcome.measured(x=value, ms=each) for value, each in zip(values, ms or [50.0] * len(values), strict=True)
    ]


def test_a_clear_leader_is_sure_and_nobody_is_measured_again():
    """And who failed once is out, however good it was. A zero is good or bad, not infinite."""
    now = verdict(GOAL, [group(10.0), group(30.0), [*group(99.0), CRASH]], sure=0.95)
    assert (now.leader, now.wanted) == (1, ())
    assert now.sure > 0.99
    assert verdict(GOAL, [[CRASH]], sure=0.95).leader is None
    assert verdict(Objective((Goal("x", "min"),)), [group(0.3), group(0.0)], sure=0.95).leader == 1


def test_close_candidates_are_measured_again_those_that_cannot_win_are_not():
    """The two that lead, of which the one that less is known of comes first."""
    now = verdict(GOAL, [group(10.0, 10.2, 9.9), group(10.3), group(5.0)], sure=0.95)
    assert now.leader == 1
    assert now.wanted == (1, 0)
    assert now.sure < 0.95


def test_one_lucky_trial_does_not_displace_what_was_measured_often():
    """A reference that held 10 in six runs stays before one of many that showed 10.6 once, under noise of 10 %."""
    noisy = [11.2, 9.0, 10.9, 9.1, 10.1, 9.9]
    others = [group(value) for value in (9.4, 9.6, 9.9, 9.1, 10.0, 9.7, 9.3)]
    assert verdict(GOAL, [group(*noisy), group(10.2), *others], sure=0.95).leader == 0
    assert verdict(GOAL, [group(*noisy), group(20.0), *others], sure=0.95).leader == 1


def test_what_runs_is_not_changed_for_a_guess():
    """A reference that keeps the limits stays until something is probably better; one that breaks them does not."""
    groups = [group(10.0, 10.5, 9.5), group(10.4), group(5.0)]
    assert verdict(GOAL, groups, sure=0.95).leader == 1
    guarded = verdict(GOAL, groups, sure=0.95, reference=0)
    assert guarded.leader == 0
    assert 1 in guarded.wanted
    assert verdict(GOAL, [group(10.0, 10.5, 9.5), group(20.0)], sure=0.95, reference=0).leader == 1
    broken = [group(10.0, 10.5, ms=(150.0, 140.0)), group(9.0)]
    assert verdict(LIMITED, broken, sure=0.95, reference=0).leader == 1


def test_a_reference_that_may_keep_a_limit_stays_as_well():
    """On average it breaks it by 1 %, which noise of 5 % explains: nothing worse takes its place, what is much better
    does. Where it surely breaks it, it goes."""
    doubtful = group(10.0, 10.5, 9.5, ms=(97.0, 106.0, 100.0))
    assert verdict(LIMITED, [doubtful, group(8.0)], sure=0.95, reference=0).leader == 0
    assert verdict(LIMITED, [doubtful, group(8.0)], sure=0.95).leader == 1
    known = group(10.0, 10.5, 9.5, ms=(111.0, 112.0, 110.0))
    assert verdict(LIMITED, [known, group(8.0)], sure=0.95, reference=0).leader == 1
    assert verdict(LIMITED, [doubtful, group(20.0)], sure=0.95, reference=0).leader == 1


def test_a_doubtful_limit_is_measured_again_whether_the_leader_kept_or_just_missed_it():
    """Noise of 10 % in the limit's metric: 96 and 104 of 100 are both open; 300 is not."""
    known = group(5.0, 5.0, 5.0, ms=(55.0, 50.0, 45.0))
    assert verdict(LIMITED, [known, group(10.0, ms=(96.0,))], sure=0.95).wanted == (1,)
    missed = verdict(LIMITED, [known, group(10.0, ms=(104.0,)), group(10.0, ms=(300.0,))], sure=0.95)
    assert (missed.leader, missed.wanted) == (0, (1,))


def test_runs_go_where_they_decide_and_the_last_to_the_leader_and_the_reference():
    """Whatever is wanted until only their shares are left; then these, whoever has fewer first."""
    open_ = verdict(GOAL, [group(10.0, 10.2, 9.9), group(10.3), group(5.0)], sure=0.95)
    assert next_runs(open_, [0, 0, 0], 2, most=6, times=2) == (1, 0)
    assert next_runs(open_, [0, 2, 0], 2, most=4, times=2) == (2,)
    assert next_runs(open_, [0, 1, 2], 2, most=4, times=2) == (1,)
    assert next_runs(open_, [1, 2, 2], 2, most=5, times=2) == ()
    clear = verdict(GOAL, [group(10.0), group(30.0)], sure=0.95)
    assert next_runs(clear, [0, 1], 0, most=12, times=2) == (0, 1)
    assert next_runs(clear, [2, 2], 0, most=12, times=2) == ()
    assert next_runs(verdict(GOAL, [[CRASH]], sure=0.95), [0], 0, most=12, times=2) == ()


def test_what_it_claims_is_right_as_often_as_it_says():
    """Of 100 searches of eight under noise of 10 %, with twelve runs, what is said to be sure is so within 5 %."""
    rng, said, was, regret, first = np.random.default_rng(0), [], [], [], []
    for _ in range(100):
        truth = np.exp(rng.normal(0.0, 0.15, 8))

        def shown(at, truth=truth):
            return TrialOutcome.measured(x=float(truth[at] * np.exp(rng.normal(0.0, 0.1))), ms=1.0)

        seen, fresh = [[shown(0), shown(0), shown(0)], *([shown(at)] for at in range(1, 8))], [0] * 8
        first.append(1.0 - truth[max(range(8), key=lambda at: seen[at][0].metrics["x"])] / truth.max())
        while order := next_runs(now := verdict(GOAL, seen, sure=0.95), fresh, 0, most=12, times=2):
            fresh[order[0]] += 1
            seen[order[0]].append(shown(order[0]))
        assert sum(fresh) <= 12
        said.append(now.sure)
        regret.append(1.0 - truth[now.leader] / truth.max())
        was.append(truth[now.leader] >= truth.max() * 0.99)
    assert np.mean(said) == pytest.approx(np.mean(was), abs=0.05)
    assert np.mean(regret) < 0.6 * np.mean(first)
