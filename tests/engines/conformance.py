"""Engine and learner checks on the machine at hand, a line each: `python tests/engines/conformance.py --device cuda`.

The checks are the tests of tests/engines, and those of tests/learn that need a GPU. What came of each is in the
JSON file as soon as it is known, so that a run that is cut off leaves its results.

    --device cuda --json out.json     everything; the SGLang of AGENTRL_SGLANG_PYTHON (a script that sets PYTHONPATH and
                                      execs an interpreter will do)
    -k EXPRESSION                     only some, as pytest selects them
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENGINES = ROOT / "tests" / "engines"
ORDER = ("test_conformance.py", "test_lora.py", "test_training.py", "test_gpu.py", "test_sglang.py")
"""The test that kills the server comes last."""


class Lines:
    """Prints a line for each check and keeps the file up to date."""

    def __init__(self, path: Path | None, device: str) -> None:
        self.path = path
        self.began = time.monotonic()
        self.data: dict[str, Any] = {"device": device, "machine": platform.machine(), "checks": {}}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        name = report.nodeid.rsplit("/", 1)[-1].replace(".py::", ": ")
        check: dict[str, Any] = {"outcome": report.outcome, "seconds": round(report.duration, 2)}
        check |= {key: value for key, value in report.user_properties}
        if report.outcome == "failed":
            check["why"] = report.longreprtext[-3000:]
        elif isinstance(report.longrepr, tuple):
            check["why"] = str(report.longrepr[2])
        self.data["checks"][name] = check
        more = ", ".join(f"{key} {value}" for key, value in report.user_properties)
        print(f"{report.outcome:8} {report.duration:6.1f} s  {name}{'  ' + more if more else ''}", flush=True)
        if report.outcome == "failed":
            print("    " + "\n    ".join(check["why"].splitlines()[-12:]), flush=True)
        self.write()

    def write(self) -> None:
        outcomes = [check["outcome"] for check in self.data["checks"].values()]
        self.data["counts"] = {kind: outcomes.count(kind) for kind in sorted(set(outcomes))}
        self.data["seconds"] = round(time.monotonic() - self.began, 1)
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(self.data, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--json", type=Path)
    parser.add_argument("-k", dest="only", default="")
    options = parser.parse_args()
    os.environ["AGENTRL_DEVICE"] = options.device
    os.environ.setdefault("SGLANG_ENABLE_JIT_DEEPGEMM", "false")  # its kernels are for shapes that no check has
    lines = Lines(options.json and options.json.resolve(), options.device)
    files = [str(ENGINES / name) for name in ORDER]
    gpu = ROOT / "tests" / "learn" / "test_gpu.py"
    if options.device == "cuda" and gpu.is_file():
        files.insert(0, str(gpu))
    flags = ["-p", "no:terminal", "-p", "no:cacheprovider", "-p", "no:xdist"]
    code = pytest.main([*flags, *(["-k", options.only] if options.only else []), *files], plugins=[lines])
    lines.write()
    print(json.dumps({key: lines.data[key] for key in ("device", "counts", "seconds")}))
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
