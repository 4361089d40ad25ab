"""The weights of KL and entropy in the objective. With a target each follows what the step before measured.

    kl_target       coefficient × (1 + 0.1 · error), error = KL / target − 1 within ± 0.2   (Ziegler et al. 2019)
    entropy_target  coefficient + 0.005 where entropy ≤ target, − 0.005 otherwise; applied only in the first case
                    (Skywork-OR1)

The state is a few numbers; a checkpoint holds them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from agentrl.learn.algorithms import Algorithm

KL_GAIN = 0.1
KL_ERROR = 0.2
"""Bound of the relative error that a KL coefficient answers to."""
ENTROPY_STEP = 0.005
ENTROPY_LIMIT = 1.0


class Coefficients:
    """What KL and entropy weigh now."""

    def __init__(self, algorithm: Algorithm) -> None:
        self._row = algorithm
        self.kl = algorithm.kl_coefficient
        self._bonus = algorithm.entropy_bonus
        self._entropy: float | None = None
        """What the last step measured."""

    @property
    def adaptive(self) -> bool:
        """Return whether either follows a target."""
        return self._row.kl_target is not None or self._row.entropy_target is not None

    @property
    def entropy_bonus(self) -> float:
        """Return the weight of the entropy now; with a target it is 0 until a step has measured less."""
        target = self._row.entropy_target
        if target is None:
            return self._bonus
        return self._bonus if self._entropy is not None and self._entropy <= target else 0.0

    def applied(self) -> Algorithm:
        """Return the algorithm with the coefficients of now."""
        if not self.adaptive:
            return self._row
        return replace(self._row, kl_coefficient=self.kl, entropy_bonus=self.entropy_bonus)

    def follow(self, *, kl: float | None, entropy: float) -> None:
        """Adapt to what a step measured; not to what is no number, after a step that was skipped."""
        if self._row.kl_target is not None and kl is not None and math.isfinite(kl):
            error = min(KL_ERROR, max(-KL_ERROR, kl / self._row.kl_target - 1.0))
            self.kl *= 1.0 + KL_GAIN * error
        if self._row.entropy_target is not None and math.isfinite(entropy):
            step = ENTROPY_STEP if entropy <= self._row.entropy_target else -ENTROPY_STEP
            self._bonus = min(ENTROPY_LIMIT, max(0.0, self._bonus + step))
            self._entropy = entropy

    def figures(self) -> dict[str, float]:
        """Return the coefficients that follow a target, for a step's report."""
        kl = {"kl_coefficient": self.kl} if self._row.kl_target is not None else {}
        return kl | ({"entropy_bonus": self.entropy_bonus} if self._row.entropy_target is not None else {})

    def state_dict(self) -> dict[str, Any]:
        """Return what changes during training; nothing where neither follows a target."""
        return {"kl": self.kl, "bonus": self._bonus, "entropy": self._entropy} if self.adaptive else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from `state_dict`; a coefficient that follows no target keeps the recipe's value."""
        if self._row.kl_target is not None and "kl" in state:
            self.kl = state["kl"]
        if self._row.entropy_target is not None and "bonus" in state:
            self._bonus, self._entropy = state["bonus"], state["entropy"]
