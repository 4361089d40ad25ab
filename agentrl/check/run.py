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

from agentrl import judges
from agentrl.catalogue import bridge
from agentrl.check import tasks, verdicts
from agentrl.check.context import Check, CheckContext
from agentrl.check.faults import ENDLESS, Failed, place
from agentrl.check.watchdog import watch
from agentrl.envs import Environment, load, tools_of
from agentrl.envs.play import stage
from agentrl.envs.schema_tools import SchemaTool
from agentrl.errors import AgentRLError, UserError
from agentrl.verifiers.base import parts_of

NEEDS_EXPERT = "this check needs an expert"
"""How the evidence of a check begins that could not run because somebody else's environment has no solution."""
ALL = {c.name: c for module in (tasks, verdicts) for c in vars(module).values() if isinstance(c, Check)}
"""Every check by name, in the order they run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of one check."""

    name: str
    ok: bool
    evidence: str
    """What was observed."""
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
    not_run: tuple[str, ...] = ()
    """Checks that were not asked for, or that did not come to their turn."""
    judge: str = ""
    """The judge that the verifier asked, where it asks one, and how well it agreed with labels."""
    rewards: str = ""
    """Who reports the rewards, where they are not computed here, and what third parties wrote into the prompt."""

    @property
    def ok(self) -> bool:
        """Whether every check that ran holds."""
        return all(result.ok for result in self.results)

    @property
    def fit(self) -> bool:
        """Whether every check ran and holds."""
        return self.ok and not self.not_run

    def json(self) -> str:
        return json.dumps({**asdict(self), "ok": self.ok, "fit": self.fit}, indent=2)


async def check(
    name: str,
    *,
    sandbox: str = "namespace",
    levels: Iterable[int] | None = None,
    per_level: int = 2,
    options: Mapping[str, Any] | None = None,
    only: Iterable[str] | None = None,
    judge: str = "",
    progress: Callable[[Result], None] | None = None,
    on_stuck: Callable[[Report], None] | None = None,
) -> Report:
    """Run the checks, or only some of them, on the first tasks of each level.

    `judge` names the judge of an environment whose verifier asks one: a YAML file with the section, or URL#MODEL.
    `on_stuck` is called from another thread, with the report so far, once the author's code holds everything up.
    """
    kind = load(name, dict(options or {}))
    names = tuple(only) if only is not None else tuple(ALL)
    unknown = [check_name for check_name in names if check_name not in ALL]
    if unknown:
        raise UserError(f"no check {', '.join(unknown)}; there are: {', '.join(ALL)}")
    chosen = tuple(levels) if levels is not None else tuple(kind.levels)
    unknown_levels = [level for level in chosen if level not in kind.levels]
    if unknown_levels:
        raise UserError(f"{name} has the levels {kind.levels.start} to {kind.levels[-1]}, not {unknown_levels}")
    results: list[Result] = []
    judged: list[str] = []

    def report(last: Result | None = None) -> Report:
        done = (*results, last) if last is not None else tuple(results)
        rest = tuple(check_name for check_name in ALL if check_name not in {result.name for result in done})
        said = reported(kind)
        return Report(
            env=name, sandbox=sandbox, levels=chosen, results=done, not_run=rest, judge="; ".join(judged), rewards=said
        )

    def give_up(evidence: str) -> None:
        assert on_stuck is not None
        on_stuck(report(Result(name=names[len(results)], ok=False, evidence=evidence, fix=ENDLESS)))

    examiner = judges.for_command(judge, name, kind, options or {})
    async with (
        judges.closing(examiner),
        stage(sandbox, limit=16, judge=examiner) as where,
        watch(give_up if on_stuck is not None else None),
    ):
        context = CheckContext(
            name=name,
            kind=kind,
            options=dict(options or {}),
            sandbox=sandbox,
            levels=chosen,
            per_level=per_level,
            where=where,
        )
        if examiner is not None:
            judged += await judges.measured(examiner, name, context.make, where)
        for check_name in names:
            results.append(await _run(ALL[check_name], context))
            if progress is not None:
                progress(results[-1])
            if context.stuck is not None:
                break  # every other check would wait as long for the same tool
    return report()


def reported(kind: type[Environment]) -> str:
    """Say who reports the rewards of an environment and which of its tools' descriptions third parties wrote."""
    verifier: Any = getattr(kind, "verifier", None)  # an environment under test may have none
    peer = next((part.reports for part in parts_of(verifier) if part.reports), "")
    foreign = [tool for tool in tools_of(kind).values() if isinstance(tool, SchemaTool)]
    lines = [f"rewards are reported by {peer}: trust `reported`, nothing of them is verified here"] if peer else []
    lines += [
        f"its tool {tool.name} says to the policy: {' '.join(tool.description.split())[:200]}" for tool in foreign
    ]
    lines += [part.remark for part in parts_of(verifier) if hasattr(part, "remark")]
    return "\n".join(lines)


async def _run(check: Check, context: CheckContext) -> Result:
    began = time.perf_counter()
    fix = check.fix
    try:
        ok, evidence = True, await check.examine(context)
    except Failed as failed:
        ok, evidence, fix = False, str(failed), failed.fix or fix
    except NotImplementedError:
        ok, evidence = False, "expert(task) is not written"
        fix = "write expert(task): the tool calls, then the final message, that solve the task; it may use the secret"
        if bridge(context.name):
            evidence = f"{NEEDS_EXPERT}: one honest solution to compare with"
            fix = "name a JSON file with a solution: --option expert=solution.json"
    except AgentRLError as error:
        at = place(error)
        ok, evidence = False, f"{type(error).__name__}: {error}{'' if at.strip(' ()') in str(error) else at}"
    except Exception as error:  # an author's bug is a finding, not a crash of the check
        ok, evidence = False, f"{type(error).__name__}: {error}{place(error)}"
        fix = "fix the exception; see the file and line above"
    seconds = round(time.perf_counter() - began, 3)
    return Result(name=check.name, ok=ok, evidence=evidence, fix="" if ok else fix, seconds=seconds)
