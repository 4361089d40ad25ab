"""Exported Harbor tasks: written only where files decide, graded by our own verifier, read by Harbor itself."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentrl import catalogue, envs
from agentrl.cli.base import app
from agentrl.envs.play import play, stage
from agentrl.errors import UserError
from agentrl.interop import peers
from agentrl.interop.harbor_export import harbor
from agentrl.interop.harbor_task import HarborTask
from agentrl.types import ToolCall

BASE = "agentrl-test-base:local"
FULL = pytest.mark.skipif(not os.environ.get("AGENTRL_FULL"), reason="containers, or an installation; AGENTRL_FULL=1")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One folder of tasks for each environment that can be written."""
    top = tmp_path_factory.mktemp("harbor")
    for name, level in (("files", 2), ("repair", 1), ("sql", 1)):
        harbor(name, top / name, {}, level=level, count=1, image=BASE)
    return {name: top / name for name in ("files", "repair", "sql")}


def test_a_task_folder_holds_what_harbor_wants_and_hides_the_rest(tasks: dict[str, Path]) -> None:
    """The agent's part names neither solution nor hidden cases, and the verifier gets a container of its own."""
    (folder,) = (tasks["repair"]).iterdir()
    read = HarborTask.read(folder)
    assert read.name == "agentrl/repair-train-1-0" and not read.wants_network
    config = tomllib.loads((folder / "task.toml").read_text())
    assert (config["schema_version"], config["artifacts"]) == ("1.4", ["/app"])
    assert config["verifier"] == {"timeout_sec": 600.0, "environment_mode": "separate"}
    task = envs.load("repair")().task("train", 1, 0)
    assert read.prompt.startswith(task.prompt) and "/app" in read.prompt
    seen = b"".join(path.read_bytes() for path in (folder / "environment").iterdir())
    secret = json.loads((folder / "tests/task.json").read_text())["secret"]
    for text in (secret, *task.secret["fixed"].values()):
        assert text.encode() not in seen and text not in read.prompt
    assert stat.S_IMODE((folder / "tests/test.sh").stat().st_mode) == 0o755


def test_two_exports_hide_different_cases(tmp_path: Path) -> None:
    """Hidden cases that could be drawn again would be a published answer sheet."""
    secrets = set()
    for place in ("a", "b"):
        (folder,) = harbor("files", tmp_path / place, {}, level=1, count=1)
        secrets.add(json.loads((folder / "tests/task.json").read_text())["secret"])
    assert len(secrets) == 2


@pytest.mark.parametrize(
    ("name", "why"),
    [("countdown", "it has no sandbox"), ("search", "it has no sandbox"), ("service", "it has no sandbox"),
     ("gym", "it has no sandbox")],
)  # fmt: skip
def test_what_cannot_be_a_harbor_task_is_refused_by_name(name: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"no task of {name} can be written as a Harbor task: {why}"):
        harbor(name, tmp_path / "out", {}, count=1)
    assert not (tmp_path / "out").exists()


def test_tasks_that_end_in_a_message_are_left_out_and_counted(tmp_path: Path) -> None:
    out = CliRunner().invoke(app, ["env", "export", "sql", str(tmp_path / "sql"), "--to", "harbor", "--count", "2"])
    assert out.exit_code == 0, out.output
    assert "left out: its score needs the final message" in out.output
    assert len(list((tmp_path / "sql").iterdir())) == 2
    again = CliRunner().invoke(app, ["env", "export", "sql", str(tmp_path / "sql"), "--to", "harbor"])
    assert again.exit_code != 0


