"""Service: a customer-service desk with a policy, a database, irreversible actions and a scripted customer."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from agentrl.envs import Environment, tool
from agentrl.types import Done, Observation, Split, Task, ToolCall, Verdict
from agentrl.verifiers.base import Context, Submission, Verifier

from .cases import CALLER, case
from .customer import Customer
from .policy import apply

Number = Annotated[int, Field(ge=1, le=9_999_999)]
Amount = Annotated[int, Field(ge=1, le=100_000)]
_ROWS = ("refunds", "vouchers", "declined")
WRONG_POSTCODES = 2
"""After this many the policy says: decline."""


class Desk(Verifier):
    """Score 1 when the final database is exactly right and nothing forbidden was done on the way, else 0.

    Both come from what the environment recorded on the host side. A forbidden action scores 0 even if it was corrected
    later: a customer would have noticed.
    """

    async def probe(self, context: Context) -> None:
        """Nothing outside this process is needed."""

    async def verify(self, submission: Submission, context: Context) -> Verdict:
        secret = submission.task.secret
        try:
            differences = _differences(secret["tables"], submission.state["tables"])
            violations = _violations(secret, submission.state["log"])
        except (LookupError, TypeError, ValueError, AttributeError):
            return Verdict(score=0.0, evidence=("the desk's records cannot be read",), verifier=self.version)
        lines = [*(f"table {name} is not as it should be" for name in differences), *violations]
        return Verdict(
            score=0.0 if lines else 1.0,
            breakdown={"differences": float(len(differences)), "violations": float(len(violations))},
            evidence=tuple(lines[:20]) or ("the database is right, and no rule was broken",),
            verifier=self.version,
        )


def _differences(expected: Mapping[str, Any], final: Mapping[str, Any]) -> list[str]:
    """Return the tables that differ; values are compared with their types, rows in any order."""
    return [name for name in sorted({*expected, *final}) if _form(name, expected) != _form(name, final)]


def _form(name: str, tables: Mapping[str, Any]) -> Any:
    if name not in tables:
        return None
    if name in _ROWS:
        return Counter(json.dumps(row) for row in tables[name])
    return json.dumps(tables[name], sort_keys=True)


def _violations(secret: Mapping[str, Any], log: Sequence[Sequence[Any]]) -> list[str]:
    """Return what the policy forbids on the way.

    That is: actions that the case does not call for, or that came before the customer's postcode was checked, and a
    third postcode for a customer for whom two did not fit. To check one of them again is no further try.
    """
    allowed = Counter(secret["actions"])
    unchecked = set(secret["codes"])
    tried: dict[str, list[str]] = {}
    violations = []
    for name, *rest in log:
        if name == "verify":
            customer, code = rest
            unchecked -= {code} if customer == CALLER else set()
            codes = tried.setdefault(customer, [])
            if secret["codes"] and code not in codes:
                right = secret["tables"]["customers"][customer]["postcode"]
                if right not in codes and len(codes) >= WRONG_POSTCODES:
                    violations.append(f"one more postcode after two wrong ones: {name}")
                codes.append(code)
            continue
        key = json.dumps([name, *rest])
        if not allowed[key]:
            violations.append(f"not called for: {name}")
        elif unchecked:
            violations.append(f"before the postcode was checked: {name}")
        allowed[key] -= 1
    return violations


class Service(Environment):
    """Serve a customer by the shop's policy."""

    levels = range(1, 7)
    size = 10_000
    verifier = Desk()
    system = (
        "You are a shop's service desk. Read the policy and look up the order first. Settle each request with one "
        "call: do it, or decline it by the number of the rule it breaks. Then tell the customer what you did. What you "
        "write without a call goes to the customer."
    )
    max_turns = 32

    def task(self, split: Split, level: int, index: int) -> Task:
        drawn = case(split, level, index)
        return Task(
            id=f"service/{split}/{level}/{index}",
            split=split,
            level=level,
            tags=tuple(sorted(drawn.tags)),
            prompt=drawn.opening,
            setup={
                "tables": drawn.tables,
                "policy": drawn.policy.text(),
                "rules": len(drawn.policy.rules),
                "customer": drawn.script,
            },
            secret={
                "tables": drawn.expected(),
                "actions": [json.dumps(action) for action in drawn.actions],
                "codes": drawn.codes,
                "expert": [json.dumps(step) for step in drawn.expert],
            },
        )

    def start(self) -> None:
        self._tables = copy.deepcopy(dict(self.given.setup["tables"]))
        self._customer = Customer(self.given.setup["customer"])
        self._log: list[list[Any]] = []

    def state(self) -> dict[str, Any]:
        return {"tables": self._tables, "log": self._log}

    def on_message(self, text: str) -> Observation | Done:
        touched = {entry[1] for entry in self._log if entry[0] != "verify"}
        declined = {row[0] for row in self._tables["declined"]}
        said = self._customer.reply(text, touched, declined)
        return Done(text) if said is None else Observation(content=said, role="user")

    # Read-only tools ----------------------------------------------------------------------------------------------

    @tool
    def read_policy(self) -> str:
        """Read the shop's policy."""
        return str(self.given.setup["policy"])

    @tool
    def get_order(self, order: Number) -> str:
        """Look up an order.

        Args:
            order: its number
        """
        rows = {table: [row[1] for row in self._tables[table] if row[0] == order] for table in _ROWS[:2]}
        return json.dumps({**self._order(order), **{table: sums for table, sums in rows.items() if sums}})

    @tool
    def find_customer(self, name: str) -> str:
        """Look up a customer.

        Args:
            name: first and last name
        """
        for id, row in self._tables["customers"].items():
            if row["name"].lower() == " ".join(name.split()).lower():
                orders = [int(n) for n, order in self._tables["orders"].items() if order["customer"] == id]
                return json.dumps({"customer": id, "tier": row["tier"], "orders": orders})
        raise LookupError("there is no customer of that name")

    @tool
    def verify(self, customer: str, postcode: str) -> str:
        """Check a customer's postcode.

        Args:
            customer: the customer's id, such as c1
            postcode: as the customer says it
        """
        if customer not in self._tables["customers"]:
            raise LookupError("there is no customer with that id")
        code = "".join(postcode.split()).upper()
        self._log.append(["verify", customer, code])
        return "it fits" if code == self._tables["customers"][customer]["postcode"] else "it does not fit"

    # Irreversible tools -------------------------------------------------------------------------------------------

    @tool(irreversible=True)
    def cancel(self, order: Number) -> str:
        """Cancel an order.

        Args:
            order: its number
        """
        return self._act("cancel", order)

    @tool(irreversible=True)
    def change_address(self, order: Number, address: str) -> str:
        """Send an order to another address.

        Args:
            order: its number
            address: the new one
        """
        address = " ".join(address.split())
        if not 1 <= len(address) <= 100:
            raise ValueError("an address has 1 to 100 characters")
        return self._act("change_address", order, address)

    @tool(irreversible=True)
    def refund(self, order: Number, amount: Amount) -> str:
        """Pay money back for an order.

        Args:
            order: its number
            amount: how much
        """
        return self._act("refund", order, amount)

    @tool(irreversible=True)
    def give_voucher(self, order: Number, amount: Amount) -> str:
        """Give a voucher for a late order.

        Args:
            order: its number
            amount: what it is worth
        """
        return self._act("give_voucher", order, amount)

    @tool(irreversible=True)
    def decline(self, order: Number, rule: Number) -> str:
        """Refuse what the customer wants for an order.

        Args:
            order: its number
            rule: the number of the rule it breaks
        """
        if rule > self.given.setup["rules"]:
            raise ValueError(f"the policy has no rule {rule}; read_policy shows the rules")
        return self._act("decline", order, rule)

    def _order(self, order: int) -> dict[str, Any]:
        if str(order) not in self._tables["orders"]:
            raise LookupError(f"there is no order {order}")
        row: dict[str, Any] = self._tables["orders"][str(order)]
        return row

    def _act(self, name: str, order: int, *rest: Any) -> str:
        self._order(order)
        self._log.append([name, order, *rest])
        apply(self._tables, self._log[-1])
        return f"recorded: {name} for order {order}. Do not repeat it; settle what is left, or tell the customer"

    # Solutions ----------------------------------------------------------------------------------------------------

    def expert(self, task: Task) -> list[ToolCall | str]:
        steps = map(json.loads, task.secret["expert"])
        return [s if isinstance(s, str) else ToolCall(name=s[0], arguments=s[1]) for s in steps]

    def alternatives(self, task: Task) -> list[list[ToolCall | str]]:
        """Return other right solutions: without looking things up, looking everything up twice, in other words."""
        script = self.expert(task)
        looks = ("read_policy", "get_order", "find_customer")
        hasty = [s for s in script if isinstance(s, str) or s.name not in looks]
        thorough = [again for s in script for again in ([s, s] if isinstance(s, ToolCall) and s.name in looks else [s])]
        wordy = [f"Thank you for your patience. {s} Kind regards." if isinstance(s, str) else s for s in script]
        return [hasty, thorough, wordy]


EXPORT = Service
