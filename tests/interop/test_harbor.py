"""Harbor task folders: read strictly, played in real containers, graded in fresh ones."""

from __future__ import annotations

import asyncio
import io
import os
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from agentrl import catalogue, envs
from agentrl.check.run import reported
from agentrl.envs.play import Played, play, stage
from agentrl.errors import AuthoringError
from agentrl.interop.harbor import REMARKS, read_reward
from agentrl.interop.harbor_task import kept
from agentrl.types import ToolCall

BASE = "agentrl-test-base:local"
TEST = """answer=$(cat /app/answer.txt 2>/dev/null)
if [ "$answer" = "$(python3 -c 'print(2 + 3)')" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""


def harbor_task(folder: Path, config: str = "", **files: str) -> Path:
    """Write a task: the sum of 2 and 3 must stand in answer.txt."""
    for name, text in {
        "task.toml": f"schema_version = '1.4'\n{config}",
        "instruction.md": "Write the sum of 2 and 3 into answer.txt.",
        "environment/Dockerfile": f"FROM {BASE}\nWORKDIR /app\nCOPY note.txt /app/note.txt\n",
        "environment/note.txt": "2 3\n",
        "solution/solve.sh": "echo 5 > /app/answer.txt\n",
        "tests/test.sh": TEST,
        **files,
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_how_a_task_is_graded_is_printed(tmp_path: Path) -> None:
    """Checks say whether grading is Harbor's own, in the agent's container, or in a fresh one."""
    harbor_task(tmp_path / "sum")
    words = {keep: reported(envs.load("harbor", {"path": str(tmp_path), "keep": keep})) for keep in REMARKS}
    assert words == dict(REMARKS)
    assert "fresh container" in words["workdir"] and "agent's own container" in words["shared"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config": "[[steps]]\nname = 'one'\n"}, "several steps is not played"),
        ({"environment/docker-compose.yaml": "services: {}"}, "several containers"),
        ({"tests/Dockerfile": "FROM x"}, "a verifier with an image of its own"),
        ({"config": "[environment]\ngpus = 2\n"}, "environment.gpus is not played"),
        ({"config": "[environment]\nos = 'windows'\n"}, "environment.os = 'windows'"),
        ({"config": "broken ="}, "this is no Harbor task"),
    ],
)
def test_what_cannot_be_played_is_refused_by_name(change: dict[str, str], message: str, tmp_path: Path) -> None:
    harbor_task(tmp_path / "odd", **change)
    with pytest.raises(AuthoringError, match=message):
        envs.load("harbor", {"path": str(tmp_path)})


def test_rewards_are_read_strictly() -> None:
    """One number in [0, 1], or several with names; whatever else is 0 and says why."""
    good = [("reward.txt", b"1\n"), ("reward.json", b"0.5"), ("reward.json", b'{"a": 1, "b": 0}'),
            ("reward.json", b'{"reward": 0.25, "b": 1}')]  # fmt: skip
    assert [read_reward(*case)[0] for case in good] == [1.0, 0.5, 0.5, 0.25]
    bad = [("reward.txt", b"nan"), ("reward.txt", b"1 1"), ("reward.txt", b"7"), ("reward.json", b"true"),
           ("reward.json", b"{}"), ("reward.json", b'{"reward": "1"}'), ("reward.json", b"[" * 50_000)]  # fmt: skip
    assert [read_reward(*case)[0] for case in bad] == [0.0] * len(bad)
    assert all("holds no reward" in read_reward(*case)[2] for case in bad)


def test_only_files_and_links_that_stay_leave_a_container() -> None:
    """A link to the tests would hand in the expected values; devices and set-user-id bits have no place there."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, kind, target in (
            ("app", tarfile.DIRTYPE, ""), ("app/a", tarfile.REGTYPE, ""), ("app/in", tarfile.SYMTYPE, "a"),
            ("app/out", tarfile.SYMTYPE, "/tests/expected"), ("app/up", tarfile.SYMTYPE, "../../tests"),
            ("app/hard", tarfile.LNKTYPE, "/tests/x"), ("app/dev", tarfile.CHRTYPE, ""),
            ("app/pipe", tarfile.FIFOTYPE, ""),
        ):  # fmt: skip
            member = tarfile.TarInfo(name)
            member.type, member.linkname, member.mode = kind, target, 0o4755
            tar.addfile(member)
    with tarfile.open(fileobj=io.BytesIO(kept(out.getvalue()))) as tar:
        assert [(m.name, m.mode) for m in tar] == [("app", 0o755), ("app/a", 0o755), ("app/in", 0o755)]


# With Docker ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base() -> None:
    """A base image, from the tar that the Docker sandboxes made once."""
    if subprocess.run(["docker", "version"], capture_output=True).returncode:
        pytest.skip("there is no Docker daemon")
    if subprocess.run(["docker", "image", "inspect", BASE], capture_output=True).returncode:
        tars = sorted((catalogue.cache_folder() / "images").glob("base-*.tar.gz"))
        if not tars:
            pytest.skip("there is no base image to build from")
        subprocess.run(["docker", "import", str(tars[0]), BASE], check=True, capture_output=True)


CHEATS = {
    "reward file": "mkdir -p /logs/verifier; (while :; do echo 1 > /logs/verifier/reward.txt; done) & sleep 0.2",
    "other python": (
        "echo 7 > /app/answer.txt; cp -L $(command -v python3) /usr/bin/real; "
        "printf '#!/bin/sh\\necho 7\\n' > /usr/local/bin/python3; chmod +x /usr/local/bin/python3; "
        "rm -f /usr/bin/python3; cp /usr/local/bin/python3 /usr/bin/python3"
    ),
}


def scores(path: Path, keep: str) -> list[float | None]:
    """Play the expert, nothing, and the cheats."""
    options: dict[str, Any] = {"path": str(path), "keep": keep, "split": "train"}
    kind = envs.load("harbor", options)

    async def main() -> list[Played]:
        task = kind().task("train", 1, 0)
        scripts = [kind().expert(task), ["done"]]
        scripts += [[ToolCall(name="bash", arguments={"command": cheat}), "done"] for cheat in CHEATS.values()]
        async with stage("process", limit=2) as where:
            return [await play(kind(), task, script, where) for script in scripts]

    return [played.score for played in asyncio.run(main())]


@pytest.mark.timeout(600)
def test_a_task_is_graded_in_a_fresh_container(base: None, tmp_path: Path) -> None:
    """The oracle scores 1 and nothing 0; with the working folder alone no cheat gains. No container is left over."""
    assert scores(harbor_task(tmp_path / "sum"), "workdir") == [1.0, 0.0, 0.0, 0.0]
    listed = ["docker", "ps", "-aq", "--filter", "label=agentrl", "--filter", "ancestor=agentrl-harbor-sum:local"]
    assert subprocess.run(listed, capture_output=True, text=True).stdout == ""


@pytest.mark.skipif(not os.environ.get("AGENTRL_FULL"), reason="eight more episodes in containers; AGENTRL_FULL=1")
@pytest.mark.timeout(600)
def test_other_ways_of_grading_let_cheats_through(base: None, tmp_path: Path) -> None:
    """With the file system a swapped program gains; in the agent's own container it does too."""
    path = harbor_task(tmp_path / "sum")
    assert scores(path, "filesystem") == [1.0, 0.0, 0.0, 1.0]
    shared = scores(path, "shared")
    assert shared[:2] == [1.0, 0.0] and shared[3] == 1.0
