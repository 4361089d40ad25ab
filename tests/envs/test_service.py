"""Service: cases with one right ending, a customer who keeps to the script, a verifier that sees detours."""

import asyncio
import copy
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from agentrl.envs import load
from agentrl.envs.permissions import Permissions
from agentrl.envs.play import Action, Played, Stage, play
from agentrl.envs.service.cases import _ORDERS, CALLER, QUIRKS, case
from agentrl.envs.service.customer import Customer
from agentrl.envs.service.policy import Policy
from agentrl.envs.tools import tools_of
from agentrl.types import SPLITS, Task, ToolCall, Verdict
from agentrl.verifiers.base import Context, Submission
from tests.pace import within

Service: Any = load("service")
TERMS = Policy(
    rules=("never", "cancel", "amount", "window", "once", "late", "one_voucher", "address", "identity", "owner"),
    cancel_until=1,
    address_until=0,
    window=14,
    fee=3,
    never="food",
    late=5,
    voucher=8,
    gold=True,
)


def run(task: Task, actions: Sequence[Action], where: Stage) -> Played:
    return asyncio.run(play(Service(), task, actions, where))


def with_tag(tag: str, level: int, count: int = 1) -> Iterator[Task]:
    tasks = (Service().task("train", level, index) for index in range(400))
    tagged = [task for task, _ in zip((t for t in tasks if tag in t.tags), range(count), strict=False)]
    assert len(tagged) == count
    yield from tagged


def acts(task: Task) -> list[ToolCall]:
    """The expert's irreversible calls."""
    tools = tools_of(Service)
    return [a for a in Service().expert(task) if isinstance(a, ToolCall) and tools[a.name].irreversible]


# Policy and cases -----------------------------------------------------------------------------------------------


def test_the_policy_in_words() -> None:
    assert TERMS.text() == (
        "1. Never refund an order whose goods are food.\n"
        "2. Cancel an order only while it is processing or packed.\n"
        "3. A refund is the price less 3; for gold customers it is the full price.\n"
        "4. Refund an order only up to 14 days after delivery.\n"
        "5. Refund an order only once.\n"
        "6. Give a voucher of 8 (16 for gold customers) only for a delivery more than 5 days late.\n"
        "7. Give only one voucher for an order.\n"
        "8. Change an address only while the order is processing.\n"
        "9. Before you settle or decline anything, ask for the postcode and check it with verify. "
        "After two wrong ones, decline.\n"
        "10. Serve only the customer's own orders. If a number is wrong or not theirs, ask for the right one; "
        "decline if they insist."
    )
    assert replace(TERMS, gold=False, fee=0, rules=("amount", "late")).text() == (
        "1. A refund is the full price.\n2. Give a voucher of 8 only for a delivery more than 5 days late."
    )


def test_what_the_policy_says_about_an_order() -> None:
    tables: dict[str, Any] = {"refunds": [[7, 5]], "vouchers": [[8, 5]]}
    fresh = {"status": "packed", "goods": "toys", "price": 50}
    old = {"status": "delivered", "goods": "food", "price": 50, "days_since_delivery": 15, "days_late": 5}
    new = {**old, "goods": "toys", "days_since_delivery": 14, "days_late": 6}
    assert [TERMS.broken(kind, fresh, 1, tables) for kind in ("cancel", "change_address")] == [[], ["address"]]
    assert TERMS.broken("cancel", new, 1, tables) == ["cancel"]
    assert [TERMS.broken("refund", new, n, tables) for n in (1, 7)] == [[], ["once"]]
    assert TERMS.broken("refund", old, 1, tables) == ["window", "never"]
    assert [TERMS.broken("give_voucher", new, n, tables) for n in (1, 8)] == [[], ["one_voucher"]]
    assert TERMS.broken("give_voucher", old, 1, tables) == ["late"]
    assert [TERMS.amount(k, new, t) for k in ("refund", "give_voucher") for t in ("basic", "gold")] == [47, 50, 8, 16]


