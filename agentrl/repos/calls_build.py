"""Finds the calls of differential tests: recorded from a package's own tests, and near ones of the same types."""

from __future__ import annotations

import ast
import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl import seeds
from agentrl.envs.splits import content_hash
from agentrl.errors import AgentError
from agentrl.repos.calls import RAISED, Call, Calls, Forms, replies
from agentrl.repos.mutate import parse
from agentrl.repos.root import SITE, Root
from agentrl.repos.run import spec_of
from agentrl.sandboxes.base import Entry
from agentrl.sandboxes.pool import Pool
from agentrl.verifiers.base import Boxes
from agentrl.verifiers.inner import source_of

MOST, NEAR = 16, 32
"""Recorded calls of a function that are kept, and calls near them that are tried."""
LONGEST = 2_000
"""Characters of a call's arguments."""


Recorded = tuple[str, str, list[Forms]]
"""A module, the name of a function in it, and the arguments of some calls."""


def record(root: Root, pool: Pool, files: Mapping[str, bytes], ids: Sequence[str]) -> dict[str, Recorded]:
    """Run tests once; return the calls of each function, by key."""
    order: dict[str, Any] = {"ids": list(ids), "most": MOST, "longest": LONGEST}
    order["code"] = [path for path in files if root.source.in_package(path) and not root.source.is_test(path)]
    order["path"] = [f"/box/{root.source.root}".rstrip("/"), "/box", SITE]
    program = source_of(__package__ or "", "inside_record")
    with pool.take(spec_of(root, files)) as box:
        try:
            done = box.exec(["python3", "-B", "-c", program], stdin=json.dumps(order).encode(), timeout=600.0)
        except AgentError:
            return {}
    if not done.ok or not done.stdout.strip():
        return {}
    rows = json.loads(done.stdout.splitlines()[-1])
    return {f"{row[0]}::{row[2]}": (row[1], row[2], [json.loads(text) for text in row[3]]) for row in rows}


def constants(source: bytes, function: str) -> Forms:
    """Return the numbers and texts in a function, numbers with their neighbours: its cases differ there."""
    forms: Forms = []
    for node in parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            for part in ast.walk(node):
                value = part.value if isinstance(part, ast.Constant) else None
                if type(value) is int and abs(value) < 1_000_000:
                    forms += [{"i": str(value + step)} for step in (-1, 0, 1)]
                elif type(value) is str and len(value) < 40:
                    forms.append(value)
    return forms


def near(recorded: Sequence[Forms], key: str, constants: Forms) -> list[Forms]:
    """Return arguments that differ from recorded ones in one place and not in type; the same on every machine."""
    rng = seeds.generator(0, "repository calls", key)
    known = {json.dumps(forms, sort_keys=True) for forms in recorded}
    others: list[Forms] = []
    for _ in range(4 * NEAR if recorded else 0):
        forms = json.loads(json.dumps(rng.choice(recorded)))
        places = list(_places(forms[0])) + list(_places(forms[1]))
        if not places:
            continue
        holder, at = rng.choice(places)
        holder[at] = _other(holder[at], constants, rng)
        text = json.dumps(forms, sort_keys=True)
        if text not in known and len(others) < NEAR:
            known.add(text)
            others.append(forms)
    return others


def _places(holder: Any) -> list[tuple[Any, Any]]:
    """Return every place of a value in a list or dict of forms, those inside other values too."""
    places: list[tuple[Any, Any]] = []
    for at in range(len(holder)) if isinstance(holder, list) else list(holder):
        form = holder[at]
        if form is None:
            continue
        places.append((holder, at))
        if isinstance(form, dict):
            ((tag, content),) = form.items()
            if tag in ("l", "t"):
                places += _places(content)
            elif tag == "d":
                places += [place for pair in content for place in _places(pair) if place != (pair, 0)]
    return places


def _other(form: Any, constants: Forms, rng: random.Random) -> Any:
    """Return another value of the same type."""
    fitting = [other for other in constants if type(other) is type(form) and (type(form) is str or "i" in form)]
    if fitting and rng.random() < 0.4:
        return rng.choice(fitting)
    if isinstance(form, bool):
        return not form
    if isinstance(form, str):
        doubled = form + form[-1:] if form else "a"
        return rng.choice([form[1:], form[:-1], doubled, form.swapcase(), form[::-1], f" {form}", ""])
    ((tag, content),) = form.items()
    if tag == "i":
        number = int(content)
        return {"i": str(rng.choice([number + 1, number - 1, 0, -number, 2 * number, 7]))}
    if tag == "f":
        number_ = float.fromhex(content)
        return {"f": rng.choice([number_ + 1, number_ - 0.5, 0.0, -number_, number_ / 2]).hex()}
    if tag == "b":
        return {"b": ""}
    if not content:
        return form
    choices = [content[1:], content[:-1], content[::-1], content + content[:1], content[:1]]
    if tag in ("s", "z", "d"):
        choices = choices[:2]
    return {tag: rng.choice(choices)}


async def steady(
    built: Root, code: Mapping[str, Entry], key: str, recorded: Recorded, constants: Forms, boxes: Boxes
) -> Calls:
    """Return the calls of a function that give the same plain data twice, in fresh processes. A call that was made up
    and raises is no use of the function: it is left out."""
    module, name, forms = recorded
    forms = sorted(forms, key=lambda one: content_hash(json.dumps(one, sort_keys=True)))
    every = [*forms, *near(forms, key, constants)]
    one = await replies(code, built.image, built.env, module, name, every, boxes)
    order = list(range(len(every)))[::-1]
    again = await replies(code, built.image, built.env, module, name, [every[at] for at in order], boxes)
    other = dict(zip(order, again, strict=True))
    kept = [
        Call(every[at], one[at], at >= len(forms))
        for at in range(len(every))
        if one[at] and one[at] == other[at] and not (at >= len(forms) and one[at].startswith(RAISED))
    ]  # fmt: skip
    return Calls(module, name, tuple(kept))
