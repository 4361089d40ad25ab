"""Make cases: a policy, a database, a customer with requests, and what the desk must do about each."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, field
from typing import Any

from agentrl import seeds
from agentrl.envs.splits import Shuffle
from agentrl.types import Split

from . import policy, words
from .policy import GOODS, STAGES, Kind, Policy, Tables, apply

CALLER = "c1"
"""The customer who writes; the orders of the other customer, c2, are none of their business."""
FIRST, NUMBERS = 100_000, 900_000
_ORDERS = Shuffle(NUMBERS, "service")
"""The first order's number decides a task's split, and no two tasks of a level share it."""

KINDS: tuple[Kind, ...] = ("cancel", "change_address", "refund", "give_voucher")
QUIRKS: dict[int, tuple[str, ...]] = {
    4: ("plain", "misread", "lost"),
    5: ("plain", "misread", "lost", "mind", "together"),
    6: ("misread", "lost", "mind", "together", "stranger", "other"),
}
"""misread: the first postcode is wrong; lost: the first order number is wrong; mind: the customer changes their mind;
together: two requests at once; stranger: the postcode never fits; other: an order of somebody else."""


@dataclass(frozen=True, slots=True)
class Request:
    """One thing that the customer wants, and the right reaction."""

    kind: Kind
    number: int
    ask: str
    action: tuple[Any, ...]
    """The right action; it may be a refusal."""

    @property
    def refused(self) -> bool:
        return bool(self.action[0] == "decline")


@dataclass(slots=True)
class Case:
    """A whole task."""

    policy: Policy
    tables: Tables
    opening: str
    script: dict[str, Any]
    """The customer's script, see `customer.Customer`."""
    actions: list[tuple[Any, ...]]
    """The actions that must be done; no others are allowed."""
    expert: list[Any]
    """Calls as [name, arguments], messages as text."""
    tags: set[str]

    @property
    def codes(self) -> list[str]:
        """Return the postcodes to check before anything is settled: the right one, or a stranger's two wrong ones."""
        said: list[str] = self.script["postcodes"]
        return said if "stranger" in self.tags else said[-1:]

    def expected(self) -> Tables:
        """Return the database after all actions."""
        after = copy.deepcopy(self.tables)
        for action in self.actions:
            apply(after, action)
        return after


def case(split: Split, level: int, index: int) -> Case:
    """Return the case with that index."""
    number = FIRST + _ORDERS.number(split, index)
    return _Maker(level, number, seeds.generator(0, "service", level, number)).case()