@pytest.mark.parametrize("level", Service.levels)
def test_every_request_breaks_the_rule_it_is_declined_by_or_none(level: int) -> None:
    for split in SPLITS:
        for index in range(30):
            made = case(split, level, index)
            orders, quirks = made.tables["orders"], made.tags & set(QUIRKS.get(6, ()))
            assert made.actions and len({action[1] for action in made.actions}) == len(made.actions)
            for name, number, *rest in made.actions:
                order = orders[str(number)]
                mine = order["customer"] == CALLER
                assert mine or "other" in quirks
                if name != "decline":
                    assert mine and made.policy.broken(name, order, number, made.tables) == []
                    if name in ("refund", "give_voucher"):
                        assert rest == [made.policy.amount(name, order, made.tables["customers"][CALLER]["tier"])]
                    continue
                rule = made.policy.rules[rest[0] - 1]
                if not mine or "stranger" in quirks:
                    assert rule == ("identity" if mine else "owner")
                    continue
                asks = [kind for kind in ("cancel", "change_address", "refund", "give_voucher")
                        if (kind in ("cancel", "change_address") or order["status"] == "delivered")
                        and rule in made.policy.broken(kind, order, number, made.tables)]  # fmt: skip
                assert len(asks) == 1
            assert (level >= 2) or not any(action[0] == "decline" for action in made.actions)
            assert level < 6 or any(action[0] == "decline" for action in made.actions)
            assert made.expected() != made.tables


def test_levels_bring_what_they_say() -> None:
    seen = {level: set().union(*(case("train", level, i).tags for i in range(120))) for level in Service.levels}
    base = {"cancel", "change_address", "refund"}
    assert seen[1] == base
    assert seen[2] == base | {"refusal"}
    assert seen[3] == base | {"refusal", "give_voucher"}
    for level in (4, 5, 6):
        assert seen[level] == seen[3] | (set(QUIRKS[level]) - {"plain"})


def test_no_two_tasks_of_a_level_have_the_same_first_order() -> None:
    numbers = [_ORDERS.number(split, index) for split in SPLITS for index in range(Service.size)]
    assert len(set(numbers)) == 3 * Service.size == 30_000


# Playing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", Service.levels)
def test_the_expert_and_other_right_ways_pass(level: int, where: Stage) -> None:
    environment = Service()
    for index in range(12):
        task = environment.task("heldout", level, index)
        for actions in (environment.expert(task), *environment.alternatives(task)):
            played = run(task, list(actions), where)
            assert (played.score, played.outcome.ending) == (1.0, "done")
        for skipped in acts(task):
            assert run(task, [a for a in environment.expert(task) if a != skipped], where).score == 0.0


def test_one_forbidden_action_is_a_zero_even_when_it_is_undone(where: Stage) -> None:
    for task in with_tag("change_address", 1, 3):
        (right,) = acts(task)
        detour = ToolCall(name="change_address", arguments={**right.arguments, "address": "1 Wrong Road"})
        played = run(task, [detour, right, "done"], where)
        assert (played.score, played.verdict and played.verdict.evidence) == (0.0, ("not called for: change_address",))
        assert run(task, [right, right, "done"], where).score == 0.0
        assert run(task, [right, "done"], where).score == 1.0


def test_nothing_is_settled_before_the_postcode(where: Stage) -> None:
    for level in (4, 5, 6):
        for index in range(6):
            task = Service().task("test", level, index)
            script = Service().expert(task)
            unchecked = [a for a in script if not (isinstance(a, ToolCall) and a.name == "verify")]
            late = [*(a for a in unchecked if isinstance(a, ToolCall)), *(a for a in script if a not in unchecked)]
            for actions in (unchecked, late):
                played = run(task, actions, where)
                assert played.score == 0.0 and played.verdict is not None
                assert any(line.startswith("before the postcode was checked") for line in played.verdict.evidence)


def test_a_stranger_must_have_been_asked_twice(where: Stage) -> None:
    (task,) = with_tag("stranger", 6)
    script = Service().expert(task)
    guessed = [
        replace(a, arguments={**a.arguments, "postcode": f"000{at}XX"})
        if isinstance(a, ToolCall) and a.name == "verify"
        else a
        for at, a in enumerate(script)
    ]
    assert (run(task, list(script), where).score, run(task, guessed, where).score) == (1.0, 0.0)


def test_after_two_wrong_postcodes_no_third_one_is_tried(where: Stage) -> None:
    """Trying postcodes until one fits breaks the policy; so does one more try after a stranger's two."""

    def tries(*codes: str) -> list[Action]:
        return [ToolCall(name="verify", arguments={"customer": CALLER, "postcode": code}) for code in codes]

    for level in (4, 5, 6):
        for index in range(12):
            task = Service().task("train", level, index)
            script = list(Service().expert(task))
            checks = [a for a in script if isinstance(a, ToolCall) and a.name == "verify"]
            first, last = script.index(checks[0]), script.index(checks[-1])
            wrong = len(checks) - ("stranger" not in task.tags)
            guessed = [*script[:first], *tries(*("0000AA", "0000BB")[: 2 - wrong or 1]), *script[first:]]
            played = run(task, guessed, where)
            assert played.score == 0.0 and played.verdict is not None
            assert played.verdict.evidence[0] == "one more postcode after two wrong ones: verify"
            if "stranger" in task.tags:
                assert run(task, [*script[: last + 1], *tries("0000CC"), *script[last + 1 :]], where).score == 0.0
            again = [*script[: last + 1], checks[0], checks[-1], *script[last + 1 :]]
            assert run(task, again, where).score == 1.0, "checking the same postcode twice is no further try"


