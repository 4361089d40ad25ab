"""Which tests are too slow to grade: told by the processor time that they take, not by how busy the machine is."""

from pathlib import Path

import pytest

from agentrl import sandboxes
from agentrl.repos import root, run, trials
from agentrl.repos.lock import lock_of
from agentrl.sandboxes.pool import Pool
from tests.repos import tiny

WAITS_AND_WORKS = """import time


def test_quick():
    pass


def test_waits():
    time.sleep(0.8)


def test_works():
    began = time.process_time()
    while time.process_time() - began < 0.3:
        pass
"""


def test_a_test_that_works_long_is_slow_and_one_that_waits_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A test that a busy machine keeps waiting must not be left out there and kept elsewhere."""
    monkeypatch.setenv("AGENTRL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(trials, "SLOW", 0.25)
    files = {"PKG-INFO": "Name: x\n", "x/__init__.py": "", "tests/test_x.py": WAITS_AND_WORKS}
    built = root.ready(lock_of(str(tiny.archive(tmp_path, files, "x-1.0")), (), lambda text: None))
    with Pool(sandboxes.load("namespace")(), limit=1) as pool:
        result = run.run(built, pool, {**built.source.code, **built.source.tests}, ["tests/test_x.py"])
    assert {name.rpartition("::")[2]: trials._why(test, [test, test]) for name, test in result.tests.items()} == {
        "test_quick": "",
        "test_waits": "",
        "test_works": "slow: takes more than 0.25 s",
    }


def _took(seconds: float) -> run.Test:
    return run.Test(run.PASSED, seconds)


@pytest.mark.parametrize(
    ("seconds", "why"),
    [
        ((1.9, 1.9, 1.9), ""),
        ((2.1, 0.1, 0.1), "slow: takes more than 2 s"),
        ((0.1, 2.1, 0.1), "slow: takes more than 2 s"),
    ],
)
def test_a_test_is_slow_if_one_of_two_runs_was(seconds: tuple[float, float, float], why: str) -> None:
    first, *others = map(_took, seconds)
    assert trials._why(first, others) == why
