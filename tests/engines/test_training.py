"""The whole loop on the real SGLang server: rollouts there, learning here, weights back, and the two agree."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from agentrl import metrics
from agentrl.loop import train
from agentrl.rollout import store

pytestmark = pytest.mark.timeout(600)
ON_GPU = os.environ.get("AGENTRL_DEVICE") == "cuda"


@pytest.mark.skipif(not os.environ.get("AGENTRL_FULL"), reason="imports torch twice more; set AGENTRL_FULL")
def test_training_with_ranks_and_sglang(kept: Any, small_recipe: Any, tmp_path: Path) -> None:
    """Weights go from rank 0 to the server: the driver has none after the first publication."""
    server = asyncio.run(kept.started("plain"))
    assert train(small_recipe(server.url, learner={"ranks": 2})) == 0
    rows = list(metrics.read(tmp_path / "r" / "metrics.jsonl", "step"))
    assert [row["learn/version"] for row in rows] == [1, 2, 3]
    assert [row["learn/on_policy"] for row in rows] == [1, 1, 1]
    assert max(row["learn/mismatch_mean"] for row in rows) < (0.05 if ON_GPU else 1e-3)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_training_with_sglang(kept: Any, small_recipe: Any, tmp_path: Path, asynchronous: bool) -> None:
    server = asyncio.run(kept.started("plain"))
    assert train(small_recipe(server.url, **{"async": {"enabled": asynchronous, "max_staleness": 1}})) == 0
    rows = list(metrics.read(tmp_path / "r" / "metrics.jsonl", "step"))
    assert [row["learn/version"] for row in rows] == [1, 2, 3]
    assert all(row["learn/grad_norm"] > 0 for row in rows)
    assert max(row["rollout/staleness_max"] for row in rows) <= (1 if asynchronous else 0)
    # Tokens of the learner's own version: engine and learner must say the same about them. The first round has no
    # others, whatever the server held before.
    assert rows[0]["learn/on_policy"] == 1
    assert max(row["learn/mismatch_mean"] for row in rows if row["learn/on_policy"] > 0) < (0.05 if ON_GPU else 1e-3)
    versions = {int(v) for s in store.read(tmp_path / "r" / "trajectories") for v in s.trajectory.segments[0].versions}
    assert versions - {-1} >= {0, 1}
