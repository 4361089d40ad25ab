"""Context that is too long: every kind of conversation is logged as the engine saw it, and none is missing."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentrl import codec
from agentrl.envs import tool, tools_of
from agentrl.envs.play import Stage
from agentrl.envs.replay import of_row, replay
from agentrl.learn.advantage import advantages
from agentrl.learn.pack import token_coefficients
from agentrl.recipe import AlgorithmSection, SummaryCompaction
from agentrl.report import episode as episode_text
from agentrl.rollout import compaction
from agentrl.rollout.render import Renderer
from agentrl.rollout.request import Budget, EnvRuntime
from agentrl.rollout.scripted import ScriptedEngine
from agentrl.types import Group, Message, ToolCall
from tests.rollout.compaction_play import (
    BUDGET,
    DROP,
    KINDS,
    SUBAGENT,
    SUMMARY,
    SYSTEM,
    TASK,
    Lister,
    call,
    engine_of,
    play,
    proved,
    result,
    say,
    told,
)
from tests.rollout.conftest import NoBoxes

pytestmark = pytest.mark.usefixtures("no_waiting")


@pytest.fixture
def lister() -> EnvRuntime:
    return EnvRuntime(name="lister", make=Lister, boxes=NoBoxes())


# What each kind shows and trains on, written out ------------------------------------------------------------------


def test_a_summary_is_sampled_and_trained_and_begins_the_next_segment(chat: Renderer, lister: EnvRuntime) -> None:
    many, summary, last = call("many", count=60), say("I counted."), say("right")
    engine = engine_of(chat, many, many, summary, last)
    played = play(SUMMARY, engine, chat, lister)
    assert (played.outcome.ending, played.outcome.score) == ("done", 1.0)
    schemas = [t.schema() for t in tools_of(Lister).values()]
    answer = f"<out>{'far ' * 60}</out>"
    request = Message(role="user", content=compaction.REQUEST)
    shown = Message(
        role="user",
        content="Your summary of the work so far:\n<out>I counted.</out>\nContinue with the task.",
    )
    opening = chat.prompt([SYSTEM, TASK], schemas).token_ids
    seen = chat.bridge([result(answer)], chat.end_of_turn)
    asked = chat.bridge([result(answer), request], chat.end_of_turn)
    assert seen is not None and asked is not None
    turn, said, ended = chat.write(many), chat.write(summary), chat.write(last)
    again = chat.prompt([SYSTEM, TASK, shown, many, result(answer)], schemas).token_ids
    assert [s.token_ids.tolist() for s in played.segments] == [
        [*opening, *turn, *seen.token_ids, *turn, *asked.token_ids, *said],
        [*again, *ended],
    ]
    parts = [(opening, 0), (turn, 1), (seen.token_ids, 0), (turn, 1), (asked.token_ids, 0), (said, 1)]
    assert played.segments[0].loss_mask.tolist() == [bool(own) for tokens, own in parts for _ in tokens]
    assert played.segments[1].loss_mask.tolist() == [False] * len(again) + [True] * len(ended)
    assert told(played) == [("task", 3), ("summary", 1)]
    assert [m.content for m in played.conversations[0].messages[5:]] == [answer, compaction.REQUEST, "I counted."]
    # The environment, and so the verifier, sees nothing of it.
    assert [m.content for m in played.messages] == ["Use the tools.", "Do 0.", "", answer, "", answer, "right"]
    assert [request_id for request_id, *_ in engine.calls] == ["2-3-0-0", "2-3-1-0", "2-3-2-0", "2-3-3-0"]
    proved(played, engine.calls)


def test_without_newest_turns_only_task_and_summary_remain(chat: Renderer, lister: EnvRuntime) -> None:
    bare = replace(SUMMARY, section=SummaryCompaction(type="summary", keep=0))
    played = play(bare, engine_of(chat, call("many", count=120), say("So."), say("right")), chat, lister)
    assert [m.role for m in played.conversations[1].messages] == ["system", "user", "user", "assistant"]
    text = chat.decode(played.segments[1].token_ids.tolist())
    assert text.endswith(
        "<|im_start|>user\nDo 0.\n\nYour summary of the work so far:\n<out>So.</out>\nContinue with the task."
        "<|im_end|>\n<|im_start|>assistant\nright<|im_end|>"
    )


def test_a_script_sums_up_the_calls_it_made(chat: Renderer, lister: EnvRuntime) -> None:
    """A demonstration under summaries: the expert knows nothing of them, so that its calls are the summary, without
    the oldest where there is no room for all; its own actions are said in their order, none of them lost."""
    many = ToolCall(name="many", arguments={"count": 60})
    whole = play(SUMMARY, ScriptedEngine(chat, [many, many, "right"]), chat, lister)
    assert (whole.outcome.ending, whole.outcome.score, told(whole)) == ("done", 1.0, [("task", 3), ("summary", 1)])
    text = 'Done so far: many({"count": 60}); many({"count": 60})'
    assert whole.conversations[0].messages[-1] == say(text)
    room = replace(SUMMARY, summary_tokens=len(chat.write(say(text))) - 1)
    cut = play(room, ScriptedEngine(chat, [many, many, "right"]), chat, lister)
    assert (cut.outcome.score, cut.conversations[0].messages[-1]) == (1.0, say('Done so far: ...; many({"count": 60})'))


def test_a_second_summary_replaces_the_first(chat: Renderer, lister: EnvRuntime) -> None:
    many = call("many", count=120)
    engine = engine_of(chat, many, say("one"), many, say("two"), say("right"))
    played = play(SUMMARY, engine, chat, lister)
    assert told(played) == [("task", 2), ("summary", 2), ("summary", 1)]
    third = played.conversations[2].messages
    assert [m.role for m in third] == ["system", "user", "user", "assistant"]
    assert "<out>two</out>" in third[2].content and not any("one" in m.content for m in third)
    proved(played, engine.calls)


def test_old_results_are_left_out_oldest_first(chat: Renderer, lister: EnvRuntime) -> None:
    # 512 tokens of opening, then three times 36 for a turn and 281 for its result: 1463 in all.
    many = call("many", count=60)
    drop = replace(DROP, threshold=1400)
    engine = engine_of(chat, many, many, many, say("right"))
    played = play(drop, engine, chat, lister)
    assert (played.outcome.score, told(played)) == (1.0, [("task", 3), ("drop", 1)])
    answer = f"<out>{'far ' * 60}</out>"
    assert [m.content for m in played.conversations[1].messages if m.role == "tool"] == [
        compaction.LEFT_OUT, compaction.LEFT_OUT, answer,
    ]  # fmt: skip
    schemas = [t.schema() for t in tools_of(Lister).values()]
    old = result(compaction.LEFT_OUT)
    rest = [SYSTEM, TASK, many, old, many, old, many, result(answer)]
    prompt = chat.prompt(rest, schemas).token_ids
    assert played.segments[1].token_ids.tolist() == [*prompt, *chat.write(say("right"))]
    assert played.segments[1].loss_mask.tolist() == [False] * len(prompt) + [True] * len(chat.write(say("right")))
    assert [m.content for m in played.messages if m.role == "tool"] == [answer] * 3
    proved(played, engine.calls)


def test_only_as_many_results_are_left_out_as_needed(chat: Renderer, lister: EnvRuntime) -> None:
    """With results long enough, leaving out the oldest alone halves the prompt, and the second one stays."""
    wide = replace(BUDGET, context=8000)
    drop = replace(DROP, threshold=4000)
    turns = [call("many", count=n) for n in (700, 20, 200)]
    played = play(drop, engine_of(chat, *turns, say("right")), chat, lister, wide)
    results = [m.content for m in played.conversations[1].messages if m.role == "tool"]
    assert results[0] == compaction.LEFT_OUT and results[1] == f"<out>{'far ' * 20}</out>"


def test_a_sub_agent_is_a_segment_of_its_own(chat: Renderer, lister: EnvRuntime) -> None:
    asked, looked, report, last = (
        call("delegate", task="find x"),
        call("look", path="x"),
        say("x is here"),
        say("right"),
    )
    engine = engine_of(chat, asked, looked, report, last)
    played = play(SUBAGENT, engine, chat, lister)
    own = [t.schema() for t in tools_of(Lister).values()]
    opening = chat.prompt([SYSTEM, TASK], [*own, compaction.DELEGATE.schema()]).token_ids
    bridge = chat.bridge([result("<out>x is here</out>", "delegate")], chat.end_of_turn)
    inner = chat.prompt([SYSTEM, Message(role="user", content="find x")], own).token_ids
    seen = chat.bridge([result("<out>x</out>", "look")], chat.end_of_turn)
    assert bridge is not None and seen is not None
    assert [s.token_ids.tolist() for s in played.segments] == [
        [*opening, *chat.write(asked), *bridge.token_ids, *chat.write(last)],
        [*inner, *chat.write(looked), *seen.token_ids, *chat.write(report)],
    ]
    for segment, turns in zip(played.segments, ([asked, last], [looked, report]), strict=True):
        sampled = segment.token_ids[segment.loss_mask].tolist()
        assert sampled == [token for turn in turns for token in chat.write(turn)]
    assert (played.outcome.score, told(played)) == (1.0, [("task", 2), ("subagent", 2)])
    assert [m.content for m in played.messages] == ["Use the tools.", "Do 0.", "", "<out>x</out>", "right"]
    proved(played, engine.calls)


def test_what_ends_the_episode_ends_it_from_a_sub_agent_too(chat: Renderer) -> None:
    class Ends(Lister):
        @tool(terminal=True)
        def submit(self, answer: str) -> str:
            """Hand in.

            Args:
                answer: what
            """
            return answer

    engine = engine_of(chat, call("delegate", task="x"), call("submit", answer="right"))
    played = play(SUBAGENT, engine, chat, EnvRuntime(name="ends", make=Ends, boxes=NoBoxes()))
    assert (played.outcome.ending, played.outcome.score) == ("done", 1.0)
    proved(played, engine.calls)


# How segments count -----------------------------------------------------------------------------------------------


def test_all_segments_share_the_score_and_a_trajectory_counts_once(chat: Renderer, lister: EnvRuntime) -> None:
    """Two episodes, one of two segments and one of one: `sequence` gives each half, spread over its own tokens."""
    long = play(SUMMARY, engine_of(chat, call("many", count=120), say("So."), say("right")), chat, lister)
    short = replace(play(SUMMARY, engine_of(chat, say("wrong")), chat, lister), index=4)
    group = Group(task=long.task, number=2, trajectories=(long, short), env="lister")
    samples = advantages([group], AlgorithmSection(type="dr_grpo"))
    assert [sorted(set(s.advantages[s.segment.loss_mask].tolist())) for s in samples] == [[0.5], [0.5], [-0.5]]
    assert [bool(s.advantages[~s.segment.loss_mask].any()) for s in samples] == [False] * 3
    first, second, other = (int(s.segment.loss_mask.sum()) for s in samples)
    each = 1 / (2 * (first + second))
    assert token_coefficients(samples, "sequence", 1) == pytest.approx([each, each, 1 / (2 * other)])
    assert token_coefficients(samples, "token", 1) == pytest.approx([1 / (first + second + other)] * 3)


# Every prompt that was sent is in a segment -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(KINDS))
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_recorded_prompts_are_what_the_engine_got(
    kind: str, data: st.DataObject, renderers: dict[str, Renderer], lister: EnvRuntime
) -> None:
    """Any turns in any order, with every template family: no request is missing from the segments, no token added."""
    family = data.draw(st.sampled_from(sorted(renderers)))
    renderer, most = renderers[family], 1 if family == "llama3" else 2  # its format has one call per turn
    parts = st.one_of(
        st.integers(0, 150).map(lambda n: call("many", count=n)),
        st.text(max_size=40).map(lambda path: call("look", path=path)),
        st.text(max_size=40).map(lambda text: call("delegate", task=text)),
        st.just(Message(role="assistant", content="", tool_calls=call("look", path="a").tool_calls * most)),
        st.just(replace(call("delegate", task="x"), tool_calls=call("delegate", task="x").tool_calls * most)),
        st.text(max_size=60).map(lambda text: say("more " + text)),
        st.text(max_size=60).map(lambda text: replace(call("look", path="b"), thinking=text, content=text[:10])),
    )
    turns = data.draw(st.lists(parts, min_size=1, max_size=7))
    budget = Budget(context=data.draw(st.integers(600, 1500)), tokens=data.draw(st.integers(20, 600)))
    compacting = KINDS[kind]
    if kind != "subagent":
        compacting = replace(compacting, threshold=data.draw(st.integers(1, budget.context - 1)))
    engine = engine_of(renderer, *turns)
    played = play(compacting, engine, renderer, lister, budget)
    assert played.outcome.grade == "graded" and not played.outcome.alarm
    proved(played, engine.calls)
    assert len(engine.calls) <= 8 and played.sampled_tokens <= budget.tokens
    assert max(map(len, played.segments)) <= max(budget.context, len(played.segments[0]) if not engine.calls else 0)
    assert played.turns == len(engine.calls) == sum(part.turns for part in played.conversations)
    assert codec.from_row(codec.to_row(played, "lister")).trajectory.conversations == played.conversations
    assert episode_text.show(played)


def test_without_compaction_it_is_the_plain_rollout(chat: Renderer, lister: EnvRuntime) -> None:
    """A conversation that never gets too long has the tokens of the plain loop; only its record says one more thing."""
    turns = [call("many", count=9), call("look", path="x"), say("more"), say("right")]
    plain = play(None, engine_of(chat, *turns), chat, lister)
    assert plain.conversations == ()
    for compacting in (SUMMARY, DROP):
        watched = play(replace(compacting, threshold=1999), engine_of(chat, *turns), chat, lister)
        assert (watched.segments, watched.messages, watched.outcome) == (plain.segments, plain.messages, plain.outcome)
        assert [part.messages for part in watched.conversations] == [plain.messages]


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_stored_episode_replays(kind: str, chat: Renderer, lister: EnvRuntime) -> None:
    """What acted on the environment is in the messages, in its order, sub-agents' turns and refused calls included."""
    looked = call("look", path="a").tool_calls
    both = Message(role="assistant", content="", tool_calls=(*looked, *call("delegate", task="b").tool_calls))
    parts = {
        "summary": [call("many", count=120), say("s"), call("look", path="b")],
        "drop": [call("many", count=60)] * 3,
        "subagent": [both, call("delegate", task="x"), call("look", path="c"), say("so")],
    }
    played = play(KINDS[kind], engine_of(chat, *parts[kind], say("right")), chat, lister)
    assert played.outcome.score == 1.0 and len(played.conversations) > 1
    record = of_row(codec.to_row(played, "lister"))
    assert asyncio.run(replay(Lister(), record, Stage(boxes=NoBoxes()))) is None
