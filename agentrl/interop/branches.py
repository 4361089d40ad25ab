"""Lays the requests of a black-box agent onto branches of exact tokens, and chooses the branches to train on.

    request: messages, tools ──┬─ its history is what a branch heard and said ──> only the new messages are rendered
                               └─ anything else (edited, forged, compacted, other tools, a sub-agent) ──> a new branch

A history counts as known only up to an answer that this session returned, compared message by message: what was sent
before, and what came back. Nothing is guessed, so that a mask can never lie on tokens of the agent's own making.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from agentrl.rollout.encoder import Span
from agentrl.rollout.render import Renderer
from agentrl.rollout.token_log import TokenLog
from agentrl.types import Completion, Message, Segment, Source

Rule = Literal["lineage", "final", "all"]
"""Which branches are trained on; see `chosen`."""

CHARACTERS = 16
"""Characters per token of the context above which a conversation is too long without being tokenised."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer of the policy, as a place on a branch."""

    number: int
    """Counted over the session, in the order of the answers: turns that two branches share have one number."""
    messages: int
    """Messages of the branch up to and including the answer."""
    segment: int
    start: int
    """Where its sampled tokens begin in the segment."""
    end: int
    last_token: int
    aside: bool
    """Whether the branch so far held text that some templates remove from history."""


@dataclass(slots=True, eq=False)
class Branch:
    """A conversation with its tokens."""

    opened: int
    """The session's clock when it began."""
    tools: str
    """The tools' schemas as canonical JSON: other tools make another conversation."""
    log: TokenLog
    messages: list[Message] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    digest: bytes = b""
    """Of the messages so far."""
    origin: Branch | None = None
    """The branch whose beginning it shares: it answers the same history once more."""
    busy: bool = False
    """A request is under way, or one was given up: nothing can be appended."""

    @property
    def system(self) -> str:
        """The system message, by which the agents behind one session are told apart."""
        return "\n\n".join(m.content for m in self.messages if m.role == "system")

    @property
    def last(self) -> int:
        """The number of its last answer; -1 without one."""
        return self.turns[-1].number if self.turns else -1


