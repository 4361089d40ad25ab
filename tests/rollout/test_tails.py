"""Tail batching and constant concurrency: nothing is lost, doubled, too old, or left out because it is long."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from agentrl.curriculum import sampler as sampling
from agentrl.curriculum.group_filter import GroupFilter
from agentrl.curriculum.tasks import Source as TaskSource
from agentrl.errors import RecipeError
from agentrl.recipe import GroupFilterSection, UniformCurriculum
from agentrl.recipe.load import build
from agentrl.rollout.inflight import Draw
from agentrl.rollout.request import EnvRuntime
from agentrl.rollout.scheduler import Plan, Scheduler
from agentrl.rollout.tails import FirstFinished, due, make_scheduler
from agentrl.types import Outcome, Round, Segment, Source, Trajectory
from benchmarks.asynchronous import on_virtual_time
from benchmarks.tails import Simulation, Tail, Tasks

Seconds = Callable[[int, int], float]
PLAN = Plan(group_size=2, groups=2, concurrency=64, asynchronous=True, max_staleness=3, mode="tail")


class Run:
    """A scheduler whose rollouts only sleep, on a clock that jumps. Tokens have the version of an episode's start."""

    def __init__(
        self,
        plan: Plan,
        seconds: Seconds,
        right: Seconds = lambda group, index: index % 2,
        *,
        count: int = 8,
        learner_s: float = 1.0,
        sampler: Any = None,
        version: int = 0,
        section: GroupFilterSection | None = None,
    ) -> None:
        self.version, self.rounds, self.ages = version, list[Round](), list[int]()
        self.begun: Counter[tuple[int, int]] = Counter()
        self.tasks: dict[int, str] = {}
        self.running, self.most, self.fewest = 0, 0, 10**9
        self.sampler = sampler or Tasks()

        async def play(draw: Draw, index: int) -> Trajectory:
            began = self.version
            self.begun[draw.group, index] += 1
            self.tasks[draw.group] = draw.task.id
            self.running += 1
            self.most = max(self.most, self.running)
            try:
                await asyncio.sleep(seconds(draw.group, index))
            finally:
                self.running -= 1
            return trajectory(draw, index, began, float(right(draw.group, index)))

        chosen = GroupFilter(section or GroupFilterSection(dynamic_sampling=False), 200)
        self.scheduler: Scheduler = make_scheduler(play, chosen, plan, version=lambda: self.version)
        on_virtual_time(self._train(count, learner_s))

    async def _train(self, count: int, learner_s: float) -> None:
        source = self.scheduler.rounds(self.sampler)
        async for round_ in source:
            self.rounds.append(round_)
            self.ages += [self.version - t.oldest_version for g in round_.kept for t in g.trajectories]
            if hasattr(self.sampler, "observe"):
                self.sampler.observe((*round_.kept, *round_.dropped))
            if len(self.rounds) == count:
                break
            self.fewest = min(self.fewest, self.running)
            await asyncio.sleep(learner_s)
            self.version += 1
        await source.aclose()

    @property
    def kept(self) -> list[list[int]]:
        return [[group.number for group in round_.kept] for round_ in self.rounds]


def trajectory(draw: Draw, index: int, version: int, score: float) -> Trajectory:
    segment = Segment(
        token_ids=np.zeros(4, np.int32),
        logprobs=np.full(4, -1.0, np.float32),
        versions=np.full(4, version, np.int32),
        sources=np.full(4, Source.SAMPLED, np.uint8),
    )
    outcome = Outcome(ending="done", grade="graded", score=score)
    task = draw.task.public()
    return Trajectory(
        task=task, group=draw.group, index=index, seed=0, segments=(segment,), messages=(), outcome=outcome
    )


def pareto(seed: int, shape: float = 1.1) -> Seconds:
    return lambda group, index: random.Random(f"{seed}/{group}/{index}").paretovariate(shape)


def handed(run: Run) -> list[int]:
    return sorted(g.number for r in run.rounds for g in r.kept + r.dropped)


