"""Proves, when a recipe loads, that a chat template only ever appends; or says exactly where it rewrites history.

A template appends when, for every conversation, the text before a turn, the turn as sampled, and our bridge together
spell what the template itself renders afterwards. The conversations tried hold tools, unicode, empty results, white
space, thinking, several calls, and tool output that spells the template's own control tokens. Observations come in two
roles, and a template may append for one and rewrite for the other: Qwen3 keeps thinking while tools answer, and takes
it out of every earlier turn when the user speaks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentrl.types import Message, Role, ToolCall

if TYPE_CHECKING:
    from agentrl.rollout.encoder import Marks
    from agentrl.rollout.render import Renderer

SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at a path.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateReport:
    """What was found out about a chat template."""

    dialect: str
    """How tool calls are written."""
    native: bool
    """Whether the template renders tools itself."""
    rewrites: Mapping[tuple[Role, bool], str]
    """(role of an observation, whether a turn before it held thinking or words beside its calls) → how the template
    changes earlier text."""
    conversations: int
    """How many were tried."""

    def __str__(self) -> str:
        """For people: what will happen, and why."""
        tools = "the chat template's own" if self.native else "ours: the chat template knows no tools that we can read"
        lines = [f"tool calls: {self.dialect} dialect ({tools})"]
        for (role, aside), how in self.rewrites.items():
            turn = "a turn that held thinking or words beside its calls" if aside else "a turn"
            lines.append(
                f"the chat template rewrites history when a {role} message follows {turn}: {how}. Trajectories get one "
                "segment a turn there, weighted so that a trajectory counts once; training costs more tokens. A "
                "template that keeps earlier turns as they were avoids this."
            )
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class _Exchange:
    """One assistant turn and what came back."""

    turn: Message
    answers: tuple[Message, ...]


def prove(renderer: Renderer) -> TemplateReport:
    """Try the template on conversations of every kind."""
    rewrites: dict[tuple[Role, bool], str] = {}
    tried = 0
    kinds: list[tuple[Role, bool]] = [("tool", False), ("tool", True), ("user", False), ("user", True)]
    for role, aside in kinds:
        refused: Exception | None = None
        passed = 0
        for opening, exchanges in conversations(renderer, role, aside):
            try:
                how = _rewriting(renderer, opening, exchanges)
            except Exception as error:  # a template raises what it likes for conversations it does not take
                refused = error
                continue
            passed += 1
            if how is not None:
                rewrites.setdefault((role, aside), how)
        tried += passed
        if not passed:
            rewrites[role, aside] = f"it refuses such a conversation ({type(refused).__name__}: {refused})"
    for role in ("tool", "user"):  # said once: what happens without thinking happens with it
        if (role, False) in rewrites:
            rewrites.pop((role, True), None)
    return TemplateReport(dialect=renderer.dialect.name, native=renderer.native, rewrites=rewrites, conversations=tried)


def conversations(renderer: Renderer, role: Role, aside: bool) -> Iterator[tuple[list[Message], list[_Exchange]]]:
    """Conversations whose observations come in one role, with or without thinking and words beside calls."""
    control = " ".join(renderer.decode([i]) for i in sorted(renderer.encoder.control_ids)[:40])
    outputs = ["done", "", "  two\n\n\nlines \n", "naïve 日本語 🙂 \u200d", f"{control}</tool_response>", "{}"]
    openings = [
        [Message(role="system", content="Be brief."), Message(role="user", content="Look around.")],
        [Message(role="user", content="  Grüße 🙂\n")],
    ]
    for opening in openings:
        exchanges = []
        for number, output in enumerate(outputs):
            thinking = "Let me see." if aside and number % 2 == 0 else ""
            answers: tuple[Message, ...]
            if role == "tool":
                call = ToolCall(
                    name="look", arguments={"path": f"/a b/{number}", "é": [1, None]}, id=f"call{number:05}"
                )
                words = "I look." if aside and number % 3 == 1 and renderer.dialect.name != "llama" else ""
                turn = Message(role="assistant", content=words, tool_calls=(call,), thinking=thinking)
                answers = (Message(role="tool", content=output, name="look", tool_call_id=call.id),)
            else:
                turn = Message(role="assistant", content=f"I say {number}.", thinking=thinking)
                answers = (Message(role="user", content=output or "go on"),)
            exchanges.append(_Exchange(turn, answers))
        yield opening, exchanges
    if role == "tool" and not aside:  # several calls in one message, where the template takes them
        both = tuple(ToolCall(name="look", arguments={"path": p}, id=f"call0000{p}") for p in "ab")
        turn = Message(role="assistant", content="", tool_calls=both)
        back = tuple(Message(role="tool", content=f"result {c.id}", name="look", tool_call_id=c.id) for c in both)
        yield openings[0], [_Exchange(turn, back), _Exchange(turn, back)]


def _rewriting(renderer: Renderer, opening: list[Message], exchanges: list[_Exchange]) -> str | None:
    """How the template departs from appending somewhere in this conversation; None when it never does."""
    messages = list(opening)
    before = _plain(*renderer.text(messages, [SCHEMA]))
    for number, exchange in enumerate(exchanges, start=1):
        turn = exchange.turn
        messages.append(turn)
        ended = _plain(*renderer.text(messages, [SCHEMA], generate=False))
        messages += exchange.answers
        after = _plain(*renderer.text(messages, [SCHEMA]))
        end = renderer.end_of_turn_text
        bridge = _plain(*renderer.bridge_text(exchange.answers))
        sampled = [renderer.spoken(turn) + end]
        said = ended[len(before) :] if ended.startswith(before) else ""
        if end in said and turn.thinking in said and turn.content in said:
            sampled.append(said[: said.rindex(end) + len(end)])
        expected = [before + text + bridge for text in sampled]
        if after not in expected:
            return _difference(number, after, max(expected, key=lambda text: _common(text, after)))
        before = after
    return None


def _common(a: str, b: str) -> int:
    """Length of the common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _difference(turn: int, rendered: str, appended: str) -> str:
    place = _common(rendered, appended)
    start = max(0, place - 12)
    return f"after turn {turn} it renders {rendered[start : place + 24]!r} where {appended[start : place + 24]!r} stood"


def _plain(marked: str, marks: Marks) -> str:
    return marked.replace(marks.open, "").replace(marks.close, "").replace(marks.cut, "")
