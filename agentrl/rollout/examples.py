"""Turns a data file into examples to train on: whole token sequences with exact masks, or a refusal with the line.

    chat     messages and tools ── the model's own template, turn by turn ── tokens; only assistant turns are trained on
    tokens   the same, and `segments` with token ids and masks ── repeated turn by turn, and must come out the same

A line is one of

    {"messages": [...], "tools": [...]}                                   a trajectory; with `label`, a judged one
    {"prompt": [...], "completion": [...], "tools": [...]}                the same, cut where the first turn begins
    {"prompt": [...], "chosen": [...], "rejected": [...], "tools": [...]} a pair

Token lines hold `segments` (of a pair `chosen_segments` and `rejected_segments`) beside the messages. A mask can only
cover what the policy wrote: everything else is rendered again from the messages, and compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from agentrl.errors import InvariantError, UserError
from agentrl.rollout.data_lines import (
    LineError,
    listed,
    messages_of,
    read_lines,
    tool_names,
    tools_of,
)
from agentrl.rollout.render import Renderer
from agentrl.rollout.token_log import TokenLog
from agentrl.rollout.tool_formats import dump
from agentrl.types import Completion, Message, Outcome, Segment, Task, Trajectory

Kind = Literal["plain", "labelled", "pairs"]
Turns = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One trajectory of a data file."""

    line: int
    """Its line, from 1; the two examples of a pair share theirs."""
    segments: tuple[Segment, ...]
    good: bool = True
    """Whether it is to become likelier: false for the rejected one of a pair, and where `label` is false."""
    hashes: tuple[str, ...] = ()
    """What its task is recognised by (`evaluation.seen_hashes`), where the line says so."""
    prompt: str = ""
    """The first user message."""

    def as_trajectory(self) -> Trajectory:
        """Return it as a demonstration that solved its task."""
        task = Task(id=f"line {self.line}", split="train", level=0, prompt=self.prompt)
        outcome = Outcome(ending="done", grade="graded", score=1.0)
        return Trajectory(
            task=task, group=self.line, index=0, seed=0, segments=self.segments, messages=(), outcome=outcome
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Examples:
    """What a data file holds."""

    path: Path
    kind: Kind
    """pairs: the chosen and the rejected one of each line follow each other."""
    examples: tuple[Example, ...]
    digest: str
    """Of the file."""


def read(path: Path, renderer: Renderer, *, context: int) -> Examples:
    """Read a data file; UserError names the lines that cannot be trained on exactly."""
    if not path.is_file():
        raise UserError(f"warm_start.data: there is no file {path}; `agentrl data RUN --out {path}` writes one")
    kinds: list[tuple[Kind, int]] = []

    def use(number: int, line: dict[str, Any]) -> tuple[Example, ...]:
        kind, examples = examples_of(number, line, renderer, context=context)
        kinds.append((kind, number))
        if kind != kinds[0][0]:
            raise LineError(f"a line of {kind} data in a file of {kinds[0][0]} data (line {kinds[0][1]})")
        return examples

    examples = tuple(example for some in read_lines(path, use) for example in some)
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return Examples(path=path, kind=kinds[0][0], examples=examples, digest=digest.hexdigest()[:16])


def check_fits(data: Examples, loss: str) -> None:
    """Refuse a file that a loss cannot learn from."""
    if loss == "sft" and data.kind == "pairs":
        raise UserError(
            f"{data.path} holds pairs: set warm_start.loss to dpo, ipo, simpo or kto, or make it without --pairs"
        )
    if loss == "sft" and (bad := next((e.line for e in data.examples if not e.good), None)):
        raise UserError(f"{data.path}, line {bad}: its label is false, and sft imitates every line; only kto takes it")
    if loss in ("dpo", "ipo", "simpo") and data.kind != "pairs":
        raise UserError(
            f"{data.path} holds no pairs, and loss: {loss} needs them: `agentrl data RUN --pairs --out FILE`"
        )
    if loss == "kto" and data.kind == "plain":
        raise UserError(f"{data.path} holds neither pairs nor labels, and loss: kto needs one of them")


def described(data: Examples) -> str:
    """Say in words what a file holds."""
    tokens = sum(int(s.loss_mask.sum()) for example in data.examples for s in example.segments)
    count = len(data.examples) // 2 if data.kind == "pairs" else len(data.examples)
    what = {"pairs": "pairs", "labelled": "judged trajectories", "plain": "trajectories"}[data.kind]
    return f"{count} {what} of {data.path}, {tokens:,} tokens to train on"


def examples_of(
    number: int, line: dict[str, Any], renderer: Renderer, *, context: int
) -> tuple[Kind, tuple[Example, ...]]:
    """Return the examples of one line; LineError where its tokens or masks cannot be made exactly."""
    schemas = tools_of(line.get("tools", []))
    hashes = tuple(listed(line.get("hashes", []), "hashes"))
    if not all(isinstance(text, str) for text in hashes):
        raise LineError("hashes must be texts")
    shapes = [keys for keys in (("messages",), ("completion",), ("chosen", "rejected")) if any(k in line for k in keys)]
    if len(shapes) != 1:
        raise LineError("a line holds `messages`, or `prompt` and `completion`, or `prompt`, `chosen` and `rejected`")
    opening: tuple[Message, ...] = ()
    if shapes[0] != ("messages",):
        opening = messages_of(line.get("prompt", []), "prompt")
        if not opening:
            raise LineError("`prompt` is missing: the messages before the first turn")
        if any(message.role == "assistant" for message in opening):
            raise LineError("`prompt` holds an assistant's message; it would be trained on")

    def one(key: str, stored: str, good: bool) -> Example:
        if key not in line:
            raise LineError(f"`{key}` is missing")
        messages = (*opening, *messages_of(line[key], key))
        segments = exact(messages, schemas, renderer, line.get(stored), where=key)
        longest = max(len(segment) for segment in segments)
        if longest > context:
            raise LineError(f"{longest:,} tokens long, and the model takes {context:,}; leave such lines out")
        prompt = next((message.content for message in messages if message.role == "user"), "")
        return Example(line=number, segments=segments, good=good, hashes=hashes, prompt=prompt)

    if shapes[0] == ("chosen", "rejected"):
        pair = one("chosen", "chosen_segments", True), one("rejected", "rejected_segments", False)
        if pair[0].segments == pair[1].segments:
            raise LineError("chosen and rejected are the same tokens")
        return "pairs", pair
    label = line.get("label")
    if label is not None and not isinstance(label, bool):
        raise LineError(f"label must be true or false, found {label!r}")
    example = one(shapes[0][0], "segments", label is not False)
    return ("plain" if label is None else "labelled"), (example,)


def exact(
    messages: Sequence[Message],
    schemas: Sequence[dict[str, Any]],
    renderer: Renderer,
    stored: Any = None,
    *,
    where: str = "messages",
) -> tuple[Segment, ...]:
    """Return the tokens and masks of a conversation. LineError where the template, or `stored`, says otherwise."""
    if stored is None:
        _check_structure(messages, schemas, where)
        _check_texts(messages, schemas, renderer, where)
        return _replayed(messages, schemas, renderer, None, where)
    given = [_stored_segment(item) for item in listed(stored, "segments")]
    turns = [run for ids, mask in given for run in _runs(ids, mask)]
    segments = _replayed(messages, schemas, renderer, turns, where)
    if len(segments) != len(given):
        raise LineError(f"{len(given)} segments, and its messages render to {len(segments)} with this model's template")
    for segment, (ids, mask) in zip(segments, given, strict=True):
        if segment.token_ids.tolist() != ids or segment.loss_mask.tolist() != mask:
            raise LineError(
                "its tokens or mask are not what its messages render to: it was made with another tokenizer or "
                "template, or its mask covers what the policy did not write"
            )
    return segments


def _stored_segment(value: Any) -> tuple[list[int], list[bool]]:
    ids, mask = (value.get("token_ids"), value.get("mask")) if isinstance(value, dict) else (None, None)
    if not isinstance(ids, list) or not isinstance(mask, list) or len(ids) != len(mask) or not ids:
        raise LineError("a segment holds `token_ids` and `mask`, lists of one length")
    if not all(type(i) is int and 0 <= i < 2**31 for i in ids):
        raise LineError("token_ids must be whole numbers from 0")
    if not all(m in (0, 1) and type(m) in (int, bool) for m in mask):
        raise LineError("a mask holds 0 and 1")
    return ids, [bool(m) for m in mask]


def _runs(ids: Sequence[int], mask: Sequence[bool]) -> list[list[int]]:
    """Return the runs of sampled tokens."""
    edges = np.flatnonzero(np.diff(np.array([False, *mask, False], dtype=np.int8)))
    return [list(ids[a:b]) for a, b in edges.reshape(-1, 2).tolist()]


def _check_structure(messages: Sequence[Message], schemas: Sequence[dict[str, Any]], where: str) -> None:
    """Refuse a conversation that no episode can have: results without calls, turns without something to answer."""
    known = set(tool_names(schemas))
    first = next((n for n, message in enumerate(messages) if message.role == "assistant"), None)
    if first is None:
        raise LineError(f"{where} holds no message of the assistant: there is nothing to train on")
    if not any(m.role == "user" for m in messages[:first]) or any(m.role == "tool" for m in messages[:first]):
        raise LineError(f"{where} must begin with a user's message (a system message may come first)")
    pending: list[Any] = []
    for place, message in enumerate(messages):
        at, before = f"{where}[{place}]", messages[place - 1].role if place else ""
        if message.role == "system" and before not in ("", "system"):
            raise LineError(f"{at}: a system message stands first only")
        if message.role == "assistant":
            if before == "assistant":
                raise LineError(f"{at}: two turns of the assistant follow each other")
            if pending:
                raise LineError(f"{at}: {len(pending)} calls of the turn before have no result")
            pending = list(message.tool_calls)
            for call in pending:
                if call.error is not None:
                    raise LineError(f"{at}: a call that could not be read has no exact text; use token data for it")
                if call.name not in known:
                    raise LineError(f"{at} calls {call.name!r}, which is not among the line's tools")
        elif message.role == "tool":
            match = next((c for c in pending if not message.tool_call_id or c.id in ("", message.tool_call_id)), None)
            if match is None or (message.name and message.name != match.name):
                raise LineError(f"{at}: a tool's result that answers no call of the turn before it")
            pending.remove(match)
        elif message.role == "user" and pending:
            raise LineError(f"{at}: {len(pending)} calls of the turn before have no result")


def _check_texts(
    messages: Sequence[Message], schemas: Sequence[dict[str, Any]], renderer: Renderer, where: str
) -> None:
    """Refuse text that spells a control token of the model: nobody can tell whether it is meant as one."""
    for place, message in enumerate(messages):
        calls = "".join(call.name + dump(dict(call.arguments)) + call.id for call in message.tool_calls)
        text = "\n".join((message.content, message.thinking, message.name, message.tool_call_id, calls))
        if (match := renderer.encoder.control.search(text)) is not None:
            raise LineError(f"{where}[{place}] spells the control token {match.group(1)!r} of this model")
    if (match := renderer.encoder.control.search(dump(list(schemas)))) is not None:
        raise LineError(f"tools spell the control token {match.group(1)!r} of this model")


def _replayed(
    messages: Sequence[Message],
    schemas: Sequence[dict[str, Any]],
    renderer: Renderer,
    turns: Turns | None,
    where: str,
) -> tuple[Segment, ...]:
    """Build the tokens as a rollout does: template, sampled turn, observations. `turns` are the sampled ones, by
    default as the renderer writes the messages."""
    log = TokenLog()
    names = tool_names(schemas)
    places = [n for n, message in enumerate(messages) if message.role == "assistant"]
    if not places or (turns is not None and len(turns) != len(places)):
        masked = "no" if turns is None else str(len(turns))
        raise LineError(f"{where} holds {len(places)} turns of the assistant, and the masks {masked}")
    aside, before = False, -1
    sampled: Sequence[int] = ()
    try:
        for number, place in enumerate(places):
            message = messages[place]
            observed = messages[before + 1 : place]
            span = renderer.bridge(observed, sampled[-1], aside=aside) if number else None
            if span is None:
                log.end_segment()
                span = renderer.prompt(messages[:place], schemas)
            log.append(span)
            sampled = renderer.write(message) if turns is None else turns[number]
            if not _same(renderer.parse(sampled, names), message, verbatim=turns is not None):
                raise LineError(f"{where}[{place}]: the assistant's tokens do not read as its message")
            aside, before = aside or renderer.aside(message), place
            count = len(sampled)
            log.append_sampled(
                log.prompt(),
                Completion(token_ids=tuple(sampled), logprobs=(0.0,) * count, versions=(0,) * count, finish="stop"),
            )
        return log.finished()
    except (LineError, InvariantError):
        raise
    except Exception as error:  # a template raises what it likes for messages that it does not take
        raise LineError(f"{where} cannot be rendered with this model's template: {error}") from None


def _same(read: Message, message: Message, *, verbatim: bool) -> bool:
    """Tell whether sampled tokens read as a message. A template's format has no place for outer white space and ids of
    calls; tokens that were stored with their message must read as all of it."""
    if verbatim:
        return read == message
    calls = [[(c.name, dict(c.arguments), c.error) for c in m.tool_calls] for m in (read, message)]
    return (read.content, read.thinking, calls[0]) == (message.content.strip(), message.thinking.strip("\n"), calls[1])
