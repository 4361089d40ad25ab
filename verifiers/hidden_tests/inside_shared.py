"""Runs in a box that holds one hidden test and the agent's repository: pytest in one process with the agent's code.

Sent to the box as text; standard library and pytest only. What it reports, the agent's code could have reported.
"""

from __future__ import annotations

import base64
import json
import os
import sys
from typing import Any


class Recorder:
    """Writes down what became of each phase of the test."""

    def __init__(self, times: int) -> None:
        self.times = times
        self.phases: list[str] = []

    def pytest_runtest_protocol(self, item: Any, nextitem: Any) -> bool:
        """As pytest does it, but as often as ordered."""
        from _pytest.runner import runtestprotocol

        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for number in range(self.times):
            if number:
                item._initrequest()
            runtestprotocol(item, nextitem=nextitem)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def pytest_runtest_logreport(self, report: Any) -> None:
        odd = hasattr(report, "wasxfail") or report.outcome != "passed"
        self.phases.append(report.when + (" " + report.outcome if odd else ""))


def main() -> None:
    with open(3, "rb") as pipe:
        order = json.loads(pipe.read())
    bundle = "/tmp/pytest.zip"
    for path, content in {**order["files"], bundle: order["pytest"]}.items():
        if os.path.dirname(path):
            os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(base64.b64decode(content))
    sys.path[:0] = [bundle, os.getcwd()]
    import pytest

    recorder = Recorder(order["times"])
    options = ["-q", "-p", "no:cacheprovider", "--tb=no", "--rootdir", os.getcwd(), "-c", os.devnull]
    folder = os.path.dirname(order["test"].split("::")[0])
    options += ["--confcutdir", folder or os.getcwd()]
    pytest.main([*options, order["test"]], plugins=[recorder])
    os.write(4, json.dumps({"nonce": order["nonce"], "test": order["test"], "phases": recorder.phases}).encode())


main()
