"""Continuations of an episode: they begin in exactly the state of their turn, in real sandboxes, or they are void."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from agentrl import codec, sandboxes
from agentrl.engines.base import Sampling
from agentrl.envs import Environment, tool
from agentrl.errors import AuthoringError
from agentrl.rollout.branch import UNFORKABLE, Branching
from agentrl.rollout.render import Renderer
from agentrl.rollout.request import Budget, EnvRuntime, RolloutId
from agentrl.rollout.rollout import rollout
from agentrl.sandboxes.base import Sandbox, SandboxSpec
from agentrl.sandboxes.pool import Pool
from agentrl.types import BRANCH, Completion, Message, Source, Split, Task, ToolCall, Trajectory, Verdict
from agentrl.verifiers.base import Context, Submission, Verifier


class Reads(Verifier):
    """1 when the answer is the word `right`; notes how the episode stood."""

    async def verify(self, submission: Submission, context: Context) -> Verdict:
        notes = (str(dict(submission.state)), str(submission.ledger["execs"]), str(submission.ledger["calls"]))
        return Verdict(score=float(submission.answer.strip() == "right"), evidence=notes)


class Desk(Environment):
    """A folder in a sandbox, a counter and a die on the host's side."""

    levels = range(1, 2)
    verifier = Reads()
    max_turns = 4

    def task(self, split: Split, level: int, index: int) -> Task:
        return Task(id=f"desk/{split}/{level}/{index}", split=split, level=level, prompt="Work.")

    def prepare(self, task: Task, rng: random.Random) -> SandboxSpec:
        return SandboxSpec(files={"a.txt": "a"})

    def start(self) -> None:
        self.count: list[int] = []

    def state(self) -> dict[str, list[int]]:
        return {"count": self.count}

    @tool
    def sh(self, line: str) -> str:
        """Run a line.

        Args:
            line: what to run
        """
        self.count.append(len(self.count))
        return self.box.exec(["sh", "-c", line]).text or "ok"

    @tool
    def roll(self) -> str:
        """Roll a die."""
        return str(self.rng.randrange(10**9))


@pytest.fixture(scope="module")
def boxes() -> Iterator[Pool]:
    backend = sandboxes.load("namespace")()
    if not backend.available().works:
        pytest.skip("namespace sandboxes do not work here")
    pool = Pool(
        backend, limit=2
    )  # fewer than the continuations: they must wait for each other, never for their episode
    yield pool
    pool.close()


@pytest.fixture
def desk(boxes: Pool) -> EnvRuntime:
    return EnvRuntime(name="desk", make=Desk, boxes=boxes)


@pytest.fixture
def chat(renderers: dict[str, Renderer]) -> Renderer:
    return renderers["qwen3"]


class Told:
    """An engine that answers by the number of the rollout and its turn; it notes its prompts."""

    def __init__(self, renderer: Renderer, says: Callable[[int, int], ToolCall | str]) -> None:
        self.renderer, self.says = renderer, says
        self.prompts: dict[tuple[int, int], tuple[int, ...]] = {}

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str = "") -> Completion:
        _, index, turn, _ = map(int, request_id.split("-"))
        self.prompts[index, turn] = tuple(token_ids)
        action = self.says(index, turn)
        calls = (action,) if isinstance(action, ToolCall) else ()
        message = Message(role="assistant", content="" if calls else str(action), tool_calls=calls)
        tokens = tuple(self.renderer.write(message))
        kept = tokens[: sampling.max_tokens]
        finish: Any = "stop" if len(kept) == len(tokens) else "length"
        return Completion(token_ids=kept, logprobs=(-0.5,) * len(kept), versions=(7,) * len(kept), finish=finish)


def sh(line: str) -> ToolCall:
    return ToolCall(name="sh", arguments={"line": line})


def play(engine: Told, runtime: EnvRuntime, *, borders: int | None = None, budget: Budget | None = None) -> Trajectory:
    rollout_id = RolloutId(seed=1, group=3, index=5, secret=b"k", branching=Branching(count=2, borders=borders))
    task = runtime.make().task("train", 1, 0)
    budget = budget or Budget(context=4000, tokens=2000, retries=0)
    return asyncio.run(rollout(engine, engine.renderer, runtime, task, rollout_id=rollout_id, budget=budget))


