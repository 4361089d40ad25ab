"""Makes the engine that a recipe names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentrl import recipe
from agentrl.rollout.engine import Engine


def make(
    section: recipe.TransformersEngine | recipe.SglangEngine | recipe.OpenaiEngine,
    model: Any,
    *,
    folder: Path | None = None,
    max_context: int | None = None,
    deterministic: bool = False,
    share: bool = True,
    version: int = 0,
) -> Engine:
    """The engine of a recipe's `rollout.engine`, not yet started.

    `model`: the learner's transformers model. `share`: learner and engine take turns, so that the embedded engine may
    sample from the learner's own tensors. `folder`: where a launched server keeps its log.
    """
    from agentrl.rollout.transformers_engine import TransformersEngine

    assert isinstance(section, recipe.TransformersEngine)
    return TransformersEngine(
        model,
        max_batch=section.max_batch,
        max_context=max_context,
        deterministic=deterministic,
        share=share,
        version=version,
    )
