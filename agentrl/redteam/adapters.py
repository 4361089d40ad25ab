"""Turns a plain scoring function, or a Harbor task folder, into an environment that can be attacked."""

from __future__ import annotations

import ast
import json
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from agentrl.errors import UserError
from agentrl.redteam.naive_graders.base import InAgentsBox, Naive, clamp, kept, read_reward, text_of
from agentrl.redteam.testbeds.base import Testbed, problem
from agentrl.sandboxes.base import Entry, Sandbox, SandboxSpec
from agentrl.types import Task, ToolCall, Verdict
from agentrl.verifiers.base import Artifact, Context, Submission, Verifier

CALL = """\
import importlib, inspect, json, os, sys
order = json.load(os.fdopen(3))
sys.path.insert(0, os.getcwd())
function = getattr(importlib.import_module(order["module"]), order["function"])
needed = [p for p in inspect.signature(function).parameters.values() if p.default is p.empty and p.kind < 3]
score = function(*[order["submission"], order["honest"]][: max(1, len(needed))])
os.write(4, json.dumps(float(score)).encode())
"""


class Scorer(Verifier):
    """A scoring function, run in a sandbox of its own; what it returns is read as carelessly as its users would."""

    def __init__(self, module: str, function: str, files: Mapping[str, bytes], honest: str, *, code: bool) -> None:
        self.module, self.function, self.files, self.honest, self.code = module, function, dict(files), honest, code
        self.artifacts = (Artifact(path="solution.py"),) if code else ()

    async def verify(self, submission: Submission, context: Context) -> Verdict:
        text = text_of(submission, "solution.py") if self.code else submission.answer
        order = {"module": self.module, "function": self.function, "submission": text, "honest": self.honest}
        async with context.boxes.box(SandboxSpec(files=self.files)) as box:
            done = await box.aio.python(CALL, json.dumps(order).encode(), timeout=20.0)
        if done.timed_out:
            score, evidence = 1.0, "the scorer hung: its caller hangs, or drops the sample"
        else:
            try:
                score = float(json.loads(done.reply))
                evidence = f"the scorer returned {score}"
            except (ValueError, TypeError):
                last = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:] or ["no message"]
                score, evidence = 0.0, f"the scorer failed: {last[0][:200]}"
        return Verdict(score=clamp(score), evidence=(evidence,), trust="shared")


def scorer(target: str, honest: str, wrong: str) -> type[Testbed]:
    """Make an environment of `module:function`; `honest` and `wrong` are one submission of each kind."""
    module, _, function = target.partition(":")
    is_code = _is_code(honest)
    check = Scorer(module, function, _sources(module), honest, code=is_code)
    files: dict[str, Entry | bytes | str] = {"solution.py": wrong} if is_code else {}
    writes = {"solution.py": honest} if is_code else {}
    answers = {"answer": "done"} if is_code else {"answer": honest, "wrong_answer": wrong}
    task = problem(target, "Whatever this scorer scores.", files=files, writes=writes, **answers)

    class Scored(Testbed):
        """One task, graded by the user's function."""

        verifier = check
        problems = (task,)

    Scored.name = target
    return Scored


def _is_code(text: str) -> bool:
    try:
        return any(isinstance(node, ast.FunctionDef) for node in ast.parse(text).body)
    except SyntaxError:
        return False


def _sources(module: str) -> dict[str, bytes]:
    """Read the module's file, or its whole package, by path. It is copied, never imported here."""
    top = module.split(".")[0]
    spec = PathFinder.find_spec(top, [str(Path.cwd()), *sys.path])
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise UserError(f"--scorer: there is no Python module {top!r} in this folder or on PYTHONPATH")
    origin = Path(spec.origin)
    if origin.name != "__init__.py":
        return {origin.name: origin.read_bytes()}
    return {str(p.relative_to(origin.parent.parent)): p.read_bytes() for p in sorted(origin.parent.rglob("*.py"))}


MOVED = (("/logs/verifier", "/box/logs/verifier"), ("/tests", "/box/tests"), ("/app", "/box"), ("/workspace", "/box"))
"""Harbor's absolute paths, and their place in our sandboxes, whose root nothing inside can write to."""


def _moved(text: bytes) -> bytes:
    for old, new in MOVED:
        text = text.replace(old.encode(), new.encode()).replace(b"/box" + new.encode(), new.encode())
    return text


def harbor(folder: Path) -> type[Testbed]:
    """Make an environment of a Harbor task folder that grades as Harbor does by default: in the agent's own sandbox."""
    for part in ("task.toml", "tests/test.sh", "solution/solve.sh"):
        if not (folder / part).is_file():
            raise UserError(f"{folder} is not a Harbor task: {part} is missing")
    start = _tree(folder / "environment")
    tests = {f"tests/{path}": content for path, content in _tree(folder / "tests").items()}
    solution = _moved((folder / "solution" / "solve.sh").read_bytes()).decode("utf-8", "replace")
    task = problem(folder.name, "A Harbor task.", files=start, commands=[solution], answer="done")

    class Harbor(InAgentsBox):
        """One task, graded by its own tests/test.sh."""

        verifier = Naive(kept, "")
        problems = (task,)

        def examine(self, box: Sandbox) -> float:
            for path, content in tests.items():
                box.write(path, content, mode=0o755)
            box.exec(["mkdir", "-p", "logs/verifier"])
            box.exec(["bash", "tests/test.sh"], timeout=60.0)
            time.sleep(0.2)  # Harbor copies the logs out before it reads them, and that takes longer still
            return read_reward(box, missing=0.0)

        def expert(self, task: Task) -> Sequence[ToolCall | str]:
            return [ToolCall(name="run", arguments={"command": solution}), "done"]

    Harbor.name = folder.name
    return Harbor


def _tree(folder: Path) -> dict[str, bytes]:
    files = [p for p in sorted(folder.rglob("*")) if p.is_file() and p.name != "Dockerfile"] if folder.is_dir() else []
    return {str(p.relative_to(folder)): _moved(p.read_bytes()) for p in files}
