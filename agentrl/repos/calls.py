"""Differential tests: calls of a function, on which a fix must do what the original does.

    a package's tests run once, recorded ──> arguments that are plain data ──> and near ones, of the same types
    ──> the original, twice, in fresh processes ──> calls that gave the same plain data
    both times: kept, with a hash of the reply

A verdict makes them in a sandbox that holds the agent's code; the hashes never go there.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

from agentrl.errors import AgentError
from agentrl.sandboxes.base import Entry, Limits, SandboxSpec
from agentrl.verifiers.base import Boxes
from agentrl.verifiers.busy import again_if_starved
from agentrl.verifiers.hidden_tests.channel import FOLDER, NO_ANSWER, Channel, Gone
from agentrl.verifiers.inner import source_of

ITEMS = 64
"""Items of an iterator that are compared."""
SECONDS = 10.0
"""Wall time of all calls of one function."""
RAISED = "!"
"""How the hash of a reply begins that is an exception."""
Forms = list[Any]
"""Arguments of a call: positional ones, and those with names, in the tagged form."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call, and what the original does."""

    forms: Forms
    reply: str
    """The hash of the reply."""
    near: bool = False
    """Whether its arguments were made from recorded ones."""


@dataclass(frozen=True, slots=True)
class Calls:
    """The calls of one function."""

    module: str
    name: str
    calls: tuple[Call, ...]

    def to_json(self) -> dict[str, Any]:
        rows = [[call.forms, call.reply, call.near] for call in self.calls]
        return {"module": self.module, "name": self.name, "calls": rows}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Calls:
        return cls(data["module"], data["name"], tuple(Call(*row) for row in data["calls"]))


def canonical(form: Any) -> Any:
    """Return a form in which equal values are the same: sets and dicts in one order. None for what is no plain data."""
    if form is None or isinstance(form, bool | str):
        return ["plain", form]
    if not isinstance(form, dict) or len(form) != 1:
        return None
    ((tag, content),) = form.items()
    if tag in ("i", "f", "b"):
        return [tag, content]
    if tag == "d":
        content = [[canonical(part) for part in pair] for pair in content]
        parts = [part for pair in content for part in pair]
    elif tag in ("l", "t", "s", "z"):
        content = parts = [canonical(item) for item in content]
    else:
        return None
    if any(part is None for part in parts):
        return None
    return [tag, sorted(content, key=json.dumps) if tag in "dsz" else content]


async def replies(
    code: Mapping[str, Entry], image: str, env: Mapping[str, str], module: str, name: str, calls: Sequence[Forms],
    boxes: Boxes,
) -> list[str]:  # fmt: skip
    """Make calls one after the other in a fresh sandbox; return a hash of what each gave, or "" where it gave no plain
    data, or none in time. An exception is its class, without its words."""
    files: dict[str, Entry | bytes | str] = {
        **code,
        f"{FOLDER}/program.py": source_of("agentrl.verifiers.hidden_tests", "inside_agent"),
    }
    limits = Limits(memory_mb=1024, seconds=SECONDS, processes=64)
    spec = SandboxSpec(image=image, files=files, limits=limits, env=dict(env))

    async def once() -> tuple[list[str], bool]:
        out: list[str] = []
        deadline = monotonic() + SECONDS
        try:
            async with boxes.box(spec) as box:
                channel = await Channel.open(box)
                try:
                    await channel.ask({"op": "import", "name": module}, SECONDS)
                    for args, kwargs in calls:
                        out.append(await _reply(channel, module, name, args, kwargs, deadline))
                finally:
                    await channel.close()
        except (Gone, AgentError) as error:
            return out + [""] * (len(calls) - len(out)), NO_ANSWER in str(error)
        return out, False

    return (await again_if_starved(once, lambda outcome: outcome[1], SECONDS))[0]


async def _reply(channel: Channel, module: str, name: str, args: Any, kwargs: Any, deadline: float) -> str:
    async def ask(op: str, **message: Any) -> dict[str, Any]:
        reply: dict[str, Any] = await channel.ask({"op": op, **message}, max(deadline - monotonic(), 0.05))
        return reply

    reply = await ask("call", at={"m": module, "n": name}, args=args, kwargs=kwargs)
    value: Any = None
    if "raise" in reply:
        value = ["raise", reply["raise"]]
    elif isinstance(reply.get("return"), dict) and "o" in reply["return"]:
        iterator = await ask("iter", at={"o": reply["return"]["o"]}, args=[])
        items: list[Any] = []
        while isinstance(iterator.get("return"), dict) and "o" in iterator["return"] and len(items) < ITEMS:
            item = await ask("next", at={"o": iterator["return"]["o"]}, args=[])
            if "raise" in item:
                items.append(["raise", item["raise"]])
                break
            items.append(canonical(item.get("return")))
        value = ["items", items] if items and None not in items else None
    else:
        plain = canonical(reply.get("return"))
        value = None if plain is None else ["return", plain]
    if value is None:
        return ""
    text = json.dumps(value, sort_keys=True)
    return (RAISED if "raise" in reply else "") + hashlib.sha256(text.encode()).hexdigest()[:24]


async def differs(
    calls: Calls, code: Mapping[str, Entry], image: str, env: Mapping[str, str], boxes: Boxes, rng: random.Random
) -> bool:
    """Return whether a version of the code does on any of these calls something else than the original."""
    order = rng.sample(calls.calls, len(calls.calls))
    told = await replies(code, image, env, calls.module, calls.name, [call.forms for call in order], boxes)
    return told != [call.reply for call in order]
