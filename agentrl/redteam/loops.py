"""Plays hostile turns through the whole way: rollouts, scheduler and evaluation, ours or somebody else's.

    attack(stand, loops) ── scripts, one per rollout ──> loops.train / rounds / evaluate ──> what came of each
                                │                              │
                                └─ Policy: says each turn as tokens, through the real renderer and real sandboxes

`Loops` is what is attacked: `Ours` here, the ordinary ones in naive_loops/. A stand is one task with its environment.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from agentrl import codec, evaluation, seeds
from agentrl.curriculum.group_filter import GroupFilter
from agentrl.curriculum.sampler import Draw
from agentrl.engines.base import Sampling
from agentrl.envs.play import Action, message_of
from agentrl.evaluation import EVAL_GROUP, Evaluation, Problem
from agentrl.recipe import GroupFilterSection
from agentrl.redteam.byte_tokenizer import renderer
from agentrl.redteam.target import Target
from agentrl.rollout.player import LocalPlayer
from agentrl.rollout.render import Renderer
from agentrl.rollout.request import Budget, EnvRuntime, RolloutId
from agentrl.rollout.scheduler import Plan, Scheduler
from agentrl.types import Completion, Group, Task

HOSTILE = Budget(context=400_000, tokens=300_000, turns=8, tool_seconds=1.0, wall_seconds=2.5, verify_seconds=0.5)
"""What a hostile episode may use: small, so that attacks that wait for a limit are quick."""
HONEST = Budget(context=4_000_000, tokens=2_000_000, verify_seconds=120.0, tool_seconds=600.0, wall_seconds=600.0)
"""What its neighbours may use: so much that only an attack can cost them their score."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Says:
    """A turn as it is sampled: this text, or these tokens."""

    text: str = ""
    tokens: tuple[int, ...] = ()
    """Instead of a text."""
    ends: bool = True
    """Whether the end of turn is sampled too; otherwise the turn runs until its tokens are used up."""
    after_s: float = 0.0
    """How long sampling it takes."""


Turn = Action | Says
Script = Callable[[int], Iterable[Turn]]
"""Attempt at an episode, counted from 0 → its turns. Where they end, empty messages follow."""


def script(*turns: Turn) -> Script:
    """Play these turns in every attempt."""
    return lambda attempt: turns


class Policy:
    """An engine that says what the script of each rollout says. Scripts are found by (group, index)."""

    def __init__(self, renderer: Renderer, scripts: Callable[[int, int], Script]) -> None:
        self.version = 0
        self.attempts: Counter[tuple[int, int]] = Counter()
        self._renderer, self._scripts = renderer, scripts
        self._turns: dict[tuple[int, int], Iterator[Turn]] = {}

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str = "") -> Completion:
        """Say the next turn of the rollout that the request is named after: group-index-turn-part."""
        group, index, turn = (int(part) for part in request_id.split("-")[:3])
        rollout = (group % EVAL_GROUP, index)
        if turn == 0:
            self._turns[rollout] = iter(self._scripts(*rollout)(self.attempts[rollout]))
            self.attempts[rollout] += 1
        says = _sampled(next(self._turns[rollout], ""), self._renderer)
        await asyncio.sleep(says.after_s)
        end = (self._renderer.end_of_turn,) if says.ends else ()
        kept = (*says.tokens, *end)[: sampling.max_tokens]
        whole = says.ends and len(kept) == len(says.tokens) + 1
        return Completion(
            token_ids=kept,
            logprobs=(0.0,) * len(kept),
            versions=(self.version,) * len(kept),
            finish="stop" if whole else "length",
        )


def _sampled(turn: Turn, renderer: Renderer) -> Says:
    if not isinstance(turn, Says):
        return Says(tokens=renderer.write(message_of(turn))[:-1])
    return turn if turn.tokens else replace(turn, tokens=tuple(renderer.encoder.encode(turn.text)))


