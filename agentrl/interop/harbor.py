"""Plays Harbor task folders with Docker, and grades them in a container that the agent never touched.

    envs: [{name: harbor, options: {path: ./tasks}}]          # a folder of task folders, or one

    agent's container ── stopped ── its working folder alone ──> fresh container of the same image
                                                                 /tests laid in only here, test.sh, reward.json or .txt
`keep` says what the graded container gets: `workdir` (the default), `filesystem` (everything the agent changed, without
its processes: for solutions that install things), or `shared` (the agent's own container, as Harbor does by default,
where a swapped program or a process that stays can forge the reward). Test code and submission share a container, so
verdicts have the trust `shared`. Containers have no network, whatever the task says.
"""

from __future__ import annotations

import atexit
import json
import math
import re
import subprocess
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from agentrl.envs import Environment, tool
from agentrl.envs.splits import split_of
from agentrl.errors import AgentError, AuthoringError
from agentrl.interop.bridge import Bridge, checked
from agentrl.interop.harbor_task import HarborTask, _variables, docker, must, packed, remove, tree_of
from agentrl.types import SPLITS, Split, Task, ToolCall, Verdict
from agentrl.verifiers.base import Context, Submission, Verifier

MAX_REWARD = 65_536
Keep = Literal["workdir", "filesystem", "shared"]
Graded = tuple[float, dict[str, float], str]
"""The score, its parts, and why."""
IMAGES = 32
"""With `keep: filesystem`, images of finished episodes that are kept, since grading may be asked for again."""
_images: deque[str] = deque()


_WHOLE = "Harbor itself, unless a task says environment_mode = 'separate', grades in the agent's own container"
REMARKS: Mapping[Keep, str] = {
    "workdir": f"graded in a fresh container that gets the working folder alone (keep: workdir); {_WHOLE}, where a "
    "swapped program or a process that stays can forge the reward: `agentrl redteam FOLDER` attacks that",
    "filesystem": "graded in a fresh container with all that the agent changed (keep: filesystem): a program that it "
    f"swapped grades it; {_WHOLE}",
    "shared": "graded in the agent's own container, as Harbor does by default (keep: shared): a swapped program or a "
    "process that stays can forge the reward; keep: workdir grades in a fresh one",
}
"""How each way of grading differs from the others, for checks and the red team to print."""


class Options(BaseModel):
    """The options of the environment `harbor`."""

    model_config = ConfigDict(extra="forbid")

    path: str
    """A task folder, or a folder of such."""
    keep: Keep = "workdir"
    """What the graded container gets of the agent's."""
    split: Literal["content", "train", "test"] = "content"
    """`content`: the instruction's text decides a task's split; otherwise all tasks are of this one."""
    turns: int = Field(default=50, ge=1)
    """The most turns of an episode."""


class RewardFile(Verifier):
    """Runs tests/test.sh and reads the reward that it leaves. No reward, or none that can be read, is 0."""

    def __init__(self, tasks: Mapping[str, HarborTask], keep: Keep) -> None:
        self._tasks, self.keep = tasks, keep
        self.remark = REMARKS[keep]
        """What readers of its scores must know; `env check` and `redteam` print it."""

    async def probe(self, context: Context) -> None:
        """Look whether Docker answers."""
        await must("version", timeout=20.0)

    async def verify(self, submission: Submission, context: Context) -> Verdict:
        harbor, state = self._tasks[submission.task.secret["folder"]], submission.state
        if self.keep == "shared":
            score, parts, why = state["graded"]
        else:
            container = await harbor.container(str(state["image"]), str(state["workdir"]))
            try:
                if self.keep == "workdir":
                    await self._lay_in(container, str(state["workdir"]), state["tree"])
                score, parts, why = await graded(harbor, container)
            finally:
                await remove([container])
        return Verdict(score=score, breakdown=parts, evidence=(why,), trust="shared", verifier=self.version)

    async def _lay_in(self, container: str, workdir: str, tree: bytes) -> None:
        """Replace the working folder of a fresh container by the agent's."""
        if workdir == "/":
            raise AgentError("the task declares no working folder: set environment.workdir, or use keep: filesystem")
        await must("exec", container, "sh", "-c", 'rm -rf "$1" && mkdir -p "$1"', "sh", workdir)
        await must("cp", "-", f"{container}:{Path(workdir).parent}", stdin=tree)


async def graded(harbor: HarborTask, container: str) -> Graded:
    """Lay the tests into a container, run them, and read the reward."""
    await must("exec", container, "sh", "-c", "rm -rf /logs/verifier /tests; mkdir -p /logs/verifier")
    await must("cp", "-", f"{container}:/", stdin=packed(harbor.folder / "tests", "tests"))
    seconds = float(harbor.verifier.get("timeout_sec", 600))
    words = ("exec", *_variables(harbor.verifier.get("env")), container, "bash", "/tests/test.sh")
    try:
        await docker(*words, timeout=seconds)
    except TimeoutError:
        return 0.0, {}, f"tests/test.sh did not end within {seconds:g} s"
    for name in ("reward.json", "reward.txt"):
        path = f"/logs/verifier/{name}"
        ended = await docker("exec", container, "head", "-c", str(MAX_REWARD), path, timeout=30.0)
        if ended.code == 0:
            return read_reward(name, ended.output)
    return 0.0, {}, "tests/test.sh left no reward"


