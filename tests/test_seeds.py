"""Seeds follow from names alone, and different names never meet by accident."""

from hypothesis import given
from hypothesis import strategies as st

from agentrl import seeds

names = st.lists(st.text(max_size=6) | st.integers(-5, 5), max_size=4)


def test_known_values_stay_what_they_are() -> None:
    assert seeds.derive(0, "reset", "files/train/1/0", 3) == 9164789342080881009
    assert seeds.secret(b"k" * 32, "t", 1).hex()[:16] == "46e891aaf8dd58ce"


@given(st.integers(0, 2**40), names, names)
def test_different_names_give_different_seeds(seed: int, a: list[str | int], b: list[str | int]) -> None:
    same = [(type(x), x) for x in a] == [(type(x), x) for x in b]
    assert (seeds.derive(seed, *a) == seeds.derive(seed, *b)) == same


def test_secrets_differ_by_key_task_and_group() -> None:
    made = {seeds.secret(key, task, group) for key in (b"a", b"b") for task in ("t", "u") for group in (0, 1)}
    assert len(made) == 8


def test_generators_repeat() -> None:
    assert seeds.generator(1, "x").random() == seeds.generator(1, "x").random()