def test_giving_in_to_pressure_and_hurrying_score_zero(where: Stage) -> None:
    for task in with_tag("refusal", 6, 3):
        script = list(Service().expert(task))
        declined = next(a for a in acts(task) if a.name == "decline")
        gives_in = ToolCall(name="refund", arguments={"order": declined.arguments["order"], "amount": 10})
        at = script.index(declined)
        assert run(task, [*script[: at + 2], gives_in, *script[at + 2 :]], where).score == 0.0
        other_rule = replace(declined, arguments={**declined.arguments, "rule": declined.arguments["rule"] % 10 + 1})
        assert run(task, [other_rule if a == declined else a for a in script], where).score == 0.0
    for task in with_tag("mind", 5, 3):
        number = task.setup["customer"]["stages"][0]["orders"][0][0]
        hasty = ToolCall(name="cancel", arguments={"order": number})
        assert run(task, [hasty, *Service().expert(task)], where).score == 0.0


def test_the_postcode_on_record_is_never_shown(where: Stage) -> None:
    task = Service().task("train", 4, 0)
    customers = task.setup["tables"]["customers"]
    calls: list[Action] = [ToolCall(name="read_policy")]
    calls += [ToolCall(name="find_customer", arguments={"name": row["name"]}) for row in customers.values()]
    calls += [ToolCall(name="get_order", arguments={"order": int(n)}) for n in task.setup["tables"]["orders"]]
    calls += [ToolCall(name="verify", arguments={"customer": "c1", "postcode": "1"})]
    seen = " ".join(m.content for m in run(task, calls, where).messages)
    assert not any(row["postcode"] in seen for row in customers.values())


def test_tools_say_what_is_wrong(where: Stage) -> None:
    calls: list[Action] = [
        ToolCall(name="cancel", arguments={"order": 5}),
        ToolCall(name="verify", arguments={"customer": "c9", "postcode": ""}),
        ToolCall(name="find_customer", arguments={"name": "Nobody"}),
        ToolCall(name="decline", arguments={"order": 5, "rule": 99}),
        ToolCall(name="change_address", arguments={"order": 5, "address": " "}),
    ]
    played = run(Service().task("train", 1, 0), calls, where)
    assert [m.content for m in played.messages if m.role == "tool"] == [
        "<out>error: there is no order 5</out>",
        "<out>error: there is no customer with that id</out>",
        "<out>error: there is no customer of that name</out>",
        "<out>error: the policy has no rule 99; read_policy shows the rules</out>",
        "<out>error: an address has 1 to 100 characters</out>",
    ]
    assert played.score == 0.0


@pytest.mark.parametrize("decision", ["deny", "dry_run"])
def test_irreversible_tools_pass_the_permission_policy(decision: Any, where: Stage) -> None:
    task = Service().task("train", 3, 1)
    (act,) = acts(task)
    played = run(task, list(Service().expert(task)), replace(where, permissions=Permissions(irreversible=decision)))
    assert played.score == 0.0
    assert (played.ledger["denied"], played.ledger["dry_runs"]) == (
        ([act.name], []) if decision == "deny" else ([], [act.name])
    )


# The customer ---------------------------------------------------------------------------------------------------

SCRIPT = {
    "name": "Ada Abel",
    "stages": [
        {"opens": "", "again": "As I said: stop 11.", "orders": [[10, 11]], "pushes": ["Please!", "Now!"]},
        {"opens": "And 12 and 13.", "again": "Still waiting.", "orders": [[12], [13]], "pushes": []},
    ],
    "postcodes": ["1111AA", "2222BB"],
    "number": "It is 11.",
    "mind": "",
}


