"""The pytest plugin of both programs that run hidden tests inside a sandbox."""

from __future__ import annotations

from typing import Any


class Recorder:
    """Runs each test `times` times in one process and records the result of every phase."""

    def __init__(self, times: int) -> None:
        self.times = times
        self.phases: dict[str, list[str]] = {}
        self.errors = 0

    def pytest_runtest_protocol(self, item: Any, nextitem: Any) -> bool:
        """Do what pytest does, but several times."""
        from _pytest.runner import runtestprotocol

        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for number in range(self.times):
            if number:
                item._initrequest()
            runtestprotocol(item, nextitem=nextitem)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def pytest_runtest_logreport(self, report: Any) -> None:
        if hasattr(report, "context") and report.outcome == "passed":
            return  # a part of a test (`with self.subTest()`), which is reported as a whole too
        odd = hasattr(report, "wasxfail") or report.outcome != "passed"
        self.phases.setdefault(report.nodeid, []).append(report.when + (" " + report.outcome if odd else ""))

    def pytest_collectreport(self, report: Any) -> None:
        self.errors += report.outcome != "passed"
