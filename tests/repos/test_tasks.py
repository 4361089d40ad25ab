"""How functions are dealt to splits, so that every level can be trained on, held out and tested."""

from collections.abc import Mapping

from agentrl.repos import tasks
from agentrl.repos.mutate import REMOVED, Change
from agentrl.repos.suite import Recipe
from agentrl.repos.tasks import Mutant
from agentrl.types import SPLITS

ALL = set(SPLITS)


def mutants(functions: Mapping[str, tuple[int, int]]) -> list[Mutant]:
    """Return faults: for each function their level (4: the body is gone) and how many there are."""
    every = []
    for place, (function, (level, count)) in enumerate(functions.items()):
        for number in range(count):
            start = 1_000 * place + number
            kind = REMOVED if level == 4 else "operator"
            change = Change("m.py", start, start + 1, "x", kind, function)
            every.append(Mutant((change,), ("t::t",), {"t::t": "E"}, ("t::t",), min(level, 3)))
    return every


def dealt(recipes: list[Recipe]) -> dict[int, set[str]]:
    """Return the splits that each level has tasks in."""
    levels: dict[int, set[str]] = {}
    for recipe in recipes:
        levels.setdefault(recipe.level, set()).add(recipe.split)
    return levels


def test_every_level_with_three_functions_has_tasks_in_all_splits() -> None:
    """Levels of three functions are rare among twenty of the first level, and one of theirs has most of the tasks."""
    functions = {f"easy{number}": (1, 6) for number in range(20)}
    functions |= {f"far{number}": (3, 2 + 20 * (number == 0)) for number in range(3)}
    functions |= {f"gone{number}": (4, 1) for number in range(3)}
    recipes = tasks.recipes(mutants(functions), "p", "1", "function")
    assert dealt(recipes) == {1: ALL, 2: ALL, 3: ALL}
    split_of = {recipe.changes[0].function: recipe.split for recipe in recipes}
    assert split_of["far0"] == "train"  # small functions are held out, so that most tasks stay for training
    places = {(recipe.changes[0].function, recipe.split) for recipe in recipes}
    assert len(places) == len(functions)  # no function is in two splits
    assert {recipe.level for recipe in recipes if recipe.changes[0].kind == REMOVED} == {3}


def test_the_dealing_does_not_depend_on_the_order_of_the_faults() -> None:
    every = mutants({f"f{number}": (1 + number % 3, 1 + number % 4) for number in range(17)})
    assert tasks.splits(every, "function") == tasks.splits(every[::-1], "function")


def test_most_tasks_are_for_training() -> None:
    chosen = tasks.splits(mutants({f"f{number}": (1, 5) for number in range(50)}), "function")
    assert [list(chosen.values()).count(split) for split in SPLITS] == [40, 5, 5]


def test_a_level_with_too_few_functions_joins_the_one_below() -> None:
    """Two functions cannot be in three splits: those of level 3 count as level 2, and what follows moves up."""
    functions = {f"a{number}": (1, 2) for number in range(6)} | {f"b{number}": (2, 2) for number in range(6)}
    functions |= {"c0": (3, 2), "c1": (3, 2)} | {f"d{number}": (4, 1) for number in range(3)}
    recipes = tasks.recipes(mutants(functions), "p", "1", "function")
    level_of: dict[str, set[int]] = {recipe.changes[0].function[0]: set() for recipe in recipes}
    for recipe in recipes:
        level_of[recipe.changes[0].function[0]].add(recipe.level)
    assert level_of == {"a": {1}, "b": {2}, "c": {2}, "d": {3}}
    assert dealt(recipes) == {1: ALL, 2: ALL, 3: ALL}


def test_a_first_level_with_too_few_functions_joins_the_next() -> None:
    functions = {"a0": (1, 3)} | {f"b{number}": (2, 2) for number in range(5)}
    recipes = tasks.recipes(mutants(functions), "p", "1", "function")
    assert dealt(recipes) == {1: ALL}


def test_several_thin_levels_join_until_one_has_all_splits() -> None:
    functions = {f"a{number}": (1, 2) for number in range(5)} | {"b": (2, 1), "c": (3, 1), "d": (4, 1)}
    recipes = tasks.recipes(mutants(functions), "p", "1", "function")
    assert dealt(recipes) == {1: ALL}
    assert len(recipes) == 13


def test_a_module_stays_in_one_split() -> None:
    """With `--split-by module` all functions of a file are dealt together."""
    every = []
    for number in range(9):
        change = Change(f"m{number // 2}.py", number, number + 1, "x", "operator", f"f{number}")
        every.append(Mutant((change,), ("t::t",), {"t::t": "E"}, ("t::t",), 1))
    recipes = tasks.recipes(every, "p", "1", "module")
    assert len({(recipe.changes[0].file, recipe.split) for recipe in recipes}) == 5
    assert dealt(recipes) == {1: ALL}
