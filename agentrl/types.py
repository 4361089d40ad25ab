"""What the parts of the system hand to each other: one frozen type per stage, checked when it is built.

    Task ─ Episode ─ Message/ToolCall/Observation ─ Completion ─ Trajectory ─ Verdict ─ Outcome
         ─ Group ─ Round ─ TrainingSample

Nothing here knows torch. Token arrays are numpy: a trajectory of 100,000 tokens costs 1.3 MB.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from agentrl.errors import Fault

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
Split = Literal["train", "heldout", "test"]
Role = Literal["system", "user", "assistant", "tool"]
Ending = Literal["done", "max_turns", "max_tokens", "timeout", "agent_error"]
Grade = Literal["graded", "infra_error", "verifier_error"]
Finish = Literal["stop", "length", "abort"]
Trust = Literal["sealed", "proxied", "shared", "judged", "reported"]

BRANCH = 10_000
"""More than the episodes of any group: what tells the index of a continuation from that of an episode."""
SPLITS: tuple[Split, ...] = ("train", "heldout", "test")


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One problem of an environment, made by `Environment.task(split, level, index)`."""

    id: str
    """Unique within the environment, e.g. `files/train/3/17`."""
    split: Split
    """Which of the disjoint sets it belongs to."""
    level: int
    """How hard it is, as the environment counts."""
    tags: tuple[str, ...] = ()
    """Features that tasks of similar difficulty share; the curriculum pools its evidence over them."""
    family: str = ""
    """Variants of one task share it: a policy that solves one mostly solves the others, so intervals count them as one.
    Empty: a task of its own."""
    prompt: str
    """What the policy is told."""
    setup: Mapping[str, Any] = field(default_factory=dict)
    """What `prepare` and the tools may use to build the episode; the policy may find out all of it."""
    secret: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """For the verifier alone: never in a sandbox, a log or a trajectory file."""

    def public(self) -> Task:
        """Return the task as an episode sees it: without its secret."""
        return replace(self, secret={})


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call as the policy wrote it; its arguments are validated only when the tool runs."""

    name: str
    """The tool's name, perhaps one that does not exist."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """The arguments as parsed JSON."""
    id: str = ""
    """The tool format's identifier, where it has one."""
    error: str | None = None
    """Set when the call could not be parsed: it is answered with this text and never executed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a conversation."""

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    """The assistant's calls, in order."""
    tool_call_id: str = ""
    """For a tool's answer: which call it answers."""
    name: str = ""
    """For a tool's answer: the tool."""
    thinking: str = ""
    """What the assistant wrote inside its thinking block; no tool and no verifier takes it for an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What the policy gets to see after it acted: untrusted data, framed and cut to its limit already."""

    content: str
    role: Literal["tool", "user"] = "tool"
    name: str = ""
    """The tool that produced it."""
    call_id: str = ""
    error: bool = False
    """The call was refused or failed; the text says why."""
    truncated: bool = False
    """The output was longer than its limit; the text says so."""

    def message(self) -> Message:
        """Return the observation as a message of the conversation."""
        return Message(role=self.role, content=self.content, tool_call_id=self.call_id, name=self.name)


@dataclass(frozen=True, slots=True)
class Done:
    """Returned by `on_message` or a terminal tool: the episode is over, and this is its final answer."""

    answer: str = ""


