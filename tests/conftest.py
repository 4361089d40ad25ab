"""How the suite is spread over workers: the tests of a file stay together, and so do files that share a server."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent
SHARED = {"rollout/engines": "sglang", "sandboxes/test_docker": "docker"}
"""Tests below these paths share one server, hence one worker."""
LONGEST = ("rollout/engines", "test_train", "sandboxes/test_docker", "verifiers/redteam", "envs", "learn")
"""Begun first, so that no worker is left alone with them at the end."""


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> str:
        return item.path.relative_to(HERE).as_posix() if item.path.is_relative_to(HERE) else ""

    def rank(item: pytest.Item) -> int:
        return next((n for n, start in enumerate(LONGEST) if place(item).startswith(start)), len(LONGEST))

    items.sort(key=rank)
    for item in items:
        shared = next((name for start, name in SHARED.items() if place(item).startswith(start)), place(item))
        item.add_marker(pytest.mark.xdist_group(shared))
