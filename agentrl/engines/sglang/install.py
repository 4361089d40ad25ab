"""Builds the Python environment of SGLang servers, apart from agentrl's own, since their version pins conflict."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from agentrl.catalogue import cache_folder
from agentrl.errors import UserError

STAND_INS = Path(__file__).parent / "cpu"
"""The requirements of a CPU server, and stand-ins for the two packages that have no CPU wheel."""
VERSION = "0.5.23"
TORCH = "2.13.0"


def folder(cpu: bool) -> Path:
    """Return the default folder of the SGLang environment."""
    return cache_folder() / "engines" / ("sglang-cpu" if cpu else "sglang")


def python(cpu: bool) -> Path:
    """Return the interpreter that starts SGLang: AGENTRL_SGLANG_PYTHON, or the one that `sglang` built."""
    named = os.environ.get("AGENTRL_SGLANG_PYTHON")
    return Path(named).expanduser() if named else folder(cpu) / "bin" / "python"


def sglang(*, cpu: bool, to: Path | None = None, say: Callable[[str], None] = print) -> Path:
    """Build an environment with SGLang unless a finished one exists, and return its interpreter."""
    target = (to or folder(cpu)).expanduser().absolute()
    interpreter = target / "bin" / "python"
    marker = target / ".agentrl"
    stamp = f"sglang {VERSION} {'cpu' if cpu else 'cuda'}\n"
    if interpreter.exists() and marker.is_file() and marker.read_text() == stamp:
        say(f"SGLang {VERSION} is installed already: {interpreter}")
        return interpreter
    target.parent.mkdir(parents=True, exist_ok=True)
    say(f"building {target} (several GB and some minutes)")
    _run([sys.executable, "-m", "venv", "--clear", str(target)])
    if cpu:
        requirements, constraints = STAND_INS / "requirements.txt", STAND_INS / "constraints.txt"
        _install(interpreter, f"torch=={TORCH}")
        # Its own requirements ask for CUDA packages, so it is installed without them.
        _install(interpreter, "--no-deps", f"sglang=={VERSION}", "apache-tvm-ffi==0.1.11", "triton")
        _install(interpreter, "-r", str(requirements), "-c", str(constraints))
    else:
        _install(interpreter, f"sglang[all]=={VERSION}")
    marker.write_text(stamp)
    say(f"installed: {interpreter}")
    return interpreter


def _install(interpreter: Path, *what: str) -> None:
    """With uv where it is at hand, which is several times as fast; with pip where it is not, or fails."""
    uv = shutil.which("uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if uv is not None:
        quick = [uv, "pip", "install", "--quiet", "--python", str(interpreter), *what]
        if subprocess.run(quick, capture_output=True).returncode == 0:
            return
    _run([str(interpreter), "-m", "pip", "install", "--disable-pip-version-check", "--quiet", *what])


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        tail = "\n".join((result.stdout + result.stderr).strip().splitlines()[-15:])
        raise UserError(f"`{' '.join(command)}` failed with exit code {result.returncode}:\n{tail}")
