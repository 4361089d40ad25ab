"""Clusters that ask for no token are not joined; one that we start is gone with all that is in it when a run ends."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from agentrl.cluster import connect
from agentrl.errors import UserError
from agentrl.learn import checkpoint
from agentrl.recipe import ClusterSection
from tests.cluster.rollouts import PATIENT, RECIPE
from tests.processes import process_family, within

FULL = bool(os.environ.get("AGENTRL_FULL"))


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RAY_ADDRESS": "ray://head:10001"}, "must be on a node of the cluster"),
        ({"RAY_ADDRESS": "http://head:8265"}, "ray job submit"),
        ({"RAY_ADDRESS": "head:6379", "RAY_AUTH_MODE": "disabled"}, "anybody who reaches the cluster"),
        ({"RAY_ADDRESS": "head:6379"}, "there is no token for the Ray cluster at head:6379"),
        ({"RAY_ADDRESS": "head:6379", "RAY_AUTH_TOKEN_PATH": "/no/such/file"}, "there is no token"),
    ],
)
def test_a_cluster_without_a_token_is_refused(
    variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(UserError, match=message), connect.connected(ClusterSection()):
        raise AssertionError("joined")


@pytest.mark.parametrize(("mode", "outcome"), [("disabled", "let in"), ("token", "refused")])
def test_a_cluster_that_lets_anybody_in_is_refused(
    mode: str, outcome: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two head servers, one without authentication: what lets the probe in is not joined."""
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    import ray

    gcs = Path(ray.__file__).parent / "core/src/ray/gcs/gcs_server"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(gcs), f"--gcs_server_port={port}", "--node-ip-address=127.0.0.1", f"--log_dir={tmp_path}"]
    command += ["--config_list=e30=", "--session-name=open", f"--session-dir={tmp_path}"]
    variables = {**os.environ, "RAY_AUTH_MODE": mode, "RAY_AUTH_TOKEN": "1" * 64}
    server = subprocess.Popen(command, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        assert within(30, lambda: _listens(port))
        assert connect.without_token(f"127.0.0.1:{port}") == outcome
        monkeypatch.setattr(ray, "is_initialized", lambda: False)
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
        monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 64)
        if outcome == "let in":
            with pytest.raises(UserError, match="asks nobody for a token"), connect.connected(ClusterSection()):
                raise AssertionError("joined")
    finally:
        server.kill()
        server.wait()


def _listens(port: int) -> bool:
    with socket.socket() as trial:
        return trial.connect_ex(("127.0.0.1", port)) == 0