def canonical(value: Any) -> str:
    """Return JSON data as one spelling."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def key(message: Message) -> bytes:
    """Return what of a message must survive a framework's round trip; spelling of JSON and outer white space may not.

    Thinking is left out, as most clients do not send it back. Ids of calls are ours, and tie a result to its call.
    """
    calls = [[c.name, dict(c.arguments)] for c in message.tool_calls]
    text = canonical([message.role, message.content.strip(), calls, message.tool_call_id])
    return text.encode("utf-8", "surrogatepass")


def digest_of(message: Message) -> bytes:
    """Return a hash of what must survive."""
    return hashlib.sha256(key(message)).digest()


def chain(start: bytes, digests: Iterable[bytes]) -> bytes:
    """Return the digest of a conversation that continues one, from those of its messages."""
    total = start
    for digest in digests:
        total = hashlib.sha256(total + digest).digest()
    return total


class Branches:
    """All branches of one session."""

    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer
        self.branches: list[Branch] = []
        self.retries = 0
        """Requests that asked once more what was answered already."""
        self._answered: dict[tuple[str, bytes], list[tuple[Branch, Turn]]] = {}
        """Where each known history ends."""
        self._asked: set[tuple[str, bytes]] = set()
        self._clock = 0

    def place(
        self,
        messages: Sequence[Message],
        schemas: Sequence[dict[str, Any]],
        room: int,
        digests: Sequence[bytes] | None = None,
        size: int | None = None,
    ) -> tuple[Branch, Span]:
        """Return the branch that a request continues, or a new one, and the tokens to append; the branch is busy then.

        `digests` are those of the messages, where they are known; `size` is the request's in bytes.
        `room` is the longest prompt. Raises ValueError where the conversation cannot be rendered or is too long.
        """
        tools = canonical(list(schemas))
        if size is None or size > CHARACTERS * room:  # nobody else waits while megabytes are tokenised for nothing
            calls = sum(len(canonical(dict(c.arguments))) for m in messages for c in m.tool_calls)
            size = sum(len(m.content) for m in messages) + calls + len(tools)
            if size > CHARACTERS * room:
                raise TooLong(f"{size} characters", room)
        known = 1 + max((i for i, m in enumerate(messages) if m.role == "assistant"), default=-1)
        digests = [digest_of(m) for m in messages] if digests is None else digests
        past, new = chain(b"", digests[:known]), messages[known:]
        places = self._answered.get((tools, past), []) if known else []
        digest = chain(past, digests[known:])
        self.retries += (tools, digest) in self._asked
        self._asked.add((tools, digest))
        self._clock += 1
        if not places or not new or not all(m.role in ("user", "tool") for m in new):
            branch, rewritten = Branch(opened=self._clock, tools=tools, log=TokenLog()), True
            span = self._opening(messages, schemas)
        else:
            branch, turn = next(((b, t) for b, t in places if b.turns[-1] is t and not b.busy), places[-1])
            span, rewritten = self._continued(messages, schemas, new, turn)
            if branch.busy or branch.turns[-1] is not turn:
                branch = self._fork(branch, turn)
        length = len(span.token_ids) + (0 if rewritten else len(branch.log))
        if length > room:
            raise TooLong(f"{length} tokens", room)
        if rewritten:
            branch.log.end_segment()
        if branch not in self.branches:
            self.branches.append(branch)
        branch.busy, branch.messages, branch.digest = True, list(messages), digest
        branch.log.append(span)
        return branch, span

    def _opening(self, messages: Sequence[Message], schemas: Sequence[dict[str, Any]]) -> Span:
        try:
            return self.renderer.prompt(messages, schemas)
        except Exception as error:  # a template raises what it likes
            raise ValueError(f"the model's chat template does not take this conversation: {error}") from error

    def _continued(
        self, messages: Sequence[Message], schemas: Sequence[dict[str, Any]], new: Sequence[Message], turn: Turn
    ) -> tuple[Span, bool]:
        """Return the tokens of the new messages, or of the whole conversation where the template rewrites history."""
        span = self.renderer.bridge(new, turn.last_token, aside=turn.aside)
        return (span, False) if span is not None else (self._opening(messages, schemas), True)

    def _fork(self, branch: Branch, turn: Turn) -> Branch:
        number = branch.turns.index(turn) + 1
        return Branch(
            opened=self._clock,
            tools=branch.tools,
            log=branch.log.fork(turn.segment, turn.end),
            turns=branch.turns[:number],
            origin=branch,
        )

    def answered(self, branch: Branch, number: int, start: int, completion: Completion, said: Message) -> None:
        """Record an answer whose tokens are on the branch's log already; `said` is the message as the agent gets it."""
        branch.messages.append(said)
        branch.digest = chain(branch.digest, [digest_of(said)])
        aside = (branch.turns[-1].aside if branch.turns else False) or self.renderer.aside(said)
        turn = Turn(
            number,
            len(branch.messages),
            len(branch.log.segments),
            start,
            len(branch.log),
            completion.token_ids[-1],
            aside,
        )
        branch.turns.append(turn)
        branch.busy = False
        self._answered.setdefault((branch.tools, branch.digest), []).append((branch, turn))


class TooLong(ValueError):
    """A conversation that does not fit the context."""

    def __init__(self, size: str, room: int) -> None:
        super().__init__(f"the conversation has {size} and the context of this run takes {room} tokens")


def final_branch(branches: Sequence[Branch], answer: str | None) -> Branch | None:
    """Return the branch of the final answer: the last one whose answer it is, else the one that spoke last."""
    spoke = sorted((b for b in branches if b.turns), key=lambda b: b.last)
    said = [b for b in spoke if answer is not None and b.messages[-1].content.strip() == answer.strip()]
    return said[-1] if said else spoke[-1] if spoke else None


