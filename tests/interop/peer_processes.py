"""Processes of other frameworks for tests: their own environments, free ports, servers that are ended again."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from agentrl.interop import peers

FOLDER = Path(__file__).parent / "peers"
ROOT = Path(__file__).parents[2]


def interpreter(name: str) -> Path:
    """Return the interpreter of a framework's own environment; skip where it is not built and not asked for."""
    there = peers._is_current(peers.folder(name), [*peers.FRAMEWORKS[name], *peers.OURS])
    if not there and not os.environ.get("AGENTRL_FULL"):
        pytest.skip(f"{name} is not installed: `agentrl env get {name}`, or AGENTRL_FULL=1")
    return peers.environment(name)


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


@contextmanager
def server(command: Sequence[str | Path], port: int, path: str = "/health") -> Iterator[str]:
    """Start a server and wait until it answers; end it afterwards."""
    process = subprocess.Popen([str(word) for word in command], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            assert process.poll() is None, f"the server ended with {process.returncode}"
            try:
                httpx.get(url + path, timeout=2.0, trust_env=False)
                break
            except httpx.HTTPError:
                time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