@dataclass(slots=True)
class _Maker:
    level: int
    first: int
    rng: random.Random
    terms: Policy = field(init=False)
    tables: Tables = field(init=False)

    def case(self) -> Case:
        rng, level = self.rng, self.level
        self.terms = policy.draw(rng, level)
        self.tables = {"customers": {}, "orders": {}, "refunds": [], "vouchers": [], "declined": []}
        for at, name in enumerate(rng.sample(words.NAMES, 2)):
            tier = rng.choice(("basic", "gold")) if level >= 3 else "basic"
            self.tables["customers"][f"c{at + 1}"] = {"name": name, "tier": tier, "postcode": words.postcode(rng)}
        quirk = rng.choice(QUIRKS.get(level, ("plain",)))
        count = 1 if level < 5 else rng.randint(2, 3)
        refusals = [level >= 2 and quirk != "stranger" and rng.random() < 0.5 for _ in range(count)]
        if level == 6 and quirk not in ("stranger", "other") and not any(refusals):
            refusals[rng.randrange(count)] = True
        requests = [self._request(refuse, quirk, at) for at, refuse in enumerate(refusals)]
        for owner in (CALLER, "c2"):
            self._order(self._number(), owner)
        orders = list(self.tables["orders"].items())
        rng.shuffle(orders)
        self.tables["orders"] = dict(orders)
        return self._assemble(requests, quirk)

    # Orders -----------------------------------------------------------------------------------------------------

    def _number(self) -> int:
        while True:
            number = FIRST + self.rng.randrange(NUMBERS)
            if number != self.first and str(number) not in self.tables["orders"]:
                return number

    def _order(self, number: int, owner: str, status: str = "") -> dict[str, Any]:
        rng = self.rng
        goods = rng.choice(list(GOODS))
        order = self.tables["orders"][str(number)] = {
            "customer": owner,
            "item": rng.choice(GOODS[goods]),
            "goods": goods,
            "price": rng.randint(12, 240),
            "status": status or rng.choice(STAGES),
            "address": words.address(rng),
        }
        if order["status"] == "delivered":
            order["days_since_delivery"] = rng.randint(1, 60)
            order["days_late"] = rng.randint(0, 12)
        return order

    def _request(self, refuse: bool, quirk: str, at: int) -> Request:
        """Return a request that breaks exactly one rule, or none."""
        number = self.first if at == 0 else self._number()
        owner = "c2" if quirk == "other" and at == 0 else CALLER
        refuse = refuse and owner == CALLER
        kind = self.rng.choice(KINDS if self.level >= 3 else KINDS[:3])
        while True:
            status = "delivered" if kind in ("refund", "give_voucher") else self.rng.choice(STAGES)
            order = self._order(number, owner, status)
            self._history(kind, number, refuse)
            broken = self.terms.broken(kind, order, number, self.tables)
            if len(broken) == refuse:
                break
            for table in ("refunds", "vouchers"):
                self.tables[table] = [row for row in self.tables[table] if row[0] != number]
        if owner == "c2":
            broken = ["owner"]
        elif quirk == "stranger":
            broken = ["identity"]
        return self._wish(kind, number, order, broken)

    def _history(self, kind: Kind, number: int, refuse: bool) -> None:
        """Give some orders a refund or voucher in the past."""
        table, rule = {"refund": ("refunds", "once"), "give_voucher": ("vouchers", "one_voucher")}.get(kind, ("", ""))
        if refuse and rule in self.terms.rules and self.rng.random() < 0.4:
            self.tables[table].append([number, self.rng.randint(5, 12)])

    def _wish(self, kind: Kind, number: int, order: dict[str, Any], broken: list[str]) -> Request:
        address = words.address(self.rng)
        ask = self.rng.choice(words.ASKS[kind]).format(order=number, address=address)
        if broken:
            return Request(kind, number, ask, ("decline", number, self.terms.number(broken[0])))
        tier = self.tables["customers"][order["customer"]]["tier"]
        rest = {
            "cancel": (),
            "change_address": (address,),
            "refund": (self.terms.amount("refund", order, tier),),
            "give_voucher": (self.terms.amount("give_voucher", order, tier),),
        }[kind]
        return Request(kind, number, ask, (kind, number, *rest))

    # Conversation -------------------------------------------------------------------------------------------------

    def _assemble(self, requests: list[Request], quirk: str) -> Case:
        rng = self.rng
        name = self.tables["customers"][CALLER]["name"]
        size = 2 if quirk == "together" else 1
        groups = [requests[:size], *([request] for request in requests[size:])]
        pushes = [self._pushes(group) for group in groups]
        first = " ".join(request.ask for request in groups[0])
        spoken, script = first, self._script(name, groups, pushes)
        head = requests[0]
        if quirk == "lost":
            wrong = self._number()
            spoken = head.ask.replace(str(head.number), str(wrong))
            script["stages"][0] |= {
                "orders": [[wrong, head.number]],
                "again": rng.choice(words.REMINDERS).format(ask=spoken),
            }
            script["number"] = rng.choice(words.CORRECTIONS).format(order=head.number)
        elif quirk == "other":
            script["number"] = rng.choice(words.INSISTS).format(order=head.number)
        elif quirk == "mind":
            spoken, script["mind"] = self._change_of_mind(head)
        right = self.tables["customers"][CALLER]["postcode"]
        if "identity" in self.terms.rules:
            one = words.postcode(rng, (right,))
            other = words.postcode(rng, (right, one))
            script["postcodes"] = {"misread": [one, right], "stranger": [one, other]}.get(quirk, [right])
        opening = rng.choice(words.GREETINGS).format(name=name, ask=spoken)
        expert = _expert(self.level, script, groups, pushes, quirk)
        refused = {"refusal"} if any(request.refused for request in requests) else set()
        tags = {request.kind for request in requests} | refused | ({quirk} - {"plain"})
        return Case(self.terms, self.tables, opening, script, [r.action for r in requests], expert, tags)

    def _pushes(self, group: list[Request]) -> list[str]:
        if self.level < 6 or not any(request.refused for request in group):
            return []
        return self.rng.sample(words.PUSHES, self.rng.randint(1, 2))

    def _script(self, name: str, groups: list[list[Request]], pushes: list[list[str]]) -> dict[str, Any]:
        stages = []
        for group, push in zip(groups, pushes, strict=True):
            ask = " ".join(request.ask for request in group)
            stages.append(
                {
                    "opens": self.rng.choice(words.FURTHER).format(ask=ask),
                    "again": self.rng.choice(words.REMINDERS).format(ask=ask),
                    "orders": [[request.number] for request in group],
                    "pushes": push,
                }
            )
        return {"name": name, "stages": stages, "postcodes": [], "number": "", "mind": ""}

    def _change_of_mind(self, request: Request) -> tuple[str, str]:
        """Return what is asked first, and what takes it back in reply to the first message, before the desk may act."""
        first = self.rng.choice(words.ASKS[self.rng.choice([kind for kind in KINDS if kind != request.kind])])
        first = first.format(order=request.number, address=words.address(self.rng))
        return first, self.rng.choice(words.CHANGES).format(ask=request.ask)


def _expert(
    level: int, script: dict[str, Any], groups: list[list[Request]], pushes: list[list[str]], quirk: str
) -> list[Any]:
    """Return the expert's part of the conversation with the customer of that script."""
    said: list[Any] = [["read_policy", {}]] if level >= 2 else []
    if quirk == "lost":
        wrong = script["stages"][0]["orders"][0][0]
        said += [["get_order", {"order": wrong}], words.ASK_NUMBER]
    for at, (group, push) in enumerate(zip(groups, pushes, strict=True)):
        said += [["get_order", {"order": request.number}] for request in group]
        if at == 0 and quirk == "other":
            said.append(words.ASK_NUMBER)
        if at == 0 and level >= 3:
            said.append(["find_customer", {"name": script["name"]}])
            for code in script["postcodes"]:
                said += [words.ASK_POSTCODE, ["verify", {"customer": CALLER, "postcode": code}]]
        said += [_call(request.action) for request in group]
        said += [words.REFUSED if any(request.refused for request in group) else words.DONE]
        said += [words.FIRM] * len(push)
    return said


def _call(action: tuple[Any, ...]) -> list[Any]:
    name, number, *rest = action
    field = {"change_address": "address", "refund": "amount", "give_voucher": "amount", "decline": "rule"}.get(name)
    return [name, {"order": number, **({field: rest[0]} if field else {})}]
