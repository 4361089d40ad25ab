"""The recipe's section about a teacher: on-policy distillation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from agentrl.recipe.base import NonNegative, Positive, Section


class TeacherSection(Section):
    """A model that judges every token which the policy samples: on-policy distillation. To each token's advantage it
    adds `coefficient` × (log π_teacher − log π_policy), whose mean over the policy's own tokens is minus the reverse KL
    divergence. It must have the policy's vocabulary."""

    path: Path
    """The teacher: a transformers folder, a run folder (its newest checkpoint), a checkpoint, or a Hugging Face id. For
    self-distillation name `model.path`, or a run of the same model."""
    urls: list[str] = Field(default_factory=list)
    """Running SGLang servers that hold it and score the tokens, e.g. http://127.0.0.1:30001; `path` then only gives the
    vocabulary. By default it is loaded and scored in this process. Never name a server of `rollout.engine`."""
    coefficient: Positive = 1.0
    """Weight of the teacher's part of the advantage."""
    reward_weight: NonNegative = 1.0
    """Weight of the algorithm's own advantage beside it. 0 learns from the teacher alone."""
    device: str = "auto"
    """Device on which it is scored in this process: `cpu`, `cuda`, `cuda:1`; `auto` takes a GPU where there is one."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision in which it is scored in this process, as `model.dtype`."""
    retries: Annotated[int, Field(ge=0, le=20)] = 4
    """How often a request to a server is sent again, with growing pauses, before the run stops."""
    timeout_s: Positive = 120.0
    """Seconds that a server may take for one sequence."""
