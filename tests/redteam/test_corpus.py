"""The corpus as a whole: how much there is, that it is well formed, and that each attack has a naive grader."""

import re
from collections import Counter
from pathlib import Path

from agentrl.redteam.attack import FAMILIES, attacks
from agentrl.redteam.naive_graders import GUARDED, NAIVE_GRADERS
from agentrl.redteam.target import SURFACES

ROOT = Path(__file__).resolve().parents[2]


def test_there_are_attacks_in_every_family() -> None:
    counts = Counter(attack.family for attack in attacks().values())
    assert sorted(counts) == sorted(FAMILIES)
    assert sum(counts.values()) >= 200 and min(counts.values()) >= 10


def test_the_pages_say_how_many_attacks_there_are() -> None:
    counts = Counter(attack.family for attack in attacks().values())
    page, readme = ((ROOT / name).read_text(encoding="utf-8") for name in ("docs/redteam.md", "README.md"))
    assert f"\n{counts.total()} attacks in thirteen families" in page
    assert dict(re.findall(r"^\| ([A-M]) \| .* \| (\d+) \|$", page, re.MULTILINE)) == {
        f: str(n) for f, n in counts.items()
    }
    assert f"withstand a suite of {counts.total()} attacks" in readme


def test_every_attack_names_real_surfaces_and_says_what_it_does() -> None:
    for attack in attacks().values():
        assert attack.needs or attack.trial is not None, attack.id  # the loops are there for every target
        assert attack.needs <= set(SURFACES), attack.id
        assert len(attack.title) > 15 and attack.fix, attack.id


def test_every_attack_is_aimed_at_a_naive_grader_or_stopped_before_any_verifier() -> None:
    """Attacks on rollouts, scheduler and evaluation have naive loops instead: see test_loops.py."""
    aimed = {id for grader in NAIVE_GRADERS.values() for id in grader.aimed}
    assert {id for id, attack in attacks().items() if attack.trial is None} - aimed == set(GUARDED)
    assert aimed <= set(attacks())
