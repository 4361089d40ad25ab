"""The one codec of trajectories: a trajectory as a row of JSON, and back.

Values of free form (a task's setup, the arguments of calls, the ledger) stand as JSON text, so that all rows have the
same columns. A task's secret is never in a trajectory, hence never in a row.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from agentrl.errors import Fault, StorageError
from agentrl.types import Conversation, Message, Outcome, Segment, Task, ToolCall, Trajectory, Verdict

FORMAT = 2
"""Raised whenever rows change so that an older reader would misread them; other formats are refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """What the run knew about a trajectory when it stored it. Rows of earlier versions have none of it."""

    kind: Literal["train", "eval", "branch"] = "train"
    """branch: a continuation that values a state of an episode of its group; see `branch_turn`."""
    stage: str = ""
    """Of an evaluation: start, sft, rl or end."""
    step: int | None = None
    """Of an evaluation: learner steps done before it."""
    predicted: float | None = None
    """The pass rate that the curriculum expected of the task."""
    time: float | None = None
    """Time of day when it was stored, since 1970."""
    attempt: int = 0
    """How often the run had been resumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What became of a trajectory at the learner."""

    step: int
    """The learner step that got its group."""
    kept: bool
    reason: str
    """Why its group was dropped."""
    advantage: float | None
    """Mean over its sampled tokens; None where it was not trained on."""
    weight: float | None


@dataclass(frozen=True, slots=True)
class Stored:
    """One row of a trajectory file."""

    env: str
    """The environment's name."""
    trajectory: Trajectory
    note: Note = Note()
    decision: Decision | None = None
    """None for evaluations, and where the learner has not got it."""


def with_decision(stored: Stored, decision: Decision | None) -> Stored:
    """Return a stored trajectory with what became of it."""
    return replace(stored, decision=decision)


def to_row(trajectory: Trajectory, env: str, note: Note | None = None, *, experts: bool = False) -> dict[str, Any]:
    """Write a trajectory as JSON data, with the same columns for every environment. `experts`: also the experts that an
    engine chose, which are much larger than all the rest and needed only to train on it."""
    note = note or Note()
    task, outcome, verdict = trajectory.task, trajectory.outcome, trajectory.verdict
    assert not task.secret, f"the trajectory of {task.id} carries a secret"
    return {
        "format": FORMAT,
        "env": env,
        "task": {
            "id": task.id,
            "split": task.split,
            "level": task.level,
            "tags": list(task.tags),
            "family": task.family,
            "prompt": task.prompt,
            "setup": _dump(task.setup),
        },
        "group": trajectory.group,
        "index": trajectory.index,
        "seed": trajectory.seed,
        "ending": outcome.ending,
        "grade": outcome.grade,
        "score": outcome.score,
        "outcome": _dump(asdict(outcome)),
        "verdict": None if verdict is None else _dump(asdict(verdict)),
        "audit": None if trajectory.audit is None else _dump(asdict(trajectory.audit)),
        "messages": [message_row(message) for message in trajectory.messages],
        "segments": [_segment(segment, experts) for segment in trajectory.segments],
        "ledger": _dump(trajectory.ledger),
        "timings": _dump({name: round(seconds, 6) for name, seconds in trajectory.timings.items()}),
        "root": trajectory.root,
        "usage": None if trajectory.usage is None else _dump(trajectory.usage),
        "states": _dump(trajectory.states) if trajectory.states else None,
        "branch_turn": trajectory.branch_turn,
        "prefix_tokens": trajectory.prefix_tokens,
        "conversations": _dump([_conversation_row(c) for c in trajectory.conversations])
        if trajectory.conversations
        else None,
        **asdict(note),
    }


def line(row: Mapping[str, Any]) -> bytes:
    """Write a row as one line of a file, without its end."""
    return _dump(row).encode("utf-8", "replace")