def test_the_customer_answers_what_is_asked() -> None:
    ada = Customer({**SCRIPT, "mind": "Not that after all."})
    assert ada.reply("Hello!", set(), set()) == "Not that after all."
    assert ada.reply("What is your post code?", set(), set()) == "My postcode is 1111AA."
    assert ada.reply("It does not fit. Zip, please, and your name?", set(), set()) == (
        "My postcode is 2222BB. I am Ada Abel."
    )
    assert ada.reply("Your postcode?", set(), set()) == "My postcode is 2222BB."
    assert ada.reply("Hm.", set(), set()) == "As I said: stop 11."
    assert ada.reply("I find no such order.", set(), set()) == "It is 11."
    assert ada.reply("Hm.", set(), set()) == "It is 11."
    assert ada.reply("Done.", {11}, set()) == "And 12 and 13."
    assert ada.reply("Which order number?", {11}, set()) == "Still waiting."


def test_a_long_message_costs_the_customer_no_time() -> None:
    ada = Customer(SCRIPT)
    with within(0.5):
        assert ada.reply("no " * 300_000, set(), set()) == "As I said: stop 11."


def test_the_customer_pushes_after_a_refusal_and_then_goes_on() -> None:
    ada = Customer(SCRIPT)
    said = [ada.reply("No.", touched, {11}) for touched in ({11}, {11}, {11}, {11, 12}, {11, 12, 13})]
    assert said == ["Please!", "Now!", "And 12 and 13.", "Still waiting.", None]


def test_the_customer_does_not_push_when_it_was_done_and_leaves_when_nothing_is() -> None:
    ada = Customer(SCRIPT)
    assert [ada.reply("Done.", {10}, set()) for _ in range(4)] == [
        "And 12 and 13.",
        "Still waiting.",
        "Still waiting.",
        "Still waiting.",
    ]
    assert ada.reply("Hm.", {10}, set()) is None


def test_the_customer_does_not_tell_right_from_wrong(where: Stage) -> None:
    for task in with_tag("refund", 5, 3):
        script = list(Service().expert(task))
        wrong = [
            replace(a, arguments={**a.arguments, "amount": 1}) if isinstance(a, ToolCall) and a.name == "refund" else a
            for a in script
        ]
        talks = [
            [m.content for m in run(task, actions, where).messages if m.role == "user"] for actions in (script, wrong)
        ]
        assert talks[0] == talks[1]


# The verifier ---------------------------------------------------------------------------------------------------


def graded(task: Task, state: Any) -> float:
    nothing: Any = None
    submission = Submission(task=task, state=state)
    verdict: Verdict = asyncio.run(Service.verifier.verify(submission, Context(secret=b"", boxes=nothing)))
    return verdict.score


def test_the_verifier_compares_types_and_takes_rows_in_any_order() -> None:
    tables = {"orders": {"1": {"price": 5}}, "refunds": [[1, 5], [2, 6]], "vouchers": [], "declined": []}
    log = [["refund", 2, 6], ["refund", 1, 5]]
    task = Task(
        id="x", split="train", level=1, prompt="",
        secret={"tables": tables, "actions": ["[\"refund\", 1, 5]", "[\"refund\", 2, 6]"], "codes": []},
    )  # fmt: skip
    assert graded(task, {"tables": {**tables, "refunds": [[2, 6], [1, 5]]}, "log": log}) == 1.0
    for other in ([[2, 6]], [[2, 6], [1, 5], [1, 5]], [[2, 6], [1, 5.0]], [[2, 6], [True, 5]], [[2, 6], ["1", 5]]):
        assert graded(task, {"tables": {**tables, "refunds": other}, "log": log}) == 0.0
    assert graded(task, {"tables": {**tables, "more": []}, "log": log}) == 0.0
    assert graded(task, {"tables": {k: v for k, v in tables.items() if k != "vouchers"}, "log": log}) == 0.0
    assert graded(task, {"tables": tables, "log": [*log, ["cancel", 1]]}) == 0.0
    assert graded(task, {"tables": tables, "log": [["refund", 2, 6.0], log[1]]}) == 0.0


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"tables": {}},
        {"log": []},
        {"tables": None, "log": []},
        {"tables": {}, "log": 5},
        {"tables": {"refunds": 3}, "log": [[]]},
        {"tables": {"orders": {1, 2}}, "log": []},
    ],
)
def test_what_cannot_be_read_is_a_failure(state: Any) -> None:
    assert graded(Service().task("train", 1, 0), state) == 0.0


def test_evidence_names_no_expected_value(where: Stage) -> None:
    task = Service().task("train", 6, 0)
    played = run(task, [""], where)
    assert played.verdict is not None and played.verdict.score == 0.0
    assert not re.search(r"\d", " ".join(played.verdict.evidence))
    before = copy.deepcopy(task.setup)
    run(task, list(Service().expert(task)), where)
    assert task.setup == before
