"""The section about context that gets too long: what is done when an episode's next prompt would not fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, Tag

from agentrl.recipe.base import Count, Section, kind
from agentrl.recipe.learning import AlgorithmSection

Keep = Annotated[int, Field(ge=0, le=1000)]


class SummaryCompaction(Section):
    """The policy is asked for a summary, a turn that is trained like any other. It continues with system prompt, task
    prompt, its summary and its newest turns."""

    type: Literal["summary"]
    """Selects summaries."""
    tokens: Count | None = None
    """A next prompt of more tokens than this is compacted first. By default three quarters of `max_context`."""
    max_tokens: Count | None = None
    """Sampled tokens of one summary. By default half of what `tokens` leaves of `max_context`."""
    keep: Keep = 1
    """Newest turns, with what they were answered, that follow the summary word for word; fewer where they do not
    fit."""


class DropCompaction(Section):
    """Old tool results are replaced by a short fixed text, the oldest first."""

    type: Literal["drop"]
    """Selects the dropping of old tool results."""
    tokens: Count | None = None
    """A next prompt of more tokens than this is compacted first, to half of it where that is possible. By default three
    quarters of `max_context`."""
    keep: Keep = 1
    """Newest tool results that are never replaced."""


class SubagentCompaction(Section):
    """The policy gets the tool `delegate(task)`: it works on the task in a conversation of its own, with the same tools
    in the same sandbox, and its last message there is the tool's result."""

    type: Literal["subagent"]
    """Selects sub-agents."""
    max_turns: Count = 8
    """Turns of one sub-agent; they count for the episode's own too."""
    max_tokens: Count | None = None
    """Sampled tokens of one sub-agent; they count for the episode's own too. By default only those bound it."""


Compaction = Annotated[
    Annotated[SummaryCompaction, Tag("summary")]
    | Annotated[DropCompaction, Tag("drop")]
    | Annotated[SubagentCompaction, Tag("subagent")],
    kind(""),
]


def refuse_compaction(
    section: Compaction | None,
    algorithm: AlgorithmSection,
    agents: Sequence[str],
    *,
    endpoint: bool,
    context: int | None,
) -> None:
    """Refuse compaction together with what cannot be played or credited exactly."""
    if section is None:
        return
    if agents:
        raise ValueError(f"rollout.compaction: the agent of {agents[0]} keeps its own context; leave one of them out")
    if endpoint:
        raise ValueError(NO_ENDPOINT)
    if context is not None and not isinstance(section, SubagentCompaction) and (section.tokens or 0) >= context:
        raise ValueError(
            f"rollout.compaction.tokens: {section.tokens} is not below rollout.max_context, which is {context}"
        )
    credit = algorithm.credited
    if credit == "branch":
        raise ValueError("rollout.compaction: credit: branch plays on from the middle of a conversation; use another")
    if section.type != "drop" and (credit != "trajectory" or algorithm.has_critic):
        what = "has a critic" if algorithm.has_critic else f"gives each {credit} its own credit"
        raise ValueError(
            f"rollout.compaction: {section.type} adds turns that the environment does not see, and algorithm "
            f"{algorithm.type} {what}; use credit: trajectory without a critic, for example type: dapo, or type: drop"
        )


NO_ENDPOINT = (
    "rollout.compaction: a chat endpoint gives no token ids, so that its conversations cannot be compacted; "
    "set rollout.compaction to null, or use the engine transformers or sglang"
)
