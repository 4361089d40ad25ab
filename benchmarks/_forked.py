"""Runs parts of a benchmark in processes of their own, forked before CUDA is used, so that none pays for imports again.

Memory that one part leaves behind, a kernel that it replaced or a crash is of no concern to the next.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # torch.cuda.is_available() then leaves CUDA alone

Row = dict[str, Any]


def forked(work: Callable[[], Row], seconds: float) -> Row:
    """Return the row that `work` returns in a child, or a row with `error` when it fails or takes too long."""
    sys.stdout.flush()
    sys.stderr.flush()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        os.setpgid(0, 0)  # compilers that it starts end with it
        os.dup2(2, 1)  # stdout is the caller's table
        with os.fdopen(writer, "w") as pipe:
            pipe.write(json.dumps(attempt(work)))
        os._exit(0)
    os.close(writer)
    text, deadline = b"", time.monotonic() + seconds
    os.set_blocking(reader, False)
    try:
        while time.monotonic() < deadline:
            try:
                part = os.read(reader, 1 << 16)
            except BlockingIOError:
                time.sleep(0.05)
                continue
            if not part:
                row: Row = json.loads(text) if text else {"error": "the process ended without a result"}
                return row
            text += part
        return {"error": f"the time was up after {seconds:.0f} s"}
    finally:
        os.close(reader)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def attempt(work: Callable[[], Row]) -> Row:
    """Return the row of `work`; running out of memory, or a missing package, is a result too."""
    try:
        return work()
    except BaseException as error:
        traceback.print_exc()
        lines = str(error).strip().splitlines()
        return {"error": f"{type(error).__name__}: {lines[0][:300] if lines else ''}"}
