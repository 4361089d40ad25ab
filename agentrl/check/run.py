"""`env check`: is an environment fit for training? Each check gives its evidence and, when it fails, a fix.

The names that the field has agreed on are kept: seed_control, episode_determinism, episode_isolation, oracle_max,
floor_gap, canary_floor, oracle_containment, no_solution_leakage, verifier_determinism, replayability.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from agentrl.check import tasks, verdicts  # noqa: F401 (importing them registers their checks)
from agentrl.check.context import ALL, CheckContext, Failed
from agentrl.envs import load
from agentrl.envs.play import stage
from agentrl.errors import AgentRLError, UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How one check went."""

    name: str
    ok: bool
    evidence: str
    """What was seen."""
    fix: str = ""
    """What to do about it, when it failed."""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All checks of one environment."""

    env: str
    sandbox: str
    levels: tuple[int, ...]
    results: tuple[Result, ...] = field(default_factory=tuple)

    @property
    def ok(self) -> bool:
        return all(result.ok for result in self.results)

    def json(self) -> str:
        return json.dumps({**asdict(self), "ok": self.ok}, indent=2)


async def check(
    name: str,
    *,
    sandbox: str = "namespace",
    levels: Iterable[int] | None = None,
    per_level: int = 2,
    options: Mapping[str, Any] | None = None,
    only: Iterable[str] | None = None,
    progress: Callable[[Result], None] | None = None,
) -> Report:
    """Run the checks, or only some of them, on the first tasks of each level."""
    kind = load(name)
    wanted = tuple(only) if only is not None else tuple(ALL)
    unknown = [one for one in wanted if one not in ALL]
    if unknown:
        raise UserError(f"no check {', '.join(unknown)}; there are: {', '.join(ALL)}")
    chosen = tuple(levels) if levels is not None else tuple(kind.levels)
    strange = [level for level in chosen if level not in kind.levels]
    if strange:
        raise UserError(f"{name} has the levels {kind.levels.start} to {kind.levels[-1]}, not {strange}")
    results = []
    async with stage(sandbox, limit=16) as where:
        bench = CheckContext(
            name=name,
            kind=kind,
            options=dict(options or {}),
            sandbox=sandbox,
            levels=chosen,
            per_level=per_level,
            where=where,
        )
        for one in wanted:
            results.append(await _run(one, bench))
            if progress is not None:
                progress(results[-1])
    return Report(env=name, sandbox=sandbox, levels=chosen, results=tuple(results))


async def _run(name: str, bench: CheckContext) -> Result:
    examine, fix = ALL[name]
    began = time.perf_counter()
    try:
        ok, evidence = True, await examine(bench)
    except Failed as failed:
        ok, evidence, fix = False, str(failed), failed.fix or fix
    except NotImplementedError:
        ok, evidence = False, "expert(task) is not written"
        fix = "write expert(task): the tool calls, then the final message, that solve the task; it may use the secret"
    except AgentRLError as error:
        ok, evidence = False, f"{type(error).__name__}: {error}"
    except Exception as error:  # an author's bug is a finding, not a crash of the check
        where = _place(error)
        ok, evidence = False, f"{type(error).__name__}: {error}{where}"
        fix = "mend the exception; see the file and line above"
    return Result(
        name=name, ok=ok, evidence=evidence, fix="" if ok else fix, seconds=round(time.perf_counter() - began, 3)
    )


def _place(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f" ({trace.tb_frame.f_code.co_filename}:{trace.tb_lineno})" if trace is not None else ""
