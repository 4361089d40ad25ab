"""Which environment is drawn from next, so that the groups that are trained on follow the recipe's weights.

A draw costs its source what it is expected to bring: the share of its groups that were kept lately. The source that has
spent least for its weight is next, so one whose groups are dropped more often is drawn more often: up to four times,
since rollouts of a source that teaches little are taken from those that teach much. Where every group is kept, a draw
costs 1 and the draws themselves have exactly the weights' proportions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

MEMORY = 0.98
"""Weight that the kept and dropped groups of a source keep with each further one."""
PRIOR = 2.0
"""Groups that a source is believed to have had before its first, all of them kept."""
RAREST = 0.25
"""A source that keeps fewer of its groups has little to teach now; it is drawn less again, down to `LEAST`. With a
tenth here, one of three environments, whose tasks all passed or failed as a whole, got two thirds of the draws."""
LEAST = 0.25
"""The part of its plain share that a source keeps which brings nothing: enough to notice when that changes."""
DEBT = 32.0
"""Groups that a source may have brought more or fewer than it has spent; the rest is forgotten."""


class Shares:
    """Chooses sources by weight, without chance."""

    def __init__(self, weights: Sequence[float]) -> None:
        self._shares = [weight / sum(weights) for weight in weights]
        self._spent = [0.0] * len(weights)
        self._surplus = [0.0] * len(weights)
        """Groups kept beyond those that were paid for."""
        self._kept = [PRIOR] * len(weights)
        self._seen = [PRIOR] * len(weights)
        self._costs: dict[int, float] = {}
        """What each draw whose group has not come back has cost, by its number."""

    def choose(self, number: int) -> int:
        """Choose the source of a draw: the one that lags its share most, the first among equals."""
        claims = [spent + surplus for spent, surplus in zip(self._spent, self._surplus, strict=True)]
        total = sum(claims) + 1
        lag = [share * total - claim for share, claim in zip(self._shares, claims, strict=True)]
        source = lag.index(max(lag))
        self._costs[number] = self.cost(source)
        self._spent[source] += self._costs[number]
        return source

    def cost(self, source: int) -> float:
        """Return what a draw of a source costs: the share of its groups that was kept lately; below a quarter, more."""
        rate = self._kept[source] / self._seen[source]
        return rate if rate >= RAREST else RAREST * RAREST / max(rate, RAREST * RAREST * LEAST)

    def settle(self, number: int, source: int, kept: bool) -> None:
        """Learn whether a draw's group was kept."""
        surplus = self._surplus[source] + kept - self._costs.pop(number, self.cost(source))
        self._surplus[source] = max(-DEBT, min(DEBT, surplus))
        self._kept[source] = MEMORY * self._kept[source] + kept
        self._seen[source] = MEMORY * self._seen[source] + 1.0

    def forget(self, number: int) -> None:
        """Take a draw as neither kept nor dropped; another one in its place costs nothing more."""
        self._costs.pop(number, None)

    def state(self) -> dict[str, Any]:
        """Return everything, as JSON values."""
        return {
            "spent": list(self._spent),
            "surplus": list(self._surplus),
            "kept": list(self._kept),
            "seen": list(self._seen),
            "costs": [[number, cost] for number, cost in self._costs.items()],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from `state()`."""
        self._spent = [float(value) for value in state["spent"]]
        self._surplus = [float(value) for value in state["surplus"]]
        self._kept = [float(value) for value in state["kept"]]
        self._seen = [float(value) for value in state["seen"]]
        self._costs = {int(number): float(cost) for number, cost in state["costs"]}