def processes(mark: str) -> dict[int, str]:
    """Return the command lines of all processes whose environment holds a mark."""
    lines = {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark.encode() in (entry / "environ").read_bytes():
                lines[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
    return lines


def marked(mark: str) -> list[str]:
    return list(processes(mark).values())


def test_the_folders_of_killed_runs_are_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A folder whose owner lives stays; so does one that shows no owner."""
    monkeypatch.setattr(connect, "ROOT", tmp_path)
    killed, running, other = (tmp_path / f"agentrl-ray-{name}" for name in ("killed", "running", "other"))
    for folder in (killed, running, other):
        (folder / "session").mkdir(parents=True)
    (killed / "owner").touch()
    with connect._locked(running):
        connect._remove_stale()
        assert set(tmp_path.iterdir()) == {running, other}
    connect._remove_stale()
    assert set(tmp_path.iterdir()) == {other}


def started(folder: Path, mark: str, **variables: str) -> subprocess.Popen[str]:
    """Start a run of very many steps on two players."""
    recipe = {**RECIPE, "run": {**RECIPE["run"], "out": str(folder), "steps": 1000}, "cluster": {"players": 2}}
    recipe |= {"envs": [{"name": "files", "levels": [1]}], "checkpoint": {"every": 1}}
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return subprocess.Popen(
        [sys.executable, "-m", "agentrl", "train", str(path)],
        env={**own, "AGENTRL_TEST_MARK": mark, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def read_until(run: subprocess.Popen[str], beginning: str) -> str:
    """Read what a run says until a line begins so; return it all."""
    assert run.stdout is not None
    seen = ""
    for line in run.stdout:
        seen += line
        if line.startswith(beginning):
            return seen
    raise AssertionError(seen)


@pytest.mark.skipif(not FULL, reason="starts and stops whole runs on Ray, a minute each; set AGENTRL_FULL")
def test_a_run_whose_head_dies_ends_and_its_last_checkpoint_is_whole(tmp_path: Path) -> None:
    """Ray's own processes on the head are killed; the driver and its players end, and the run can be resumed."""
    mark, token = f"mark-{os.getpid()}-{time.time_ns()}", secrets.token_hex(32)
    private = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "RAY_USAGE_STATS_ENABLED": "0", **PATIENT}
    with socket.socket() as free, tempfile.TemporaryDirectory(prefix="agr-", dir="/tmp") as folder:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        free.close()
        start = [str(Path(sys.executable).parent / "ray"), "start", "--head", "--node-ip-address=127.0.0.1"]
        start += [f"--port={address.partition(':')[2]}", "--num-cpus=2", "--include-dashboard=false"]
        start += [f"--temp-dir={folder}", "--object-store-memory=83886080"]
        own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        head = {**own, **private, "AGENTRL_TEST_MARK": mark}
        run = None
        try:
            subprocess.run(start, env=head, check=True, capture_output=True, timeout=300)
            run = started(tmp_path, mark, **private, RAY_ADDRESS=address)
            read_until(run, "step 2/")
            for pid, line in processes(mark).items():
                if "gcs_server" in line or "/raylet/raylet" in line:
                    os.kill(pid, signal.SIGKILL)
            assert run.stdout is not None
            rest = run.stdout.read()
            assert run.wait(150) != 0, rest
            assert within(60, lambda: not [line for line in marked(mark) if "ray::PlayerActor" in line])
        finally:
            if run is not None:
                run.kill()
                run.wait()
            for pid in processes(mark):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    saved = checkpoint.latest(tmp_path / "cluster" / "checkpoints")
    assert saved is not None and saved.step >= 2 and saved.warnings == ()
    assert load_file(saved.model / "model.safetensors")


@pytest.mark.skipif(not FULL, reason="starts and stops whole runs on Ray, a minute each; set AGENTRL_FULL")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_stopped_leaves_nothing_behind(number: signal.Signals, tmp_path: Path) -> None:
    """In the middle of a round: no actor, raylet, sandbox, mount, control group or folder stays."""
    mark = f"mark-{os.getpid()}-{time.time_ns()}"
    mounts = Path("/proc/self/mounts").read_text()
    run = started(tmp_path, mark)
    try:
        seen = read_until(run, "step 2/")
        assert run.stdout is not None and run.poll() is None, seen
        family = process_family(run.pid) - {run.pid}
        folders = set(re.findall(r"/tmp/agentrl-ray-\w+", " ".join(marked(mark))))
        assert [os.stat(folder).st_mode & 0o777 for folder in folders] == [0o700]
        assert len([line for line in marked(mark) if "ray" in line]) > 4
        players = [pid for pid, line in processes(mark).items() if "ray::PlayerActor" in line]
        assert [os.getpriority(os.PRIO_PROCESS, pid) for pid in players] == [0, 0]
        if number == signal.SIGINT:
            os.killpg(run.pid, number)  # as Ctrl-C does: to everything in the foreground
        else:
            run.send_signal(number)
        rest = run.stdout.read() if number != signal.SIGKILL else ""
        assert run.wait(60) == {signal.SIGKILL: -9}.get(number, 3), seen + rest
    finally:
        run.kill()
        run.wait()
    # After kill -9 Ray's agents look now and then whether their raylet lives; on a busy machine that takes a while.
    assert within(120 if number == signal.SIGKILL else 30, lambda: marked(mark) == []), marked(mark)
    assert within(10, lambda: not any(os.path.exists(f"/proc/{pid}") for pid in family))
    assert Path("/proc/self/mounts").read_text() == mounts
    if number == signal.SIGKILL:
        connect._remove_stale()  # as the next run does
    assert [folder for folder in folders if os.path.exists(folder)] == []
    if number != signal.SIGKILL:
        rows = [json.loads(line) for line in (tmp_path / "cluster" / "metrics.jsonl").read_text().splitlines()]
        assert [row["rollout/players"] for row in rows if row["kind"] == "step"][:1] == [2]


@pytest.mark.timeout(600)
@pytest.mark.skipif(not FULL, reason="starts whole runs on Ray, up to five minutes each; set AGENTRL_FULL")
@pytest.mark.parametrize(
    ("number", "words"),
    [(signal.SIGKILL, "Raylet is terminated"), (signal.SIGSTOP, "this process is ended: Ray's raylet")],
)
def test_a_run_whose_only_raylet_dies_or_stands_still_ends(number: signal.Signals, words: str, tmp_path: Path) -> None:
    """With the reason, although calls to a raylet that stands still never return; the last checkpoint is whole."""
    mark = f"mark-{os.getpid()}-{time.time_ns()}"
    run = started(tmp_path, mark)
    try:
        read_until(run, "step 2/")
        (raylet,) = [pid for pid, line in processes(mark).items() if "/raylet/raylet" in line]
        os.kill(raylet, number)
        rest, _ = run.communicate(timeout=300)
        assert run.returncode == 1 and words in rest, rest
        if number == signal.SIGSTOP:  # the players were told before
            assert re.search("lost player .*: Ray's raylet on the machine", rest), rest
        assert within(120, lambda: marked(mark) == []), marked(mark)  # as after kill -9
    finally:
        run.kill()
        run.wait()
        for pid in processes(mark):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        connect._remove_stale()
    saved = checkpoint.latest(tmp_path / "cluster" / "checkpoints")
    assert saved is not None and saved.step >= 2 and saved.warnings == ()
