"""The benchmark of players: experts play as an engine, a tree's processor time is whole, the page shows evidence."""

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agentrl.engines.base import Sampling
from benchmarks import _players as load
from benchmarks._scale_page import EVIDENCE, PAGE, filled
from benchmarks._scale_step import _beside
from benchmarks.rollouts import renderer
from benchmarks.scale import _compared, _summary


def test_the_page_shows_the_evidence() -> None:
    """After new evidence: python -m benchmarks.scale page."""
    text = PAGE.read_text(encoding="utf-8")
    assert filled(text, EVIDENCE) == text


def test_a_page_without_evidence_says_so(tmp_path: Path) -> None:
    text = filled(PAGE.read_text(encoding="utf-8"), tmp_path)
    assert text.count("*Not measured yet*") == 3 and text.count("*Not computed yet.*") == 1


def test_a_step_is_compared_with_that_of_one_process() -> None:
    rows = [{"players": 0, "step_s": 6.0, "rollout_s": 4.0}, {"players": 4, "step_s": 3.0, "rollout_s": 1.0}]
    assert [(row["times_one_process"], row["rollout_times_one_process"]) for row in _beside(rows)] == [(1, 1), (2, 4)]


def test_an_expert_answers_by_the_name_of_the_request() -> None:
    engine, sampling = load.ExpertEngine(renderer()), Sampling(max_tokens=1 << 20)

    async def turn(request: str) -> tuple[int, ...]:
        return tuple((await engine.generate((1,), sampling, request_id=request)).token_ids)

    first, again, second = (asyncio.run(turn(f"3-0-{number}-0")) for number in (0, 0, 1))
    assert first == again != second
    assert asyncio.run(turn("3-2-1-0")) == second  # another rollout of the group plays the same
    with pytest.raises(Exception, match="the expert of repair has . turns, but the episode continues"):
        asyncio.run(turn("3-0-9-0"))


def test_one_process_plays_and_is_graded_as_the_experts_deserve() -> None:
    """`play` raises where a score is not the expected one: 1, and 0 for every other rollout of repair."""

    async def main() -> None:
        with load.one_process(load.recipe(1, 4)) as player:
            for env in load.ENVS:
                await asyncio.gather(*(load.play(player, env, number) for number in range(2)))

    asyncio.run(main())


def test_processor_time_of_children_counts_after_their_death_too() -> None:
    work = "import time; end = time.process_time() + 0.3\nwhile time.process_time() < end: pass"
    before = load.this_tree()
    subprocess.run([sys.executable, "-c", work], check=True)
    after = load.this_tree()
    assert after["cpu"] - before["cpu"] >= 0.28
    assert after["driver"] - before["driver"] < 0.28


def test_a_window_counts_what_ended_inside_it() -> None:
    async def one(number: int) -> None:
        await asyncio.sleep(0.05)

    seen = asyncio.run(load.under_load(one, 4, 0.5, lambda: {"cpu": time.monotonic()}))
    assert 8 <= seen["episodes"] <= 44
    assert seen["cpu_s_per_episode"] * seen["episodes"] == pytest.approx(seen["wall_s"], rel=0.1)


def test_the_summary_says_where_it_stops_growing_and_why() -> None:
    here = {"episodes_per_s": 10.0, "cpu_s_per_episode": 0.1}
    rows = []
    for players, rate in ((1, 10.0), (2, 20.0), (4, 31.0), (8, 31.5)):
        spent = {"driver_s_per_episode": 0.001, "machine_s_per_episode": 0.12, "players_s_per_episode": 0.102}
        there = {"episodes_per_s": rate, "cpu_s_per_episode": 0.105, **spent}
        rows.append(_compared("repair", players, here, there, cores=4))
    assert rows[2]["times_one_process"] == pytest.approx(3.1)
    assert rows[2]["share_of_ideal"] == pytest.approx(0.775)
    assert rows[0]["cpu_ratio_without_rays_own"] == pytest.approx(1.03)
    repair = _summary(rows, 4, 32)["repair"]
    assert (repair["stops_growing_at_players"], repair["why"]) == (4, "the machine's cores are busy")
