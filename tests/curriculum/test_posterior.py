"""Beliefs: exact where they can be, finite everywhere, never starved and never fed with errors."""

from __future__ import annotations

import math
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agentrl.curriculum.group_stats import GroupStats
from agentrl.curriculum.posterior import (
    Posterior,
    as_beta,
    expected_variance,
    laplace,
    sigmoid,
)

STATS = GroupStats(
    level=1, index=0, tags=(), count=8, total=4.0, spread=2 / 7, informative=True, censored=False, version=0,
    predicted=None,
)  # fmt: skip


def fresh(decay: float = 0.99, task_decay: float = 0.99, levels: tuple[int, ...] = (1,)) -> Posterior:
    return Posterior(levels, decay, task_decay)


def tell(
    posterior: Posterior, index: int, total: float, *, level: int = 1, tags: tuple[str, ...] = (), n: int = 8
) -> int:
    row = posterior.row(level, index)
    if row is None:
        row = posterior.open(level, index, posterior.strata.number(level, tags))
    mean = total / n
    stats = replace(STATS, level=level, index=index, tags=tags, count=n, total=total, version=posterior.clock)
    posterior.learn(row, replace(stats, spread=mean * (1 - mean) * n / (n - 1)))
    return row


@settings(max_examples=200)
@example(prior=4.0, variance=24.0, count=0.5625, share=0.0)  # plain Newton swings between two flat sides
@given(
    prior=st.floats(-12, 12),
    variance=st.floats(1e-6, 50),
    count=st.floats(0.01, 1000),
    share=st.floats(0, 1),
)
def test_laplace_finds_the_mode(prior: float, variance: float, count: float, share: float) -> None:
    total = count * share
    x, left = laplace(prior, variance, count, total)
    slope = (x - prior) / variance - (total - count * sigmoid(x))
    assert math.isfinite(x)
    assert abs(slope) <= 1e-4 * (1.0 / variance + count)
    assert 0.0 < left <= variance


def test_laplace_by_hand() -> None:
    """4 of 8 at a prior mean of 0 leave the mean; the precision grows by 8 · 1/4."""
    assert laplace(0.0, 2.0, 8.0, 4.0) == (0.0, 1.0 / (0.5 + 2.0))


@pytest.mark.parametrize(("mean", "variance"), [(0.0, 0.5), (1.0, 1.0), (-2.0, 2.0), (3.0, 4.0), (-4.0, 0.1)])
def test_closed_forms_are_near_the_integrals(mean: float, variance: float) -> None:
    x = mean + math.sqrt(variance) * np.random.default_rng(0).standard_normal(400_000)
    p = 1.0 / (1.0 + np.exp(-x))
    assert float(expected_variance(np.array(mean), variance)) == pytest.approx((p * (1 - p)).mean(), abs=0.012)
    a, b = as_beta(mean, variance)
    assert a / (a + b) == pytest.approx(p.mean(), abs=0.002)
    assert a * b / ((a + b) * (a + b + 1)) == pytest.approx((p * (1 - p)).mean(), abs=0.002)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 1), st.integers(1, 2000), st.integers(0, 50)), max_size=40))
def test_finite_at_extremes(groups: list[tuple[int, float, int, int]]) -> None:
    posterior = fresh(levels=(1, 2, 3, 4))
    for level, share, count, versions in groups:
        posterior.advance(posterior.clock + versions)
        row = tell(posterior, 7, share * count, level=level + 1, tags=("a",), n=count + 1)
        mean, variance = posterior.believe(row)
        a, b = posterior.beta(row)
        assert math.isfinite(mean) and variance > 0 and a > 0 and b > 0 and math.isfinite(a + b)
    means, variances = posterior.strata.beliefs()
    assert np.isfinite(means).all() and (variances > 0).all()


def test_unseen_tasks_start_from_their_stratum() -> None:
    """Thirty tasks of level 1 pass, thirty of level 3 fail: level 2, never seen, lies between, and new tasks follow."""
    posterior = fresh(levels=(1, 2, 3))
    for index in range(30):
        tell(posterior, index, 8.0, level=1)
        tell(posterior, index, 0.0, level=3)
    beliefs = [as_beta(*posterior.strata.believe(posterior.strata.number(level, ()))) for level in (1, 2, 3)]
    rates = [passes / (passes + failures) for passes, failures in beliefs]
    assert rates[0] > 0.95 and rates[2] < 0.05
    assert 0.2 < rates[1] < 0.8


