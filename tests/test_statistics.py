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


def test_all_and_best_of_k_count_the_subsets() -> None:
    scores = [0.0, 1.0, 1.0, 0.25, 0.5]
    for k in range(1, 6):
        subsets = list(combinations(scores, k))
        best = sum(max(s) for s in subsets) / len(subsets)
        assert statistics.best_of_k(scores, k) == pytest.approx(best)
        every = sum(min(s) == 1.0 for s in subsets) / len(subsets)
        assert statistics.all_of_k(5, 2, k) == pytest.approx(every)
    for wrong in (0, 6):
        with pytest.raises(ValueError, match="samples per task"):
            statistics.best_of_k(scores, wrong)
        with pytest.raises(ValueError, match="samples per task"):
            statistics.all_of_k(5, 2, wrong)


def test_mcnemar_by_hand() -> None:
    """Ten flips, two of them to the worse: twice (1 + 10 + 45) of 1024."""
    assert statistics.mcnemar(8, 2) == statistics.mcnemar(2, 8) == pytest.approx(2 * 56 / 1024)
    assert (statistics.mcnemar(0, 0), statistics.mcnemar(5, 5), statistics.mcnemar(1, 0)) == (1.0, 1.0, 1.0)
    assert statistics.mcnemar(2000, 1500) < 1e-15, "large counts do not overflow"


def test_changes_count_families_once() -> None:
    a, b = [0.0, 0.0, 1.0, 0.5, 0.0], [1.0, 1.0, 0.0, 0.5, 1.0]
    assert statistics.changes(a, b) == (3, 1)
    assert statistics.changes(a, b, families=["x", "x", "x", "", "y"]) == (2, 0)
    assert statistics.changes([0.1 + 0.2], [0.3]) == (0, 0), "rounding is no change"


def test_an_interval_never_has_no_width() -> None:
    """Where every draw is the same, Wilson's interval stands, over families."""
    for values in ([0.0] * 10, [1.0] * 10):
        expected = statistics.wilson(sum(values), 10)
        assert statistics.rate(values) == expected
    two = statistics.rate([0.0] * 10, families=["a"] * 5 + ["b"] * 5)
    assert two == statistics.wilson(0, 2) and two.high > 0.6
    assert statistics.rate([0.0, 1.0] * 20) == statistics.bootstrap([0.0, 1.0] * 20)
    same = statistics.paired_rate([1.0] * 10, [1.0] * 10)
    assert same == Interval(0.0, -statistics.wilson(0, 10).high, statistics.wilson(0, 10).high)
    assert statistics.paired_rate([0.0] * 10, [1.0] * 10).high == 1.0


def test_variance_between_and_within_by_hand() -> None:
    """Two tasks of four tries: rates 1/4 and 3/4, within 1/4 each, noise 1/16, between 1/8 - 1/16."""
    found = statistics.variance([[True, False, False, False], [True, True, True, False]])
    assert [found.between, found.within] == pytest.approx([0.0625, 0.25])
    assert found.share_between == pytest.approx(0.2)
    assert statistics.variance([[True, True], [False, False]]).share_between == 1.0
    assert statistics.variance([[True, False], [True, False]]).share_between == 0.0
    for too_few in ([], [[True, False]], [[True], [False]]):
        assert str(statistics.variance(too_few).share_between) == "nan"


def test_the_size_that_shows_a_difference_by_hand() -> None:
    """Half of the differences +1 and half -1: deviation sqrt(100 / 99), so 2.801585 * 1.00504 / 10 at a hundred."""
    gaps = [1.0, -1.0] * 50
    assert statistics.detectable(gaps) == pytest.approx(0.28157, abs=1e-4)
    assert statistics.tasks_needed(gaps, 0.28157) in (100, 101)
    assert statistics.tasks_needed(gaps, 0.05) == 3172
    twice = [gap for gap in gaps for _ in range(2)]
    families = [str(at) for at in range(100) for _ in range(2)]
    assert statistics.detectable(twice, families=families) == statistics.detectable(gaps)
    assert statistics.tasks_needed(twice, 0.05, families=families) == 2 * 3172
    assert 0 < statistics.detectable([0.0] * 100) < 0.1, "where nothing varied, one more might have"
    assert statistics.detectable_alone([0.0, 1.0] * 50) == pytest.approx(0.19909, abs=1e-4)


@given(st.integers(0, 60), st.integers(0, 60), st.integers(1, 60))
def test_parity_with_scipy_and_statsmodels(better: int, worse: int, tried: int) -> None:
    stats = pytest.importorskip("scipy.stats")
    contingency = pytest.importorskip("statsmodels.stats.contingency_tables")
    proportion = pytest.importorskip("statsmodels.stats.proportion")
    if better + worse:
        exact = contingency.mcnemar([[3, better], [worse, 4]], exact=True).pvalue
        assert statistics.mcnemar(better, worse) == pytest.approx(exact)
        coin = stats.binomtest(better, better + worse, 0.5).pvalue
        assert statistics.mcnemar(better, worse) == pytest.approx(coin)
    passed = min(better, tried)
    low, high = proportion.proportion_confint(passed, tried, method="wilson")
    ours = statistics.wilson(passed, tried)
    assert [ours.low, ours.high] == pytest.approx([low, high], abs=1e-6)
    k = 1 + worse % tried
    none = stats.hypergeom(tried, passed, k).pmf(0)  # k of the tries drawn without putting back, none of them right
    assert statistics.pass_at_k(tried, passed, k) == pytest.approx(1 - none)
    assert statistics.all_of_k(tried, passed, k) == pytest.approx(stats.hypergeom(tried, passed, k).pmf(k))
