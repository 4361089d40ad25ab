"""Says what works on this machine, what is missing, and the command that gets it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at."""

    name: str
    works: bool
    gives: tuple[str, ...] = ()
    """What it offers here; for a sandbox, what it keeps apart."""
    missing: tuple[str, ...] = ()
    """What is missing, in words."""
    fix: str = ""
    """The command that installs or enables it."""


def sandboxes() -> list[Finding]:
    """Every sandbox backend that can be found, tried for real."""
    from agentrl import catalogue
    from agentrl.errors import AgentRLError
    from agentrl.sandboxes import load

    found = []
    for name in catalogue.members("sandboxes"):
        try:
            backend = load(name)()
            try:
                seen = backend.available()
            finally:
                backend.close()
        except AgentRLError as error:
            found.append(Finding(name=name, works=False, missing=(str(error),)))
            continue
        gives = seen.isolates or (("nothing is isolated",) if seen.works else ())
        found.append(Finding(name=name, works=seen.works, gives=gives, missing=seen.missing, fix=seen.fix))
    return found


def engines() -> list[Finding]:
    """What can sample: the embedded engine's packages, and SGLang's environments."""
    from importlib.util import find_spec

    from agentrl.engines.sglang import install

    absent = tuple(name for name in ("torch", "transformers") if find_spec(name) is None)
    fix = "pip install 'agentrl[train]'" if absent else ""
    found = [Finding(name="transformers", works=not absent, missing=absent, fix=fix)]
    for cpu in (False, True):
        python, flag = install.python(cpu), " --cpu" if cpu else ""
        there = python.exists()
        found.append(
            Finding(
                name=f"sglang{' on the CPU' if cpu else ''}",
                works=there,
                gives=(str(python),) if there else (),
                missing=() if there else ("its environment is not built",),
                fix="" if there else f"agentrl engine install sglang{flag}",
            )
        )
    return found


def devices() -> list[Finding]:
    """Accelerators that torch sees; without torch, nothing can be said."""
    from importlib.util import find_spec

    if find_spec("torch") is None:
        return [Finding(name="torch", works=False, missing=("torch",), fix="pip install 'agentrl[train]'")]
    import torch

    cpu = Finding(name="cpu", works=True, gives=(f"{torch.get_num_threads()} threads",))
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
"""What the doctor looks at, in order; each section finds things and never raises for one that is missing."""


def examine() -> dict[str, list[Finding]]:
    """All sections."""
    return {name: look() for name, look in SECTIONS.items()}


def as_json(report: dict[str, list[Finding]]) -> dict[str, list[dict[str, Any]]]:
    """The report as plain data."""
    return {name: [asdict(finding) for finding in findings] for name, findings in report.items()}


def as_text(report: dict[str, list[Finding]]) -> str:
    """The report for a person at a terminal."""
    lines: list[str] = []
    for section, findings in report.items():
        lines += [section]
        for finding in findings:
            lines.append(f"  {finding.name}: {'works' if finding.works else 'does not work here'}")
            lines += [f"    + {text}" for text in finding.gives]
            lines += [f"    - {text}" for text in finding.missing]
            lines += [f"    fix: {finding.fix}"] if finding.fix else []
    return "\n".join(lines)