def chosen(
    branches: Sequence[Branch],
    rule: Rule,
    *,
    answer: str | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> list[Branch]:
    """Return the branches to train on, in the order in which they began.

    final     the branch of the final answer alone
    lineage   also the conversations that it replaced: same system message and tools, each over before the next began
              (an agent that compacts or rewrites its context); of retries the one that was continued
    all       every branch

    `include` and `exclude` are texts to look for in system messages: sub-agents, titles and summaries can be added or
    left out by them; `exclude` counts more.
    """
    final = final_branch(branches, answer)
    if final is None:
        return []
    spoke = [b for b in branches if b.turns]
    if rule == "all":
        picked = spoke
    elif rule == "final":
        picked = [final]
    else:
        picked = [final]
        same = [b for b in spoke if b is not final and (b.system, b.tools) == (final.system, final.tools)]
        for branch in sorted(same, key=lambda b: (b.last, b.opened), reverse=True):
            if _replaced(branch, picked[-1]):
                picked.append(branch)
    picked += [b for b in spoke if b not in picked and any(text in b.system for text in include)]
    picked = [b for b in picked if not any(text in b.system for text in exclude)]
    return sorted(picked, key=lambda b: b.opened)


def _replaced(earlier: Branch, later: Branch) -> bool:
    """Tell whether a conversation was over when another took its place, and was not merely asked once more."""
    first = later
    while first.origin is not None:
        first = first.origin
    over = earlier.last < (first.turns[0].number if first.turns else 0)
    opening = earlier.messages[: earlier.turns[0].messages - 1]
    asked_again = [key(m) for m in opening] == [key(m) for m in first.messages[: first.turns[0].messages - 1]]
    return over and not asked_again and earlier.origin is not first


def segments_of(branches: Sequence[Branch]) -> tuple[Segment, ...]:
    """Return the segments of branches; a turn that several share is trained on once, in the first of them."""
    done: set[int] = set()
    segments: list[Segment] = []
    for branch in branches:
        ends = {turn.segment: turn.end for turn in branch.turns}
        whole = branch.log.fork(branch.turns[-1].segment, branch.turns[-1].end)
        whole.end_segment()
        for number, segment in enumerate(whole.segments):
            if number not in ends:
                continue
            repeated = [t for t in branch.turns if t.segment == number and t.number in done]
            segment = _without(segment, repeated, ends[number])
            if segment.loss_mask.any():
                segments.append(segment)
        done.update(turn.number for turn in branch.turns)
    return tuple(segments)


def _without(segment: Segment, repeated: Sequence[Turn], end: int) -> Segment:
    """Return a segment up to its last answer, with turns that stand elsewhere as context that is not trained on."""
    if not repeated and end == len(segment):
        return segment
    sources, logprobs = segment.sources[:end].copy(), segment.logprobs[:end].copy()
    versions = segment.versions[:end].copy()
    for turn in repeated:
        sources[turn.start : turn.end] = Source.TEMPLATE
        logprobs[turn.start : turn.end] = 0.0
        versions[turn.start : turn.end] = -1
    experts = None if segment.experts is None else segment.experts[:end]
    return Segment(np.asarray(segment.token_ids[:end]), logprobs, versions, sources, experts)


def returned(said: Message, ids: Iterable[str]) -> Message:
    """Return a parsed turn as the agent gets it: with ids of ours, and all as text where a call cannot be read.

    Space before the first word is left out in every case: a stream cannot know which case it will be.
    """
    said = replace(said, content=said.content.lstrip())
    if any(call.error is not None for call in said.tool_calls):
        return replace(said, tool_calls=())
    fresh = iter(ids)
    return replace(said, tool_calls=tuple(replace(call, id=next(fresh)) for call in said.tool_calls))
