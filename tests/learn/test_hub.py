"""Hugging Face ids as `model.path`, against a server on this machine."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import RecipeError
from agentrl.learn.hub import is_hub_id, model_folder
from agentrl.learn.model import load_model, save_model
from agentrl.recipe import Recipe

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ROOT = Path(__file__).resolve().parents[2]


class Hub(BaseHTTPRequestHandler):
    """The two calls of the hub that a download makes."""

    files: dict[str, bytes]
    asked: list[tuple[str, str | None]]

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        path = self.path.partition("?")[0]
        self.asked.append((path, self.headers.get("Authorization")))
        if path.startswith("/api/models/tiny/secret") and self.headers.get("Authorization") != "Bearer hf_right":
            self._send(401, b"{}", {"X-Error-Code": "GatedRepo"}, body)
        elif path.startswith(("/api/models/tiny/model/revision/none", "/tiny/model/resolve/none")):
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"}, body)
        elif "/tree/" in path and path.startswith(("/api/models/tiny/model", "/api/models/tiny/secret")):
            entries = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in self.files.items()
            ]
            self._send(200, json.dumps(entries).encode(), {}, body)
        elif path.startswith(("/api/models/tiny/model", "/api/models/tiny/secret")):
            listing = {"id": "tiny/model", "sha": COMMIT, "siblings": [{"rfilename": name} for name in self.files]}
            self._send(200, json.dumps(listing).encode(), {}, body)
        elif "/resolve/" in path and (content := self.files.get(path.rpartition("/")[2])) is not None:
            headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
            self._send(200, content, headers, body)
        else:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, body)

    def _send(self, code: int, content: bytes, headers: dict[str, str], body: bool) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@pytest.fixture
def hub(make_recipe: Callable[..., Recipe], tmp_path: Path) -> Iterator[tuple[str, Any]]:
    """A hub with one tiny model, and code and a pickle beside it."""
    folder = tmp_path / "source"
    save_model(*load_model(make_recipe().model, device="cpu"), folder)
    (folder / "modeling_evil.py").write_text("raise SystemExit")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")

    class Served(Hub):
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
        asked: list[tuple[str, str | None]] = []

    server = ThreadingHTTPServer(("127.0.0.1", 0), Served)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", Served
    server.shutdown()
    server.server_close()


SCRIPT = """
import json, sys
from pathlib import Path
from agentrl.errors import RecipeError
from agentrl.learn.hub import model_folder
for name, revision in json.loads(sys.argv[1]):
    try:
        folder = model_folder(Path(name), revision)
        print("ok", sorted(p.name for p in folder.iterdir()))
        if revision:
            from agentrl.learn.model import load_model
            from agentrl.recipe import PretrainedModel
            section = PretrainedModel(path=name, revision=revision, dtype="float32")
            print(sum(p.numel() for p in load_model(section, device="cpu")[0].parameters()))
    except RecipeError as error:
        print(error)
"""


def ask(tmp_path: Path, endpoint: str, *models: tuple[str, str | None], token: str = "") -> list[str]:
    """Ask in a process of its own, because huggingface_hub reads its environment when it is imported."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and "proxy" not in k.lower()}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT)}
    environment |= {"HF_TOKEN": token} if token else {}
    environment |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_ETAG_TIMEOUT": "5"}
    command = [sys.executable, "-c", SCRIPT, json.dumps(models)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env=environment, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().splitlines()


def test_a_hub_id_is_downloaded_once_without_code_and_found_again_offline(hub: tuple[str, Any], tmp_path: Path) -> None:
    endpoint, served = hub
    models = [("tiny/model", None), ("tiny/model", COMMIT), ("tiny/model", "none"), ("tiny/absent", None)]
    first, second, count, none, absent, secret = ask(tmp_path, endpoint, *models, ("tiny/secret", None))
    assert first.startswith("ok ['chat_template.jinja', 'config.json'") and first == second
    assert int(count) > 20_000
    assert "modeling_evil.py" not in first and "pytorch_model.bin" not in first
    assert none == "model.path: tiny/model: the hub has no revision 'none' of it"
    assert absent.startswith("model.path: tiny/absent: no such folder here and no such model on the hub")
    assert secret.startswith("model.path: tiny/secret: the hub asks for an accepted licence: accept it on http://")
    assert {token for _, token in served.asked} == {None}
    weights = [path for path, _ in served.asked if path.endswith("model.safetensors")]
    assert 1 <= len(weights) <= 2  # a HEAD and a GET

    nowhere = "http://127.0.0.1:9"
    again, offline, allowed = ask(
        tmp_path, nowhere, ("tiny/model", None), ("tiny/other", None), ("tiny/secret", None), token="hf_right"
    )
    assert again == first
    assert "tiny/other: no such folder here, the hub cannot be reached, and its cache does not hold" in offline
    assert "tiny/secret: no such folder here, the hub cannot be reached" in allowed
    assert ask(tmp_path, endpoint, ("tiny/secret", None), token="hf_right")[0].startswith("ok ")
    assert served.asked[-1][1] == "Bearer hf_right"


def test_what_reads_like_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "mine").mkdir(parents=True)
    names = ["Qwen/Qwen3-4B", "models/mine", "/Qwen/Qwen3-4B", "smollm2", "a/b/c", "../x", "a/..", "~/m"]
    assert [name for name in names if is_hub_id(Path(name))] == ["Qwen/Qwen3-4B"]
    assert model_folder(Path("models/mine")) == Path("models/mine")
    with pytest.raises(RecipeError, match="model.revision is for models of the Hugging Face hub"):
        model_folder(Path("models/mine"), "main")
