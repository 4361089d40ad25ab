"""The learner's ranks as Ray actors: the same training as in one process, and an end when one of them is killed."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.engines.base import Delivery
from agentrl.errors import LearnerError, RecipeError
from agentrl.learn import checkpoint
from agentrl.learn.learner import Learner
from agentrl.learn.model import load_model
from agentrl.learn.sharded import ShardedLearner
from agentrl.recipe import Recipe
from tests.engines.fake_server import FakeServer
from tests.learn.conftest import make_samples as samples_fixture

SAMPLES: Any = getattr(samples_fixture, "__wrapped__", samples_fixture)()


def recipe(out: Path, **learner: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "run": {"name": "ranks", "steps": 10, "out": str(out), "threads": 1},
            "model": {"type": "scratch", "vocabulary": 270, "layers": 2, "width": 32, "heads": 2, "context": 256},
            "envs": [{"name": "none"}],
            "cluster": {"players": 1},
            "learner": {"device": "cpu", "lr": 1e-2, "max_mismatch": 100.0, "micro_tokens": 100} | learner,
        }
    )


@pytest.mark.parametrize(
    ("starts", "told"), [(True, "ended or stood still while it started"), (False, "handed no weights over for 1 s")]
)
def test_a_rank_that_stands_still_while_something_is_asked_of_it_ends_the_run(
    starts: bool, told: str, nodes: Any, tmp_path: Path
) -> None:
    import ray

    from agentrl.cluster.connect import connected
    from agentrl.cluster.ranks import RayRankPool

    ours = recipe(tmp_path, ranks=1)
    assert ours.cluster is not None
    with connected(ours.cluster):
        pool = RayRankPool(ours)
        pid = ray.get(pool.ranks[0].process.remote())
        os.kill(pid, signal.SIGSTOP)
        pool.timeout_s = 1.0
        with pytest.raises(LearnerError, match=told):
            if starts:
                pool.start(ours.model_dump(mode="json"), tmp_path, 1)
            else:
                pool.stream(lambda bucket: None)


def test_two_actors_train_like_one_process_and_end_together(
    nodes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take the model for one that their nodes do not see: it is sent to them, and nothing of it stays there."""
    import ray

    from agentrl.cluster import ranks
    from agentrl.cluster.connect import connected
    from agentrl.cluster.ranks import RayRankPool

    monkeypatch.setattr(ranks, "fingerprint", lambda folder: "another")
    before = set(Path(tempfile.gettempdir()).glob("agentrl-rank-*"))
    ours = recipe(tmp_path, ranks=2)
    alone = Learner(*load_model(ours.model, device="cpu"), recipe(tmp_path))
    assert ours.cluster is not None
    with connected(ours.cluster):
        learner = ShardedLearner(*load_model(ours.model, device="cpu"), ours, RayRankPool(ours))
        try:
            assert all(torch.equal(t, learner.weights()[n]) for n, t in alone.weights().items())
            assert set(Path(tempfile.gettempdir()).glob("agentrl-rank-*")) <= before
            one = alone.step(alone.pack(SAMPLES(12))).metrics()
            two = learner.step(learner.pack(SAMPLES(12))).metrics()
            for name in one:
                if "second" not in name:
                    assert two[name] == pytest.approx(one[name], rel=1e-5), name
            server = FakeServer(learner.weights())
            server.running = False
            try:
                order = Delivery(urls=(server.url,), way="tensor", version=1, address="127.0.0.1", timeout_s=30.0)
                assert (learner.deliver(order).error, server.version) == ("", "1")
            finally:
                server.close()
            saved = checkpoint.load(checkpoint.save(tmp_path / "checkpoints", learner))
            learner.load_state_dict(saved.learner)
            assert learner.steps == 1
            os.kill(ray.get(learner.pool.ranks[1].process.remote()), signal.SIGKILL)
            with pytest.raises(LearnerError, match=r"rank 1 of the learner died, or its node\. All ranks were ended"):
                learner.step(learner.pack(SAMPLES(12)))
            with pytest.raises(LearnerError, match="have ended"):
                learner.step(learner.pack(SAMPLES(12)))
        finally:
            learner.close()


def test_no_room_for_ranks_is_said(nodes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from agentrl.cluster import ranks
    from agentrl.cluster.connect import connected

    monkeypatch.setattr(ranks, "PLACE_S", 1.0)
    ours = recipe(tmp_path, ranks=2, device="cuda")
    assert ours.cluster is not None
    with connected(ours.cluster), pytest.raises(RecipeError, match=r"learner\.ranks is 2, and each needs 1 CPU and 1"):
        ranks.RayRankPool(ours)
