"""The search finds what a careless verifier accepts, shrinks it, and writes a test; against ours it finds nothing."""

import asyncio
import subprocess
import sys
import time
from pathlib import Path

from agentrl import seeds
from agentrl.redteam.attack import NotApplicable, attacks
from agentrl.redteam.naive_graders import NAIVE_GRADERS
from agentrl.redteam.proposals import Candidate, propose
from agentrl.redteam.report import Report
from agentrl.redteam.search import search, shrink
from agentrl.redteam.suite import AttackTarget
from agentrl.redteam.testbeds.answers import Words
from agentrl.redteam.testbeds.code import Functions
from agentrl.sandboxes.pool import Pool

REWARD = "echo '{\"reward\": 1}' > logs/verifier/reward.json"


def run(attack_target: AttackTarget, boxes: Pool, seconds: float, folder: Path) -> Report:
    empty = Report(target=attack_target.name, backend="namespace", controls=(), findings=())
    return asyncio.run(search(attack_target, boxes, empty, seconds=seconds, folder=folder))


def test_it_breaks_a_naive_grader_and_saves_the_smallest_exploit(boxes: Pool, tmp_path: Path) -> None:
    report = run(AttackTarget.of("substring", NAIVE_GRADERS["substring"]), boxes, 4.0, tmp_path)
    found = [f for f in report.findings if f.id.startswith("G.found-")]
    assert found == list(report.findings) and all(f.succeeded and f.score == 1.0 for f in found)
    assert min(len(f.transcript[-1].content) for f in found) <= len("apricot") + 1
    saved = sorted(tmp_path.glob("test_found_*.py"))
    assert [p.name for p in saved] == sorted(f"test_found_{f.id.removeprefix('G.found-')}.py" for f in found)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(saved[0])],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1 and "assert 1.0 <= 0.0" in done.stdout, done.stdout


def test_combinations_are_shrunk_to_the_action_that_matters(boxes: Pool) -> None:
    """A sandbox perturbed in several ways, of which two write the reward: the others are left out."""
    attack_target = AttackTarget.of("reward_file", NAIVE_GRADERS["reward_file"])

    async def smallest() -> list[str]:
        (target,) = await attack_target.survey(boxes)
        commands = ("true", "mkdir -p logs/verifier", REWARD, "ls")
        all_of_them = Candidate(commands, lambda parts: [*map(target.run, parts), target.final("done")], fine=False)
        return list((await shrink(target, all_of_them, until=time.monotonic() + 60)).parts)

    assert asyncio.run(smallest()) == ["mkdir -p logs/verifier", REWARD]


def test_everything_there_is_to_vary_is_proposed(boxes: Pool) -> None:
    attack_target = AttackTarget.of("functions", Functions)
    (target,) = asyncio.run(attack_target.survey(boxes))
    rng, lengths = seeds.generator(0, "test"), set()
    for _ in range(300):
        try:
            lengths.add(len(propose(target, list(attacks().values()), rng).parts))
        except NotApplicable:
            continue
    assert {1, 2, 3} <= lengths and max(lengths) > 3  # a source, one to three perturbations, attacks in combination


def test_it_finds_nothing_against_ours(boxes: Pool, tmp_path: Path) -> None:
    report = run(AttackTarget.of("words", Words), boxes, 2.0, tmp_path)
    assert [f.result for f in report.findings] == ["held"]
    assert list(tmp_path.iterdir()) == []