def read_reward(name: str, content: bytes) -> Graded:
    """Read a reward file strictly: one finite number in [0, 1], or several with names, of which the mean counts unless
    one is called `reward`."""
    try:
        value: Any = json.loads(content) if name.endswith("json") else float(content)
        parts = value if isinstance(value, dict) else {"reward": value}
        if not parts or not all(type(v) in (int, float) and math.isfinite(v) for v in parts.values()):
            raise ValueError("no finite number")
        score = float(parts.get("reward", math.fsum(parts.values()) / len(parts)))
        if not 0.0 <= score <= 1.0:
            raise ValueError(f"{score:g} lies outside [0, 1]")
    except (ValueError, RecursionError) as error:
        return 0.0, {}, f"{name} holds no reward: {str(error)[:80]}"
    return score, {str(key)[:60]: float(part) for key, part in parts.items()}, f"{name}: {score:g}"


class Harbor(Bridge):
    """Do a task in a container with a shell."""

    options: ClassVar[Options]
    folders: ClassVar[Mapping[Split, Sequence[HarborTask]]] = {}
    system = "You are root in a container. Use bash; say done when the task is done."

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._container = ""

    @classmethod
    def made_from(cls, options: Mapping[str, Any]) -> type[Environment]:
        return _class(checked("harbor", Options, options))

    def size_of(self, split: Split, level: int) -> int | None:
        return len(self.folders.get(split, ()))

    def task(self, split: Split, level: int, index: int) -> Task:
        tasks = self.folders.get(split)
        if not tasks:
            raise AuthoringError(f"harbor: {self.options.path} has no task of split {split!r}; set `split`")
        harbor = tasks[index % len(tasks)]
        family = re.sub(r"[-_]?\d+$", "", harbor.name)
        id = f"{self.name or 'harbor'}/{split}/{level}/{index % len(tasks)}"
        place = {"folder": str(harbor.folder)}
        return Task(id=id, split=split, level=level, prompt=harbor.prompt, family=family, setup=place, secret=place)

    @property
    def _harbor(self) -> HarborTask:
        folder = self.given.setup["folder"]
        return next(task for tasks in self.folders.values() for task in tasks if str(task.folder) == folder)

    async def start(self) -> None:  # type: ignore[override]
        self._image = await self._harbor.image()
        self._workdir = await self._harbor.workdir(self._image)
        self._container = await self._harbor.container(self._image, self._workdir)

    @tool(timeout_s=180)
    async def bash(self, command: str) -> str:
        """Run a command in the container.

        Args:
            command: what to run
        """
        ended = await docker("exec", self._container, "timeout", "-k", "5", "170", "bash", "-c", command, timeout=178.0)
        text = (ended.output + ended.errors).decode("utf-8", "replace")
        return text + (f"\n[exit code {ended.code}]" if ended.code else "")

    async def state(self) -> Mapping[str, Any]:  # type: ignore[override]
        if self.options.keep == "shared":  # as Harbor does by default: what the agent started still runs
            return {"graded": await graded(self._harbor, self._container)}
        await must("stop", "-t", "0", self._container)  # nothing of the agent's runs any more
        kept: dict[str, Any] = {"image": self._image, "workdir": self._workdir}
        if self.options.keep == "workdir":
            return {**kept, "tree": await tree_of(self._container, self._workdir)}
        image = f"agentrl-harbor-graded:{uuid.uuid4().hex}"
        await must("commit", self._container, image)
        _images.append(image)
        while len(_images) > IMAGES:
            await docker("rmi", "-f", _images.popleft())
        return {**kept, "image": image}

    async def stop(self) -> None:  # type: ignore[override]
        if self._container:
            await remove([self._container])

    def expert(self, task: Task) -> Sequence[ToolCall | str]:
        script = Path(task.setup["folder"]) / "solution" / "solve.sh"
        if not script.is_file():
            raise NotImplementedError(f"{script} is missing")
        return [ToolCall(name="bash", arguments={"command": script.read_text(encoding="utf-8")}), "done"]


@atexit.register
def _forget() -> None:
    """Remove the images that are left."""
    if _images:
        subprocess.run(["docker", "rmi", "-f", *_images], capture_output=True, check=False)


def _class(options: Options) -> type[Harbor]:
    root = Path(options.path).expanduser().resolve()
    places = [root] if (root / "task.toml").is_file() else sorted(file.parent for file in root.glob("*/task.toml"))
    if not places:
        raise AuthoringError(f"harbor: {root} is no Harbor task, nor a folder of such: there is no task.toml")
    tasks = [HarborTask.read(place) for place in places]
    folders: dict[Split, list[HarborTask]] = {}
    for task in tasks:
        split = split_of(" ".join(task.prompt.split())) if options.split == "content" else options.split
        folders.setdefault(split, []).append(task)
    splits = tuple(split for split in SPLITS if split in folders)
    body: dict[str, Any] = {
        "__doc__": Harbor.__doc__,
        "__module__": __name__,
        "options": options,
        "folders": folders,
        "splits": splits,
        "size": min(len(part) for part in folders.values()),
        "max_turns": options.turns,
        "verifier": RewardFile({str(task.folder): task for task in tasks}, options.keep),
    }
    return type("Harbor", (Harbor,), body)
