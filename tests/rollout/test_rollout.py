"""One episode with one engine: every budget ends it as what it is, and every failure is told apart by whose it was."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from agentrl import seeds
from agentrl.engines.base import Sampling
from agentrl.envs import Environment, tool
from agentrl.envs.play import uninterrupted
from agentrl.errors import AuthoringError, EngineError, SandboxDied, SandboxError
from agentrl.rollout import sampling as turn_sampling
from agentrl.rollout.encoder import Span
from agentrl.rollout.render import Renderer
from agentrl.rollout.request import Budget, EnvRuntime, RolloutId
from agentrl.rollout.rollout import rollout
from agentrl.rollout.sampling import SamplingParams
from agentrl.rollout.token_log import TokenLog
from agentrl.sandboxes.base import SandboxSpec
from agentrl.types import Completion, Message, Task, ToolCall, Trajectory
from agentrl.verifiers.base import Context, Submission

LOOK = Message(role="assistant", content="", tool_calls=(ToolCall(name="look", arguments={"path": "here"}),))
RIGHT = Message(role="assistant", content="right")
BUDGET = Budget(context=4000, tokens=1000)


pytestmark = pytest.mark.usefixtures("no_waiting")


def play(
    engine: Any,
    renderer: Renderer,
    world: EnvRuntime,
    budget: Budget = BUDGET,
    place: RolloutId | None = None,
    **options: Any,
) -> Trajectory:
    task = world.make().task("train", 1, 0)
    place = place or RolloutId(seed=1, group=2, index=3, secret=b"k")
    return asyncio.run(rollout(engine, renderer, world, task, rollout_id=place, budget=budget, **options))


def script(puppet: Any, renderer: Renderer, *messages: Message, **options: Any) -> Any:
    """An engine that says these messages, the last of them for ever."""
    turns = [renderer.write(m) for m in messages]
    state = {"turn": 0}

    def says(request_id: str, prompt: Sequence[int], sampling: Sampling) -> Sequence[int]:
        turn, state["turn"] = state["turn"], state["turn"] + 1
        return turns[min(turn, len(turns) - 1)]

    return puppet(says, renderer.stop_token_ids, **options)


# Budgets ---------------------------------------------------------------------------------------------------------


def test_a_whole_episode(puppet: Any, chat: Renderer, echo: EnvRuntime) -> None:
    engine = script(puppet, chat, LOOK, RIGHT)
    made = play(engine, chat, echo, sampling=SamplingParams(temperature=0.7, top_p=0.9, top_k=5))
    assert (made.outcome.ending, made.outcome.grade, made.outcome.score) == ("done", "graded", 1.0)
    assert [(m.role, m.content) for m in made.messages] == [
        ("system", "Use the tools."),
        ("user", "Do 0."),
        ("assistant", ""),
        ("tool", "<out>here</out>"),
        ("assistant", "right"),
    ]
    (segment,) = made.segments
    assert segment.token_ids.tolist() == [*engine.calls[1][1], *chat.write(RIGHT)]
    assert chat.decode(segment.token_ids[segment.loss_mask].tolist()) == chat.decode(
        [*chat.write(LOOK), *chat.write(RIGHT)]
    )
    assert (made.group, made.index, made.task.secret) == (2, 3, {})
    assert made.seed == seeds.derive(1, "reset", "echo/train/1/0", 2)
    assert [call[0] for call in engine.calls] == ["2-3-0-0", "2-3-1-0"]
    assert engine.calls[0][2] == Sampling(
        max_tokens=1000,
        temperature=0.7,
        top_p=0.9,
        top_k=5,
        seed=seeds.derive(1, "sampling", "echo/train/1/0", 2, 3, 0),
        stop_token_ids=chat.stop_token_ids,
    )
    assert set(made.timings) == {"start", "engine", "tools", "finish", "verifier", "overhead", "total"}
    assert made.ledger["calls"] == 1


def test_turns_run_out(puppet: Any, chat: Renderer, echo: EnvRuntime) -> None:
    engine = script(puppet, chat, LOOK)
    made = play(engine, chat, echo, replace(BUDGET, turns=3))
    assert (made.outcome.ending, made.outcome.score, len(engine.calls)) == ("max_turns", 0.0, 3)
    assert made.segments[0].loss_mask[-1]  # what came back last was never shown, so it is not in the tokens


def test_without_a_limit_the_environment_sets_the_turns(puppet: Any, chat: Renderer, echo: EnvRuntime) -> None:
    engine = script(puppet, chat, LOOK)
    assert (play(engine, chat, echo).outcome.ending, len(engine.calls)) == ("max_turns", 8)


def test_sampled_tokens_run_out(puppet: Any, chat: Renderer, echo: EnvRuntime) -> None:
    one = len(chat.write(LOOK))
    made = play(script(puppet, chat, LOOK), chat, echo, replace(BUDGET, tokens=2 * one + 5))
    assert (made.outcome.ending, made.outcome.score, made.sampled_tokens) == ("max_tokens", 0.0, 2 * one + 5)
    made = play(script(puppet, chat, LOOK), chat, echo, replace(BUDGET, tokens=2 * one))
    assert (made.outcome.ending, made.sampled_tokens) == ("max_tokens", 2 * one)
    assert made.segments[0].loss_mask[-1]


def test_the_tokens_of_a_turn_run_out_and_nothing_half_written_is_carried_out(
    puppet: Any, chat: Renderer, echo: EnvRuntime
) -> None:
    for length in range(1, len(chat.write(LOOK))):
        made = play(script(puppet, chat, LOOK), chat, echo, replace(BUDGET, turn_tokens=length))
        assert (made.outcome.ending, made.outcome.grade, made.sampled_tokens) == ("max_tokens", "graded", length)
        assert made.ledger["calls"] == 0
        assert made.messages[-1].role == "assistant"


def test_the_context_runs_out(puppet: Any, chat: Renderer, echo: EnvRuntime) -> None:
    first = play(script(puppet, chat, RIGHT), chat, echo)
    prompt = int((~first.segments[0].loss_mask).sum())
    turn = len(chat.write(LOOK))
    for room, sampled in ((prompt, 0), (prompt + 1, 1), (prompt + turn, turn), (prompt + turn + 3, turn)):
        made = play(script(puppet, chat, LOOK), chat, echo, replace(BUDGET, context=room))
        assert (made.outcome.ending, made.outcome.grade, made.sampled_tokens) == ("max_tokens", "graded", sampled)
        assert made.tokens == prompt + sampled  # an observation for which there is no room is left out


def test_wall_time_runs_out_in_the_engine(puppet: Any, chat: Renderer, echo: EnvRuntime) -> None:
    engine = script(puppet, chat, LOOK)
    engine.delay = lambda request_id: 0.0 if request_id.endswith("0-0") else 30.0
    began = time.perf_counter()
    made = play(engine, chat, echo, replace(BUDGET, wall_seconds=0.3))
    assert (made.outcome.ending, made.outcome.score) == ("timeout", 0.0)
    assert made.sampled_tokens == len(chat.write(LOOK))
    assert time.perf_counter() - began < 10 and engine.running == 0


def test_tool_time_runs_out(puppet: Any, chat: Renderer, echo: EnvRuntime) -> None:
    class Slow(type(echo.make())):  # type: ignore[misc]
        @tool
        async def look(self, path: str) -> str:
            """Look slowly.

            Args:
                path: where
            """
            await asyncio.sleep(0.4)
            return path

    made = play(script(puppet, chat, LOOK), chat, replace(echo, make=Slow), replace(BUDGET, tool_seconds=0.7))
    assert (made.outcome.ending, made.outcome.score) == ("timeout", 0.0)
    assert len([m for m in made.messages if m.role == "assistant"]) == 2
    assert 0.69 < made.timings["tools"] < 5


# Engines that stumble --------------------------------------------------------------------------------------------


class Stumbling:
    """Gives at most `pace` tokens a request, each time under newer weights, and fails now and then."""

    def __init__(self, tokens: Sequence[int], pace: int, fail: Sequence[int] = ()) -> None:
        self.tokens, self.pace, self.fail = tokens, pace, set(fail)
        self.calls: list[tuple[tuple[int, ...], Sampling]] = []
        self.given = 0

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str = "") -> Completion:
        self.calls.append((tuple(token_ids), sampling))
        number = len(self.calls)
        if number in self.fail:
            raise EngineError("the server went away")
        part = tuple(self.tokens[self.given : self.given + min(self.pace, sampling.max_tokens)])
        self.given += len(part)
        over = self.given == len(self.tokens)
        return Completion(
            token_ids=part,
            logprobs=(-0.5,) * len(part),
            versions=(number,) * len(part),
            finish="stop" if over else "length" if len(part) == sampling.max_tokens else "abort",
        )


def test_an_aborted_turn_goes_on_under_newer_weights(chat: Renderer, echo: EnvRuntime) -> None:
    turn = chat.write(Message(role="assistant", content="right"))
    engine = Stumbling(turn, pace=2)
    made = play(engine, chat, echo)
    assert made.outcome.score == 1.0
    (segment,) = made.segments
    assert segment.token_ids[segment.loss_mask].tolist() == list(turn)
    assert segment.versions[segment.loss_mask].tolist() == [1 + i // 2 for i in range(len(turn))]
    prompt = engine.calls[0][0]
    assert [call[0] for call in engine.calls] == [prompt + turn[: 2 * i] for i in range(len(engine.calls))]
    assert [call[1].max_tokens for call in engine.calls] == [1000 - 2 * i for i in range(len(engine.calls))]
    assert len({call[1].seed for call in engine.calls}) == len(engine.calls)


def test_aborts_do_not_stretch_the_budget(chat: Renderer, echo: EnvRuntime) -> None:
    made = play(Stumbling(chat.write(LOOK), pace=2), chat, echo, replace(BUDGET, tokens=7))
    assert (made.outcome.ending, made.sampled_tokens, made.ledger["calls"]) == ("max_tokens", 7, 0)


def test_a_failed_request_is_tried_again_where_it_stood(chat: Renderer, echo: EnvRuntime) -> None:
    engine = Stumbling(chat.write(RIGHT), pace=1, fail=[2, 4])
    made = play(engine, chat, echo)
    assert made.outcome.score == 1.0
    assert engine.calls[1] == engine.calls[2] and engine.calls[3] == engine.calls[4]


def test_an_engine_that_stays_away_is_nobodys_score(chat: Renderer, echo: EnvRuntime) -> None:
    engine = Stumbling(chat.write(RIGHT), pace=1, fail=range(2, 1000))
    made = play(engine, chat, echo)
    assert (made.outcome.grade, made.outcome.score) == ("infra_error", None)
    assert made.outcome.fault is not None
    assert (made.outcome.fault.component, made.outcome.fault.blame) == ("engine", "infra")
    assert made.outcome.fault.cause == "EngineError: the server went away"


def test_an_engine_that_only_aborts_is_found_out(
    chat: Renderer, echo: EnvRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turn_sampling, "EMPTY_ABORTS", 3)
    made = play(Stumbling((1, 2, 3), pace=0), chat, echo, replace(BUDGET, retries=0))
    assert made.outcome.fault is not None
    assert made.outcome.fault.cause == "EngineError: the engine aborted a request 4 times without sampling a token"


# Whose doing it is -----------------------------------------------------------------------------------------------


class Trouble(Environment):
    """Raises what it is told to, where it is told to."""

    starts = 0

    def __init__(self, world: EnvRuntime, where: str, error: Exception, times: int = 99) -> None:
        super().__init__()
        self.inner, self.where, self.error, self.times = world.make(), where, error, times
        self.verifier = self.inner.verifier  # type: ignore[misc]

    def task(self, split: Any, level: int, index: int) -> Task:
        return self.inner.task(split, level, index)

    def _maybe(self, where: str) -> None:
        if self.where == where and Trouble.starts <= self.times:
            raise self.error

    def start(self) -> None:
        Trouble.starts += 1
        self._maybe("start")

    @tool
    def look(self, path: str) -> str:
        """Look.

        Args:
            path: where
        """
        self._maybe("look")
        return path


@pytest.mark.parametrize(
    ("where", "error", "times", "expected", "starts"),
    [
        ("look", SandboxDied("out of memory"), 99, ("agent_error", "graded", 0.0, "agent"), 1),
        ("look", SandboxError("the daemon is gone"), 99, ("done", "infra_error", None, "infra"), 4),
        ("look", SandboxError("the daemon is gone"), 1, ("done", "graded", 1.0, None), 2),
        ("look", AttributeError("a bug"), 99, ("agent_error", "graded", 0.0, "agent"), 2),
        ("look", AttributeError("a bug"), 1, ("done", "graded", 1.0, None), 2),
        ("look", AssertionError("of the author's"), 99, ("agent_error", "graded", 0.0, "agent"), 2),
        ("look", AuthoringError("not a path"), 99, ("agent_error", "graded", 0.0, "agent"), 2),
        ("look", ValueError("no such path"), 99, ("done", "graded", 1.0, None), 1),
        ("start", SandboxError("no box"), 2, ("done", "graded", 1.0, None), 3),
    ],
)
def test_failures_by_whose_doing_they_are(
    puppet: Any,
    chat: Renderer,
    echo: EnvRuntime,
    where: str,
    error: Exception,
    times: int,
    expected: tuple[Any, ...],
    starts: int,
) -> None:
    Trouble.starts = 0
    world = replace(echo, make=lambda: Trouble(echo, where, error, times))

    def says(request_id: str, prompt: Sequence[int], sampling: Sampling) -> Sequence[int]:
        return chat.write(LOOK) if request_id.split("-")[2] == "0" else chat.write(RIGHT)

    engine = puppet(says, chat.stop_token_ids)
    made = play(engine, chat, world)
    outcome = made.outcome
    assert (outcome.ending, outcome.grade, outcome.score, outcome.fault and outcome.fault.blame) == expected
    assert Trouble.starts == starts
    # A retry keeps its seeds.
    by_turn: dict[str, set[int | None]] = {}
    for request, _, sampling, _ in engine.calls:
        by_turn.setdefault(request, set()).add(sampling.seed)
    assert all(len(found) == 1 for found in by_turn.values())


def test_what_a_user_must_fix_is_not_swallowed(puppet: Any, chat: Renderer, echo: EnvRuntime) -> None:
    world = replace(echo, make=lambda: Trouble(echo, "start", AuthoringError("declare the tool")))
    with pytest.raises(AuthoringError, match="declare the tool"):
        play(script(puppet, chat, LOOK), chat, world)


def test_what_recurs_with_the_same_tokens_is_the_policys_failure(puppet: Any, chat: Renderer, echo: EnvRuntime) -> None:
    """The engine is asked once for each turn; the second attempt repeats its tokens, and the alarm names the line."""
    Trouble.starts = 0
    world = replace(echo, make=lambda: Trouble(echo, "look", TypeError("x")))
    engine = script(puppet, chat, LOOK)
    trajectory = play(engine, chat, world, replace(BUDGET, retries=0))
    assert (trajectory.outcome.score, trajectory.outcome.alarm, Trouble.starts) == (0.0, True, 2)
    assert len(engine.calls) == 1
    assert trajectory.sampled_tokens == len(chat.write(LOOK))
    assert trajectory.outcome.fault is not None
    assert trajectory.outcome.fault.cause == "TypeError: x"
    assert trajectory.outcome.fault.line.startswith("test_rollout.py:")


def test_a_box_that_cannot_be_had_is_infra(puppet: Any, chat: Renderer, echo: EnvRuntime) -> None:
    class Boxed(type(echo.make())):  # type: ignore[misc]
        def prepare(self, task: Task, rng: Any) -> SandboxSpec:
            return SandboxSpec()

    made = play(script(puppet, chat, RIGHT), chat, replace(echo, make=Boxed))
    assert (made.outcome.grade, made.segments, made.messages) == ("infra_error", (), ())
    assert made.outcome.fault is not None and made.outcome.fault.cause == "SandboxError: there are no boxes here"


# Seeds and secrets -----------------------------------------------------------------------------------------------


def test_seeds_differ_by_rollout_and_turn_and_share_the_reset() -> None:
    task = Task(id="t", split="train", level=1, prompt="")
    places = [RolloutId(seed=0, group=g, index=i) for g in range(3) for i in range(4)]
    assert len({p.reset(task) for p in places}) == 3
    found = [p.sampling(task, turn, part) for p in places for turn in range(3) for part in range(2)]
    assert len(set(found)) == len(found)


def test_the_verifier_gets_the_groups_secret(puppet: Any, chat: Renderer, echo: EnvRuntime) -> None:
    heard: list[tuple[bytes, float, Any]] = []

    class Listens(type(echo.make().verifier)):  # type: ignore[misc]
        async def verify(self, submission: Submission, context: Context) -> Any:
            heard.append((context.secret, context.deadline_s, submission.task.secret))
            return await super().verify(submission, context)

    class Heard(type(echo.make())):  # type: ignore[misc]
        verifier = Listens()

    for index in (0, 1):
        place = RolloutId(seed=1, group=7, index=index, secret=b"of the group")
        play(script(puppet, chat, RIGHT), chat, replace(echo, make=Heard), replace(BUDGET, verify_seconds=9.0), place)
    assert heard == [(b"of the group", 9.0, {"a": 1})] * 2


# Cancelling ------------------------------------------------------------------------------------------------------


def test_cancelling_closes_the_episode_and_passes_on(puppet: Any, chat: Renderer, echo: EnvRuntime) -> None:
    closed = []

    class Held(type(echo.make())):  # type: ignore[misc]
        def stop(self) -> None:
            time.sleep(0.05)
            closed.append(True)

    engine = script(puppet, chat, RIGHT)
    engine.delay = lambda request_id: 60.0

    async def main() -> None:
        world = replace(echo, make=Held)
        task = world.make().task("train", 1, 0)
        work = asyncio.create_task(
            rollout(engine, chat, world, task, rollout_id=RolloutId(seed=0, group=0, index=0), budget=BUDGET)
        )
        while not engine.running:
            await asyncio.sleep(0.005)
        work.cancel()
        await asyncio.sleep(0.01)
        work.cancel()  # a second Ctrl-C, while it is closing
        with pytest.raises(asyncio.CancelledError):
            await work

    asyncio.run(main())
    assert closed == [True] and engine.running == 0


def test_uninterrupted_runs_to_the_end() -> None:
    done = []

    async def work() -> int:
        await asyncio.sleep(0.03)
        done.append(True)
        return 3

    async def main() -> None:
        assert await uninterrupted(work()) == 3
        task = asyncio.create_task(uninterrupted(work()))
        for _ in range(3):
            await asyncio.sleep(0.005)
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert done == [True, True]


# The log --------------------------------------------------------------------------------------------------------


def completion(*tokens: int) -> Completion:
    count = len(tokens)
    return Completion(token_ids=tokens, logprobs=(-1.0,) * count, versions=(4,) * count, finish="stop")


def test_the_tape_holds_what_was_laid_and_sampled() -> None:
    log = TokenLog()
    log.append(Span((1, 2), b"\0\1"))
    log.append_sampled(log.prompt(), completion(3, 4))
    log.append(Span((5,), b"\0"))
    log.append_sampled(log.prompt(), completion(6))
    log.end_segment()
    log.append(Span((7,), b"\0"))
    first, second = [*log.segments, *log.finished()][0], log.segments[1]
    assert first.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert first.sources.tolist() == [0, 1, 2, 2, 0, 2]
    assert first.logprobs.tolist() == [0, 0, -1, -1, 0, -1]
    assert first.versions.tolist() == [-1, -1, 4, 4, -1, 4]
    assert second.token_ids.tolist() == [7]
    assert log.finished() == (first,)  # a segment without a sampled token teaches nothing


def test_the_tape_refuses_tokens_the_engine_did_not_see() -> None:
    log = TokenLog()
    log.append(Span((1, 2), b"\0\0"))
    with pytest.raises(AssertionError, match="other tokens than the trajectory"):
        log.append_sampled([1, 9], completion(3))
    log.append_sampled([1, 2], completion(3))
    log._ids[0] = 9
    with pytest.raises(AssertionError, match="departs from what the engine saw"):
        log.append_sampled(log.prompt(), completion(4))
    with pytest.raises(AssertionError, match="differs from what the engine saw"):
        log.end_segment()