def test_how_many_groups_under_way_a_round_has_to_wait_for() -> None:
    """At version 5 with k = 2 and 4 groups per round: those of 3 must go now, those of 4 by 6, those of 5 by 7."""
    assert due([], 5, 2, 4) == 0
    assert due([3], 5, 2, 4) == 1
    assert due([4] * 4, 5, 2, 4) == 0
    assert due([4] * 7, 5, 2, 4) == 3
    assert due([3, 4, 4, 4, 4, 4, 4], 5, 2, 4) == 3
    assert due([5] * 12, 5, 2, 4) == 4
    assert due([5, 5], 5, 0, 4) == 2
    assert due([4] * 6 + [5] * 5, 5, 2, 4) == 3


def test_a_long_group_runs_on_until_it_is_due() -> None:
    """Group 2 takes 25 s: rounds go on without it for three versions, and the fourth waits for it."""
    run = Run(PLAN, lambda group, index: 25.0 if group == 2 else 1.0 + group / 100, count=6)
    assert run.kept[:4] == [[0, 1], [3, 4], [5, 6], [2, 7]]
    assert run.scheduler.statistics()["long_rounds"] == 1 and run.scheduler.statistics()["stale_groups"] == 0
    assert max(run.ages) == 3 and max(run.begun.values()) == 1


def test_one_long_round_waits_for_all_that_are_aside() -> None:
    """Groups 1 and 3 are long, 3 began a version later: the round at which 1 is due waits for both."""
    run = Run(PLAN, lambda group, index: {1: 20.0, 3: 25.0}.get(group, 1.0 + group / 100), count=8)
    assert [1, 3] in run.kept and run.scheduler.statistics()["long_rounds"] == 1


@pytest.mark.parametrize("mode", ["tail", "steady"])
@pytest.mark.parametrize(("staleness", "concurrency"), [(1, 64), (2, 8), (6, 24)])
@pytest.mark.parametrize("dropped", [False, True])
def test_every_group_is_handed_over_once_and_in_time(
    mode: Any, staleness: int, concurrency: int, dropped: bool
) -> None:
    """Heavy tails, every third group dropped or none: ages are bounded, rounds whole, no number lost or doubled."""
    plan = replace(PLAN, groups=4, max_staleness=staleness, mode=mode, concurrency=concurrency)
    section = GroupFilterSection() if dropped else None

    def passed(group: int, index: int) -> float:
        return 1 if dropped and group % 3 == 0 else index % 2

    run = Run(plan, pareto(staleness), passed, count=16, section=section)
    assert max(run.ages) <= staleness and all(len(numbers) == 4 for numbers in run.kept)
    numbers = handed(run)
    assert len(numbers) == len(set(numbers)) and run.scheduler.statistics()["stale_groups"] == 0
    # What is left out is young: it began within the last rounds, and would have come.
    missing = set(range(max(numbers))) - set(numbers)
    assert len(missing) <= 4 * (staleness + 1) and set(run.begun.values()) == {1}
    assert all(len(g.trajectories) == 2 for r in run.rounds for g in r.kept)
    if mode == "steady":
        assert run.most <= concurrency


def test_the_number_of_episodes_under_way_is_held() -> None:
    """Wherever a step ends, just as many episodes run as `concurrency` says."""
    plan = replace(PLAN, mode="steady", group_size=4, groups=4, concurrency=40, max_staleness=8)
    run = Run(plan, lambda group, index: random.Random(f"{group}/{index}").uniform(4.0, 12.0), count=20, learner_s=0.1)
    assert (run.fewest, run.most) == (40, 40)


@pytest.mark.parametrize("mode", ["tail", "steady"])
def test_being_long_where_it_is_wrong_gains_a_policy_nothing(mode: Any) -> None:
    """Half of the episodes are wrong and take 20 times as long: they are half of all baselines, in whole groups."""
    plan = replace(PLAN, group_size=4, groups=4, mode=mode, concurrency=40, max_staleness=4)
    run = Run(plan, lambda group, index: 1.0 if index % 2 else 20.0 + group % 7, count=8)
    assert {g.scores for r in run.rounds for g in r.kept} == {(0.0, 1.0, 0.0, 1.0)}
    # Groups differ too: in half of them every wrong episode is long, in the others none is.
    slow = Run(plan, lambda group, index: 25.0 if group % 2 and not index % 2 else 1.0, count=30)
    numbers = [number for round_ in slow.kept[:25] for number in round_]
    assert 0.42 <= sum(number % 2 for number in numbers) / len(numbers) <= 0.5
    assert slow.scheduler.statistics()["stale_groups"] == 0