def from_row(row: Mapping[str, Any]) -> Stored:
    """Read the trajectory that a row was made from."""
    if row.get("format") != FORMAT:
        raise StorageError(
            f"a trajectory row has format {row.get('format')!r}; this version of agentrl reads format {FORMAT} only, "
            "so read the file with the version that wrote it"
        )
    task = {**row["task"], "tags": tuple(row["task"]["tags"]), "setup": json.loads(row["task"]["setup"])}
    outcome = json.loads(row["outcome"])
    if outcome["fault"] is not None:
        outcome["fault"] = Fault(**outcome["fault"])
    trajectory = Trajectory(
        task=Task(**task),
        group=row["group"],
        index=row["index"],
        seed=row["seed"],
        segments=tuple(
            Segment(
                np.array(s["token_ids"], dtype=np.int32),
                np.array(s["logprobs"], dtype=np.float32),
                np.array(s["versions"], dtype=np.int32),
                np.array(s["sources"], dtype=np.uint8),
                _experts(s.get("experts")),
            )
            for s in row["segments"]
        ),
        messages=tuple(message_from_row(message) for message in row["messages"]),
        outcome=Outcome(**outcome),
        verdict=_verdict(row["verdict"]),
        audit=_verdict(row.get("audit")),
        ledger=json.loads(row["ledger"]),
        timings=json.loads(row["timings"]),
        root=row["root"],
        usage=json.loads(row["usage"]) if row.get("usage") else None,
        states=tuple(json.loads(row["states"])) if row.get("states") else (),
        branch_turn=row.get("branch_turn"),
        prefix_tokens=row.get("prefix_tokens", 0),
        conversations=tuple(map(_conversation, json.loads(row.get("conversations") or "[]"))),
    )
    return Stored(row["env"], trajectory, Note(**{name: row[name] for name in NOTED if name in row}))


def _verdict(text: str | None) -> Verdict | None:
    if not text:
        return None
    verdict = json.loads(text)
    lists = {"evidence": tuple(verdict["evidence"]), "turn_scores": tuple(verdict["turn_scores"])}
    return Verdict(**{**verdict, **lists})


NOTED = tuple(part.name for part in fields(Note))


def message_row(message: Message) -> dict[str, Any]:
    """Write one message of a conversation."""
    calls = [
        {"name": c.name, "arguments": _dump(c.arguments), "id": c.id, "error": c.error} for c in message.tool_calls
    ]
    return {
        "role": message.role,
        "content": message.content,
        "tool_calls": calls,
        "tool_call_id": message.tool_call_id,
        "name": message.name,
        "thinking": message.thinking,
    }


def message_from_row(row: Mapping[str, Any]) -> Message:
    """Read one message of a conversation."""
    calls = (ToolCall(**{**call, "arguments": json.loads(call["arguments"])}) for call in row["tool_calls"])
    return Message(**{**row, "tool_calls": tuple(calls)})


def _conversation_row(conversation: Conversation) -> dict[str, Any]:
    messages = [message_row(message) for message in conversation.messages]
    return {"kind": conversation.kind, "opening": conversation.opening, "messages": messages}


def _conversation(row: Mapping[str, Any]) -> Conversation:
    return Conversation(**{**row, "messages": tuple(map(message_from_row, row["messages"]))})


def stored(value: Any) -> Any:
    """Return a value of free form as a row gives it back."""
    return json.loads(_dump(value).encode("utf-8", "replace"))


def _experts(row: Mapping[str, Any] | None) -> NDArray[np.signedinteger[Any]] | None:
    if row is None:
        return None
    return np.frombuffer(base64.b64decode(row["base64"]), dtype=row["dtype"]).reshape(row["shape"])


def _segment(segment: Segment, experts: bool) -> dict[str, Any]:
    row: dict[str, Any] = {
        "token_ids": segment.token_ids.tolist(),
        # Nine digits tell any two float32 apart; the seventeen of a float64 would only cost space.
        "logprobs": [float(f"{x:.9g}") if x else 0.0 for x in segment.logprobs.tolist()],
        "versions": segment.versions.tolist(),
        "sources": segment.sources.tolist(),
    }
    if experts and (chosen := segment.experts) is not None:
        text = base64.b64encode(chosen.tobytes()).decode()
        row["experts"] = {"shape": list(chosen.shape), "dtype": chosen.dtype.str, "base64": text}
    return row


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=_other, separators=(",", ":"))


def _other(value: Any) -> Any:
    """Give values without a JSON form the nearest one: environments may put them into setup or ledger."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, set | frozenset | tuple | range):
        return sorted(value, key=str) if isinstance(value, set | frozenset) else list(value)
    return str(value)