@dataclass(frozen=True, kw_only=True)
class Stand:
    """Where an attack on the loops is played: one task of an environment."""

    target: Target
    runtime: EnvRuntime
    renderer: Renderer
    slack_s: float = 3.0
    """How much later than without an attacker anything may be."""
    again: int = 2
    """How often an attack that made something late is tried again: it must do so every time."""
    usual: dict[str, float] = field(default_factory=dict)
    """How long an honest rollout takes alone, by the name of the loops; measured once."""

    @classmethod
    def of(cls, target: Target, **options: Any) -> Stand:
        """Set up a stand for a target of the red team."""
        arena = target.arena
        runtime = EnvRuntime(name="attacked", make=arena.make, boxes=arena.stage.boxes, judge=arena.stage.judge)
        return cls(target=target, runtime=runtime, renderer=renderer(), **options)

    @property
    def task(self) -> Task:
        return self.target.arena.task

    @property
    def honest(self) -> Script:
        """What the expert does."""
        return script(*self.target.expert)

    @property
    def wrong(self) -> Script:
        """Wrong work without cheating."""
        return script(self.end)

    @property
    def end(self) -> Action:
        """The end of an episode in which nothing was done."""
        return self.target.final(self.target.idle_answer)

    def speaking(self, template: str) -> Stand:
        """Return the same stand with another chat template."""
        return replace(self, renderer=renderer(template))

    def playing(self, make: Callable[[], Any]) -> Stand:
        """Return the same stand with another environment."""
        return replace(self, runtime=replace(self.runtime, make=make))

    def problems(self, count: int) -> list[Problem]:
        """Return up to `count` held-out tasks of the task's level, each once; the task itself comes first."""
        environment = self.runtime.make()
        tasks = {self.task.id: self.task}
        split = "heldout" if "heldout" in environment.splits else self.task.split
        size = environment.size_of(split, self.task.level)
        for index in range(2 * count if size is None else min(2 * count, size)):
            with suppress(LookupError):
                task = environment.task(split, self.task.level, index)
                tasks.setdefault(task.id, task)
        return [Problem(self.runtime.name, task) for task in list(tasks.values())[:count]]

    def expert(self, task: Task) -> Script:
        """Return what the expert does in any task."""
        return script(*self.runtime.make().expert(task))


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What came of one group."""

    scores: tuple[float | None, ...]
    """Of each rollout, as its baseline and the loss count it; None: it vanished."""
    seconds: tuple[float, ...]
    """How long each took; until the end of the group for one that vanished."""
    total_s: float
    """How long the learner waited."""
    stall_s: float
    """The longest time for which the event loop stood still."""
    starved_s: float = 0.0
    """How long its thread waited for a processor of a busy machine."""


class Loops(Protocol):
    """What trains and measures policies."""

    name: str

    async def train(self, stand: Stand, hostile: Sequence[Script], neighbours: int = 1) -> Trained:
        """Play one group of the stand's task, and hand it to the learner: hostile rollouts, then honest neighbours."""
        ...

    async def rounds(self, stand: Stand, scripts: Callable[[int], Sequence[Script]], count: int) -> list[int]:
        """Train asynchronously for `count` rounds; return the numbers of the groups that were trained on."""
        ...

    async def evaluate(self, stands: Mapping[str, Stand], tries: Sequence[Tries], *, seed: int = 0) -> Figures:
        """Evaluate a policy: each problem with the scripts of its tries."""
        ...

    def trained_on(self, heldout: Sequence[Task], demonstrations: Path, rollouts: Sequence[Task]) -> int:
        """Count the held-out tasks that the demonstrations of a file or the rollouts of a run had."""
        ...


@dataclass(frozen=True, slots=True)
class Tries:
    """One problem of an evaluation, and what the policy does in each of its tries."""

    problem: Problem
    scripts: tuple[Script, ...]


class Figures(Protocol):
    """What an evaluation reports."""

    def rate(self, env: str, *, level: int | None = None, k: int = 1) -> float:
        """Return pass@k of an environment, or the share of passes of one of its levels."""
        ...


# Ours ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OurFigures:
    """An evaluation as metrics and tables show it."""

    result: Evaluation

    def rate(self, env: str, *, level: int | None = None, k: int = 1) -> float:
        summary = self.result.by_environment()[env].summary([k])
        return float(summary[f"pass@{k}"]["value"] if level is None else summary["levels"][str(level)])


