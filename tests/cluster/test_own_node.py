"""A run whose own node is marked dead ends in order, or its process does; one that ended is let be."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.cluster import own_node
from agentrl.cluster.connect import connected
from agentrl.cluster.own_node import OWN_NODE, OwnNode
from agentrl.recipe import ClusterSection
from tests.processes import within


def quick(left: list[str], **others: Any) -> OwnNode:
    """A node that is looked at often; `left` gets what would have ended this process."""
    return OwnNode(look_s=0.05, leave_s=0.2, shutdown_s=0.2, leave=left.append, **others)


@pytest.mark.parametrize("stuck", [True, False])
def test_a_process_ends_where_its_run_does_not(stuck: bool) -> None:
    told, reasons, left = threading.Event(), list[str](), list[str]()

    def tell(why: str) -> None:
        reasons.append(why)
        told.set()

    node = quick(left, is_dead=lambda: True)
    node.leave_s = 0.2 if stuck else 30.0
    node.told.add(tell)
    with node.watched():
        assert told.wait(30.0)
        if stuck:
            assert within(30.0, lambda: left)
    assert reasons == [own_node.LOST]
    assert [own_node.LOST in why and "--resume" in why for why in left] == ([True] if stuck else [])


def test_one_watches_for_all_until_the_last_has_ended() -> None:
    looks = list[float]()
    node = quick([], is_dead=lambda: looks.append(time.monotonic()))
    before = watchers()
    with node.watched():
        with node.watched():
            assert len(watchers() - before) == 1
        seen = len(looks)
        assert within(30.0, lambda: len(looks) > seen + 1)
    assert within(30.0, lambda: not watchers() - before)


def test_a_connected_process_is_watched(opened: tuple[Any, list[str]]) -> None:
    """And its players are told of what becomes of its node."""
    players, _ = opened
    with connected(ClusterSection()):
        assert OWN_NODE._watching.locked() and watchers()
    assert players._tell in OWN_NODE.told


def watchers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "agentrl-own-node"}


def test_it_is_dead_where_ray_says_so_of_this_node() -> None:
    here, there = {"NodeID": "here", "Alive": False}, {"NodeID": "there", "Alive": False}
    ray = SimpleNamespace(
        is_initialized=lambda: False,
        get_runtime_context=lambda: SimpleNamespace(get_node_id=lambda: "here"),
        nodes=lambda: [here, there],
    )
    assert not own_node.is_dead(ray)  # it is not asked
    ray.is_initialized = lambda: True
    assert own_node.is_dead(ray)
    here["Alive"] = True
    assert not own_node.is_dead(ray)
    ray.nodes = lambda: 1 / 0
    assert not own_node.is_dead(ray)


@pytest.mark.parametrize("how", ["in order", "raises", "hangs"])
def test_ray_has_a_time_to_let_go(how: str) -> None:
    left = list[str]()
    node = quick(left)

    def shutdown() -> None:
        assert node._looking.locked()  # nobody asks Ray meanwhile
        if how == "raises":
            raise RuntimeError("interrupted")
        assert how != "hangs" or within(30.0, lambda: left)

    try:
        node.shut_down(SimpleNamespace(shutdown=shutdown))
    except RuntimeError:
        assert how == "raises"
    time.sleep(0.5)
    assert len(left) == (how == "hangs")
    assert not node._looking.locked()


@pytest.mark.parametrize("stderr", ["read", "closed", "full"])
def test_leaving_waits_for_nobody(stderr: str) -> None:
    """Neither for what runs, nor for a reader of the last words."""
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
