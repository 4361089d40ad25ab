"""A hostile policy plays whole rollouts through every chat template: each episode ends graded, with no alarm.

Turns are sampled as tokens: calls, well-formed and malformed, made of the expert's and of hostile pieces; random
tokens, control tokens among them. Worlds: one whose tools answer with hostile output, and shipped environments in real
sandboxes. Sixty turns per template; ten thousand with AGENTRL_FULL=1, with a record in docs/evidence/.

    one event loop: 8 workers ── next episode ──> rollout (renders, parses, plays, grades) ──> Tally
                    LoopStalls ── a tick every 10 ms: how long did anything keep the loop?
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from pydantic import BaseModel

from agentrl import codec, envs, sandboxes
from agentrl.envs import Environment, tool
from agentrl.envs.tool_output import frame, text_of
from agentrl.rollout.render import Renderer
from agentrl.rollout.request import Budget, EnvRuntime, RolloutId
from agentrl.rollout.rollout import rollout
from agentrl.sandboxes.pool import Pool
from agentrl.types import Done, Observation, Split, Task, ToolCall, Trajectory, Verdict
from agentrl.verifiers.base import Context, Submission, Verifier
from tests.pace import slowness

FAMILIES = ["chatml", "qwen3", "llama3", "mistral", "gemma"]
FULL = os.environ.get("AGENTRL_FULL") == "1"
TURNS = 10_000 if FULL else 60
WORKERS = 8
MAX_STALL_S = 3.0
"""Seconds for which eight rollouts together may keep the event loop: each renders up to 32,000 tokens per turn."""
SHIPPED = ("files", "repair", "sql", "service", "search")
LONGEST = 200_000
"""Characters of a turn: more than the budget's tokens can hold."""
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


COMMANDS = (
    *(
        "ls -la; cat *",
        "rm -rf . /box/* 2>/dev/null",
        "kill -9 -1",
        "head -c 3000000 /dev/urandom",
        "yes | head -c 9999999",
    ),
    *(
        "printf '\\ud800\\xff\\xfe\\x00'",
        "mkfifo f; ln -s / r",
        "head -c 40000000 /dev/zero > big",
        "exit 3",
        "sleep 1",
    ),
    *(
        "for i in $(seq 40); do sleep 9 & done",
        "select * from sqlite_master",
        "drop table if exists a",
        "pragma x=1",
        "",
    ),
    *("with recursive n(i) as (select 1 union all select i+1 from n) select count(*) from n", "../../etc/passwd", "/"),
)
"""What a policy asks of a shell, a database or a path."""


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
        taken = ToolCall(name="take", arguments={"data": {"a": 1}, "number": 1})
        return [
            ToolCall(name="look", arguments={"path": "a"}),
            taken,
            ToolCall(name="submit", arguments={"answer": "a"}),
            "right",
        ]


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


def value_text(rng: random.Random, literals: Sequence[str], value: Any) -> str:
    """Return the text of an argument: the expert's, or a hostile one, mostly of the same type."""
    chance = rng.random()
    if chance < 0.3:
        return json.dumps(value)
    if chance < 0.4:
        return json_text(rng, literals)
    if isinstance(value, dict):
        return object_text(rng, literals)
    if isinstance(value, str):
        hostile = words(rng, literals)
        texts = [json.dumps(hostile), f'"{words(rng, literals, 2)}"', '"a\\ud800b"', json.dumps(rng.choice(COMMANDS))]
        place = rng.randint(0, len(value))
        return rng.choice([*texts, json.dumps(value[:place] + hostile + value[place:])])
    return rng.choice(["1", "-1", "9" * 4299, "1.5", "true", "1e308"])


def call_text(rng: random.Random, literals: Sequence[str], arguments_key: str, known: Sequence[ToolCall]) -> str:
    """Return one call as JSON text, mostly one that can be read, of a tool that the expert uses."""
    raw = words(rng, literals, 3).replace('"', "").replace("\\", "\\\\")
    call = rng.choice(known)
    names = [call.name] * 6 + [f"{call.name}\\ud800", raw, "n" * rng.choice([61, 3_000])]
    pairs = [f'"{key}": {value_text(rng, literals, value)}' for key, value in call.arguments.items()]
    if rng.random() < 0.1:
        pairs += [f'"{raw or "x"}{i}": 1' for i in range(rng.choice([1, 3_000]))]
    arguments = "{" + ", ".join(pairs) + "}"
    if rng.random() < 0.1:
        arguments = json_text(rng, literals)
    identifiers = ["x", "", "abcdefghi", "é" * 9, "[INST]abc", "a" * 10, "\\ud800", "abcdefgh\\n", "\\u0000", raw]
    identifier = rng.choice(["3", "null", f'"{rng.choice(identifiers)}"', f'"{rng.choice(identifiers)}"'])
    extra = f', "id": {identifier}' if rng.random() < 0.3 else ""
    return f'{{"name": "{rng.choice(names)}", "{arguments_key}": {arguments}{extra}}}'


def turn_text(rng: random.Random, renderer: Renderer, literals: Sequence[str], known: Sequence[ToolCall]) -> str:
    """Return a hostile turn in the renderer's own tool format."""
    name = renderer.tool_format.name
    key = "parameters" if name == "llama" else "arguments"
    count = rng.choice([1, 1, 1, 2, 3, 33]) if rng.random() < 0.99 else 2_000
    calls = [call_text(rng, literals, key, known) for _ in range(min(count, 4))]
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