class Ours:
    """agentrl's own Player, Scheduler and evaluation."""

    name = "agentrl"

    async def train(self, stand: Stand, hostile: Sequence[Script], neighbours: int = 1) -> Trained:
        scripts = [*hostile, *[stand.honest] * neighbours]
        policy = Policy(stand.renderer, lambda group, index: scripts[index])
        clock = asyncio.get_running_loop().time
        began, ended = clock(), [0.0] * len(scripts)

        async def play(draw: Draw, index: int) -> Any:
            player = _player(stand, policy, HOSTILE if index < len(hostile) else HONEST)
            secret = seeds.secret(key, draw.task.id, 0)
            trajectory = await player.play(draw.env, draw.task, RolloutId(seed=0, group=0, index=index, secret=secret))
            ended[index] = clock() - began
            return trajectory

        key = evaluation.new_key()
        plan = Plan(group_size=len(scripts), groups=1, concurrency=len(scripts))
        async with stalls() as stall:
            source = _scheduler(play, plan, policy).rounds(_Draws(stand))
            round_ = await anext(source)
            total = clock() - began
            await source.aclose()
        # A group with fewer than two scores has no baseline: what it holds is not trained on.
        group = next(iter(round_.kept), None)
        scores = {t.index: t.outcome.score for t in group.trajectories} if group is not None else {}
        return Trained(
            scores=tuple(scores.get(index) for index in range(len(scripts))),
            seconds=tuple(seconds or total for seconds in ended),
            total_s=total,
            stall_s=stall.longest_s,
            starved_s=stall.starved_s,
        )

    async def rounds(self, stand: Stand, scripts: Callable[[int], Sequence[Script]], count: int) -> list[int]:
        policy = Policy(stand.renderer, lambda group, index: scripts(group)[index])
        player, size = _player(stand, policy, HONEST), len(scripts(0))

        async def play(draw: Draw, index: int) -> Any:
            secret = seeds.secret(key, draw.task.id, draw.group)
            rollout_id = RolloutId(seed=0, group=draw.group, index=index, secret=secret)
            return await player.play(draw.env, draw.task, rollout_id)

        key = evaluation.new_key()
        plan = Plan(group_size=size, groups=2, concurrency=8, asynchronous=True, max_staleness=1)
        trained: list[Group] = []
        source = _scheduler(play, plan, policy).rounds(_Draws(stand))
        for _ in range(count):
            trained += (await anext(source)).kept
            await asyncio.sleep(0.05)  # the learner's step
            policy.version += 1
        await source.aclose()
        return [group.number for group in trained]

    async def evaluate(self, stands: Mapping[str, Stand], tries: Sequence[Tries], *, seed: int = 0) -> OurFigures:
        stand = next(iter(stands.values()))
        policy = Policy(stand.renderer, lambda group, index: tries[group].scripts[index])
        player = replace(_player(stand, policy, HONEST), runtimes={name: s.runtime for name, s in stands.items()})
        result = await evaluation.evaluate(
            player,
            [t.problem for t in tries],
            samples=len(tries[0].scripts),
            seed=seed,
            key=evaluation.new_key(),
            concurrency=8,
        )
        return OurFigures(result)

    def trained_on(self, heldout: Sequence[Task], demonstrations: Path, rollouts: Sequence[Task]) -> int:
        lines = demonstrations.read_text(encoding="utf-8").splitlines()
        shown = [codec.from_row(json.loads(line)).trajectory.task for line in lines]
        return sum(evaluation.overlap(heldout, evaluation.seen_hashes([*shown, *rollouts])))


OURS = Ours()


def _player(stand: Stand, policy: Policy, budget: Budget) -> LocalPlayer:
    runtimes = {stand.runtime.name: stand.runtime}
    return LocalPlayer(engine=policy, renderer=stand.renderer, runtimes=runtimes, budget=budget)


def _scheduler(play: Any, plan: Plan, policy: Policy) -> Scheduler:
    group_filter = GroupFilter(GroupFilterSection(dynamic_sampling=False), HONEST.tokens)
    return Scheduler(play, group_filter, plan, version=lambda: policy.version)


@dataclass(slots=True)
class _Draws:
    """Draws the stand's task again and again."""

    stand: Stand
    number: int = -1

    def next(self) -> Draw:
        self.number += 1
        return Draw(env=self.stand.runtime.name, task=self.stand.task, group=self.number, task_index=0)

    def learn(self, group: Group) -> None:
        """Do nothing: what is drawn depends on no result."""

    def redraw(self, number: int) -> None:
        """Do nothing: every draw is of the same task."""


# Being late ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Stall:
    """How long the event loop stood still at most."""

    longest_s: float = 0.0
    starved_s: float = 0.0
    """How long its thread had no processor in all."""


@asynccontextmanager
async def stalls() -> Any:
    """Measure how long the event loop stands still, less the time for which its thread waited for a processor."""
    stall, waited_before = Stall(), _waited_s()

    async def watch() -> None:
        while True:
            began, waited = time.monotonic(), _waited_s()
            await asyncio.sleep(0.02)
            still = time.monotonic() - began - 0.02 - (_waited_s() - waited)
            stall.longest_s = max(stall.longest_s, still)

    watcher = asyncio.create_task(watch())
    try:
        yield stall
    finally:
        stall.starved_s = _waited_s() - waited_before
        await asyncio.sleep(0.05)  # what blocked the loop until now is seen too
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)


def _waited_s() -> float:
    """Return for how long this thread was ready to run and had no processor."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0
