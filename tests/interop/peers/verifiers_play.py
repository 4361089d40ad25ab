"""Plays, checks and attacks a verifiers taskset with agentrl, in verifiers' own environment; prints what came."""

import asyncio
import json
import sys
import tempfile
from pathlib import Path

from agentrl import ToolCall, envs
from agentrl.check.run import check
from agentrl.envs.play import play, stage
from agentrl.errors import AuthoringError
from agentrl.redteam import command

OPTIONS = {"id": "agentrl-glossary"}
kind = envs.load("verifiers", OPTIONS)
look = ToolCall(name=next(iter(envs.tools_of(kind))), arguments={"word": "word0"})


async def episodes():
    async with stage("process", limit=2) as where:
        scripts = ([look, "It means meaning0."], ["no idea"], [ToolCall(name=look.name, arguments={"wrd": 1}), "x"])
        return [await play(kind(), kind().task("train", 1, 0), script, where) for script in scripts]


played = asyncio.run(episodes())
names = ["task_contract", "oracle_max", "canary_floor"]
report = asyncio.run(check("verifiers", options=OPTIONS, only=names, sandbox="process", per_level=1))
with tempfile.TemporaryDirectory() as folder:
    solution = Path(folder) / "solution.json"
    facts = {f"verifiers/heldout/1/{i}": f"meaning{3 * i + 1}" for i in range(4)}
    solution.write_text(json.dumps({task: [fact] for task, fact in facts.items()}))
    options = (f"id={OPTIONS['id']}", f"expert={solution}")
    request = command.Request(target="verifiers", options=options, backend="process", families=("I",))
    (attacked,) = command.reports(request)
try:
    envs.load("verifiers", {"id": "no-such-taskset"})
    missing = ""
except AuthoringError as error:
    missing = str(error)
print(
    json.dumps(
        {
            "tools": [tool.schema()["function"] for tool in envs.tools_of(kind).values()],
            "size": kind.size,
            "scores": [p.score for p in played],
            "trust": played[0].verdict.trust,
            "shown": [m.content for m in played[0].messages if m.role == "tool"],
            "refused": played[2].messages[3].content,
            "checks": {r.name: [r.ok, r.evidence] for r in report.results},
            "rewards": report.rewards,
            "controls": [[c.name, c.score] for c in attacked.controls],
            "breaches": sorted(f.id for f in attacked.breaches),
            "notes": list(attacked.notes),
            "missing": missing,
        }
    ),
    file=sys.stdout,
)
