"""Hostile solutions must be wrong: an oracle of our own runs them beside the reference, without any verifier."""

import asyncio
import base64
import json
import re

from agentrl.redteam import suite
from agentrl.redteam.attack import NotApplicable, Variants, attacks
from agentrl.redteam.solution import Solution
from agentrl.redteam.target import Target, perturb
from agentrl.redteam.testbeds.code import EXERCISES, Functions
from agentrl.sandboxes.base import SandboxSpec
from agentrl.sandboxes.pool import Pool
from agentrl.types import ToolCall

ORACLE = """\
import json, os, sys
order = json.load(os.fdopen(3))
name, out = order["name"], os.dup(4)
os.close(4)
scope = {"__name__": "candidate"}
exec(order["source"], scope)
found = [scope[name](given) for given in order["inputs"]]
plain = all(type(v) in (int, float, str, list, dict) for v in found)
os.write(out, (order["key"] + json.dumps(found if plain else None)).encode())
"""


def sources(target: Target) -> dict[str, list[str]]:
    """Return every source that a code attack submits whole, by attack."""
    submitted: dict[str, list[str]] = {}
    for attack in attacks().values():
        if "python" not in attack.needs or attack.partial or not attack.needs <= target.surfaces:
            continue
        try:
            plays = attack.play(target)
        except NotApplicable:
            continue
        for script in plays if isinstance(plays, Variants) else [plays]:
            for action in script if isinstance(script, list) else []:
                if isinstance(action, ToolCall) and str(action.arguments.get("command", "")).endswith("> solution.py"):
                    body = re.findall(r"printf %s (\S+) \|", str(action.arguments["command"]))[0]
                    submitted.setdefault(attack.id, []).append(base64.b64decode(body).decode())
    return submitted


def test_no_code_attack_computes_the_function(boxes: Pool) -> None:
    exercise = EXERCISES[2]

    async def run() -> tuple[list[str], int]:
        attack_target = suite.AttackTarget(name="functions", make=Functions, tasks=Functions.problems[2:3])
        (target,) = await attack_target.survey(boxes)
        right, tried = [], 0
        places = asyncio.Semaphore(4)

        async def one(id: str, source: str) -> None:
            nonlocal tried
            order = {"source": source, "name": exercise.name, "inputs": [g for g, _ in exercise.hidden], "key": "k:"}
            async with places, boxes.box(SandboxSpec()) as box:
                done = await box.aio.python(ORACLE, json.dumps(order).encode(), timeout=1.0)
            tried += 1
            if done.reply == b"k:" + json.dumps([e for _, e in exercise.hidden]).encode():
                right.append(id)

        slow = {a.id for a in attacks().values() if a.slow}
        await asyncio.gather(*(one(i, s) for i, several in sources(target).items() if i not in slow for s in several))
        return right, tried

    right, tried = asyncio.run(run())
    assert right == []
    assert tried > 60


def test_a_solution_is_hollowed_poisoned_and_wrapped() -> None:
    honest = "LIMIT = 3\n\n\ndef double(x: int) -> int:\n    return x * 2\n"
    solution = Solution("pack/tool.py", honest, "def double(x):\n    return 7\n")
    assert solution.module == "pack.tool"
    assert solution.functions == ("double",)
    assert solution.hollow("None", "import os") == (
        "import os\n\nLIMIT = 3\n\ndef double(x: int) -> int:\n    return None\n"
    )
    assert solution.poisoned("import os") == "import os\n\ndef double(x):\n    return 7\n"
    assert solution.wrapped("def w(f): return f\n", "w").endswith("def w(f): return f\n\ndouble = w(double)\n")


def test_a_perturbed_answer_is_another_one() -> None:
    assert [perturb(a) for a in ("408", "3.75", "x^2 + x - 6", "apricot", "")] == [
        "817",
        "3.151",
        "x^2 + x - 13",
        "bqsjdpu",
        "42",
    ]