def writes(index: int, turn: int) -> ToolCall | str:
    """The episode writes two files and gives up; continuations look at what there is, and are right."""
    if index == 5:
        said: list[ToolCall | str] = [sh("echo one > one.txt"), sh("echo two > /tmp/two; echo two > two.txt"), "wrong"]
        return said[turn]
    looked = sh("cat *.txt /tmp/two 2>/dev/null; stat -c %y one.txt")
    return looked if turn == 1 else "right"


def test_a_continuation_begins_exactly_where_its_turn_did(chat: Renderer, desk: EnvRuntime) -> None:
    """Files, /tmp, times, tokens, messages, counters and the ledger of what ran are those before the turn."""
    engine = Told(chat, writes)
    trajectory = play(engine, desk)
    branches = trajectory.branches
    numbers = [5 + BRANCH * n for n in (1, 2, 3, 4)]
    assert [(b.index, b.branch_turn, b.outcome.score, b.turns) for b in branches] == [
        (numbers[0], 1, 1.0, 2), (numbers[1], 1, 1.0, 2), (numbers[2], 2, 1.0, 1), (numbers[3], 2, 1.0, 1)
    ]  # fmt: skip
    assert trajectory.outcome.score == 0.0
    # Those of the first border see the same prompt there, and another one after a turn of their own.
    same = {key: prompt == engine.prompts[5, key[1]] for key, prompt in engine.prompts.items() if key[0] != 5}
    assert same == {(number, 1): True for number in numbers[:2]} | {
        (numbers[0], 2): False, (numbers[1], 2): False, (numbers[2], 2): True, (numbers[3], 2): True
    }  # fmt: skip
    first, last = branches[0], branches[2]
    assert first.messages[:4] == trajectory.messages[:4] and last.messages[:6] == trajectory.messages[:6]
    assert "aone\n" in first.messages[5].content and "two" not in first.messages[5].content
    # The counter and the ledger know of the turns before: one call and one command, then one more of its own.
    assert first.verdict is not None and last.verdict is not None
    assert first.verdict.evidence == ("{'count': [0, 1]}", "2", "2")
    assert last.verdict.evidence == ("{'count': [0, 1]}", "2", "2")


def test_only_what_a_continuation_sampled_counts_as_sampled(chat: Renderer, desk: EnvRuntime) -> None:
    """The tokens before its border are context, without logprobs; they still count against the episode's budget."""
    engine = Told(chat, writes)
    trajectory = play(engine, desk)
    (whole,) = trajectory.segments
    branch = trajectory.branches[2]
    (own,) = branch.segments
    border = int((whole.turns == 2).argmax())
    assert own.token_ids[:border].tolist() == whole.token_ids[:border].tolist()
    assert set(own.sources[:border].tolist()) == {Source.TEMPLATE, Source.OBSERVATION}
    assert own.loss_mask.sum() == branch.sampled_tokens == len(chat.write(Message(role="assistant", content="right")))
    assert branch.prefix_tokens == int((whole.turns >= 0)[:border].sum())
    assert trajectory.spent_tokens == trajectory.sampled_tokens + sum(b.sampled_tokens for b in trajectory.branches)
    tight = Budget(context=4000, tokens=branch.prefix_tokens + 1, retries=0)
    cut = play(Told(chat, writes), desk, budget=tight)
    assert [(b.outcome.ending, b.sampled_tokens) for b in cut.branches if b.branch_turn == 2] == [("max_tokens", 1)] * 2
    stored = codec.from_row(codec.to_row(branch, "desk")).trajectory
    assert (stored.branch_turn, stored.prefix_tokens, stored.segments) == (2, branch.prefix_tokens, branch.segments)


def test_the_environments_random_source_is_forked(chat: Renderer, desk: EnvRuntime) -> None:
    """What the episode and its continuations roll after the same first roll is the same."""

    def rolls(index: int, turn: int) -> ToolCall | str:
        return "wrong" if turn == 2 else ToolCall(name="roll", arguments={})

    trajectory = play(Told(chat, rolls), desk)
    rolled = [[m.content for m in t.messages if m.role == "tool"] for t in trajectory.all]
    assert len(set(rolled[0])) == 2
    assert [r == rolled[0] for r in rolled] == [True] * 5