class Source(IntEnum):
    """Where a token of a trajectory came from. Only sampled tokens are ever trained on.

    What an episode sampled before a continuation branched off is an observation of the continuation.
    """

    TEMPLATE = 0
    OBSERVATION = 1
    SAMPLED = 2
    FORCED = 3
    """Written into the policy's turn to end its thinking: part of the turn, never of the loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The tokens that an engine sampled for one request."""

    token_ids: tuple[int, ...]
    """The sampled tokens verbatim, the end-of-turn token included when it was sampled."""
    logprobs: tuple[float, ...]
    """log π of each under the distribution it was drawn from (temperature applied, before top-p and top-k)."""
    versions: tuple[int, ...]
    """The policy version that sampled each token."""
    finish: Finish
    """stop: an end-of-turn token or stop string; length: the budget; abort: cut off by the engine or by us."""
    experts: NDArray[np.signedinteger[Any]] | None = field(default=None, compare=False, repr=False)
    """(tokens, layers, k): the experts that a mixture of experts chose for all tokens but the last, prompt included;
    None where nobody asked."""

    def __post_init__(self) -> None:
        n = len(self.token_ids)
        if not len(self.logprobs) == len(self.versions) == n:
            raise ValueError(f"completion has {n} tokens, {len(self.logprobs)} logprobs, {len(self.versions)} versions")


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """A run of tokens that a model saw as one sequence; arrays of one length."""

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    """The engine's logprob of each sampled token; 0 elsewhere."""
    versions: NDArray[np.int32]
    """The policy version of each sampled token; -1 elsewhere."""
    sources: NDArray[np.uint8]
    """A `Source` for each token."""
    experts: NDArray[np.signedinteger[Any]] | None = None
    """(tokens, layers, k): the experts that the engine chose for each token; -1 where it computed none. None: not
    recorded."""

    def __post_init__(self) -> None:
        for name, dtype in (("token_ids", np.int32), ("logprobs", np.float32), ("versions", np.int32)):
            object.__setattr__(self, name, np.ascontiguousarray(getattr(self, name), dtype=dtype))
        object.__setattr__(self, "sources", np.ascontiguousarray(self.sources, dtype=np.uint8))
        shapes = {a.shape for a in (self.token_ids, self.logprobs, self.versions, self.sources)}
        if len(shapes) != 1 or self.token_ids.ndim != 1:
            raise ValueError(f"a segment's arrays must have one length and one dimension, got {sorted(shapes)}")
        if self.experts is not None:
            if self.experts.ndim != 3 or len(self.experts) != len(self.token_ids):
                raise ValueError(f"{len(self.token_ids)} tokens have experts of shape {self.experts.shape}")
            self.experts.setflags(write=False)
        if len(self.sources) and int(self.sources.max()) > Source.FORCED:
            raise ValueError("a segment's sources must be TEMPLATE, OBSERVATION, SAMPLED or FORCED")
        if (self.token_ids < 0).any():
            raise ValueError("a segment holds a negative token id")
        sampled = self.loss_mask
        logprobs = self.logprobs[sampled]
        if not np.isfinite(logprobs).all() or (logprobs > 1e-4).any():
            raise ValueError("a sampled token's logprob must be finite and at most 0")
        if (self.versions[sampled] < 0).any() or (self.versions[~sampled] != -1).any() or self.logprobs[~sampled].any():
            raise ValueError("sampled tokens carry a version and a logprob; all others carry -1 and 0")
        for array in (self.token_ids, self.logprobs, self.versions, self.sources):
            array.setflags(write=False)

    def __len__(self) -> int:
        return len(self.token_ids)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Segment):
            return NotImplemented
        names = ("token_ids", "logprobs", "versions", "sources", "experts")
        return all(np.array_equal(getattr(self, n), getattr(other, n)) for n in names)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        """Be short: nobody wants thousands of numbers printed, and numpy takes milliseconds for them."""
        return f"Segment({len(self)} tokens, {int(self.loss_mask.sum())} sampled)"

    @property
    def loss_mask(self) -> NDArray[np.bool_]:
        """True exactly on the sampled tokens."""
        mask: NDArray[np.bool_] = self.sources == Source.SAMPLED
        return mask

    @property
    def turns(self) -> NDArray[np.int32]:
        """Return for each token the number of its turn within this segment; -1 for tokens that were not sampled.

        A turn is a run of tokens that were sampled or forced: between two turns there is always a bridge.
        """
        mask = self.loss_mask
        inside = mask | (self.sources == Source.FORCED)
        starts = inside & ~np.concatenate(([False], inside[:-1]))
        return np.where(mask, np.cumsum(starts) - 1, -1).astype(np.int32)


def forced_turns(segments: Sequence[Segment]) -> int:
    """Return how often a turn's thinking was closed for it."""
    forced = [np.concatenate(([False], segment.sources == Source.FORCED)) for segment in segments]
    return sum(int((flags[1:] & ~flags[:-1]).sum()) for flags in forced)


def turns_in(segments: Sequence[Segment]) -> int:
    """Return the number of turns in the segments of an episode."""
    return sum(int(segment.turns.max(initial=-1)) + 1 for segment in segments)


