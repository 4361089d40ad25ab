"""Finds out what works on this machine, what is missing, and which command installs it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check."""

    name: str
    works: bool
    gives: tuple[str, ...] = ()
    """What it offers here; for a sandbox, what it isolates."""
    missing: tuple[str, ...] = ()
    """What is missing, in words."""
    fix: str = ""
    """The command that installs or enables it."""


def sandboxes() -> list[Finding]:
    """Try every sandbox backend."""
    from agentrl import catalogue
    from agentrl.errors import AgentRLError
    from agentrl.sandboxes import load

    findings = []
    for name in catalogue.members("sandboxes"):
        try:
            backend = load(name)()
            try:
                state = backend.available()
            finally:
                backend.close()
        except AgentRLError as error:
            findings.append(Finding(name=name, works=False, missing=(str(error),)))
            continue
        gives = state.isolates or (("nothing is isolated",) if state.works else ())
        findings.append(Finding(name=name, works=state.works, gives=gives, missing=state.missing, fix=state.fix))
    return findings


def engines() -> list[Finding]:
    """Look for the engines: the packages of the embedded one, and SGLang's environments."""
    from importlib.util import find_spec

    from agentrl.engines.sglang import install

    absent = tuple(name for name in ("torch", "transformers") if find_spec(name) is None)
    fix = "pip install 'agentrl[train]'" if absent else ""
    findings = [Finding(name="transformers", works=not absent, missing=absent, fix=fix)]
    for cpu in (False, True):
        python, flag = install.python(cpu), " --cpu" if cpu else ""
        name = f"sglang{' on the CPU' if cpu else ''}"
        fix = f"agentrl engine install sglang{flag}"
        version, problem = _sglang_version(python)
        if version:
            findings.append(Finding(name=name, works=True, gives=(f"{version} in {python}",)))
        else:
            findings.append(Finding(name=name, works=False, missing=(problem,), fix=fix))
    return findings


def _sglang_version(python: Path) -> tuple[str, str]:
    """Ask an interpreter, without this process's environment variables, which SGLang it has; or say what is wrong."""
    if not python.exists():
        return "", "its environment is not built"
    code = "import importlib.metadata, importlib.util as u; assert u.find_spec('sglang'); "
    code += "print(importlib.metadata.version('sglang'))"
    try:
        ended = subprocess.run([str(python), "-I", "-c", code], capture_output=True, text=True, timeout=60, env={})
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"{python} cannot be run: {error}"
    if ended.returncode:
        return "", f"{python} has no SGLang"
    return ended.stdout.strip(), ""


def devices() -> list[Finding]:
    """List the devices that torch can use."""
    from importlib.util import find_spec

    if find_spec("torch") is None:
        return [Finding(name="torch", works=False, missing=("torch",), fix="pip install 'agentrl[train]'")]
    import torch

    from agentrl.learn.model import slow_bfloat16

    speed = ("bfloat16 is emulated here, a hundred times slower than float32",) if slow_bfloat16() else ()
    cpu = Finding(name="cpu", works=True, gives=(f"{torch.get_num_threads()} threads", *speed))
    cards = [
        Finding(
            name=f"cuda:{number}",
            works=True,
            gives=(torch.cuda.get_device_name(number), f"{torch.cuda.mem_get_info(number)[1] >> 30} GiB"),
        )
        for number in range(torch.cuda.device_count())
    ]
    return [cpu, *cards]


SECTIONS: dict[str, Callable[[], list[Finding]]] = {"sandboxes": sandboxes, "engines": engines, "devices": devices}
"""The checks, in order; none raises for something that is missing."""


def examine() -> dict[str, list[Finding]]:
    """Run all checks."""
    return {name: check() for name, check in SECTIONS.items()}


def examine_cluster(path: Path | None, *, as_json: bool, say: Callable[[str], None]) -> int:
    """Join the cluster that RAY_ADDRESS names, or start Ray here, and examine every node; return the exit code."""
    import json

    from agentrl import recipe as recipes
    from agentrl.cluster import connect
    from agentrl.recipe import ClusterSection

    recipe = recipes.load(path, []) if path is not None else None
    section = (recipe.cluster if recipe is not None else None) or ClusterSection()
    with connect.connected(section):
        from agentrl.cluster import nodes

        report = nodes.examine(recipe, sandboxes)
    say(json.dumps(report.as_json()) if as_json else nodes.as_text(report))
    return 0 if report.fit else 1


def as_json(report: dict[str, list[Finding]]) -> dict[str, list[dict[str, Any]]]:
    """Return the report as plain data."""
    return {name: [asdict(finding) for finding in findings] for name, findings in report.items()}


def as_text(report: dict[str, list[Finding]]) -> str:
    """Return the report for a terminal."""
    lines: list[str] = []
    for section, findings in report.items():
        lines += [section]
        for finding in findings:
            lines.append(f"  {finding.name}: {'works' if finding.works else 'does not work here'}")
            lines += [f"    + {text}" for text in finding.gives]
            lines += [f"    - {text}" for text in finding.missing]
            lines += [f"    fix: {finding.fix}"] if finding.fix else []
    return "\n".join(lines)
