"""The laws that requests are drawn from, against exact masses.

Chi-square tests on seed 0 are deterministic; those on fresh seeds fail by chance once in a million runs.
"""

from __future__ import annotations

import itertools
import secrets

import numpy as np
import pytest
from scipy import special, stats

from plait_loadtest.distributions import ZipfRanks, cumulative, pick_distinct, zipf_weights

SEEDS = [(0, 1e-3), (secrets.randbits(62), 1e-6)]


def check_shares(observed, shares, chance, seed):
    """Chi-square; cells with an expectation below 5 are taken together."""
    expected = np.asarray(shares) * np.sum(observed)
    small = expected < 5
    observed = np.append(np.asarray(observed)[~small], np.asarray(observed)[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    keep = expected > 0
    assert observed[~keep].sum() == 0
    if keep.sum() > 1:
        assert stats.chisquare(observed[keep], expected[keep]).pvalue > chance, f"seed {seed}"


@pytest.mark.parametrize("exponent", [0.0, 1.0, 1.0 + 1e-9, 1.05, 4.0])
@pytest.mark.parametrize("rows", [3, 50])
@pytest.mark.parametrize("columns", [1, 2])
def test_ranks_follow_zipf_exactly(exponent, rows, columns):
    """Every rank of a small table has its finite Zipf mass, also next to exponent 1: one column from a table of sums,
    several by rejection."""
    shares = zipf_weights(rows, exponent) / zipf_weights(rows, exponent).sum()
    for seed, chance in SEEDS:
        ranks = ZipfRanks(np.array([rows] * columns), exponent).draw(np.random.default_rng(seed), 20_000)
        assert ranks.shape == (20_000, columns)
        for column in ranks.T:
            check_shares(np.bincount(column, minlength=rows), shares, chance, seed)


def test_ranks_of_a_huge_table_follow_zipf():
    """10^8 rows: shares of octaves of ranks are those of the Hurwitz zeta function."""
    rows, exponent = 10**8, 1.05
    edges = np.append(2 ** np.arange(27), rows + 1)  # ranks from 1
    mass = special.zeta(exponent, edges.astype(float))
    for seed, chance in SEEDS:
        ranks = ZipfRanks(np.array([rows]), exponent).draw(np.random.default_rng(seed), 50_000)[:, 0] + 1
        assert ranks.max() <= rows
        check_shares(np.histogram(ranks, bins=edges)[0], -np.diff(mass) / (mass[0] - mass[-1]), chance, seed)


def test_columns_of_ranks_keep_to_their_own_table():
    """Each column has its number of rows; a table of one row gives row 0."""
    rows = np.array([1, 3, 40_000_000, 7])
    ranks = ZipfRanks(rows, 1.05).draw(np.random.default_rng(0), 5_000)
    assert (ranks >= 0).all()
    assert (ranks < rows).all()
    assert (ranks.max(axis=0)[[0, 1, 3]] == [0, 2, 6]).all()
    assert ranks.max(axis=0)[2] > 1_000_000  # P(not) < 1e-80: a rank beyond 10^6 has a share above 0.03


def test_distinct_picks_are_drawn_by_weight_from_those_left():
    """Every ordered triple of four items has the probability of drawing without putting back."""
    weights = np.array([0.5, 0.3, 0.15, 0.05])
    sums = cumulative(weights.tolist()).tolist()
    triples = list(itertools.permutations(range(4), 3))
    shares = [
        np.prod([weights[item] / (1 - weights[list(triple[:place])].sum()) for place, item in enumerate(triple)])
        for triple in triples
    ]
    for seed, chance in SEEDS:
        drawn = [pick_distinct(sums, row) for row in np.random.default_rng(seed).random((20_000, 3)).tolist()]
        check_shares([drawn.count(triple) for triple in triples], shares, chance, seed)
