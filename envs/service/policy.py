"""The shop's policy: rules with numbers that differ between tasks, and what they say about a request."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["cancel", "change_address", "refund", "give_voucher"]
Tables = dict[str, Any]
"""customers and orders by id; refunds, vouchers and declined as rows [order, amount or rule]."""

STAGES = ("processing", "packed", "shipped", "delivered")
GOODS = {
    "kitchen": ("kettle", "pan", "toaster", "mixer"),
    "clothes": ("coat", "scarf", "shirt", "boots"),
    "food": ("coffee", "honey", "jam", "tea"),
    "toys": ("kite", "puzzle", "robot", "doll"),
    "garden": ("spade", "hose", "rake", "lamp"),
    "books": ("atlas", "novel", "cookbook", "diary"),
}


@dataclass(frozen=True, slots=True)
class Policy:
    """The terms of one task, and the order in which its rules are written."""

    rules: tuple[str, ...]
    """Keys of the rules that apply; the first is rule 1."""
    cancel_until: int
    """The last stage at which an order can be cancelled, as an index into STAGES."""
    address_until: int
    window: int
    """Days after delivery within which a refund is due."""
    fee: int
    """Subtracted from a refund."""
    never: str
    """The kind of goods that is not refunded."""
    late: int
    """A delivery more than this many days late earns a voucher."""
    voucher: int
    gold: bool
    """Gold customers pay no fee and get twice the voucher."""

    def number(self, key: str) -> int:
        """Return a rule's number in the text."""
        return self.rules.index(key) + 1

    def text(self) -> str:
        """Return the policy as the desk reads it."""
        return "\n".join(f"{at}. {self._rule(key)}" for at, key in enumerate(self.rules, 1))

    def _rule(self, key: str) -> str:
        full = "; for gold customers it is the full price" if self.gold else ""
        twice = f" ({2 * self.voucher} for gold customers)" if self.gold else ""
        return {
            "cancel": f"Cancel an order only while it is {' or '.join(STAGES[: self.cancel_until + 1])}.",
            "address": f"Change an address only while the order is {' or '.join(STAGES[: self.address_until + 1])}.",
            "window": f"Refund an order only up to {self.window} days after delivery.",
            "amount": f"A refund is the price less {self.fee}{full}." if self.fee else "A refund is the full price.",
            "never": f"Never refund an order whose goods are {self.never}.",
            "once": "Refund an order only once.",
            "late": f"Give a voucher of {self.voucher}{twice} only for a delivery more than {self.late} days late.",
            "one_voucher": "Give only one voucher for an order.",
            "identity": "Before you settle or decline anything, ask for the postcode and check it with verify. "
            "After two wrong ones, decline.",
            "owner": "Serve only the customer's own orders. If a number is wrong or not theirs, ask for the right one; "
            "decline if they insist.",
        }[key]

    def broken(self, kind: Kind, order: Mapping[str, Any], number: int, tables: Tables) -> list[str]:
        """Return the rules that a request on an order would break."""
        stage = STAGES.index(order["status"])
        refunded = any(row[0] == number for row in tables["refunds"])
        rewarded = any(row[0] == number for row in tables["vouchers"])
        breaks = {
            "cancel": kind == "cancel" and stage > self.cancel_until,
            "address": kind == "change_address" and stage > self.address_until,
            "window": kind == "refund" and order["days_since_delivery"] > self.window,
            "never": kind == "refund" and order["goods"] == self.never,
            "once": kind == "refund" and refunded,
            "late": kind == "give_voucher" and order["days_late"] <= self.late,
            "one_voucher": kind == "give_voucher" and rewarded,
        }
        return [key for key, broken in breaks.items() if broken and key in self.rules]

    def amount(self, kind: Kind, order: Mapping[str, Any], tier: str) -> int:
        """Return the amount of a refund or a voucher."""
        gold = self.gold and tier == "gold"
        if kind == "refund":
            return int(order["price"]) - (0 if gold else self.fee)
        return self.voucher * (2 if gold else 1)


def draw(rng: random.Random, level: int) -> Policy:
    """Draw the policy of a task of that level."""
    rules = ["cancel", "address", "amount"]
    if level >= 2:
        rules.append("window")
    if level >= 3:
        rules += ["never", "once", "late", "one_voucher"]
    if level >= 4:
        rules += ["identity", "owner"]
    rng.shuffle(rules)
    return Policy(
        rules=tuple(rules),
        cancel_until=rng.randint(0, 1),
        address_until=rng.randint(0, 1),
        window=rng.choice((7, 10, 14, 20, 30, 45)),
        fee=rng.choice((2, 3, 4, 5)) if level >= 3 else 0,
        never=rng.choice(list(GOODS)),
        late=rng.choice((2, 3, 5, 7)),
        voucher=rng.choice((4, 5, 6, 8, 10)),
        gold=level >= 3 and rng.random() < 0.6,
    )


def apply(tables: Tables, action: Sequence[Any]) -> None:
    """Apply an action to the tables: the only place where they change. The order must exist."""
    name, number, *rest = action
    if name == "cancel":
        tables["orders"][str(number)]["status"] = "cancelled"
    elif name == "change_address":
        tables["orders"][str(number)]["address"] = rest[0]
    else:
        table = {"refund": "refunds", "give_voucher": "vouchers", "decline": "declined"}[name]
        tables[table].append([number, rest[0]])
