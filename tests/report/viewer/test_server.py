"""The viewer's server: for this machine alone, read only, nothing but the page and what it may show."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from starlette.testclient import TestClient

from agentrl.cli import main
from agentrl.report.viewer import server, tokens
from agentrl.report.viewer.server import ASSETS, STATIC, Runs, app
from benchmarks.viewer import make_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder / "small", steps=2, groups=2, size=2)
    return folder


@pytest.fixture
def client(folder: Path, tmp_path: Path) -> Iterator[TestClient]:
    runs = Runs([folder], cache=tmp_path / "cache")
    yield TestClient(app(runs), base_url="http://127.0.0.1:7600")
    runs.close()


PATHS = [
    "/", *(f"/static/{name}" for name in ASSETS), "/api/runs", "/api/run/small/overview", "/api/run/small/curriculum",
    "/api/run/small/facets", "/api/run/small/rows", "/api/run/small/one/train.0.0",
    "/api/run/small/one/eval.start.0.1099511627776.0", "/api/run/small/task?task=files/train/1/0",
    "/api/run/small/shared/small",
]  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
def test_everything_is_answered_with_the_headers(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 200
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self';" in policy and "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert b"the run's key" not in answer.content


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "evil.example:7600", "", "localhost@evil"])
def test_another_host_is_refused(client: TestClient, host: str) -> None:
    for path in ("/", "/api/runs", "/api/run/small/events"):
        answer = client.get(path, headers={"host": host})
        assert (answer.status_code, answer.text) == (421, "this address is not served here\n")


@pytest.mark.parametrize("host", ["127.0.0.1:7600", "localhost", "LOCALHOST:1", "[::1]:7600"])
def test_this_machine_is_served(client: TestClient, host: str) -> None:
    assert client.get("/api/runs", headers={"host": host}).status_code == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_it_is_read_only(client: TestClient, method: str) -> None:
    assert client.request(method, "/api/runs").status_code == 405


@pytest.mark.parametrize(
    "path",
    [
        "/static/../server.py", "/static/%2e%2e/server.py", "/static/vendor/../../server.py", "/static//etc/passwd",
        "/static/index.html", "/key", "/api/run/small/key", "/api/run/..%2Fsmall/overview", "/api/run/%2e%2e/overview",
        "/api/run/small/one/..%2f..%2fkey", "/api/run/small%2f..%2fsmall/rows", "/api/run/nobody/rows", "/api/redteam",
        "/api/run/nobody/events",
    ],
)  # fmt: skip
def test_nothing_else_is_served(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 404 and b"the run's key" not in answer.content


def test_a_wrong_question_is_answered_in_words(client: TestClient) -> None:
    answer = client.get("/api/run/small/rows?level=x")
    assert answer.status_code == 400 and "cannot be read" in answer.json()["error"]
    assert client.get("/api/run/small/one/train.99.0").json() == {"error": "it is no longer there"}


def test_the_assets_are_small_and_their_licences_are_there() -> None:
    files = [path for path in STATIC.rglob("*") if path.is_file() and path.suffix in (".js", ".css", ".html")]
    assert sorted(str(p.relative_to(STATIC)) for p in files) == sorted([*ASSETS, "index.html"])
    assert sum(path.stat().st_size for path in files) < 150_000
    text = (STATIC / "vendor" / "LICENSES.txt").read_text()
    assert "Leon Sorokin" in text and "Jason Miller" in text and "Apache License" in text


def test_no_asset_asks_for_anything_elsewhere() -> None:
    own = [STATIC / name for name in (*ASSETS, "index.html") if not name.startswith("vendor")]
    for path in own:
        text = path.read_text()
        assert "http://" not in text and "https://" not in text
        for word in (
            "innerHTML",
            "dangerouslySetInnerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "eval(",
            "new Function",
        ):
            assert word not in text, (path.name, word)


def test_characters_spread_over_tokens_stand_at_the_last(folder: Path) -> None:
    ids = list("a é 🙂".encode())
    assert tokens.texts(folder / "small", ids) == ["a", " ", "", "é", " ", "", "", "", "🙂"]
    assert tokens.texts(folder / "small", [255, 97, 240]) == ["\ufffd", "a", "\ufffd"]
    assert tokens.texts(folder / "small", [99999]) == ["<99999>"]
    assert tokens.texts(folder, [1]) is None


def test_a_missing_extra_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(SystemExit) as end:
        main(["view", str(folder), "--no-browser"])
    assert end.value.code == 2
    assert "pip install 'agentrl[view]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing-here"], "no such folder"),
        (["."], "no run there"),
        (["RUNS", "--redteam", "none.json"], "no such file"),
    ],
)
def test_wrong_arguments_are_said(
    arguments: list[str],
    said: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main(["view", *(str(folder) if a == "RUNS" else a for a in arguments), "--no-browser"])
    assert end.value.code == 2 and said in capsys.readouterr().err


def test_a_port_in_use_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(SystemExit):
            main(["view", str(folder), "--no-browser", "--port", str(taken.getsockname()[1])])
    assert "choose another with --port" in capsys.readouterr().err


def test_it_loads_no_training_code(folder: Path) -> None:
    """The viewer knows files only: no engine, no environment, no torch."""
    code = (
        "import sys; import agentrl.report.viewer.server, agentrl.report.html; "
        "print([m for m in sys.modules if m.startswith(('torch', 'transformers', 'agentrl.envs', 'agentrl.rollout', "
        "'agentrl.learn', 'agentrl.engines', 'agentrl.sandboxes', 'agentrl.verifiers'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_an_update_that_costs_much_delays_the_next(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time that a page's questions took is paid back before it is told to ask again."""
    monkeypatch.setattr(server, "BEAT_S", 0.01)
    monkeypatch.setattr(server, "SHARE", 1.0 / (os.cpu_count() or 1))
    shutil.copytree(folder / "small", tmp_path / "runs" / "small")
    runs = Runs([tmp_path / "runs"], cache=tmp_path / "cache")
    view = runs.get("small")
    runs.timed(lambda: [number * number for number in range(1_000_000)])
    assert runs.spent > 0.005

    class Connected:
        async def is_disconnected(self) -> bool:
            return False

    async def main() -> None:
        changes = server._changes(runs, view, cast("Any", Connected()))
        await anext(changes)
        told = time.monotonic()
        runs.spent += 0.5
        with (view.path / "metrics.jsonl").open("a") as file:
            file.write('{"kind": "alarm", "step": 2, "name": "signal", "text": "none"}\n')
        await anext(changes)
        assert time.monotonic() - told > 0.45

    asyncio.run(main())
    runs.close()
