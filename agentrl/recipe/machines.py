"""The sections about the machines that rollouts are played on."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from agentrl.recipe.base import Count, Positive, Section


class SandboxSection(Section):
    """Limits on the sandboxes of all environments."""

    boxes: Count = 64
    """Sandboxes alive at once per backend, episodes and grading together. Raise it with `rollout.concurrency`."""


class ClusterSection(Section):
    """Play rollouts in processes of their own, on this machine or on a Ray cluster. RAY_ADDRESS says which cluster;
    without it Ray starts on this machine."""

    type: Literal["ray"] = "ray"
    """Selects Ray."""
    players: Annotated[int, Field(ge=1, le=4096)] = 2
    """Processes that play rollouts, spread over the nodes of the cluster. About one per two cores; they share
    `rollout.concurrency` and `sandboxes.boxes`."""
    cpus: Positive = 1.0
    """CPU cores that Ray sets aside for each player."""
