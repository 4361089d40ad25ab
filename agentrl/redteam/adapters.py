"""Turns a Harbor task folder into an environment that can be attacked; scorers.py does it for scoring functions."""

from __future__ import annotations

import time
import tomllib
from collections.abc import Sequence
from pathlib import Path

from agentrl.errors import UserError
from agentrl.interop.harbor_task import COMPOSE
from agentrl.redteam.naive_graders.base import InAgentsBox, Naive, kept, read_reward
from agentrl.redteam.testbeds.base import Testbed, problem
from agentrl.sandboxes.base import Sandbox
from agentrl.types import Task, ToolCall

MOVED = (("/logs/verifier", "/box/logs/verifier"), ("/tests", "/box/tests"), ("/app", "/box"), ("/workspace", "/box"))
"""Harbor's absolute paths, and their place in our sandboxes, whose root nothing inside can write to."""


SHARED = (
    "graded as Harbor does by default, in the agent's own container; `agentrl redteam harbor --option path=FOLDER` "
    "attacks the same tasks graded in a fresh container that gets the working folder alone (needs Docker)"
)


def _moved(text: bytes) -> bytes:
    for old, new in MOVED:
        text = text.replace(old.encode(), new.encode()).replace(b"/box" + new.encode(), new.encode())
    return text


def harbor(folder: Path) -> type[Testbed]:
    """Make an environment of a Harbor task folder that grades as Harbor does by default: in the agent's own sandbox."""
    for part in ("task.toml", "tests/test.sh", "solution/solve.sh"):
        if not (folder / part).is_file():
            raise UserError(f"{folder} is not a Harbor task: {part} is missing")
    _readable(folder)
    start = _tree(folder / "environment")
    tests = {f"tests/{path}": content for path, content in _tree(folder / "tests").items()}
    solution = _moved((folder / "solution" / "solve.sh").read_bytes()).decode("utf-8", "replace")
    task = problem(folder.name, "A Harbor task.", files=start, commands=[solution], answer="done")

    naive = Naive(kept, "")
    naive.remark = SHARED  # type: ignore[attr-defined]  # what readers of its scores must know; it is printed

    class Harbor(InAgentsBox):
        """One task, graded by its own tests/test.sh."""

        verifier = naive
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


def _readable(folder: Path) -> None:
    """Refuse, by name, the kinds of Harbor task that are not played."""
    try:
        config = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise UserError(f"{folder / 'task.toml'} cannot be read: {error}") from None
    if config.get("steps") or (folder / "steps").is_dir():
        raise UserError(f"{folder} is a Harbor task of several steps, which is not played")
    for name in COMPOSE:
        if (folder / "environment" / name).exists():
            raise UserError(f"{folder} is a Harbor task of several containers ({name}), which is not played")
    verifier = config.get("verifier") or {}
    if verifier.get("environment_mode") == "separate" or verifier.get("environment"):
        raise UserError(
            f"{folder} is a Harbor task that is graded in a container of its own, which needs Docker: "
            f"agentrl redteam harbor --option path={folder}"
        )
    environment = config.get("environment") or {}
    if environment.get("mcp_servers") or environment.get("gpus"):
        raise UserError(f"{folder} is a Harbor task with MCP servers or GPUs, which is not played")


def _tree(folder: Path) -> dict[str, bytes]:
    files = [p for p in sorted(folder.rglob("*")) if p.is_file() and p.name != "Dockerfile"] if folder.is_dir() else []
    return {str(p.relative_to(folder)): _moved(p.read_bytes()) for p in files}