def hostile_turn(rng: random.Random, renderer: Renderer, known: Sequence[ToolCall]) -> list[int]:
    """Return the tokens of a hostile turn, up to the first that an engine would stop at."""
    vocabulary = renderer.tokenizer.backend_tokenizer.get_vocab_size()
    if rng.random() < 0.15:
        ids = [rng.randrange(vocabulary + 3) for _ in range(rng.randint(0, 40))]
    else:
        text = turn_text(rng, renderer, sorted(renderer.encoder.literals), known)
        ids = renderer.encoder.encode(text[:LONGEST])
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


class LoopStalls:
    """Measures the longest time that anything but the scripted policy kept the event loop, by this thread's own clock:
    a neighbour that takes the processor does not count."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self.excused = 0.0
        self._last = time.thread_time()

    def tick(self) -> None:
        now = time.thread_time()
        self.longest_s = max(self.longest_s, now - self._last - self.excused)
        self._last, self.excused = now, 0.0
        asyncio.get_running_loop().call_later(0.01, self.tick)


@dataclass
class Tally:
    """What became of the episodes."""

    turns: int = 0
    episodes: int = 0
    endings: Counter[str] = field(default_factory=Counter)
    worlds: Counter[str] = field(default_factory=Counter)
    ungraded: list[str] = field(default_factory=list)
    """What ended without a grade, or was graded only because an exception recurred."""

    def add(self, world: str, turns: Sequence[list[int]], trajectory: Trajectory, renderer: Renderer) -> None:
        outcome = trajectory.outcome
        if (outcome.grade, outcome.alarm, outcome.score is None) != ("graded", False, False):
            trace = outcome.fault.trace if outcome.fault is not None else ""
            self.ungraded.append(
                f"{trajectory.task.id} {outcome.grade}: {trace}\n{renderer.decode(turns[-1])[:2_000]!r}"
            )
        self.turns += len(turns)
        self.episodes += 1
        self.endings[outcome.ending] += 1
        self.worlds[world] += 1


@pytest.fixture(scope="module")
def worlds() -> Iterator[list[EnvRuntime]]:
    """The hostile world, and shipped environments where there are real sandboxes for them."""
    backend = sandboxes.load("namespace")()
    pool = Pool(backend, limit=2 * WORKERS)
    names = SHIPPED if backend.available().works else ()
    yield [
        EnvRuntime(name="hostile", make=Hostile, boxes=pool),
        *(EnvRuntime(name=name, make=envs.load(name), boxes=pool) for name in names),
    ]
    pool.close()


async def play(family: str, renderer: Renderer, worlds: Sequence[EnvRuntime], puppet: Any) -> tuple[Tally, float]:
    """Play hostile episodes until there are enough turns. Return what became of them, and the longest stall."""
    tally, stalls = Tally(), LoopStalls()
    stalls.tick()
    numbers = iter(range(1_000_000))

    async def episode(number: int) -> None:
        rng = random.Random(f"{family} {number}")
        runtime = worlds[number % len(worlds)]
        environment = runtime.make()
        task = environment.task("train", rng.choice(list(environment.levels)), number)
        known = [action for action in environment.expert(task) if isinstance(action, ToolCall)]
        turns: list[list[int]] = []

        def says(*_: Any) -> list[int]:
            began = time.thread_time()
            turns.append(hostile_turn(rng, renderer, known))
            stalls.excused += time.thread_time() - began
            return turns[-1]

        trajectory = await rollout(
            puppet(says, renderer.stop_token_ids),
            renderer,
            runtime,
            task,
            rollout_id=RolloutId(seed=1, group=number, index=0),
            budget=Budget(context=32_000, tokens=16_000, turns=24, tool_seconds=6.0),
        )
        began = time.thread_time()
        if number % 4 == 0:
            check_recorded(trajectory)
        tally.add(runtime.name, turns, trajectory, renderer)
        stalls.excused += time.thread_time() - began

    async def work() -> None:
        while tally.turns < TURNS:
            await episode(next(numbers))

    await asyncio.gather(*(work() for _ in range(WORKERS)))
    return tally, stalls.longest_s


@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("family", FAMILIES)
def test_hostile_turns_never_leave_an_episode_ungraded(
    renderers: dict[str, Renderer],
    worlds: list[EnvRuntime],
    puppet: Any,
    evidence: Callable[[str, Any], None],
    family: str,
) -> None:
    """Whatever is sampled and whatever the tools return: graded, by the verifier, without an alarm."""
    began = time.monotonic()
    tally, stall_s = asyncio.run(play(family, renderers[family], worlds, puppet))
    if FULL:
        record = {
            "turns": tally.turns,
            "episodes": tally.episodes,
            "endings": dict(sorted(tally.endings.items())),
            "environments": dict(sorted(tally.worlds.items())),
            "ungraded": len(tally.ungraded),
            "longest_loop_stall_s": round(stall_s, 3),
            "seconds": round(time.monotonic() - began),
        }
        evidence(f"hostile-turns-{family}", record)
    assert tally.ungraded == []
    assert tally.turns >= TURNS and len(tally.worlds) == len(worlds)
    assert stall_s < MAX_STALL_S * slowness()


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
