"""Asynchronous rounds lose no slow task: a clock that jumps stands for time, so the machine's load does not matter."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from agentrl.assembly import plan_of
from agentrl.curriculum.group_filter import GroupFilter
from agentrl.recipe import GroupFilterSection, Recipe
from agentrl.rollout.inflight import Draw
from agentrl.rollout.scheduler import Plan, Scheduler
from agentrl.types import Outcome, Round, Segment, Source, Trajectory
from benchmarks.asynchronous import Overtaking, TaskDraws, Workload, best, on_virtual_time, train

WORKLOAD = Workload(rounds=20)
Seconds = Callable[[int, int], float]
PLAN = Plan(group_size=2, groups=4, concurrency=64, asynchronous=True, max_staleness=1)


def trajectory(draw: Draw, index: int, version: int, score: float, tokens: int = 4) -> Trajectory:
    segment = Segment(
        token_ids=np.zeros(tokens, np.int32),
        logprobs=np.full(tokens, -1.0, np.float32),
        versions=np.full(tokens, version, np.int32),
        sources=np.full(tokens, Source.SAMPLED, np.uint8),
    )
    outcome = Outcome(ending="done", grade="graded", score=score)
    return Trajectory(
        task=draw.task, group=draw.group, index=index, seed=0, segments=(segment,), messages=(), outcome=outcome
    )


class Run:
    """A scheduler whose rollouts only sleep, on a clock of its own."""

    def __init__(
        self, plan: Plan, seconds: Seconds, right: Seconds = lambda group, index: index % 2, **options: Any
    ) -> None:
        self.version, self.draws = 0, TaskDraws(WORKLOAD)
        self.rounds: list[Round] = []
        self.ages: list[int] = []
        tokens: Callable[[int], int] = options.get("tokens", lambda group: 4)

        async def play(draw: Draw, index: int) -> Trajectory:
            began = self.version
            await asyncio.sleep(seconds(draw.group, index))
            return trajectory(draw, index, began, float(right(draw.group, index)), tokens(draw.group))

        section = options.get("section", GroupFilterSection())
        self.scheduler = Scheduler(play, GroupFilter(section, 200), plan, version=lambda: self.version)
        on_virtual_time(self._train(options.get("count", 8), options.get("learner_s", 1.0)))

    async def _train(self, count: int, learner_s: float) -> None:
        source = self.scheduler.rounds(self.draws)
        async for round_ in source:
            self.rounds.append(round_)
            self.ages += [self.version - t.oldest_version for g in round_.kept for t in g.trajectories]
            if len(self.rounds) == count:
                break
            await asyncio.sleep(learner_s)
            self.version += 1
        self.seconds = asyncio.get_running_loop().time()
        await source.aclose()

    @property
    def numbers(self) -> list[tuple[list[int], list[int]]]:
        return [([g.number for g in r.kept], [g.number for g in r.dropped]) for r in self.rounds]


def handed(rounds: Sequence[Round]) -> list[int]:
    return sorted(group.number for round_ in rounds for group in round_.kept + round_.dropped)


@pytest.mark.parametrize("staleness", [1, 2, 4])
@pytest.mark.parametrize("refill", [False, True])
@pytest.mark.parametrize("slots", [160, 64])
def test_slow_tasks_keep_their_share_at_the_best_throughput(staleness: int, refill: bool, slots: int) -> None:
    """Half of the tasks take ten times as long: they are half of what is trained on, and rounds are whole."""
    workload = replace(WORKLOAD, refill=refill, slots=slots)
    figures = on_virtual_time(train(Scheduler, workload, staleness))
    assert 0.45 <= figures["slow_share"] <= 0.55
    assert figures["groups_per_second"] >= 0.95 * best(workload, staleness)
    assert figures["smallest_round"] == workload.groups and figures["staleness_max"] <= staleness
    assert figures["stale_groups"] == 0


def test_the_schedule_before_lost_slow_tasks() -> None:
    """The experiment can tell the difference: rounds filled by whatever is ready first hold a quarter of slow tasks."""
    shares = [on_virtual_time(train(Overtaking, WORKLOAD, staleness))["slow_share"] for staleness in (1, 2, 4)]
    assert max(shares) < 0.3


@pytest.mark.parametrize("times", [40.0, 1000.0])
def test_however_slow_a_task_is_it_is_trained_on(times: float) -> None:
    """Patience grows with each group that was lost, and a lost task is drawn again."""
    workload = replace(WORKLOAD, times_slower=times, rounds=60)
    figures = on_virtual_time(train(Scheduler, workload, 1))
    assert 0.45 <= figures["slow_share"] <= 0.55


def test_after_the_first_round_a_slow_group_holds_no_refill_up() -> None:
    """Rounds of two groups, in turns with the learner. Group 2 takes 10 s, 3 is dropped after 1 s, and 4, which takes
    its place at once, takes 8 s."""
    plan = Plan(group_size=2, groups=2)
    seconds = lambda group, index: {2: 10.0, 4: 8.0}.get(group, 1.0)  # noqa: E731
    run = Run(plan, seconds, lambda group, index: 1 if group == 3 else index, count=2, learner_s=0.0)
    assert run.numbers == [([0, 1], []), ([2, 4], [3])] and run.seconds == pytest.approx(11.0)


def test_tokens_are_counted_by_length_and_by_what_became_of_them() -> None:
    """Group 1 hangs in its second rollout; every third group passes in all of its rollouts."""
    run = Run(
        PLAN,
        lambda group, index: 1e6 if (group, index) == (1, 1) else 1.0,
        lambda group, index: 1 if group % 3 == 0 else index,
        tokens=lambda group: 5 if group % 2 else 300,
        count=4,
    )
    figures = run.scheduler.tokens_by_length()
    groups = [(g, r.reasons.get(g.number)) for r in run.rounds for g in r.kept + r.dropped]
    expected: dict[str, dict[str, int]] = {"trained": {}, "dropped": {}, "stale": {}, "thrown": {}}
    for group, reason in groups:
        fate = {None: "trained", "no signal": "dropped", "stale": "stale"}[reason]
        length = "8" if group.number % 2 else "512"
        tokens = sum(t.sampled_tokens for t in group.trajectories)
        expected[fate][length] = expected[fate].get(length, 0) + tokens
    assert figures == expected
    assert figures["stale"] == {"8": 5} and set(figures["trained"]) == set(figures["dropped"]) == {"8", "512"}
    state = run.scheduler.state()
    scheduler = run.scheduler
    resumed = Scheduler(scheduler._groups.play, scheduler.group_filter, PLAN, version=scheduler.version)
    resumed.restore(state)
    assert resumed.tokens_by_length() == expected


def test_rounds_are_made_of_the_oldest_whatever_finishes_first() -> None:
    """The same draws are in the same rounds for any durations, as when learner and rollouts take turns."""

    def run(seed: int, plan: Plan = PLAN) -> list[tuple[list[int], list[int]]]:
        durations = lambda group, index: random.Random(f"{seed}/{group}/{index}").uniform(1.0, 20.0)  # noqa: E731
        return Run(plan, durations, lambda group, index: 1 if group % 3 == 0 else index, count=3).numbers

    expected = [([1, 2, 4, 5], [0, 3]), ([7, 8, 10, 11], [6, 9]), ([13, 14, 16, 17], [12, 15])]
    assert run(0) == run(1) == run(2) == run(0, replace(PLAN, asynchronous=False)) == expected


def test_what_never_ends_is_overtaken_and_its_task_is_drawn_again() -> None:
    run = Run(PLAN, lambda group, index: 1e6 if group == 2 else 1.0)
    lost = [(r.number, g.number) for r in run.rounds for g in r.dropped]
    assert lost == [(2, 2)] and run.rounds[2].reasons == {2: "stale"}
    again = [g.number for r in run.rounds for g in r.kept if g.task.id.endswith("/2")]
    assert len(again) == 1 and again[0] > 2
    assert all(len(r.kept) == 4 for r in run.rounds) and max(run.ages) <= 1
    assert run.seconds < 100


def test_a_group_within_its_budgets_is_not_overtaken() -> None:
    """Beside groups of a second one takes a minute, which its episodes may: it is waited for, and trained on."""
    slow = lambda group, index: 60.0 if group == 2 else 1.0  # noqa: E731
    assert [g.number for r in Run(PLAN, slow).rounds for g in r.dropped] == [2]
    run = Run(replace(PLAN, patience_s=100.0), slow)
    assert [g.number for r in run.rounds for g in r.dropped] == []
    assert [g.number for g in run.rounds[0].kept] == [0, 1, 2, 3] and max(run.ages) <= 1


def test_the_plan_of_a_recipe_waits_for_all_that_an_episode_may_take() -> None:
    rollout = {"engine": {"type": "transformers"}, "episode_seconds": 100, "verify_seconds": 20}
    recipe = Recipe.model_validate(
        {"run": {"name": "x", "steps": 1}, "model": {"path": "x"}, "envs": [{"name": "x"}], "rollout": rollout}
    )
    assert plan_of(recipe).patience_s == 240.0


def test_waiting_for_a_slow_group_does_not_draw_without_end() -> None:
    """Everything but the oldest ends at once and carries no signal: draws stop where the filter's refills do."""
    run = Run(
        PLAN,
        lambda group, index: 1000.0 if group == 0 else 50.0,
        lambda group, index: index if group == 0 else 1,
        section=GroupFilterSection(max_extra=1.0),
        count=1,
    )
    (only,) = run.numbers
    assert only == ([0], list(range(1, 16)))
    assert run.scheduler.statistics()["groups"] == 2 * (4 + 4)


