"""Measures of a verifier: mutants by hand, Wilson's bound by hand, and a whole report on a real testbed."""

import asyncio

from agentrl import envs
from agentrl.redteam import suite
from agentrl.redteam.mutate import mutants, text_mutants
from agentrl.redteam.naive_graders import NAIVE_GRADERS
from agentrl.redteam.quality import equivalents, near_misses, quality, shortfalls, wrong_works
from agentrl.redteam.testbeds.code import Functions
from agentrl.sandboxes.pool import Pool
from agentrl.statistics import wilson


def test_mutants_of_a_small_function() -> None:
    source = "def f(a, b):\n    if a < b:\n        return a + 1\n    return not b\n"
    body = "def f(a, b):\n    if {}:\n        return {}\n    return {}\n"
    assert dict(mutants(source)) == {
        "line 1: statement 1 is left out": "def f(a, b):\n    return not b\n",
        "line 1: statement 2 is left out": "def f(a, b):\n    if a < b:\n        return a + 1\n",
        "line 2: a condition is turned round": body.format("not a < b", "a + 1", "not b"),
        "line 4: nothing is returned": body.format("a < b", "a + 1", "None"),
        "line 2: Lt becomes LtE": body.format("a <= b", "a + 1", "not b"),
        "line 3: nothing is returned": body.format("a < b", "None", "not b"),
        "line 4: a sign or a not is lost": body.format("a < b", "a + 1", "not not b"),
        "line 3: Add becomes Sub": body.format("a < b", "a - 1", "not b"),
        "line 3: a number grows by one": body.format("a < b", "a + 2", "not b"),
        "line 3: a number becomes zero": body.format("a < b", "a + 0", "not b"),
    }


def test_mutants_of_a_query() -> None:
    query = "SELECT a FROM t JOIN u ON t.i = u.i WHERE b < 12"
    assert dict(text_mutants(query)) == {
        "< at 44 becomes <=": "SELECT a FROM t JOIN u ON t.i = u.i WHERE b <= 12",
        "= at 30 becomes <>": "SELECT a FROM t JOIN u ON t.i <> u.i WHERE b < 12",
        "WHERE at 36 becomes WHERE 1 OR": "SELECT a FROM t JOIN u ON t.i = u.i WHERE 1 OR b < 12",
        "12 at 46 grows by one": "SELECT a FROM t JOIN u ON t.i = u.i WHERE b < 13",
    }
    assert [text for _, text in text_mutants("(3 + 4) * 2")] == [
        "(3 - 4) * 2",
        "(3 + 4) + 2",
        "(4 + 4) * 2",
        "(3 + 5) * 2",
        "(3 + 4) * 3",
    ]


def test_wilson_bound() -> None:
    assert round(wilson(0, 200).high, 4) == 0.0188
    assert round(wilson(1, 20).high, 4) == 0.2361
    assert wilson(0, 0).high == 1.0


def test_near_misses_are_never_the_answer() -> None:
    assert near_misses("24") == ["49", "2", "240", "-24", "4", "24 24"]


def test_our_hidden_tests_kill_every_mutant_and_accept_other_solutions(boxes: Pool) -> None:
    attack_target = suite.AttackTarget(name="functions", make=Functions, tasks=Functions.problems[1:3])
    found = asyncio.run(quality(attack_target, boxes, repeats=5, load=1))
    assert found["mutation"]["score"] == 1.0 and found["mutation"]["killed"] >= 10
    assert found["alternatives"] == {"tried": 1, "false_negatives": 0, "missed": []}
    assert found["flakes"] == {
        "tried": 10,
        "failed": 0,
        "upper_95": round(wilson(0, 10).high, 4),
        "busy_processes": 1,
    }
    assert shortfalls(found) == []
    assert found["discrimination"] == 1.0


def test_a_thin_specification_shows_in_its_mutation_score(boxes: Pool) -> None:
    grader = NAIVE_GRADERS["names_only"]
    attack_target = suite.AttackTarget(name="names_only", make=grader, tasks=grader.problems)
    found = asyncio.run(quality(attack_target, boxes, repeats=1, load=0))
    assert found["mutation"]["score"] < 0.5 and found["mutation"]["survivors"]
    assert shortfalls(found) == [f"mutation score {found['mutation']['score']:.3f} is below 0.95"]


def test_actions_are_left_out_and_their_arguments_changed(boxes: Pool) -> None:
    """In an environment that is graded on what its tools did: every such mutant fails, or leaves nothing different."""
    attack_target = suite.AttackTarget.of("service", envs.load("service"), levels=[3])
    (target,) = asyncio.run(attack_target.survey(boxes))
    wrong = [mutant.what for mutant in wrong_works(target)]
    kinds = {what.split(":")[0].rstrip("0123456789 ") for what in wrong}
    assert len(wrong) >= 6 and any("is left out" in kind for kind in kinds)
    assert any(" becomes " in what for what in wrong)
    found = asyncio.run(quality(attack_target, boxes, repeats=1, load=0))
    assert found["mutation"]["survived"] == 0 and found["mutation"]["killed"] > 0


def test_equivalent_mutants_are_recognised(boxes: Pool) -> None:
    attack_target = suite.AttackTarget(name="functions", make=Functions, tasks=Functions.problems[:1])

    async def run() -> tuple[bool, bool]:
        (target,) = await attack_target.survey(boxes)
        honest = target.code.honest
        same = await equivalents(target, honest.replace("abs(n)", "abs(-n)"), boxes)
        return same, await equivalents(target, honest.replace("abs(n)", "abs(n) + 1"), boxes)

    assert asyncio.run(run()) == (True, False)