ConversationKind = Literal["task", "summary", "drop", "subagent"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What the policy saw and said from one beginning on, in an episode whose context is compacted."""

    kind: ConversationKind
    """What it began with: the task, a summary, a history without its old results, or a task of a sub-agent."""
    opening: int
    """Messages that it began with; each of the assistant's messages after them was sampled in it."""
    messages: tuple[Message, ...]

    @property
    def turns(self) -> int:
        """The number of turns that were sampled in it."""
        return sum(message.role == "assistant" for message in self.messages[self.opening :])


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A verifier's judgement of one submission."""

    score: float
    """A finite number in [0, 1]."""
    breakdown: Mapping[str, float] = field(default_factory=dict)
    """Named parts of the score; shaping terms stand here under their own names."""
    evidence: tuple[str, ...] = ()
    """Why, in lines a person can read. Holds no expected value: it may be shown beside the trajectory."""
    trust: Trust = "sealed"
    """sealed: no agent code ran beside the comparison. proxied: agent code ran in another process. shared: it ran
    inside the test process. judged: a model's opinion. reported: a reward that somebody else's environment sent; how it
    came about was not seen here."""
    turn_scores: tuple[float, ...] = ()
    """Process rewards, one per turn, where the verifier gives them."""
    cost_s: float = 0.0
    """Wall seconds that grading took."""
    verifier: str = ""
    """The verifier's name and version hash."""

    def __post_init__(self) -> None:
        if not isinstance(self.score, int | float) or isinstance(self.score, bool):
            raise ValueError(f"a score must be a number, got {type(self.score).__name__}")
        if not math.isfinite(self.score) or not 0.0 <= self.score <= 1.0:
            raise ValueError(f"a score must be a finite number in [0, 1], got {self.score!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How an episode ended, whether it could be graded, and what it scored."""

    ending: Ending
    """done, or which budget ran out, or the agent broke its own episode. A truncated episode is still graded."""
    grade: Grade
    """graded, or which part of the system failed; then there is no score."""
    score: float | None
    fault: Fault | None = None
    """The cause of an infra_error, verifier_error or agent_error."""
    alarm: bool = False
    """The episode broke itself, its grading or its player again and again while the system was well: scored 0."""

    @property
    def cut_off(self) -> bool:
        """Whether a budget ended the episode."""
        return self.ending in ("max_tokens", "max_turns", "timeout")

    def __post_init__(self) -> None:
        if (self.grade == "graded") != (self.score is not None):
            raise ValueError(f"an outcome has a score exactly when it is graded: {self.grade}, {self.score}")
        if self.score is not None and not (math.isfinite(self.score) and 0.0 <= self.score <= 1.0):
            raise ValueError(f"a score must be a finite number in [0, 1], got {self.score!r}")
        if self.grade != "graded" and self.fault is None:
            raise ValueError(f"an outcome of grade {self.grade} needs the fault that caused it")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One finished episode: the tokens exactly as the engine saw them, and how it went."""

    task: Task
    """Without its secret."""
    group: int
    """Number of the group it belongs to, counted over the run."""
    index: int
    """Its place in the group; that of a continuation is `BRANCH` × (1 + its number) + that of its episode."""
    seed: int
    """The group's reset seed."""
    segments: tuple[Segment, ...]
    """Usually one; one per turn where the chat template rewrites history; at least one for each of `conversations`."""
    messages: tuple[Message, ...]
    """The conversation as text: what was said to the environment, and what it answered."""
    outcome: Outcome
    verdict: Verdict | None = None
    ledger: Mapping[str, Any] = field(default_factory=dict)
    """What the episode did to its sandbox: files, denied calls, timeouts, bytes."""
    timings: Mapping[str, float] = field(default_factory=dict)
    """Seconds spent in engine, tools, verifier and overhead."""
    root: str = ""
    """Hash of the pinned root the sandbox ran on."""
    audit: Verdict | None = None
    """What the environment's audit verifier said, where it looked at the episode too; no part of the reward."""
    usage: Mapping[str, int] | None = None
    """For an episode that a chat endpoint played, which gives no token ids: the `prompt` and `completion` tokens that
    it took. Such a trajectory has no segments, so nothing of it can ever be trained on."""
    states: tuple[str, ...] = ()
    """A hash of the state before each turn, where the algorithm compares turns of equal states (`Episode.state`); ""
    for one that equals no other."""
    branches: tuple[Trajectory, ...] = ()
    """Continuations that were played from its turns, where the algorithm values states by them."""
    branch_turn: int | None = None
    """Of a continuation: how many turns its episode had before it. They are in its messages, not among its turns."""
    prefix_tokens: int = 0
    """Of a continuation: how many tokens its episode had sampled before it."""
    conversations: tuple[Conversation, ...] = ()
    """Where context is compacted: what the policy saw, in the order of `segments`; a summary and the words between an
    agent and its sub-agent stand here only, since the environment never sees them."""

    def __post_init__(self) -> None:
        if self.usage is not None and self.segments:
            raise ValueError(
                f"trajectory of {self.task.id} has token ids and an endpoint's usage; it can have only one"
            )
        if self.task.secret:
            raise ValueError(f"trajectory of {self.task.id} carries the task's secret; build it from task.public()")
        # An episode that ended the process that played it, again and again, is graded 0; its tokens are gone.
        without = self.usage is None and not self.outcome.alarm
        if self.outcome.grade == "graded" and not self.segments and without:
            raise ValueError(f"graded trajectory of {self.task.id} has no tokens")

    @property
    def sampled_tokens(self) -> int:
        """The number of tokens that the policy sampled."""
        if self.usage is not None:
            return self.usage["completion"]
        return int(sum(s.loss_mask.sum() for s in self.segments))

    @property
    def spent_tokens(self) -> int:
        """The number of tokens that were sampled for it, those of its continuations included."""
        return sum(t.sampled_tokens for t in self.all)

    @property
    def turns(self) -> int:
        """The number of turns that it sampled."""
        return turns_in(self.segments)

    @property
    def all(self) -> tuple[Trajectory, ...]:
        """The episode itself, then its continuations."""
        return (self, *self.branches)

    @property
    def tokens(self) -> int:
        """The number of all tokens, over all segments."""
        return sum(len(s) for s in self.segments)

    @property
    def oldest_version(self) -> int:
        """The oldest policy version that sampled any of its tokens; -1 when it sampled none."""
        return min((int(s.versions[s.loss_mask].min()) for s in self.segments if s.loss_mask.any()), default=-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The rollouts of one task that are compared with each other."""

    task: Task
    """Without its secret."""
    number: int
    trajectories: tuple[Trajectory, ...]
    predicted: float | None = None
    """The pass rate the curriculum expected when it drew the task."""
    censored: bool = False
    """Stopped early, because its outcome could carry no signal any more."""
    env: str = ""
    """The environment's name."""

    @property
    def scores(self) -> tuple[float, ...]:
        """The scores of the graded rollouts, in order."""
        return tuple(t.outcome.score for t in self.trajectories if t.outcome.score is not None)

    @property
    def informative(self) -> bool:
        """Whether its scores differ, so that a group baseline leaves a signal."""
        return len(self.scores) > 1 and max(self.scores) > min(self.scores)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """The groups that one learner step gets, and those that the group filter dropped on the way."""

    number: int
    kept: tuple[Group, ...]
    dropped: tuple[Group, ...] = ()
    reasons: Mapping[int, str] = field(default_factory=dict)
    """Why each dropped group (by number) was dropped."""
    timings: Mapping[str, float] = field(default_factory=dict)
    """Seconds of wall time: rollout, waiting for the learner, waiting for rollouts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSample:
    """One segment with what the loss needs to know about it. Every filter acts through `weight` alone."""

    segment: Segment
    advantages: NDArray[np.float32]
    """One for each token; 0 where nothing was sampled."""
    weight: float
    """How much the trajectory counts; segments of one trajectory share its weight."""
    group: int
    trajectory: int
    """Index within the group."""
    positive: bool = False
    """Whether the trajectory solved its task."""
    rewards: NDArray[np.float32] | None = None
    """For a critic, which makes the advantages: a turn's reward on the last of its tokens."""
    values: NDArray[np.float32] | None = None
    """What the critic said before each sampled token."""
    returns: NDArray[np.float32] | None = None
    """What it should have said; nan where it is not asked."""

    def __post_init__(self) -> None:
        if len(self.advantages) != len(self.segment):
            raise ValueError(f"{len(self.advantages)} advantages for {len(self.segment)} tokens")
        if not math.isfinite(self.weight) or self.weight < 0:
            raise ValueError(f"a sample's weight must be finite and not negative, got {self.weight!r}")
