"""The corpus as a whole: how much there is, that it is well formed, and that each attack has a naive grader."""

from collections import Counter

from agentrl.redteam.attack import FAMILIES, attacks
from agentrl.redteam.naive_graders import GUARDED, NAIVE_GRADERS
from agentrl.redteam.target import SURFACES


def test_there_are_attacks_in_every_family() -> None:
    counts = Counter(attack.family for attack in attacks().values())
    assert sorted(counts) == sorted(FAMILIES)
    assert sum(counts.values()) >= 200 and min(counts.values()) >= 10


def test_every_attack_names_real_surfaces_and_says_what_it_does() -> None:
    for attack in attacks().values():
        assert attack.needs and attack.needs <= set(SURFACES), attack.id
        assert len(attack.title) > 15 and attack.fix, attack.id


def test_every_attack_is_aimed_at_a_naive_grader_or_stopped_before_any_verifier() -> None:
    aimed = {id for grader in NAIVE_GRADERS.values() for id in grader.aimed}
    assert set(attacks()) - aimed == set(GUARDED)
    assert aimed <= set(attacks())
