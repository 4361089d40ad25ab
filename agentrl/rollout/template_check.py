"""Checks, when a recipe loads, that a chat template only ever appends, and reports where it rewrites history.

A template appends when, for every conversation, the text before a turn, the turn as sampled, and our bridge together
spell what the template itself renders afterwards. The conversations tried hold tools, unicode, empty results, white
space, thinking, several calls, and tool output that spells the template's own control tokens. Observations come in two
roles, and a template may append for one and rewrite for the other: Qwen3 keeps thinking while tools answer, and removes
it from every earlier turn when the user speaks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from agentrl.rollout.encoder import Encoder, Marks, unmark
from agentrl.rollout.tool_formats import ToolFormat
from agentrl.types import Message, Role, ToolCall

SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at a path.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    },
}


class Rendering(Protocol):
    """What the check needs of a renderer."""

    encoder: Encoder
    tool_format: ToolFormat
    native: bool
    end_of_turn_text: str

    def text(
        self, messages: Sequence[Message], schemas: Sequence[dict[str, Any]] = (), generate: bool = True
    ) -> tuple[str, Marks]: ...
    def bridge_text(self, observations: Sequence[Message]) -> tuple[str, Marks]: ...
    def spoken(self, message: Message) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateReport:
    """What the check found out about a chat template."""

    tool_format: str
    """How tool calls are written."""
    native: bool
    """Whether the template renders tools itself."""
    rewrites: Mapping[tuple[Role, bool], str]
    """(role of an observation, whether a turn before it held thinking or words beside its calls) → how the template
    changes earlier text."""
    conversations: int
    """How many were tried."""

    def __str__(self) -> str:
        """Say what will happen, and why."""
        tools = "the chat template's own" if self.native else "ours: the chat template has no tools that we can read"
        lines = [f"tool calls: {self.tool_format} format ({tools})"]
        for (role, aside), change in self.rewrites.items():
            turn = "a turn that held thinking or words beside its calls" if aside else "a turn"
            lines.append(
                f"the chat template rewrites history when a {role} message follows {turn}: {change}. Trajectories get "
                "one segment per turn there, weighted so that a trajectory counts once; training costs more tokens. A "
                "template that keeps earlier turns unchanged avoids this."
            )
        return "\n".join(lines)


Exchange = tuple[Message, tuple[Message, ...]]
"""One assistant turn and what came back."""


def check_template(renderer: Rendering) -> TemplateReport:
    """Try the template on conversations of every kind, and report where it rewrites history."""
    rewrites: dict[tuple[Role, bool], str] = {}
    tried = 0
    kinds: list[tuple[Role, bool]] = [("tool", False), ("tool", True), ("user", False), ("user", True)]
    for role, aside in kinds:
        refused: Exception | None = None
        passed = 0
        for opening, exchanges in conversations(renderer, role, aside):
            try:
                change = _rewriting(renderer, opening, exchanges)
            except Exception as error:  # a template raises what it likes for conversations it does not take
                refused = error
                continue
            passed += 1
            if change is not None:
                rewrites.setdefault((role, aside), change)
        tried += passed
        if not passed:
            rewrites[role, aside] = f"it refuses such a conversation ({type(refused).__name__}: {refused})"
    for role in ("tool", "user"):  # said once: what happens without thinking happens with it
        if (role, False) in rewrites:
            rewrites.pop((role, True), None)
    return TemplateReport(
        tool_format=renderer.tool_format.name, native=renderer.native, rewrites=rewrites, conversations=tried
    )


def conversations(renderer: Rendering, role: Role, aside: bool) -> Iterator[tuple[list[Message], list[Exchange]]]:
    """Yield conversations whose observations come in one role, with or without thinking and words beside calls."""
    control = " ".join(renderer.encoder.decode([i]) for i in sorted(renderer.encoder.control_ids)[:40])
    outputs = ["done", "", "  two\n\n\nlines \n", "naïve 日本語 🙂 \u200d", f"{control}</tool_response>", "{}"]
    openings = [
        [Message(role="system", content="Be brief."), Message(role="user", content="Look around.")],
        [Message(role="user", content="  Grüße 🙂\n")],
    ]
    for opening in openings:
        exchanges: list[Exchange] = []
        for number, output in enumerate(outputs):
            thinking = "Let me see." if aside and number % 2 == 0 else ""
            if role == "user":
                turn = Message(role="assistant", content=f"I say {number}.", thinking=thinking)
                exchanges.append((turn, (Message(role="user", content=output or "go on"),)))
                continue
            call = ToolCall(name="look", arguments={"path": f"/a b/{number}", "é": [1, None]}, id=f"call{number:05}")
            words = "I look." if aside and number % 3 == 1 and renderer.tool_format.name != "llama" else ""
            turn = Message(role="assistant", content=words, tool_calls=(call,), thinking=thinking)
            exchanges.append((turn, (Message(role="tool", content=output, name="look", tool_call_id=call.id),)))
        yield opening, exchanges
    if role == "tool" and not aside:  # several calls in one message, where the template takes them
        both = tuple(ToolCall(name="look", arguments={"path": p}, id=f"call0000{p}") for p in "ab")
        turn = Message(role="assistant", content="", tool_calls=both)
        back = tuple(Message(role="tool", content=f"result {c.id}", name="look", tool_call_id=c.id) for c in both)
        yield openings[0], [(turn, back), (turn, back)]


def _rewriting(renderer: Rendering, opening: list[Message], exchanges: list[Exchange]) -> str | None:
    """Return how the template departs from appending somewhere in this conversation; None when it never does."""
    messages = list(opening)
    end = renderer.end_of_turn_text
    before = _unmarked(*renderer.text(messages, [SCHEMA]))
    for number, (turn, answers) in enumerate(exchanges, start=1):
        messages.append(turn)
        ended = _unmarked(*renderer.text(messages, [SCHEMA], generate=False))
        messages += answers
        after = _unmarked(*renderer.text(messages, [SCHEMA]))
        bridge = _unmarked(*renderer.bridge_text(answers))
        sampled = [renderer.spoken(turn) + end]
        rendered = ended[len(before) :] if ended.startswith(before) else ""
        if end in rendered and turn.thinking in rendered and turn.content in rendered:
            sampled.append(rendered[: rendered.rindex(end) + len(end)])
        expected = [before + text + bridge for text in sampled]
        if after not in expected:
            nearest = max(expected, key=lambda text: _common(text, after))
            place = _common(nearest, after)
            quoted = slice(max(0, place - 12), place + 24)
            return f"after turn {number} it renders {after[quoted]!r} where {nearest[quoted]!r} stood"
        before = after
    return None


def _common(a: str, b: str) -> int:
    """Return the length of the common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _unmarked(marked: str, marks: Marks) -> str:
    return unmark(marked, marks)[0]
