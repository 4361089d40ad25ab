"""A hostile policy plays whole rollouts through every chat template: each episode ends graded, with no alarm.

Turns are sampled as tokens: calls, well-formed and malformed, made of hostile pieces; random tokens, control tokens
among them. The tools answer with hostile output. Sixty turns per template, ten thousand with AGENTRL_FULL=1.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from pydantic import BaseModel

from agentrl import codec
from agentrl.envs import Environment, tool
from agentrl.envs.tool_output import frame, text_of
from agentrl.rollout.render import Renderer
from agentrl.rollout.rollout import Budget, EnvRuntime, RolloutId, rollout
from agentrl.types import Done, Observation, Split, Task, ToolCall, Trajectory, Verdict
from agentrl.verifiers.base import Context, Submission, Verifier

FAMILIES = ["chatml", "qwen3", "llama3", "mistral", "gemma"]
TURNS = 10_000 if os.environ.get("AGENTRL_FULL") == "1" else 60
PRIVATE = "".join(map(chr, range(0xE000, 0xF900)))
PIECES = (
    *("\\ud800", "\\udfff", "\\ud83d\\ude00", "\\ude00\\ud83d", "\\u0000", "\\ue000", "\\", '"'),
    *("\ue000", "\ue001\ue002", "\ue003", "\ue004", "\U000f0000", "\ufffd", "\u202e", "\u2066", "\u200b", "\ufeff"),
    *(
        "\\u12",
        "\x00",
        "\x1b[",
        "\u2028",
        "\x85",
        "\x1c",
        "\u3000",
        " " * 40,
        "\n\n",
        "\r\n",
        "\t",
        "<" + " " * 300,
        "\u0301" * 40,
        "🙂",
        "日本",
    ),
    *("＜|im_end|＞", "{{ messages }}", "{% raise %}", "{#", "%}", "{", "}", "[", "]", "<", "</", "&amp;", "${x}"),
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<out>", "</out>"),
    *("[TOOL_CALLS]", "[TOOL_RESULTS]", "[INST]", "call00000", '"name":', '"parameters":', "<|python_tag|>", "None"),
    *("a", "look", "more", "right", ""),
)


class Accepts(Verifier):
    """Grades every episode 0: what is tried here is the way to the verifier."""

    async def verify(self, submission: Submission, context: Context) -> Verdict:
        return Verdict(score=0.0)

    async def probe(self, context: Context) -> None:
        return None


class Hostile(Environment):
    """Its tools return what an attacker would have them return."""

    levels = range(1, 2)
    verifier = Accepts()
    system = "Use the tools."
    max_turns = 12

    def __init__(self) -> None:
        self.count = 0

    def draw(self, text: str) -> random.Random:
        """Return a generator that depends on what the policy said and on nothing outside the episode."""
        self.count += 1
        return random.Random(f"{self.count} {text}")

    def task(self, split: Split, level: int, index: int) -> Task:
        return Task(id=f"hostile/{split}/{level}/{index}", split=split, level=level, prompt=f"Do {index}.")

    @tool
    def look(self, path: str) -> Any:
        """Look at a path.

        Args:
            path: where
        """
        return output(self.draw(path), path)

    @tool
    def take(self, data: dict[str, Any], number: int = 0, items: list[Any] | None = None) -> Any:
        """Take data of any kind and give it back.

        Args:
            data: anything
            number: a number
            items: more of it
        """
        return {"data": data, "number": number**3, "items": items}

    @tool(terminal=True)
    def submit(self, answer: str) -> str:
        """Submit an answer.

        Args:
            answer: the answer
        """
        return answer + "\ud800"

    def on_message(self, text: str) -> Observation | Done:
        if text.startswith("right"):
            return Done(text + "\udc80")
        return Observation(content=text + self.draw(text).choice(["", "\ud800", " ", PRIVATE[:20]]), role="user")

    def expert(self, task: Task) -> list[ToolCall | str]:
        return ["right"]


class Row(BaseModel):
    """A tool may return a model."""

    text: str


def output(rng: random.Random, path: str) -> Any:
    """Return hostile tool output, of every type."""
    deep: list[Any] = []
    for _ in range(5_000):
        deep = [deep]
    results: list[Callable[[], Any]] = [
        lambda: path,
        lambda: "".join(rng.choices(PIECES, k=6)),
        lambda: "",
        lambda: " \n ",
        lambda: PRIVATE[:20],
        lambda: PRIVATE if rng.random() < 0.1 else PRIVATE[10:60],
        lambda: "\ud800" + path + "\udfff",
        lambda: {"a\ud800": ["\udc00", path]},
        lambda: Row(text="\ud800"),
        lambda: 10**5000,
        lambda: {"n": [10**5000]},
        lambda: deep,
        lambda: float("nan"),
        lambda: b"\xff\x00",
        lambda: {1, 2},
        lambda: {(1, 2): object},
        lambda: "<" * 500,
        lambda: "<" + " " * 100_000 if rng.random() < 0.1 else "<" + " " * 300 + "out",
        lambda: None,
    ]
    return rng.choice(results)()


# Hostile turns ---------------------------------------------------------------------------------------------------


def words(rng: random.Random, literals: Sequence[str], most: int = 6) -> str:
    """Return pieces in a row, some of them a control token's text or half of it."""
    parts = []
    for _ in range(rng.randint(0, most)):
        literal = rng.choice(literals)
        parts.append(rng.choice([rng.choice(PIECES), rng.choice(PIECES), literal, literal[: len(literal) // 2]]))
    return "".join(parts)


def json_text(rng: random.Random, literals: Sequence[str], depth: int = 0) -> str:
    """Return the text of a JSON value; often hostile, sometimes invalid."""
    kind = rng.choice(["text", "text", "raw", "number", "list", "object", "deep", "word"])
    if kind == "raw":  # escapes in it are meant
        return f'"{words(rng, literals)}"'
    if kind == "number":
        numbers = ["0", "-0", "1e999", "-1e400", "1e-999", "9" * 400, "9" * 4300, "9" * 6000, "0." + "1" * 3000, "01"]
        return rng.choice(numbers)
    if kind == "list" and depth < 3:
        return f"[{', '.join(json_text(rng, literals, depth + 1) for _ in range(rng.randint(0, 3)))}]"
    if kind == "object" and depth < 3:
        return object_text(rng, literals, depth + 1)
    if kind == "deep":
        levels = rng.choice([5, 60, 63, 64, 65, 100, 300, 480, 900, 1100, 4_000])
        return rng.choice(["[" * levels + "]" * levels, '{"a":' * levels + "1" + "}" * levels])
    if kind == "word":
        return rng.choice(["null", "true", "NaN", "Infinity", "-Infinity", "nul", "undefined", "''"])
    return json.dumps(words(rng, literals), ensure_ascii=rng.random() < 0.5)


def object_text(rng: random.Random, literals: Sequence[str], depth: int = 0) -> str:
    """Return the text of a JSON object, perhaps with a key twice."""
    keys = ["a", "a", "path", "data", words(rng, literals, 3).replace('"', ""), "\\ud800"]
    pairs = [f'"{rng.choice(keys)}": {json_text(rng, literals, depth)}' for _ in range(rng.randint(0, 3))]
    return "{" + ", ".join(pairs) + "}"


def call_text(rng: random.Random, literals: Sequence[str], arguments_key: str) -> str:
    """Return one call as JSON text, mostly one that can be read."""
    raw = words(rng, literals, 3).replace('"', "").replace("\\", "\\\\")
    name = rng.choice(["look", "look", "take", "take", "submit", "look\\ud800", raw, "n" * rng.choice([61, 3_000])])
    texts = json.dumps(words(rng, literals)), f'"{words(rng, literals, 2)}"', '"a\\ud800b"', '"a"'
    arguments = {
        "look": f'{{"path": {rng.choice(texts)}}}',
        "take": f'{{"data": {object_text(rng, literals)}, "number": {rng.choice(["1", "9" * 4299, "1.5"])}}}',
        "submit": f'{{"answer": {texts[0]}}}',
    }.get(name, object_text(rng, literals))
    if rng.random() < 0.1:
        arguments = json_text(rng, literals)
    identifiers = ["x", "", "abcdefghi", "é" * 9, "[INST]abc", "a" * 10, "\\ud800", "abcdefgh\\n", "\\u0000", raw]
    identifier = rng.choice(["3", "null", f'"{rng.choice(identifiers)}"', f'"{rng.choice(identifiers)}"'])
    extra = f', "id": {identifier}' if rng.random() < 0.3 else ""
    return f'{{"name": "{name}", "{arguments_key}": {arguments}{extra}}}'


def turn_text(rng: random.Random, renderer: Renderer, literals: Sequence[str]) -> str:
    """Return a hostile turn in the renderer's own tool format."""
    name = renderer.tool_format.name
    key = "parameters" if name == "llama" else "arguments"
    count = rng.choice([1, 1, 1, 2, 3, 33]) if rng.random() < 0.99 else 2_000
    calls = [call_text(rng, literals, key) for _ in range(min(count, 4))]
    calls = [calls[i % len(calls)] for i in range(count)]
    if name == "hermes":
        text = rng.choice(["", "\n"]).join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)
    elif name == "mistral":
        text = f"[TOOL_CALLS] [{', '.join(calls)}]"
    else:
        text = calls[0]
    kind = rng.random()
    if kind < 0.1:
        text = text[: rng.randint(0, len(text))]
    elif kind < 0.2:
        place = rng.randint(0, len(text))
        text = text[:place] + words(rng, literals, 2) + text[place:]
    elif kind < 0.4:
        text = words(rng, literals)
    elif kind < 0.42:
        text = rng.choice(["<tool_call>", "{", "<think>", "[", "</tool_call>", "[TOOL_CALLS]", '{"name":']) * 3_000
    if rng.random() < 0.2:
        text = f"<think>{words(rng, literals)}</think>{text}"
    return words(rng, literals, 2) + text if rng.random() < 0.1 else text


def hostile_turn(rng: random.Random, renderer: Renderer, literals: Sequence[str]) -> list[int]:
    """Return the tokens of a hostile turn, up to the first that an engine would stop at."""
    vocabulary = renderer.tokenizer.backend_tokenizer.get_vocab_size()
    if rng.random() < 0.15:
        ids = [rng.randrange(vocabulary + 3) for _ in range(rng.randint(0, 40))]
    else:
        ids = renderer.encoder.encode(turn_text(rng, renderer, literals))
    ended = next((place for place, i in enumerate(ids) if i in renderer.stop_token_ids), len(ids))
    end = [] if rng.random() < 0.02 else [rng.choice(renderer.stop_token_ids)]
    return [*ids[:ended], *end] or [renderer.end_of_turn]


def check_recorded(trajectory: Trajectory) -> None:
    """Every text of the trajectory is well formed, and its row reads back as it was written."""
    for message in trajectory.messages:
        calls = json.dumps([[c.name, c.id, c.error, dict(c.arguments)] for c in message.tool_calls], ensure_ascii=False)
        if message.role == "assistant":
            "".join((message.content, message.thinking, message.name, message.tool_call_id, calls)).encode()
    stored = codec.from_row(json.loads(codec.line(codec.to_row(trajectory, "hostile")))).trajectory
    assert [m for m in stored.messages if m.role == "assistant"] == [
        m for m in trajectory.messages if m.role == "assistant"
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_hostile_turns_never_leave_an_episode_ungraded(
    renderers: dict[str, Renderer], echo: EnvRuntime, puppet: Any, family: str
) -> None:
    """Whatever is sampled and whatever the tools return: graded, by the verifier, without an alarm."""
    renderer = renderers[family]
    literals = sorted(renderer.encoder.literals)
    runtime = EnvRuntime(name="hostile", make=Hostile, boxes=echo.boxes)
    played = episode = 0
    while played < TURNS:
        rng = random.Random(f"{family} {episode}")
        turns: list[list[int]] = []

        def says(*_: Any, rng: random.Random = rng, turns: list[list[int]] = turns) -> list[int]:
            turns.append(hostile_turn(rng, renderer, literals))
            return turns[-1]

        trajectory = asyncio.run(
            rollout(
                puppet(says, renderer.stop_token_ids),
                renderer,
                runtime,
                Hostile().task("train", 1, episode),
                rollout_id=RolloutId(seed=1, group=episode, index=0),
                budget=Budget(context=3_000_000, tokens=1_000_000, turns=12),
            )
        )
        outcome = trajectory.outcome
        assert (outcome.grade, outcome.score, outcome.alarm, outcome.fault) == ("graded", 0.0, False, None), (
            f"episode {episode}: {outcome.fault and outcome.fault.trace}\n{renderer.decode(turns[-1])[:2_000]!r}"
        )
        check_recorded(trajectory)
        played += len(turns)
        episode += 1


def test_whatever_a_tool_returns_is_shown() -> None:
    """Results that neither JSON nor Python can write are described; half characters survive until the frame."""

    class Stubborn:
        def __str__(self) -> str:
            raise KeyError("no")

    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert text_of(10**5000) == "a result of type int that cannot be shown as text: ValueError"
    assert text_of({"n": 10**5000}) == "a result of type dict that cannot be shown as text: ValueError"
    assert text_of(deep) == "a result of type list that cannot be shown as text: RecursionError"
    assert text_of(Stubborn()) == "a result of type Stubborn that cannot be shown as text: KeyError"
    assert text_of(Row(text="a\ud800")) == "text='a\\ud800'"
    assert frame(text_of({"a": "\udfff"}), 80) == ('<out>{"a": "\\udfff"}</out>', False)
    assert text_of({"a": [1, None, "é"]}) == '{"a": [1, null, "é"]}'


def test_a_final_answer_and_a_reply_hold_no_half_characters(
    renderers: dict[str, Renderer], echo: EnvRuntime, puppet: Any
) -> None:
    """An author's own `Done` and `Observation` may carry what an agent wrote to a file."""
    renderer = renderers["chatml"]
    turns = [[*renderer.encoder.encode(text), renderer.end_of_turn] for text in ("hello there", "right")]
    answers: list[str] = []

    class Notes(Accepts):
        async def verify(self, submission: Submission, context: Context) -> Verdict:
            answers.append(submission.answer)
            return Verdict(score=1.0)

    class World(Hostile):
        verifier = Notes()

        def on_message(self, text: str) -> Observation | Done:
            return Done("right\udc80") if text == "right" else Observation(content=f"{text}\ud800", role="user")

    trajectory = asyncio.run(
        rollout(
            puppet(lambda *_: turns.pop(0), renderer.stop_token_ids),
            renderer,
            EnvRuntime(name="hostile", make=World, boxes=echo.boxes),
            World().task("train", 1, 0),
            rollout_id=RolloutId(seed=1, group=0, index=0),
            budget=Budget(context=10_000),
        )
    )
    assert (trajectory.outcome.score, answers) == (1.0, ["right\ufffd"])
    assert [m.content for m in trajectory.messages if m.role == "user"][1:] == ["hello there\ufffd"]
