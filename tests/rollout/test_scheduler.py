"""Rounds: in order when synchronous, never too old when asynchronous, nothing left behind when they end."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest

from agentrl.curriculum import sampler as sampling
from agentrl.curriculum.group_filter import GroupFilter
from agentrl.curriculum.tasks import Source
from agentrl.errors import AuthoringError, EngineError
from agentrl.recipe import GroupFilterSection, LearnabilityCurriculum, UniformCurriculum
from agentrl.rollout import sampling as turn_sampling
from agentrl.rollout.player import LocalPlayer, RequestGate
from agentrl.rollout.render import Renderer
from agentrl.rollout.request import Budget, EnvRuntime, RolloutId
from agentrl.rollout.scheduler import Plan, Scheduler
from agentrl.types import Group, Message, Round

BUDGET = Budget(context=4000, tokens=200, retries=0)


@dataclass
class Setting:
    """A scheduler with an engine whose answers and delays follow from the request alone."""

    renderer: Renderer
    world: EnvRuntime
    puppet: Any

    def engine(self, right: Callable[[int, int], bool], delay: Callable[[str], float] = lambda _: 0.0) -> Any:
        yes, no = (self.renderer.write(Message(role="assistant", content=text)) for text in ("right", "wrong"))

        def says(request_id: str, prompt: Sequence[int], options: Any) -> Sequence[int]:
            group, index, *_ = map(int, request_id.split("-"))
            return yes if right(group, index) else no

        engine = self.puppet(says, self.renderer.stop_token_ids)
        engine.delay = delay
        return engine

    def scheduler(
        self, engine: Any, plan: Plan, section: GroupFilterSection | None = None, **options: Any
    ) -> Scheduler:
        player = LocalPlayer(
            engine=options.get("gate", engine),
            renderer=self.renderer,
            runtimes={"echo": self.world},
            budget=options.get("budget", BUDGET),
        )

        def play(draw: Any, index: int) -> Any:
            seed, secret = options.get("seed", 0), options.get("key", b"")
            rollout_id = RolloutId(seed=seed, group=draw.group, index=index, secret=secret)
            return player.play(draw.env, draw.task, rollout_id)

        chosen = GroupFilter(section or GroupFilterSection(), 200)
        return Scheduler(play, chosen, plan, version=lambda: engine.version)

    def sampler(self, kind: Any = None) -> Any:
        source = Source(name="echo", environment=self.world.make())
        return sampling.Sampler(kind or UniformCurriculum(type="uniform"), [source], seed=3)


@pytest.fixture
def setting(renderers: dict[str, Renderer], echo: EnvRuntime, puppet: Any) -> Setting:
    return Setting(renderers["chatml"], echo, puppet)


def mixed(group: int, index: int) -> bool:
    """Every third group has no signal."""
    return index % 2 == 0 if group % 3 else True


def uneven(seed: int) -> Callable[[str], float]:
    """Delays from a heavy tail, settled by the request."""
    return lambda request: min(0.1, 0.002 * random.Random(f"{seed}/{request}").paretovariate(1.2))


async def take(
    scheduler: Scheduler, sampler: Any, count: int, learn: Callable[[Round], Any] | None = None
) -> list[Round]:
    found = []
    source = scheduler.rounds(sampler)
    async for round_ in source:
        found.append(round_)
        sampler.observe(round_.kept + round_.dropped)
        if learn is not None:
            await learn(round_)
        if len(found) == count:
            break
    await source.aclose()
    return found


def numbers(rounds: Sequence[Round]) -> list[tuple[list[int], list[int]]]:
    return [([g.number for g in r.kept], [g.number for g in r.dropped]) for r in rounds]


# Synchronous -----------------------------------------------------------------------------------------------------


def test_rounds_come_in_dispatch_order_whatever_finishes_first(setting: Setting) -> None:
    def run(seed: int, concurrency: int) -> tuple[Any, Any]:
        plan = Plan(group_size=4, groups=4, concurrency=concurrency)
        scheduler = setting.scheduler(setting.engine(mixed, uneven(seed)), plan, seed=5, key=b"k")
        rounds = asyncio.run(take(scheduler, setting.sampler(LearnabilityCurriculum()), 3))
        tokens = [
            [
                (t.group, t.index, t.seed, s.token_ids.tolist())
                for g in r.kept + r.dropped
                for t in g.trajectories
                for s in t.segments
            ]
            for r in rounds
        ]
        return numbers(rounds), tokens

    first = run(0, 64)
    assert first[0] == [([1, 2, 4, 5], [0, 3]), ([7, 8, 10, 11], [6, 9]), ([13, 14, 16, 17], [12, 15])]
    assert run(1, 64) == first and run(2, 3) == first


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_what_fills_up_the_first_round_knows_of_the_groups_before_it(setting: Setting, seed: int) -> None:
    """Groups 0, 3 and 6 have no signal: each makes room for one more, which knows of all groups up to it, and of no
    other, whatever finishes first. Later rounds are learnt from as a whole."""

    class Noting:
        def __init__(self) -> None:
            self.inner = setting.sampler()
            self.observe = self.inner.observe
            self.learnt: list[int] = []
            self.known: dict[int, list[int]] = {}

        def next(self) -> Any:
            draw = self.inner.next()
            self.known[draw.group] = list(self.learnt)
            return draw

        def learn(self, group: Group) -> None:
            self.learnt.append(group.number)
            self.inner.learn(group)

    sampler = Noting()
    scheduler = setting.scheduler(setting.engine(mixed, uneven(seed)), Plan(group_size=4, groups=5))
    asyncio.run(take(scheduler, sampler, 2))
    expected: dict[int, list[int]] = dict.fromkeys(range(5), []) | {5: [0], 6: [0, 1, 2, 3], 7: [0, 1, 2, 3, 4, 5, 6]}
    assert {number: known for number, known in sampler.known.items() if number < 8} == expected
    assert sampler.learnt == list(range(8)) and max(sampler.known) > 12  # the second round was filled up too


def test_dropped_groups_say_why_and_groups_are_whole(setting: Setting) -> None:
    scheduler = setting.scheduler(setting.engine(mixed), Plan(group_size=4, groups=4))
    (only,) = asyncio.run(take(scheduler, setting.sampler(), 1))
    assert only.reasons == {0: "no signal", 3: "no signal"}
    assert [[t.index for t in g.trajectories] for g in only.kept] == [[0, 1, 2, 3]] * 4
    assert [g.scores for g in only.kept] == [(1.0, 0.0, 1.0, 0.0)] * 4
    assert {g.env for g in only.kept} == {"echo"} and all(not g.task.secret for g in only.kept)
    assert set(only.timings) == {"rollout", "learner"}


def test_refill_ends_where_the_gate_says(setting: Setting) -> None:
    scheduler = setting.scheduler(
        setting.engine(lambda g, i: True), Plan(group_size=2, groups=4), GroupFilterSection(max_extra=1.5)
    )
    (only,) = asyncio.run(take(scheduler, setting.sampler(), 1))
    assert numbers([only]) == [([], list(range(10)))]


def test_a_round_sized_by_tokens(setting: Setting) -> None:
    size = len(setting.renderer.write(Message(role="assistant", content="right")))
    wanted = 9 * 2 * size
    scheduler = setting.scheduler(setting.engine(mixed, uneven(3)), Plan(group_size=2, groups=2, tokens=wanted))
    rounds = asyncio.run(take(scheduler, setting.sampler(), 2))
    for round_ in rounds:
        got = sum(t.sampled_tokens for g in round_.kept for t in g.trajectories)
        assert wanted <= got < wanted + 4 * 2 * size


def test_no_more_rollouts_at_once_than_allowed(setting: Setting) -> None:
    engine = setting.engine(mixed, lambda _: 0.002)
    asyncio.run(take(setting.scheduler(engine, Plan(group_size=8, groups=8, concurrency=5)), setting.sampler(), 1))
    assert engine.most == 5


def test_a_group_that_can_carry_no_signal_stops_early_in_order(setting: Setting) -> None:
    section = GroupFilterSection(early_stop=0.6)
    engine = setting.engine(lambda g, i: True, uneven(4))
    scheduler = setting.scheduler(engine, Plan(group_size=8, groups=2), section)
    rounds = asyncio.run(take(scheduler, setting.sampler(), 1))
    again = asyncio.run(
        take(
            setting.scheduler(setting.engine(lambda g, i: True, uneven(5)), Plan(group_size=8, groups=2), section),
            setting.sampler(),
            1,
        )
    )
    lengths = [[len(g.trajectories) for g in r.dropped] for r in rounds]
    assert lengths == [[len(g.trajectories) for g in r.dropped] for r in again]
    assert all(0 < n < 8 for row in lengths for n in row)
    assert all(
        g.censored and reason == "stopped"
        for r in rounds
        for g, reason in zip(r.dropped, r.reasons.values(), strict=True)
    )


@pytest.mark.parametrize("seed", [4, 5])
def test_what_half_a_group_settles_the_other_half_never_begins(setting: Setting, seed: int) -> None:
    """Groups 0 and 3 all pass, the others are mixed; half of them are begun with half of their rollouts."""

    class Doubtful:
        def __init__(self) -> None:
            self.inner = setting.sampler()
            self.observe, self.learn = self.inner.observe, self.inner.learn

        def next(self) -> Any:
            draw = self.inner.next()
            belief = (0.5, 0.5) if draw.group % 3 == 0 else (2.0, 0.5) if draw.group % 3 == 1 else (8.0, 8.0)
            return replace(draw, belief=belief)

    begun: set[tuple[int, int]] = set()

    def right(group: int, index: int) -> bool:
        begun.add((group, index))
        return index % 2 == 0 if group % 3 else True

    plan = Plan(group_size=8, groups=4, concurrency=64)
    scheduler = setting.scheduler(setting.engine(right, uneven(seed)), plan)
    (only,) = asyncio.run(take(scheduler, Doubtful(), 1))
    assert {g.number: len(g.trajectories) for g in only.kept} == {1: 8, 2: 8, 4: 8, 5: 8}
    assert {g.number: len(g.trajectories) for g in only.dropped} == {0: 4, 3: 4}
    assert set(only.reasons.values()) == {"no signal"} and not any(g.censored for g in only.dropped)
    assert scheduler.statistics()["spared_rollouts"] == 8 and len(begun) == 4 * 8 + 2 * 4


def test_infra_failures_leave_their_group_and_are_counted(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn_sampling, "BACKOFF_S", 0.0)
    engine = setting.engine(lambda g, i: i == 1)
    speak = engine.says

    def says(request_id: str, *rest: Any) -> Any:
        if request_id.split("-")[1] == "3":
            raise EngineError("gone")
        return speak(request_id, *rest)

    engine.says = says
    scheduler = setting.scheduler(engine, Plan(group_size=4, groups=2))
    (only,) = asyncio.run(take(scheduler, setting.sampler(), 1))
    assert [g.scores for g in only.kept] == [(0.0, 1.0, 0.0)] * 2
    assert [[t.outcome.grade for t in g.trajectories][3] for g in only.kept] == ["infra_error"] * 2
    assert scheduler.statistics()["ungraded"] == 2


def test_what_a_user_must_mend_ends_the_run_and_leaves_nothing(setting: Setting) -> None:
    def says(request_id: str, *rest: Any) -> Any:
        if request_id.startswith("2-"):
            raise AuthoringError("mend me")
        return setting.renderer.write(Message(role="assistant", content="right"))

    for plan in (Plan(group_size=2, groups=4), Plan(group_size=2, groups=4, asynchronous=True)):
        engine = setting.puppet(says, setting.renderer.stop_token_ids)
        engine.delay = lambda request: 5.0 if request.startswith("3-") else 0.01
        with pytest.raises(AuthoringError, match="mend me"):
            asyncio.run(take(setting.scheduler(engine, plan), setting.sampler(), 1))
        assert engine.running == 0


@pytest.mark.parametrize("asynchronous", [False, True])
def test_where_all_groups_fail_at_once_one_error_is_told(
    setting: Setting, asynchronous: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def says(*_: Any) -> Any:
        raise AuthoringError("wrong everywhere")

    engine = setting.puppet(says, setting.renderer.stop_token_ids)
    with pytest.raises(AuthoringError, match="wrong everywhere"):
        plan = Plan(group_size=2, groups=4, asynchronous=asynchronous)
        asyncio.run(take(setting.scheduler(engine, plan), setting.sampler(), 1))
    gc.collect()
    assert not [record for record in caplog.records if record.name == "asyncio"]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_ending_early_leaves_no_task_behind(setting: Setting, asynchronous: bool) -> None:
    """Closing the rounds, and cancelling what waits for one (Ctrl-C), both end everything under way."""
    held: set[int] = set()
    begun: list[int] = []

    class Counted(type(setting.world.make())):  # type: ignore[misc]
        def start(self) -> None:
            held.add(id(self))
            begun.append(1)

        def stop(self) -> None:
            held.discard(id(self))

    setting = replace(setting, world=replace(setting.world, make=Counted))
    plan = Plan(group_size=4, groups=4, concurrency=8, asynchronous=asynchronous)

    async def main() -> None:
        slow = setting.engine(mixed, lambda request: 0.0 if int(request.split("-")[0]) < 6 else 30.0)
        await take(setting.scheduler(slow, plan), setting.sampler(), 1)
        assert slow.running == 0
        stuck = setting.engine(mixed, lambda _: 30.0)
        waiting = asyncio.create_task(take(setting.scheduler(stuck, plan), setting.sampler(), 1))
        while stuck.running < 8:
            await asyncio.sleep(0.005)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert stuck.running == 0
        others = asyncio.all_tasks() - {asyncio.current_task()}
        assert others == set()

    asyncio.run(main())
    assert begun and not held


def test_many_episodes_on_one_loop(setting: Setting) -> None:
    engine = setting.engine(lambda g, i: i % 2 == 0, lambda _: 1.0)
    plan = Plan(group_size=8, groups=64, concurrency=512)
    (only,) = asyncio.run(take(setting.scheduler(engine, plan), setting.sampler(), 1))
    assert len(only.kept) == 64 and engine.most == 512


# Asynchronous ----------------------------------------------------------------------------------------------------


def staleness(round_: Round, version: int) -> list[int]:
    return [version - t.oldest_version for g in round_.kept for t in g.trajectories]


@pytest.mark.parametrize("allowed", [0, 1, 3])
@pytest.mark.parametrize(("engine_s", "learner_s"), [(0.001, 0.05), (0.03, 0.001), (0.01, 0.01)])
def test_no_sample_is_older_than_allowed(setting: Setting, allowed: int, engine_s: float, learner_s: float) -> None:
    """Slow learner, slow engine, or both alike: bounded age and queue, every group handed out once, no deadlock."""
    engine = setting.engine(mixed, lambda request: engine_s * random.Random(request).paretovariate(1.5))
    plan = Plan(group_size=2, groups=4, concurrency=64, asynchronous=True, max_staleness=allowed)
    scheduler = setting.scheduler(engine, plan)
    ages: list[int] = []
    most = 0

    async def learn(round_: Round) -> None:
        nonlocal most
        ages.extend(staleness(round_, engine.version))
        for _ in range(5):
            figures = scheduler.statistics()
            most = max(most, int(figures["running_groups"] + figures["ready_groups"]))
            await asyncio.sleep(learner_s / 5)
        engine.version += 1

    rounds = asyncio.run(asyncio.wait_for(take(scheduler, setting.sampler(), 12, learn), 60))
    assert max(ages) <= allowed
    assert all(len(r.kept) == 4 for r in rounds)
    assert most <= 4 * (allowed + 1)
    handed = [g.number for r in rounds for g in r.kept + r.dropped]
    assert len(handed) == len(set(handed))
    if allowed and engine_s < learner_s:
        assert max(ages) > 0  # it did run ahead


def test_rollouts_run_on_while_the_learner_works(setting: Setting) -> None:
    engine = setting.engine(lambda g, i: i == 0, lambda _: 0.02)
    scheduler = setting.scheduler(engine, Plan(group_size=2, groups=2, asynchronous=True, max_staleness=2))
    ready: list[float] = []

    async def learn(round_: Round) -> None:
        for _ in range(500):
            if scheduler.statistics()["ready_groups"] >= 2:
                break
            await asyncio.sleep(0.01)
        ready.append(scheduler.statistics()["ready_groups"])
        engine.version += 1

    asyncio.run(take(scheduler, setting.sampler(), 4, learn))
    assert len(ready) == 4 and min(ready) >= 2  # the whole next round, before the learner was done


def test_stragglers_that_grew_too_old_are_cancelled_and_told(setting: Setting) -> None:
    """One group takes for ever: it is dropped as stale in flight, and the others are not held up."""
    engine = setting.engine(lambda g, i: i == 0, lambda request: 60.0 if request.startswith("1-1") else 0.002)
    scheduler = setting.scheduler(engine, Plan(group_size=2, groups=2, asynchronous=True, max_staleness=1))

    async def learn(round_: Round) -> None:
        engine.version += 1

    rounds = asyncio.run(asyncio.wait_for(take(scheduler, setting.sampler(), 5, learn), 30))
    stale = [
        (r.number, g.number, len(g.trajectories)) for r in rounds for g in r.dropped if r.reasons[g.number] == "stale"
    ]
    assert stale == [(2, 1, 1)]
    assert scheduler.statistics()["stale_groups"] == 1 and engine.running == 0


def test_a_learner_that_never_learns_from_anything_is_not_left_waiting(setting: Setting) -> None:
    engine = setting.engine(lambda g, i: True, lambda _: 0.001)
    plan = Plan(group_size=2, groups=2, asynchronous=True)
    rounds = asyncio.run(asyncio.wait_for(take(setting.scheduler(engine, plan), setting.sampler(), 2), 30))
    assert all(not r.kept and len(r.dropped) >= 8 for r in rounds)


def test_an_asynchronous_round_sized_by_tokens(setting: Setting) -> None:
    size = len(setting.renderer.write(Message(role="assistant", content="right")))
    plan = Plan(group_size=2, groups=1, tokens=5 * 2 * size, asynchronous=True, max_staleness=1)
    engine = setting.engine(lambda g, i: i == 0, lambda _: 0.001)

    async def learn(round_: Round) -> None:
        engine.version += 1

    rounds = asyncio.run(asyncio.wait_for(take(setting.scheduler(engine, plan), setting.sampler(), 4, learn), 30))
    for round_ in rounds:
        sizes = [sum(t.sampled_tokens for t in g.trajectories) for g in round_.kept]
        assert sum(sizes[:-1]) < 5 * 2 * size <= sum(sizes)


def test_weights_wait_for_running_requests_when_asked_to(setting: Setting) -> None:
    engine = setting.engine(lambda g, i: i == 0, lambda _: 0.05)
    seen: list[int] = []

    async def publish() -> None:
        seen.append(engine.running)
        await asyncio.sleep(0.05)
        seen.append(engine.running)
        engine.version += 1

    for in_flight in (False, True):
        seen.clear()
        plan = Plan(group_size=2, groups=2, concurrency=4, asynchronous=True, max_staleness=4)
        gate = RequestGate(engine)
        scheduler = setting.scheduler(engine, plan, gate=gate)

        async def learn(round_: Round, in_flight: bool = in_flight, gate: RequestGate = gate) -> None:
            await asyncio.sleep(0.02)
            async with nullcontext() if in_flight else gate.closed():
                await publish()

        asyncio.run(asyncio.wait_for(take(scheduler, setting.sampler(), 4, learn), 30))
        assert (max(seen) == 0) is not in_flight


# Checkpoints -----------------------------------------------------------------------------------------------------


def test_a_synchronous_run_goes_on_as_if_it_had_not_stopped(setting: Setting) -> None:
    plan = Plan(group_size=2, groups=3)
    whole = asyncio.run(
        take(setting.scheduler(setting.engine(mixed), plan), setting.sampler(LearnabilityCurriculum()), 4)
    )
    sampler = setting.sampler(LearnabilityCurriculum())
    first = setting.scheduler(setting.engine(mixed), plan)
    begun = asyncio.run(take(first, sampler, 2))
    states = first.state(), sampler.state()
    later = setting.sampler(LearnabilityCurriculum())
    later.restore(states[1])
    second = setting.scheduler(setting.engine(mixed), plan)
    second.restore(states[0])
    rest = asyncio.run(take(second, later, 2))
    assert numbers([*begun, *rest]) == numbers(whole)
    assert [r.number for r in rest] == [2, 3]
    assert second.statistics()["rollouts"] == sum(len(g.trajectories) for r in whole for g in r.kept + r.dropped)


def test_an_interrupted_asynchronous_run_loses_no_draw(setting: Setting) -> None:
    """Slow groups that were under way are begun again under their numbers: resuming does not favour the quick."""
    plan = Plan(group_size=2, groups=2, asynchronous=True, max_staleness=3)
    sampler = setting.sampler()
    engine = setting.engine(lambda g, i: i == 0, lambda request: 9.0 if request.startswith("1-") else 0.002)
    begun = asyncio.run(take(setting.scheduler(engine, plan), sampler, 2))
    later = setting.sampler()
    later.restore(sampler.state())
    rest = asyncio.run(take(setting.scheduler(setting.engine(lambda g, i: i == 0), plan), later, 4))
    handed = sorted(g.number for r in [*begun, *rest] for g in r.kept + r.dropped)
    assert handed == list(range(len(handed))) and 1 in {g.number for g in rest[0].kept}
