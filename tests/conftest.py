"""For the whole suite: `make test` draws the same examples every time; `make test-full` looks for new ones.

`--report-json FILE` writes what came of a run as data: how many passed, what failed and why, what took longest.
"""

from __future__ import annotations

import datetime
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from agentrl import catalogue

# Tests run side by side, on small models: more threads would wait for each other. Read when torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A machine may stall for a second: how long an example takes says nothing. Fixtures that examples share hold no state.
PATIENT: Any = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
}
settings.register_profile("new", **PATIENT)
settings.register_profile("same", **PATIENT, derandomize=True)
settings.load_profile("new" if os.environ.get("AGENTRL_FULL") else "same")


@pytest.fixture(autouse=True)
def members_named_by_a_test_are_forgotten() -> Iterator[None]:
    """A folder that was named by its path is found by its name from then on, for the life of the process. (Its module
    stays imported: names of such members must differ between tests.)"""
    before = os.environ.get(catalogue.NAMED)
    yield
    os.environ.pop(catalogue.NAMED, None)
    if before is not None:
        os.environ[catalogue.NAMED] = before


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--report-json", metavar="FILE", help="write counts, failures and durations as JSON")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--report-json")
    if path and not hasattr(config, "workerinput"):  # under xdist only the controller writes
        config.pluginmanager.register(Summary(Path(path)), "agentrl-summary")


class Summary:
    """Collects the reports of a run and writes them when it ends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.began = time.time()
        self.outcomes: dict[str, str] = {}
        self.why: dict[str, str] = {}
        self.seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        wrong = report.outcome != "passed"
        if wrong or report.when == "call":
            error = report.failed and report.when != "call"
            self.outcomes[report.nodeid] = "error" if error else report.outcome
        if wrong:
            self.why[report.nodeid] = self._reason(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.outcomes[report.nodeid] = "error"
            self.why[report.nodeid] = self._reason(report)

    def _reason(self, report: pytest.TestReport | pytest.CollectReport) -> str:
        if isinstance(report.longrepr, tuple):  # a skip: file, line, reason
            return str(report.longrepr[2])
        return str(report.longrepr)[-2000:]

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        named: dict[str, dict[str, str]] = {kind: {} for kind in ("failed", "error", "skipped")}
        for test, outcome in self.outcomes.items():
            if outcome in named:
                named[outcome][test] = self.why.get(test, "")
        counts: dict[str, Any] = dict(sorted(Counter(self.outcomes.values()).items()))
        slowest = sorted(self.seconds.items(), key=lambda one: -one[1])[:50]
        data = {
            "exit": int(exitstatus),
            "full": bool(os.environ.get("AGENTRL_FULL")),
            "date": datetime.datetime.fromtimestamp(self.began, datetime.UTC).isoformat(timespec="seconds"),
            "seconds": round(time.time() - self.began, 1),
            "counts": counts,
            **named,
            "slowest": {test: round(took, 2) for test, took in slowest},
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


@pytest.fixture
def member(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], str]:
    """Write an environment that the catalogue then finds."""
    monkeypatch.setenv("AGENTRL_PATH", str(tmp_path))

    def write(name: str, source: str) -> str:
        folder = tmp_path / "envs" / name
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(source)
        return name

    return write


@pytest.fixture
def evidence(request: pytest.FixtureRequest) -> Callable[[str, Any], None]:
    """Keep what a long run measured: `evidence("soak-fuzz", {...})` writes docs/evidence/soak-fuzz.json."""

    def keep(name: str, found: Any) -> None:
        folder = request.config.rootpath / "docs" / "evidence"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    return keep
