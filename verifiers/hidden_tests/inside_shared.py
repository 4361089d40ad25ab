"""Runs in a sandbox that holds one hidden test and the agent's repository: pytest in one process with the agent's code.

It needs the standard library and pytest. Whatever it reports, the agent's code could have reported.
"""

from __future__ import annotations

import base64
import json
import os
import sys

from agentrl.verifiers.hidden_tests.inside_pytest import Recorder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import BinaryIO


def main(pipe: BinaryIO) -> None:
    """Carry out the order in `pipe`, from which this program itself has been read already."""
    order = json.loads(pipe.read())
    pipe.close()
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
    phases = [phase for phases in recorder.phases.values() for phase in phases]
    os.write(4, json.dumps({"nonce": order["nonce"], "test": order["test"], "phases": phases}).encode())


main(globals()["pipe"])
