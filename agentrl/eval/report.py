"""What an evaluation tells: figures per environment and level, comparisons with a verdict in words, and the tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentrl import statistics
from agentrl.errors import UserError
from agentrl.evaluation import MAX_UNGRADED, Evaluation, Problem, interval, task_count
from agentrl.statistics import Interval
from agentrl.types import Trajectory

Figures = dict[str, Any]
SMALL = 0.05
"""The difference that a comparison without a result names the size for."""


def figures(evaluation: Evaluation, ks: Sequence[int]) -> Figures:
    """Return every figure of one environment, and the same again for each of its levels."""
    levels = sorted({problem.task.level for problem in evaluation.problems})
    parts = {str(level): _of_level(evaluation, level) for level in levels}
    return {**_figures(evaluation, ks), "by_level": {level: _figures(part, ks) for level, part in parts.items()}}


def _figures(evaluation: Evaluation, ks: Sequence[int]) -> Figures:
    tries = list(evaluation.passes.values())
    scores = [[t.outcome.score or 0.0 for t in t_s] for _, t_s in evaluation.tries()]
    families = [problem.task.family for problem in evaluation.problems]
    solved = max(1, sum(map(sum, tries)))
    spread = statistics.variance(tries)
    seconds = sum(t.timings.get("total", 0.0) for t in evaluation.trajectories)
    by_k = {
        f"all@{k}": [statistics.all_of_k(len(t), sum(t), k) for t in tries] for k in ks
    } | {f"best@{k}": [statistics.best_of_k(s, k) for s in scores] for k in ks}  # fmt: skip
    return {
        **evaluation.summary(ks),
        **{name: statistics.rate(values, families=families).as_dict() for name, values in by_k.items()},
        "passed": sum(map(sum, tries)),
        "seconds_per_success": seconds / solved,
        "prompt_tokens": sum((t.usage or {}).get("prompt", 0) for t in evaluation.trajectories),
        "completion_tokens": sum(t.sampled_tokens for t in evaluation.trajectories),
        "token_ids": all(t.usage is None for t in evaluation.trajectories),
        "agent_errors": sum(t.outcome.ending == "agent_error" for t in evaluation.trajectories),
        "variance_between": _number(spread.between),
        "variance_within": _number(spread.within),
        "variance_share_between": _number(spread.share_between),
        "detectable": _number(statistics.detectable_alone([sum(t) / len(t) for t in tries], families=families)),
    }


def _of_level(evaluation: Evaluation, level: int) -> Evaluation:
    problems: list[Problem] = []
    trajectories: list[Trajectory] = []
    for problem, tries in evaluation.tries():
        if problem.task.level == level:
            problems.append(problem)
            trajectories += tries
    return replace(evaluation, problems=tuple(problems), trajectories=tuple(trajectories))


def curve(evaluation: Evaluation) -> list[list[float]]:
    """Return pass@k for k = 1, 2, 4, ... up to the number of tries: k, value, low, high."""
    most = min((len(t) for t in evaluation.passes.values()), default=0)
    ks = sorted({*(2**i for i in range(most.bit_length())), most} - {0})
    points = [(k, evaluation.pass_at(k)) for k in ks]
    return [[k, at.value, at.low, at.high] for k, at in points]


def compare(second: Evaluation, first: Evaluation) -> Figures:
    """Tell how much better `first` is than `second` on the same tasks; the verdict is in words.

    It is refused when too many tries of either could not be graded: they count as failed, whatever caused that.
    """
    for name, side in (("first", first), ("second", second)):
        if side.ungraded > MAX_UNGRADED * len(side.trajectories):
            raise UserError(
                f"{side.ungraded} of {len(side.trajectories)} tries of the {name} policy could not be graded, more "
                f"than {MAX_UNGRADED:.0%}: a comparison would measure that; find out why, then evaluate again"
            )
    before, after = second.per_task(), first.per_task()
    if before.keys() != after.keys():
        raise UserError("the two policies were tried on different tasks; evaluate both on the same ones")
    a, b = list(before.values()), [after[task] for task in before]
    families = [first.family.get(task, "") for task in before]
    difference = statistics.paired_rate(a, b, families=families)
    better, worse = statistics.changes(a, b, families=families)
    p = statistics.mcnemar(better, worse)
    gaps = [y - x for x, y in zip(a, b, strict=True)]
    needed = statistics.tasks_needed(gaps, SMALL, families=families)
    return {
        "difference": difference.as_dict(),
        "better": better,
        "worse": worse,
        "mcnemar_p": p,
        "detectable": _number(statistics.detectable(gaps, families=families)),
        "tasks_needed": needed,
        "verdict": verdict(difference, p, needed),
    }


def verdict(difference: Interval, p: float, needed: int) -> str:
    """Say a paired comparison in words. It is settled only where interval and test agree."""
    value, low, high = (100 * x for x in (difference.value, difference.low, difference.high))
    if low > 0 and p < 0.05:
        return f"better by {value:.1f} points [{low:.1f}, {high:.1f}] (McNemar p {_p(p)})"
    if high < 0 and p < 0.05:
        return f"worse by {-value:.1f} points [{-high:.1f}, {-low:.1f}] (McNemar p {_p(p)})"
    return (
        f"no difference at this size: {value:+.1f} points [{low:+.1f}, {high:+.1f}] (McNemar p {_p(p)}); "
        f"about {needed} tasks would show {100 * SMALL:.0f} points"
    )


def _p(p: float) -> str:
    return f"{p:.2g}" if p >= 0.001 else "< 0.001"


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


# Tables -----------------------------------------------------------------------------------------------------------


def table(report: Mapping[str, Any], ks: Sequence[int]) -> str:
    """Write the report for people."""
    lines = [f"protocol {report['protocol']['hash']}"]
    for policy in report["policies"]:
        lines.append(
            f"{policy['name']}, tasks that were trained on: {policy['trained_on'][0]} (near-duplicates: "
            f"{policy['trained_on'][1]})"
        )
        for env, summary in policy["environments"].items():
            lines += _environment(env, summary, ks)
            if "strategy" in policy:
                lines += _strategy(policy["strategy"], env)
        lines += [f"  note: {note}" for note in policy.get("notes", ())]
    if judge := report.get("judge"):
        lines.append(f"judge: {judge['judge']}, {judge['calls']} questions, {judge['tokens']} tokens")
    lines += [f"{c['first']} against {c['second']}: {c['verdict']}" for c in report.get("comparisons", ())]
    if "folder" in report:
        lines.append(f"files: {report['folder']}")
    return "\n".join(lines)


def _environment(env: str, summary: Mapping[str, Any], ks: Sequence[int]) -> list[str]:
    lines = [f"  {env}: {task_count(summary)}"]
    for k in ks:
        more = f"   all {k} pass {interval(summary[f'all@{k}'])}   best of {k} {summary[f'best@{k}']['value']:.3f}"
        lines.append(f"    pass@{k:<4} {interval(summary[f'pass@{k}'])}" + (more if k > 1 else ""))
    if len(summary["by_level"]) > 1:
        for level, part in summary["by_level"].items():
            rates = "  ".join(f"pass@{k} {interval(part[f'pass@{k}'])}" for k in ks)
            lines.append(f"    level {level:<4} {rates}  ({task_count(part)})")
    per_success = "no success"
    if summary["passed"]:
        per_success = f"per success {summary['tokens_per_success']:.0f} tokens, "
        per_success += f"{summary['turns_per_success']:.1f} turns, {summary['seconds_per_success']:.1f} s"
    lines.append(
        f"    {per_success}; tool errors {summary['tool_errors']:.2f} per episode; "
        f"cut off {summary['truncated']:.0%}; ungraded {summary['ungraded']}"
    )
    shows = f"    this size can show a difference of {100 * (summary['detectable'] or 0):.0f} points"
    share = summary["variance_share_between"]
    lines.append(shows + (f"; {share:.0%} of the variance lies between tasks" if share is not None else ""))
    return lines


def _strategy(told: Mapping[str, Any], env: str) -> list[str]:
    """Write what a strategy made of the tries in one environment."""
    part, tries = told["environments"][env], told["tries"]
    by_judge = told.get("feedback") == "judge" or told["name"] == "judge"
    title = {"vote": f"vote of {tries}", "judge": f"judge's choice of {tries}", "retry": f"retry, try {tries}"}
    judge = f" and {told['judge_tokens_per_task']:.0f} of the judge" if by_judge else ""
    any_tokens = part.get("oracle_tokens_per_task", part["tokens_per_task"])
    rows = [
        f"    {title[told['name']]:<22} {interval(part['success'])}   "
        f"{part['tokens_per_task']:.0f} tokens{judge} per task",
        f"    {'one try':<22} {interval(part['pass@1'])}   {part['tokens_per_try']:.0f} tokens per task",
        f"    {f'oracle: any of {tries}':<22} {interval(part['any'])}   {any_tokens:.0f} tokens per task",
    ]
    if "by_try" in part:
        rows.append("    success by try: " + ", ".join(f"{rate:.3f}" for rate in part["by_try"]))
    if "agreement" in told:
        rows.append(f"    {told['agreement']:.0%} of the tries agree with the vote")
    if told.get("judge_failures"):
        rows.append(f"    the judge gave no readable opinion of {told['judge_failures']} tries")
    if part["no_choice"] and told["name"] == "judge":
        rows.append(f"    {part['no_choice']} tasks without a graded choice count as failed")
    return [*rows, f"    {told['name']} against one try: {part['against_one_try']}"]


def markdown(report: Mapping[str, Any], ks: Sequence[int]) -> str:
    """Write one table of all policies and environments, for a page or a pull request."""
    heads = ["policy", "environment", *(f"pass@{k}" for k in ks), *(f"all {k} pass" for k in ks if k > 1)]
    heads += ["tasks", "tokens per success", "ungraded"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for policy in report["policies"]:
        for env, summary in policy["environments"].items():
            cells = [policy["name"].replace("|", "\\|"), env]
            cells += [interval(summary[f"pass@{k}"]) for k in ks]
            cells += [interval(summary[f"all@{k}"]) for k in ks if k > 1]
            cells += [str(summary["tasks"]), f"{summary['tokens_per_success']:.0f}", str(summary["ungraded"])]
            lines.append("| " + " | ".join(cells) + " |")
    lines += _strategies(report["policies"])
    lines += ["", f"Protocol `{report['protocol']['hash']}`; 95 % intervals over families of tasks."]
    lines += [f"- {c['first']} against {c['second']}: {c['verdict']}" for c in report.get("comparisons", ())]
    return "\n".join(lines)


def _strategies(policies: Sequence[Mapping[str, Any]]) -> list[str]:
    """Write the table of strategies, where the report has one."""
    told = [(policy["name"].replace("|", "\\|"), policy["strategy"]) for policy in policies if "strategy" in policy]
    if not told:
        return []
    heads = ["policy", "environment", "strategy", "success", "tokens per task", "one try", "its tokens", "oracle: any"]
    lines = ["", "| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for name, strategy in told:
        for env, part in strategy["environments"].items():
            cells = [name, env, f"{strategy['name']}, {strategy['tries']} tries", interval(part["success"])]
            cells += [f"{part['tokens_per_task']:.0f}", interval(part["pass@1"]), f"{part['tokens_per_try']:.0f}"]
            lines.append("| " + " | ".join([*cells, interval(part["any"])]) + " |")
    return lines