@pytest.mark.parametrize("mode", ["tail", "steady"])
def test_a_group_that_never_ends_is_counted_and_its_task_drawn_again(mode: Any) -> None:
    plan = replace(PLAN, mode=mode, max_staleness=2)
    run = Run(plan, lambda group, index: 1e9 if (group, index) == (1, 1) else 1.0, count=12)
    lost = [(g.number, r.reasons[g.number]) for r in run.rounds for g in r.dropped]
    assert lost == [(1, "stale")] and run.scheduler.statistics()["stale_groups"] == 1
    again = [number for number, task in run.tasks.items() if task == run.tasks[1]]
    assert len(again) == 2 and again[1] in [number for round_ in run.kept for number in round_]


@pytest.mark.parametrize("mode", ["tail", "steady"])
def test_a_killed_run_loses_and_doubles_nothing(mode: Any, echo: EnvRuntime) -> None:
    """Stopped three times at a checkpoint, with long groups under way: each draw is handed over exactly once."""

    def fresh() -> sampling.Sampler:
        return sampling.Sampler(
            UniformCurriculum(type="uniform"), [TaskSource(name="echo", environment=echo.make())], seed=3
        )

    plan = replace(PLAN, mode=mode, groups=4, concurrency=24, max_staleness=5)
    sampler, state, numbers, version, done = fresh(), None, list[int](), 0, 0
    for _ in range(4):
        run = Run(plan, pareto(7), count=6, sampler=sampler, version=version)
        numbers += handed(run)
        version, state, done = run.version + 1, sampler.state(), done + 6
        sampler = fresh()
        sampler.restore(state)
    assert state is not None
    pending = [draw[0] for draw in state["pending"]]
    assert sorted(numbers + pending) == list(range(len(numbers) + len(pending)))


def test_a_mode_that_cannot_run_on_is_refused() -> None:
    base = {
        "run": {"name": "x"},
        "model": {"type": "scratch"},
        "envs": [{"name": "countdown"}],
    }
    sections: list[dict[str, Any]] = [{}, {"enabled": True, "in_flight": False}, {"enabled": True, "max_staleness": 0}]
    for section in sections:
        with pytest.raises(RecipeError, match="lets long groups run on under later versions"):
            build({**base, "async": {"mode": "tail", **section}})
    build({**base, "async": {"mode": "steady", "enabled": True, "max_staleness": 8}})


def test_the_modes_train_on_younger_tokens_and_favour_no_length() -> None:
    """The benchmark's claims, in small, on a log-normal tail."""
    plan = Plan(group_size=4, groups=4, concurrency=32, asynchronous=True, max_staleness=4)
    rows = {
        mode: on_virtual_time(Simulation(tail=Tail(), plan=replace(plan, mode=mode), rounds=20).run())
        for mode in ("oldest", "tail", "steady")
    }
    assert max(rows[mode]["staleness_mean"] for mode in ("tail", "steady")) < 0.8 * rows["oldest"]["staleness_mean"]
    for row in rows.values():
        assert row["groups_trained"] == row["groups_started"] and row["tokens_wasted"] == pytest.approx(0.0)
        assert row["mean_length_trained"] == pytest.approx(row["mean_length_started"])


def test_other_plans_get_the_scheduler_that_waits_for_the_oldest() -> None:
    plans = (replace(PLAN, mode="oldest"), replace(PLAN, asynchronous=False), PLAN)
    kinds = [type(make_scheduler(None, None, plan, version=lambda: 0)) for plan in plans]  # type: ignore[arg-type]
    assert kinds == [Scheduler, Scheduler, FirstFinished]