def test_the_sources_that_are_brought_need_nothing_else(tasks: dict[str, Path]) -> None:
    """They load under an interpreter without any package, and make the very task again."""
    for name, folder in tasks.items():
        (task,) = folder.iterdir()
        about = json.loads((task / "tests/task.json").read_text())
        program = (
            f"import sys; sys.path.insert(0, {str(task / 'tests/grader')!r})\n"
            "import agentrl.verifiers.grade, agentrl.sandboxes.process.backend\n"
            f"import {about['module']} as m\n"
            f"print(m.{about['name']}().task('train', {about['level']}, {about['index']}).prompt)"
        )
        done = subprocess.run([sys.executable, "-I", "-S", "-B", "-c", program], capture_output=True, text=True)
        expected = envs.load(name)().task("train", about["level"], about["index"]).prompt
        assert done.stdout == f"{expected}\n", done.stderr


# With Docker ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base() -> Iterator[None]:
    """A daemon, and a base image from the tar that the Docker sandboxes made once."""
    pytest.importorskip("docker")
    from agentrl.sandboxes.docker import daemon

    tars = sorted((catalogue.cache_folder() / "images").glob("base-*.tar.gz"))
    if not tars:
        pytest.skip("there is no base image to build from")
    with ExitStack() as stack:
        try:
            stack.enter_context(daemon.running())
        except UserError as error:
            pytest.skip(str(error))
        if subprocess.run(["docker", "image", "inspect", BASE], capture_output=True).returncode:
            subprocess.run(["docker", "import", str(tars[0]), BASE], check=True, capture_output=True)
        yield


FORGES = (
    r"""cd /; mkdir -p logs/verifier; cd logs/verifier; echo "{\"reward\": 1}" > reward.json; echo 1 > reward.txt"""
)
HOSTILE = r"""
for f in lib/*.py; do cat > $f <<'END'
import os
def __getattr__(name):
    for path, text in (("/logs/verifier/reward.json", '{"reward": 1}'), ("/logs/verifier/reward.txt", "1")):
        try: open(path, "w").write(text)
        except OSError: pass
    return lambda *a, **k: open("/tests/task.json").read()
if os.fork() == 0:
    os.setsid()
    while True:
        __getattr__("x")
END
done
"""


@FULL
@pytest.mark.timeout(900)
def test_exported_tasks_are_graded_in_containers(base: None, tasks: dict[str, Path]) -> None:
    """The expert's solution scores 1; doing nothing, forging the reward, and code that attacks its grader score 0."""

    async def scores(folder: Path, *commands: str) -> list[float | None]:
        kind = envs.load("harbor", {"path": str(folder), "split": "train"})
        task = kind().task("train", 1, 0)
        scripts = [kind().expert(task), ["done"]]
        scripts += [[ToolCall(name="bash", arguments={"command": command}), "done"] for command in commands]
        async with stage("process", limit=2) as where:
            return [(await play(kind(), task, script, where)).score for script in scripts]

    assert asyncio.run(scores(tasks["files"], FORGES)) == [1.0, 0.0, 0.0]
    assert asyncio.run(scores(tasks["repair"], FORGES, HOSTILE)) == [1.0, 0.0, 0.0, 0.0]
    assert asyncio.run(scores(tasks["sql"], FORGES)) == [1.0, 0.0, 0.0]


@FULL
@pytest.mark.timeout(900)
def test_harbor_itself_reads_the_folders(tasks: dict[str, Path]) -> None:
    """Harbor's own Task takes them, and grades them in a container of their own."""
    try:
        python = peers.environment("harbor")
    except UserError as error:
        pytest.skip(str(error))
    program = (
        "import sys\nfrom harbor.models.task.task import Task\n"
        "from harbor.models.task.verifier_mode import resolve_task_verifier_mode as mode\n"
        "for folder in sys.argv[1:]:\n    task = Task(folder)\n"
        "    config = task.config\n"
        "    print(task.name, mode(config).value, config.artifacts, config.environment.network_mode.value)"
    )
    folders = [str(task) for folder in tasks.values() for task in folder.iterdir()]
    done = subprocess.run([str(python), "-c", program, *folders], capture_output=True, text=True)
    names = [f"agentrl/{Path(folder).name}" for folder in folders]
    assert done.stdout.splitlines() == [f"{name} separate ['/app'] no-network" for name in names], done.stderr
