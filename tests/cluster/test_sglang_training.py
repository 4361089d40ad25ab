"""A training run whose players ask real SGLang servers on the cluster, one of which is killed on the way."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from agentrl import loop as training
from agentrl import metrics
from agentrl import recipe as recipes
from agentrl.engines.sglang import install
from agentrl.engines.sglang.routing import of_group
from agentrl.learn import checkpoint
from agentrl.rollout import store
from agentrl.types import Segment, Source
from tests.cluster.rollouts import RECIPE

pytestmark = [
    pytest.mark.skipif(not os.environ.get("AGENTRL_FULL"), reason="starts SGLang three times; set AGENTRL_FULL"),
    pytest.mark.timeout(900),
]


def recipe(out: Path) -> recipes.Recipe:
    """Return a run of two servers and two players that would go on for long."""
    engine = {
        "type": "sglang",
        "device": "cpu",
        "servers": 2,
        "memory_fraction": 0.1,
        "start_timeout_s": 400.0,
        "flags": ["--max-total-tokens", "4096", "--log-requests", "--log-requests-level", "0"],
    }
    return recipes.Recipe.model_validate(
        {
            **RECIPE,
            "run": {**RECIPE["run"], "name": "served", "out": str(out), "steps": 500},
            "envs": [{"name": "files", "levels": [1]}],
            "rollout": {**RECIPE["rollout"], "concurrency": 8, "engine": engine},
            "group_filter": {"dynamic_sampling": False},
            "algorithm": {"entropy_bonus": 0.01},
            "learner": {"lr": 0.0001, "groups_per_step": 4},
            "async": {"enabled": True, "max_staleness": 2, "in_flight": False},
            "checkpoint": {"every": 1, "keep": 1},
            "cluster": {"players": 2, "cpus": 0.2},
        }
    )


def steps(run: Path) -> list[metrics.Row]:
    """Return the steps that are written so far."""
    return list(metrics.read(run / "metrics.jsonl", "step")) if (run / "metrics.jsonl").exists() else []


def wait(run: Path, over: threading.Event, done: Callable[[list[metrics.Row]], bool]) -> None:
    """Wait until a run's steps are as wanted; raise when the run is over before."""
    deadline = time.monotonic() + 600.0
    while not done(steps(run)):
        assert time.monotonic() < deadline and not over.wait(0.5), steps(run)[-1:]


def turns_of(segment: Segment) -> list[list[int]]:
    """Return the versions of each turn's tokens: sampled ones that follow each other."""
    pairs = zip(segment.sources.tolist(), segment.versions.tolist(), strict=True)
    return [
        [version for _, version in turn] for own, turn in groupby(pairs, lambda pair: pair[0] == Source.SAMPLED) if own
    ]


def groups_of(actor: Any) -> set[str]:
    """Return the groups whose requests a server has seen, from its log."""
    import ray

    untyped: Any = ray
    log = untyped.get(actor.__ray_call__.remote(lambda far: far._server.log.read_text()))
    return set(re.findall(r"rid='(\d+)-\d+-\d+-", log))


def test_a_run_goes_on_when_a_server_is_killed(
    nodes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, evidence: Callable[[str, Any], None]
) -> None:
    """Two servers, two players, `in_flight: false`. One server is killed after two steps; its groups go to the other,
    and the one that takes its place has the current weights: what it samples agrees with the learner."""
    if not install.python(cpu=True).exists():
        pytest.skip("SGLang for the CPU is not installed")
    import ray

    from agentrl.cluster.servers import RayServers

    run, opened, errors = tmp_path / "served", list[RayServers](), list[BaseException]()
    groups: list[set[str]] = []
    start = RayServers.start

    async def remembered(self: RayServers) -> None:
        opened.append(self)
        await start(self)

    monkeypatch.setattr(RayServers, "start", remembered)

    def disturb() -> None:
        try:
            wait(run, over, lambda rows: len(rows) >= 2)
            urls, held = opened[0].addresses, [opened[0]._up[slot] for slot in (0, 1)]
            groups.extend(groups_of(server.actor) for server in held)
            for group in set.union(*groups):  # requests of a group stay together
                assert group in groups[of_group(group, urls)] and group not in groups[1 - of_group(group, urls)]
            untyped: Any = ray
            os.killpg(untyped.get(held[0].actor.process.remote()), signal.SIGKILL)
            wait(run, over, lambda rows: rows[-1]["rollout/servers_lost"] == 1 and rows[-1]["rollout/servers"] == 2)
            joined = len(steps(run))
            wait(run, over, lambda rows: len(rows) >= joined + 3)
        except BaseException as error:
            errors.append(error)
        finally:
            if not over.is_set():
                os.kill(os.getpid(), signal.SIGINT)

    over, thread = threading.Event(), threading.Thread(target=disturb)
    thread.start()
    try:
        assert training.train(recipe(tmp_path)) == 3
    finally:
        over.set()
        thread.join()
    assert errors == [] and all(groups)
    rows = steps(run)
    assert {(row["rollout/players"], row["rollout/players_lost"], row["rollout/episodes_lost"]) for row in rows} == {
        (2, 0, 0)
    }
    assert [row["rollout/servers"] for row in rows[:2]] == [2, 2]
    assert 1 in {row["rollout/servers"] for row in rows} and rows[-1]["rollout/servers"] == 2
    assert all(row["rollout/ungraded"] == 0 and row["learn/grad_norm"] > 0 for row in rows)
    assert all(row["learn/mismatch_mean"] < 1e-3 for row in rows if row["learn/on_policy"] > 0)
    assert [metrics.undeclared(row) for row in rows] == [[]] * len(rows)
    saved = checkpoint.latest(run / "checkpoints")
    assert saved is not None and saved.step == len(rows)
    # No request was under way while weights were sent: each turn was sampled by one version.
    segments = [segment for stored in store.read(run / "trajectories") for segment in stored.trajectory.segments]
    turns = [versions for segment in segments for versions in turns_of(segment)]
    assert turns and {len(set(versions)) for versions in turns} == {1}
    assert len({versions[0] for versions in turns}) >= 4
    names = ("step", "seconds", "rollout/servers", "rollout/servers_lost", "rollout/players", "rollout/episodes",
             "rollout/ungraded", "rollout/prompt_cache", "learn/version", "learn/on_policy", "learn/mismatch_mean",
             "learn/grad_norm", "learn/publish_seconds")  # fmt: skip
    evidence(
        "sglang-players",
        {
            "what": "two real SGLang servers on the CPU, two players, a tiny policy; server 0 was killed after 2 steps",
            "groups_by_server_before": [len(seen) for seen in groups],
            "turns": len(turns),
            "steps": [{name: row[name] for name in names} for row in rows],
        },
    )
