"""A run whose own node is marked dead ends in order, or its process does; one that ended is let be."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from agentrl.cluster import own_node


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What would have ended this process."""
    reasons: list[str] = []
    monkeypatch.setattr(own_node, "leave", reasons.append)
    monkeypatch.setattr(own_node, "LOOK_S", 0.05)
    monkeypatch.setattr(own_node, "LEAVE_S", 0.2)
    monkeypatch.setattr(own_node, "SHUTDOWN_S", 0.2)
    yield reasons
    assert own_node._watching.acquire(blocking=False)
    own_node._watching.release()


def watchers() -> int:
    return sum(thread.name == "agentrl-own-node" for thread in threading.enumerate())


@pytest.mark.parametrize("stuck", [True, False])
def test_a_process_ends_where_its_run_does_not(stuck: bool, left: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_node, "_is_dead", lambda: True)
    told = threading.Event()
    reasons: list[str] = []

    def tell(why: str) -> None:
        reasons.append(why)
        told.set()

    monkeypatch.setattr(own_node, "told", {tell})
    with own_node.watched():
        assert told.wait(5.0)
        if stuck:
            time.sleep(0.6)
    time.sleep(0.4)
    assert reasons == [own_node.LOST]
    assert [own_node.LOST in why and "--resume" in why for why in left] == ([True] if stuck else [])


def test_one_watches_for_all_and_asks_nobody_before_ray_is_there(
    left: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked before, Ray would connect to whatever it finds."""
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.nodes", lambda: left.append("asked"))
    before = watchers()
    with own_node.watched(), own_node.watched():
        assert watchers() == before + 1
        time.sleep(0.3)
    time.sleep(0.2)
    assert (watchers(), left) == (before, [])


def test_it_is_dead_where_ray_says_so_of_this_node(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = {"NodeID": "here", "Alive": True}, {"NodeID": "there", "Alive": False}
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr("ray.get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "here"))
    monkeypatch.setattr("ray.nodes", lambda: [here, there])
    assert not own_node._is_dead()
    here["Alive"] = False
    assert own_node._is_dead()
    monkeypatch.setattr("ray.nodes", lambda: 1 / 0)
    assert not own_node._is_dead()


@pytest.mark.parametrize("how", ["in order", "raises", "hangs"])
def test_ray_has_a_time_to_let_go(how: str, left: list[str]) -> None:
    def shutdown() -> None:
        if how == "raises":
            raise RuntimeError("interrupted")
        time.sleep(0.6 if how == "hangs" else 0.0)

    try:
        own_node.shut_down(SimpleNamespace(shutdown=shutdown))
    except RuntimeError:
        assert how == "raises"
    time.sleep(0.4)
    assert len(left) == (how == "hangs")
    assert not own_node._looking.locked()


@pytest.mark.parametrize("stderr", ["read", "closed", "full"])
def test_leaving_waits_for_nobody(stderr: str) -> None:
    """Neither for what runs, nor for whoever should read the last words."""
    code = "import os, time, threading; from agentrl.cluster import own_node\n"
    code += "threading.Timer(0.2, own_node.leave, ['it is over']).start()\n"
    code += {"read": "", "closed": "os.close(2)\n", "full": "os.set_blocking(2, False)\n"}[stderr]
    if stderr == "full":
        code += "try:\n  while True: os.write(2, b'x' * 4096)\nexcept BlockingIOError: os.set_blocking(2, True)\n"
    reading, writing = os.pipe()
    try:
        done = subprocess.run([sys.executable, "-c", f"{code}time.sleep(60)"], stderr=writing, timeout=30, check=False)
        said = os.read(reading, 65536) if stderr != "closed" else b""
    finally:
        os.close(reading)
        os.close(writing)
    assert done.returncode == 1
    assert stderr != "read" or said == b"agentrl: this process is ended: it is over\n"