def test_a_tag_speaks_for_levels_where_it_was_not_seen() -> None:
    posterior = fresh(levels=(1, 2))
    for index in range(20):
        tell(posterior, index, 7.0, level=1, tags=("easy",))
        tell(posterior, 100 + index, 1.0, level=1, tags=("hard",))
    easy, _ = posterior.strata.believe(posterior.strata.number(2, ("easy",)))
    hard, _ = posterior.strata.believe(posterior.strata.number(2, ("hard",)))
    assert easy > hard + 1.0


def test_when_the_policy_improves_untouched_tasks_move_along() -> None:
    posterior = fresh()
    low, high = tell(posterior, 0, 1.0), tell(posterior, 1, 6.0)
    for index in range(2, 20):
        tell(posterior, index, 3.0)
    before = [posterior.believe(row)[0] for row in (low, high)]
    for version in range(1, 11):
        posterior.advance(version)
        for index in range(2, 20):
            tell(posterior, index, 6.0)
    after = [posterior.believe(row)[0] for row in (low, high)]
    assert after[0] > before[0] + 0.5 and after[1] > before[1] + 0.2
    assert after[1] > after[0], "what sets them apart is kept"


def test_certainty_fades_and_the_last_guess_stays() -> None:
    posterior = fresh(decay=0.9, task_decay=0.9)
    untouched = fresh(decay=0.9, task_decay=0.9)
    row = tell(posterior, 0, 8.0)
    blank = untouched.open(1, 0, untouched.strata.number(1, ()))
    mean, variance = posterior.believe(row)
    assert mean > 1.0
    posterior.advance(400)
    stale, wide = posterior.believe(row)
    assert stale == pytest.approx(mean)
    assert variance < wide == pytest.approx(untouched.believe(blank)[1])
    tell(posterior, 0, 0.0)
    assert posterior.believe(row)[0] < 0.5, "one group of failures undoes a stale success"


def test_late_and_censored_groups_count_less() -> None:
    def shift(version: int, censored: bool) -> float:
        posterior = fresh(decay=0.8)
        posterior.advance(5)
        row = posterior.open(1, 0, posterior.strata.number(1, ()))
        posterior.learn(row, replace(STATS, total=0.0, spread=0.0, version=version, censored=censored))
        return posterior.believe(row)[0]

    assert shift(5, False) < shift(2, False) < shift(0, False) < 0.0
    assert shift(5, False) < shift(5, True) < 0.0


def test_equal_fractional_scores_teach_nothing() -> None:
    """Always exactly one half: p(1-p) is largest, but the groups carry no signal, and liveliness says so."""
    posterior = fresh()
    row, other = tell(posterior, 0, 4.0), tell(posterior, 1, 4.0)
    for _ in range(20):
        posterior.learn(row, replace(STATS, spread=0.0))
        posterior.learn(other, replace(STATS, index=1))
    _, _, lively = posterior.many(np.array([row, other]))
    assert lively[0] < 0.2 and lively[1] > 0.8


def test_tasks_that_lie_apart_are_noticed() -> None:
    rng = np.random.default_rng(0)
    found = []
    for deviation in (0.2, 2.0):
        posterior = fresh()
        for index in range(400):
            tell(posterior, index, float(rng.binomial(8, sigmoid(deviation * rng.standard_normal()))))
        found.append(posterior.apart)
    assert found[0] < 0.4 and found[1] > 1.5


def test_tags_without_end_share_a_stratum() -> None:
    posterior = fresh()
    for index in range(400):
        posterior.strata.number(1, (f"unique {index}",))
    assert len(posterior.strata) == 256


def test_round_trip() -> None:
    posterior = fresh(levels=(1, 2))
    for index in range(100):
        posterior.advance(index // 10)
        tell(posterior, index % 37, float(index % 9), level=1 + index % 2, tags=("a",) if index % 3 else ("b", "c"))
    copy = fresh(levels=(1, 2))
    copy.restore(posterior.state())
    for index in range(100, 150):
        for each in (posterior, copy):
            each.advance(index // 10)
            tell(each, index % 61, float(index % 9), level=1 + index % 2, tags=("b", "c"))
    assert [posterior.believe(row) for row in range(posterior.count)] == [
        copy.believe(row) for row in range(copy.count)
    ]


def test_a_million_tasks_fit_in_memory() -> None:
    """What docs/curriculum.md says: about 165 bytes for a task that was seen, found again by level and index."""
    posterior = fresh(levels=(1, 2))
    stratum = posterior.strata.number(1, ())
    tracemalloc.start()
    try:
        for index in range(60_000):
            posterior.open(1, index, stratum)
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert posterior.row(1, 59_999) == 59_999
    assert 100 < used / 60_000 < 200