def test_a_fork_in_another_state_is_void(chat: Renderer, desk: EnvRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody changes a file, or only its time, between fork and first turn: infrastructure, never a score."""
    real = Pool._fork
    changed: list[str] = []

    def tampered(self: Pool, origin: Sandbox, snapshot: str) -> Sandbox:
        box = real(self, origin, snapshot)
        changed.append("")
        line = ["echo no > a.txt", "touch -d @0 one.txt", "true", "true"][min(len(changed), 4) - 1]
        box.exec(["sh", "-c", line])
        return box

    monkeypatch.setattr(Pool, "_fork", tampered)
    trajectory = play(Told(chat, writes), desk)
    outcomes = sorted((b.outcome.grade, b.outcome.score or 0.0) for b in trajectory.branches)
    assert outcomes == [("graded", 1.0), ("graded", 1.0), ("infra_error", 0.0), ("infra_error", 0.0)]
    void = next(b for b in trajectory.branches if b.outcome.score is None)
    assert void.outcome.fault is not None and "began in another state" in void.outcome.fault.cause
    assert void.sampled_tokens == 0


def test_a_host_side_state_that_differs_is_void_too(chat: Renderer, desk: EnvRuntime) -> None:
    """A counter that all instances share is no state of one episode: the environment cannot be forked."""
    asked = itertools.count()

    class Forgetful(Desk):
        def state(self) -> dict[str, list[int]]:
            return {"count": [*self.count, next(asked)]}

    trajectory = play(Told(chat, writes), replace(desk, make=Forgetful))
    assert [b.outcome.grade for b in trajectory.branches] == ["infra_error"] * 4


def test_an_environment_that_cannot_be_copied_is_refused(chat: Renderer, desk: EnvRuntime) -> None:
    class Locked(Desk):
        def start(self) -> None:
            super().start()
            self.lock = threading.Lock()

    with pytest.raises(AuthoringError, match=r"Locked\.lock \(lock\) cannot be copied"):
        play(Told(chat, writes), replace(desk, make=Locked))


def test_a_shell_or_a_program_left_running_makes_a_turn_unforkable(chat: Renderer, desk: EnvRuntime) -> None:
    """A snapshot holds no processes, so nothing may be concluded from a fork without them. The episode goes on."""

    def leaves(index: int, turn: int) -> ToolCall | str:
        started, ended = sh("sleep 60 >/dev/null 2>&1 & echo started"), sh("pkill sleep; echo ended")
        said: list[ToolCall | str] = [started, ended, "right"]
        return said[turn]

    trajectory = play(Told(chat, leaves), desk)
    assert trajectory.outcome.score == 1.0
    assert trajectory.ledger[UNFORKABLE] == {1: "programs that the episode started are still running in its sandbox"}
    assert [b.branch_turn for b in trajectory.branches] == [2, 2]


def test_large_files_are_not_kept(chat: Renderer, desk: EnvRuntime) -> None:
    """A policy that fills its disk cannot fill the trainer's memory."""

    def fills(index: int, turn: int) -> ToolCall | str:
        return sh("head -c 20000000 /dev/urandom > big; echo ok") if turn == 0 else "right"

    trajectory = play(Told(chat, fills), desk)
    assert (trajectory.branches, trajectory.outcome.score) == ((), 1.0)
    assert "16 MiB" in trajectory.ledger[UNFORKABLE][1]


def test_borders_are_spread_evenly_over_an_episode() -> None:
    borders: list[Any] = [f"border {turn}" for turn in range(1, 8)]

    def chosen(most: int | None) -> list[Any]:
        return list(Branching(count=1, borders=most).chosen(borders))

    assert chosen(1) == ["border 4"]
    assert chosen(3) == ["border 2", "border 4", "border 6"]
    assert chosen(None) == chosen(9) == borders


def test_a_continuation_knows_that_an_answer_was_sent_back(chat: Renderer, boxes: Pool) -> None:
    """It has its one objection behind it, and the answer that met it counts where no other follows."""

    class Doubtful(Desk):
        def objection(self, answer: str) -> str:
            return "Are you sure?"

    def says(index: int, turn: int) -> ToolCall | str:
        if index == 5:
            return ("right", sh("true"), "wrong")[turn]
        return sh("true") if index // BRANCH % 2 else "wrong"

    trajectory = play(Told(chat, says), EnvRuntime(name="desk", make=Doubtful, boxes=boxes))
    assert (trajectory.outcome.score, trajectory.turns) == (0.0, 3)
    found = {(b.index // BRANCH % 2, b.outcome.ending, b.outcome.score) for b in trajectory.branches}
    assert found == {(1, "max_turns", 1.0), (0, "done", 0.0)}
    assert all(b.turns == 1 for b in trajectory.branches if b.outcome.ending == "done")