@pytest.mark.parametrize("seed", range(12))
def test_any_durations_and_filters_keep_the_bounds_without_deadlock(seed: int) -> None:
    """Random plans and heavy-tailed durations: bounded age, every draw handed out once, no group forgotten."""
    rng = random.Random(seed)
    plan = Plan(
        group_size=rng.choice([2, 4]),
        groups=rng.choice([1, 3, 5]),
        tokens=rng.choice([None, None, 60]),
        concurrency=rng.choice([1, 3, 64]),
        asynchronous=True,
        max_staleness=rng.choice([0, 1, 3]),
    )
    rate = rng.choice([0.1, 0.5])
    run = Run(
        plan,
        lambda group, index: random.Random(f"{seed}/{group}/{index}").paretovariate(0.7),
        lambda group, index: float(random.Random(f"{seed}/{group}/{index}").random() < rate),
        section=GroupFilterSection(dynamic_sampling=rng.random() < 0.7, max_extra=rng.choice([0.0, 0.5, 3.0])),
        learner_s=rng.choice([0.0, 1.0, 20.0]),
        tokens=lambda group: random.Random(f"{seed}/{group}").choice([1, 5, 30]),
        count=30,
    )
    numbers = handed(run.rounds)
    assert len(numbers) == len(set(numbers)) and max(run.ages, default=0) <= plan.max_staleness
    if plan.tokens is None:
        assert all(len(r.kept) <= plan.groups for r in run.rounds)
    under_way = set(range(max(numbers))) - set(numbers)
    allowed = plan.max_staleness + 1
    assert len(under_way) <= allowed * max(len(r.kept) + len(r.dropped) for r in run.rounds)
