"""Statistics against values computed by hand or by counting."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl import statistics
from agentrl.statistics import Interval


@given(st.integers(1, 7).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_counts_the_subsets(case: tuple[int, int, int]) -> None:
    n, c, k = case
    subsets = list(combinations([1] * c + [0] * (n - c), k))
    assert statistics.pass_at_k(n, c, k) == pytest.approx(sum(any(s) for s in subsets) / len(subsets))


def test_pass_at_k_needs_k_samples() -> None:
    with pytest.raises(ValueError, match="pass@4"):
        statistics.pass_at_k(3, 1, 4)


def test_wilson_is_honest_at_the_ends() -> None:
    found = statistics.wilson(0, 200)
    assert (found.value, found.low) == (0.0, 0.0)
    assert found.high == pytest.approx(0.01885, abs=1e-4)


def test_the_bootstrap_repeats_and_covers_the_mean() -> None:
    data = [0.0, 1.0] * 50
    found = statistics.bootstrap(data, seed=1)
    assert found == statistics.bootstrap(data, seed=1)
    assert (found.value, round(found.low, 1), round(found.high, 1)) == (0.5, 0.4, 0.6)


def test_variants_of_a_task_make_no_interval_narrower() -> None:
    data = [0.0, 1.0, 0.5, 0.25] * 10
    alone = statistics.bootstrap(data)
    fivefold = [value for value in data for _ in range(5)]
    family = [str(at) for at in range(len(data)) for _ in range(5)]
    assert statistics.bootstrap(fivefold, families=family) == alone
    assert statistics.bootstrap(data, families=[""] * len(data)) == alone, "without a name, each is its own"
    naive = statistics.bootstrap(fivefold)
    assert naive.high - naive.low < 0.6 * (alone.high - alone.low)
    worse = [value - 0.1 for value in fivefold]
    assert statistics.paired(fivefold, worse, families=family).value == pytest.approx(-0.1)


def test_families_count_by_their_tasks() -> None:
    """One family of nine right answers and one wrong task: the mean is 0.9, and both alone can be drawn."""
    found = statistics.bootstrap([1.0] * 9 + [0.0], families=["nine"] * 9 + [""])
    assert (found.value, found.low, found.high) == (0.9, 0.0, 1.0)


def test_a_paired_difference_is_sharper_than_two_intervals() -> None:
    a = [0.0] * 50 + [1.0] * 50
    b = [0.0] * 40 + [1.0] * 60
    difference = statistics.paired(a, b)
    assert difference.value == pytest.approx(0.1)
    assert difference.low > 0
    assert statistics.verdict(difference).startswith("better: +10.0 points")
    assert statistics.verdict(Interval(0.0, -0.1, 0.1)).startswith("no difference")
    with pytest.raises(ValueError, match="same tasks"):
        statistics.paired([1.0], [1.0, 0.0])
