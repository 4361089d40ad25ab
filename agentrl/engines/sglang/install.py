"""Builds the environments that inference servers live in, apart from agentrl's own, since their pins fight."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from agentrl.errors import UserError

STAND_INS = Path(__file__).parent / "sglang_cpu"
"""Requirements of a CPU server, and stand-ins for the two packages that have no CPU wheel."""
VERSION = "0.5.23"
TORCH = "2.13.0"


def cache() -> Path:
    """Where agentrl keeps what it builds: AGENTRL_CACHE, or ~/.cache/agentrl."""
    return Path(os.environ.get("AGENTRL_CACHE") or "~/.cache/agentrl").expanduser()


def folder(cpu: bool) -> Path:
    """Where the SGLang environment lies by default."""
    return cache() / "engines" / ("sglang-cpu" if cpu else "sglang")


def python(cpu: bool) -> Path:
    """The interpreter that SGLang is started with: AGENTRL_SGLANG_PYTHON, or the one `install` made."""
    named = os.environ.get("AGENTRL_SGLANG_PYTHON")
    return Path(named).expanduser() if named else folder(cpu) / "bin" / "python"


def sglang(*, cpu: bool, to: Path | None = None, say: Callable[[str], None] = print) -> Path:
    """Build an environment with SGLang, unless a finished one is there; returns its interpreter."""
    target = (to or folder(cpu)).expanduser().absolute()
    interpreter = target / "bin" / "python"
    mark = target / ".agentrl"
    stamp = f"sglang {VERSION} {'cpu' if cpu else 'cuda'}\n"
    if interpreter.exists() and mark.is_file() and mark.read_text() == stamp:
        say(f"SGLang {VERSION} is installed already: {interpreter}")
        return interpreter
    target.parent.mkdir(parents=True, exist_ok=True)
    say(f"building {target} (several GB and some minutes)")
    _run([sys.executable, "-m", "venv", "--clear", str(target)])
    pip = [str(interpreter), "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
    if cpu:
        requirements, constraints = STAND_INS / "requirements.txt", STAND_INS / "constraints.txt"
        _run([*pip, f"torch=={TORCH}"])
        # Its own requirements ask for CUDA packages, so it comes without them.
        _run([*pip, "--no-deps", f"sglang=={VERSION}", "apache-tvm-ffi==0.1.11", "triton"])
        _run([*pip, "-r", str(requirements), "-c", str(constraints)])
    else:
        _run([*pip, f"sglang[all]=={VERSION}"])
    mark.write_text(stamp)
    say(f"installed: {interpreter}")
    return interpreter


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-15:])
        raise UserError(f"`{' '.join(command)}` failed with exit code {done.returncode}:\n{tail}")
