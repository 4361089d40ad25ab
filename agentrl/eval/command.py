"""`agentrl eval`: tries policies on held-out tasks under one protocol, alone or against each other, and reports."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, cast

from agentrl import envs, evaluation, event_loop, judges, seeds, serving
from agentrl.errors import UserError
from agentrl.eval import folder as eval_folder
from agentrl.eval import report as eval_report
from agentrl.eval import strategies
from agentrl.eval.folder import EvalFolder, Protocol
from agentrl.eval.report import markdown, table
from agentrl.eval.strategies import Asked, Chosen, Strategy
from agentrl.eval.targets import Target, find, recipe_of
from agentrl.evaluation import EVAL_GROUP, Evaluation, Problem, overlap, problems_of
from agentrl.recipe import EvalSection, OpenaiEngine, Recipe
from agentrl.report import curve as pictures
from agentrl.rollout.chat import ChatPlayer
from agentrl.rollout.request import EnvRuntime
from agentrl.rollout.runtimes import source_versions
from agentrl.rollout.store import Store
from agentrl.types import Trajectory

__all__ = ["Target", "dump", "evaluate", "find", "parse_ks", "run", "run_all", "write"]
Say = Callable[[str], None]
KEEP = 1 << 50
"""Bytes that the episodes of an evaluation may take: none is ever deleted."""


def parse_ks(text: str) -> list[int]:
    """Read `1,8` as numbers."""
    try:
        ks = sorted({int(part) for part in text.split(",")})
    except ValueError:
        ks = []
    if not ks or ks[0] < 1:
        raise UserError(f"--k {text!r}: write whole numbers from 1, e.g. --k 1,8")
    return ks


def named(target: str | None, endpoint: str | None, model: str | None, on: str | None) -> tuple[str, str | None]:
    """Return the policy that the command line names, and what its tasks come from."""
    if (endpoint is None) != (model is None):
        raise UserError("--endpoint needs --model, and --model needs --endpoint: which model, and where it is served")
    if endpoint is not None:
        if target is not None and on is not None:
            raise UserError("the policy is at --endpoint: name the recipe of its tasks once, as target or with --on")
        return f"{model}@{endpoint}", on or target
    if target is None:
        raise UserError("say what to evaluate: a recipe, a run, a model, --endpoint URL --model NAME, or --suite FILE")
    return target, on


def only_suite(*others: Any) -> None:
    """Refuse options beside --suite that the suite's file settles."""
    if any(other for other in others):
        raise UserError("--suite names its models, environments and comparisons itself; leave out target, --compare, "
                        "--on, --endpoint and --set")  # fmt: skip


def exit_code(report: Mapping[str, Any]) -> int:
    """Return 1 where a comparison had to be refused, else 0."""
    return int(any(c.get("refused") for c in report.get("comparisons", ())))


def write(report: Mapping[str, Any], ks: Sequence[int], as_markdown: bool) -> str:
    """Write the report for people, as text or as Markdown."""
    return markdown(report, ks) if as_markdown else table(report, ks)


def evaluate(
    target: str,
    *,
    compare: str | None = None,
    on: str | None = None,
    k: Sequence[int] = (1,),
    endpoint: Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
    **options: Any,
) -> dict[str, Any]:
    """Evaluate a policy on held-out tasks, alone or against another; return the report as plain data.

    `target` and `compare` name a recipe, a run folder, a checkpoint, a transformers folder, a hub id, an SGLang
    server's URL, an OpenAI-compatible endpoint (`MODEL@URL`) or the folder of an earlier evaluation. `on` names the
    recipe or run whose tasks are tried, for what has no recipe of its own. `endpoint` holds further keys of an
    endpoint's section: key_variable, requests_per_minute, tokens_per_minute, max_tokens_total, price_in, price_out,
    max_cost. `options`: strategy, tries, feedback, judge, tasks, levels, temperature, out, fresh, curve, say.
    """
    tasks_from = recipe_of(on, overrides) if on else None
    first = find(target, recipe=tasks_from, overrides=overrides, limits=endpoint)
    other = find(compare, recipe=tasks_from or first.recipe, overrides=overrides, limits=endpoint) if compare else None
    return run(first, other, ks=k, **options)


def run(target: Target, other: Target | None, *, ks: Sequence[int], **options: Any) -> dict[str, Any]:
    """Evaluate one policy, or two on the same tasks with the same seeds; return the report as plain data."""
    pairs = [(0, 1)] if other is not None else []
    return run_all([target, *([other] if other is not None else [])], ks=ks, pairs=pairs, **options)


def run_all(
    targets: Sequence[Target],
    *,
    ks: Sequence[int],
    pairs: Sequence[tuple[int, int]] = (),
    base: Recipe | None = None,
    strategy: str | None = None,
    tries: int | None = None,
    feedback: str | None = None,
    judge: str | None = None,
    tasks: int | None = None,
    levels: Sequence[int] | None = None,
    temperature: float | None = None,
    out: Path | None = None,
    fresh: bool = False,
    curve: Path | None = None,
    say: Say = print,
    prepare: Callable[[Recipe], None] = lambda recipe: None,
) -> dict[str, Any]:
    """Evaluate policies under the protocol of one recipe, by default the first one's. `pairs` are compared: the first
    against the second. `prepare` is called with that recipe before anything is played. `strategy` (vote, judge, retry)
    makes one answer of `tries` tries; `judge` names another judge for it than the recipe's."""
    how = strategies.parse(strategy, tries, feedback, judge)
    live = [target for target in targets if target.stored is None]
    base = base or (live or list(targets))[0].recipe
    if not live:
        _refuse_changes({"--tasks": tasks, "--levels": levels, "--temperature": temperature})
        return _read_again(targets, base, how, judge, ks, pairs, curve)
    changed = {"tasks": tasks, "levels": list(levels) if levels else None, "temperature": temperature}
    section = (base.eval or EvalSection()).model_copy(update={k: v for k, v in changed.items() if v is not None})
    results: list[Evaluation] = []
    chosen: list[Chosen] = []
    ks = strategies.ks_of(how, ks)
    _refuse_agents(how, base)
    prepare(base)
    with serving.runtimes(base, elsewhere=base.cluster is not None) as runtimes:
        problems = problems_of(base, section, runtimes)
        seed = seeds.derive(base.run.seed, "eval")
        versions, grading = source_versions(runtimes), judges.judge_of(runtimes)
        chooser = _chooser(how, judge, base, runtimes)
        told = how.rules(chooser.name if chooser else "") if how else None
        rules = eval_folder.protocol(
            problems, base.rollout, section, seed, versions, grading.name if grading else "", told
        )
        earlier = {t.stored: _stored(t) for t in targets if t.stored is not None}
        _check_tries([result for result, _ in earlier.values()], how.tries if how else max(ks))
        _same("this evaluation", rules, [(t.name, earlier[t.stored][1]) for t in targets if t.stored is not None])
        policies = [{"name": target.name, "identity": target.identity} for target in live]
        recipe = base.model_copy(update={"eval": section})
        parent = base.run.out / base.run.name / "evaluations"
        with eval_folder.open_folder(parent, out, rules, policies, recipe=recipe, fresh=fresh) as folder:
            try:
                number = 0
                for t in targets:
                    asked = Asked(chooser, folder.key) if chooser is not None else None
                    number += t.stored is None
                    results.append(
                        earlier[t.stored][0]
                        if t.stored is not None
                        else event_loop.run(
                            _try(t, number, folder, recipe, problems, runtimes, ks, seed, say, how, asked)
                        )
                    )
                    if how is not None:
                        chosen.append(event_loop.run(_choose(how, results[-1], asked)))
            except BaseException:
                say(f"the episodes that ended are kept in {folder.path}; the same command resumes there")
                raise
            report = _report(
                targets, results, rules, ks, pairs, curve, how, chosen, key=folder.key.hex(), folder=str(folder.path)
            )
            if grading is not None:
                report["judge"] = grading.report()
            if chooser is not None:
                report["strategy_judge"] = chooser.report()
                if grading is not None and grading.name == chooser.name:
                    for policy in report["policies"]:
                        policy["notes"].append("the strategy asks the verifier's judge: its choice knows the grader")
            folder.write(report, markdown(report, ks))
    return report


def _read_again(
    targets: Sequence[Target],
    base: Recipe,
    how: Strategy | None,
    judge: str | None,
    ks: Sequence[int],
    pairs: Sequence[tuple[int, int]],
    curve: Path | None,
) -> dict[str, Any]:
    """Report on earlier evaluations alone: nothing is played."""
    stored = [_stored(target) for target in targets]
    rules = stored[0][1]
    _same(targets[0].name, rules, [(t.name, theirs) for t, (_, theirs) in zip(targets, stored, strict=True)])
    how, results = _as_played(how, rules, [results for results, _ in stored])
    chooser = _chooser(how, judge, base, None) if how is not None and how.name == "judge" else None
    key = bytes.fromhex(eval_folder.read(targets[0].stored.parent)[0]["key"]) if targets[0].stored else b""
    opened = [(result, Asked(chooser, key) if chooser is not None else None) for result in results]
    chosen = [event_loop.run(_choose(how, result, asked)) for result, asked in opened] if how else []
    return _report(targets, results, rules, strategies.ks_of(how, ks), pairs, curve, how, chosen)


def _refuse_changes(asked: Mapping[str, object]) -> None:
    """Refuse options that say how to play, where nothing is played."""
    if given := [name for name, value in asked.items() if value is not None]:
        raise UserError(f"{', '.join(given)}: earlier evaluations are read again as they were played; name a policy to "
                        "measure it in another way")  # fmt: skip


def _refuse_agents(how: Strategy | None, recipe: Recipe) -> None:
    if how is None or how.name != "retry":
        return
    agents = [s.name for s in recipe.envs if s.agent or getattr(envs.load(s.source, s.options or None), "agent", None)]
    if agents:
        raise UserError(f"--strategy retry: an agent plays {', '.join(agents)} and makes its own prompts; use vote or "
                        "judge")  # fmt: skip


def _chooser(
    how: Strategy | None, name: str | None, recipe: Recipe, runtimes: Mapping[str, EnvRuntime] | None
) -> judges.Judge | None:
    """Make the judge of a strategy, not yet started: the one that is named, else the recipe's. It has a budget of its
    own, apart from that of a verifier's judge."""
    if how is None or not how.asks_judge:
        return None
    if name is not None:
        return judges.named(name)
    if recipe.judge is None:
        raise UserError(f"--strategy {how.name} needs a judge; name one with --judge URL#MODEL, or add to the recipe\n"
                        f"{judges.WHAT_TO_WRITE}")  # fmt: skip
    return serving.make_judge(recipe, runtimes) if runtimes is not None else judges.make(recipe.judge)


async def _choose(how: Strategy, tries: Evaluation, asked: Asked | None) -> Chosen:
    """Make one answer per task of a policy's tries."""
    async with judges.closing(asked.judge if asked is not None else None):
        return await strategies.choose(how, strategies.cut(tries, how.tries), asked)


def _as_played(
    how: Strategy | None, rules: Protocol, results: Sequence[Evaluation]
) -> tuple[Strategy | None, list[Evaluation]]:
    """Return the strategy for tries that are there already: those of `retry` were told of each other."""
    told = rules.get("strategy")
    if how is not None and (how.name == "retry") != (told is not None):
        made = "with --strategy retry, so that they depend on each other" if told else "independently of each other"
        raise UserError(f"--strategy {how.name}: the tries of this evaluation were made {made}; evaluate again")
    most = min(len(group) for result in results for _, group in result.tries())
    if told is not None:
        how = Strategy(name="retry", tries=how.tries if how else most, feedback=told["feedback"])
    if how is not None:
        _check_tries(results, how.tries)
    return how, list(results)


def _check_tries(results: Sequence[Evaluation], count: int) -> None:
    if any(len(group) < count for result in results for _, group in result.tries()):
        raise UserError(f"--k or --tries {count} needs as many tries per task; an earlier evaluation has fewer")


def _same(name: str, rules: Protocol, others: Sequence[tuple[str, Protocol]]) -> None:
    """Refuse to put results beside each other that came about under different protocols."""
    for other, theirs in others:
        if theirs["hash"] != rules["hash"]:
            raise UserError(
                f"{name} (protocol {rules['hash']}) and {other} (protocol {theirs['hash']}) cannot be compared; they "
                "differ in:\n  "
                + "\n  ".join(eval_folder.differences(rules, theirs))
                + "\nevaluate both again together"
            )


def _stored(target: Target) -> tuple[Evaluation, Protocol]:
    """Read the results of an earlier evaluation, with their protocol."""
    assert target.stored is not None
    record, _ = eval_folder.read(target.stored.parent)
    rows = eval_folder.rows(target.stored)
    groups = sorted({group for group, _ in rows})
    tries = min((sum(g == group for g, _ in rows) for group in groups), default=0)
    if not tries or len(groups) != record["protocol"]["task_count"]:
        raise UserError(f"{target.stored}: episodes of this evaluation are missing")
    problems = [Problem(rows[group, 0].env, rows[group, 0].trajectory.task) for group in groups]
    trajectories = [rows[group, index].trajectory for group in groups for index in range(tries)]
    return Evaluation(problems=tuple(problems), trajectories=tuple(trajectories)), record["protocol"]


async def _try(
    target: Target,
    number: int,
    folder: EvalFolder,
    base: Recipe,
    problems: Sequence[Problem],
    runtimes: Mapping[str, EnvRuntime],
    ks: Sequence[int],
    seed: int,
    say: Say,
    how: Strategy | None,
    asked: Asked | None,
) -> Evaluation:
    """Play what is missing of one policy's episodes; the budget is that of the protocol, the engine the policy's."""
    section = base.eval or EvalSection()
    own = target.recipe.rollout
    budget = base.rollout.model_copy(update={"engine": own.engine, "concurrency": own.concurrency})
    recipe = target.recipe.model_copy(update={"rollout": budget, "envs": base.envs})
    done = {at: row.trajectory for at, row in eval_folder.rows(folder.side(number)).items()}
    samples = how.tries if how is not None else max(ks)
    total = len(problems) * samples
    have = sum((EVAL_GROUP + n, i) in done for n in range(len(problems)) for i in range(samples))
    say(f"evaluating {target.name}: {len(problems)} tasks, {samples} tries each" + (f", {have} done" if have else ""))

    def progress(finished: int, of: int) -> None:
        if finished > have and of >= 20 and finished * 10 // of > (finished - 1) * 10 // of:
            say(f"  {finished} of {of} episodes")

    async with AsyncExitStack() as stack:
        play: Any = None
        judge: judges.Judge | None = None
        if have < total:
            used = base if asked is None else base.model_copy(update={"judge": None})
            judge = await stack.enter_async_context(judges.open_judge(used, runtimes, say=say))
            opened = serving.open_player(
                recipe, runtimes, model=target.model, url=target.url, folder=folder.side(number), say=say
            )
            player = await stack.enter_async_context(opened)
            if isinstance(player, ChatPlayer):
                stack.enter_context(folder.spending(number, player.endpoint.spending))
            play = player.at(section.temperature)
            if asked is not None:
                await stack.enter_async_context(judges.closing(asked.judge))
        store = Store(folder.side(number), disk_bytes=KEEP)
        stack.push_async_callback(store.close)

        async def record(problem: Problem, trajectory: Trajectory) -> None:
            if judge is None or not judge.refused or trajectory.outcome.score is not None:
                await store.add(trajectory, problem.env)

        async def tell(problem: Problem, before: Trajectory) -> str:
            return strategies.feedback(before, await asked.critique(problem, before) if asked is not None else "")

        result = await evaluation.evaluate(
            play,
            problems,
            samples=samples,
            seed=seed,
            key=folder.key,
            concurrency=own.concurrency,
            progress=progress,
            done=done,
            record=record,
            submitted=True,
            feedback=tell if how is not None and how.name == "retry" else None,
        )
    if judge is not None and judge.refused:
        raise UserError(f"{judge.spent}; the tries that it did not judge would have counted as failed")
    return result


def _report(
    targets: Sequence[Target],
    results: Sequence[Evaluation],
    rules: Protocol,
    ks: Sequence[int],
    pairs: Sequence[tuple[int, int]],
    curve: Path | None,
    how: Strategy | None,
    chosen: Sequence[Chosen],
    **more: Any,
) -> dict[str, Any]:
    _check_tries(results, max(ks))
    if how is not None:  # the figures of single tries are of those that were told nothing
        results = [strategies.cut(result, 1 if how.name == "retry" else how.tries) for result in results]
    policies: list[dict[str, Any]] = []
    for target, result in zip(targets, results, strict=True):
        policies.append(
            {
                "name": target.name,
                "environments": {env: eval_report.figures(part, ks) for env, part in result.by_environment().items()},
                "trained_on": _trained_on(target, result),
                "curve": eval_report.curve(result),
                "notes": _notes(target, result),
            }
        )
    for policy, choice in zip(policies, chosen, strict=False):
        policy["strategy"] = strategies.figures(cast(Strategy, how), choice)
    report = {**more, "k": list(ks), "protocol": rules, "policies": policies}
    if pairs:
        compared = [choice.chosen for choice in chosen] or results
        report["comparisons"] = [c for a, b in pairs for c in _comparisons(targets, compared, a, b)]
    if curve is not None:
        lines = [(t.name, eval_report.curve(result)) for t, result in zip(targets, results, strict=True)]
        curve.parent.mkdir(parents=True, exist_ok=True)
        curve.write_text(pictures.draw(lines), encoding="utf-8")
    return report


def _trained_on(target: Target, result: Evaluation) -> Sequence[int]:
    if target.stored is None:
        return overlap([problem.task for problem in result.problems], set(target.trained))
    _, report = eval_folder.read(target.stored.parent)
    counts: list[int] = report["policies"][int(target.stored.name) - 1]["trained_on"]
    return counts


def _notes(target: Target, result: Evaluation) -> list[str]:
    """Say what a reader must know about these figures."""
    notes = []
    engine = target.recipe.rollout.engine
    usage = [t.usage for t in result.trajectories if t.usage is not None]
    if usage:
        prompt, completion = (sum(u[name] for u in usage) for name in ("prompt", "completion"))
        prices = (engine.price_in, engine.price_out) if isinstance(engine, OpenaiEngine) else (0.0, 0.0)
        cost = (prompt * prices[0] + completion * prices[1]) / 1e6
        notes.append(
            f"played by a chat endpoint: no token ids, tokens as it counts them ({prompt} prompt, {completion} "
            "completion" + (f", cost {cost:.4g})" if any(prices) else ")")
        )
    if result.ungraded > evaluation.MAX_UNGRADED * len(result.trajectories):
        notes.append(f"{result.ungraded} of {len(result.trajectories)} tries have no grade and count as failed")
    return notes


def _comparisons(targets: Sequence[Target], results: Sequence[Evaluation], a: int, b: int) -> list[dict[str, Any]]:
    """Compare two policies over all environments, and in each one where there are several."""
    parts = {"": (results[a], results[b])}
    first, second = results[a].by_environment(), results[b].by_environment()
    if len(first) > 1:
        parts |= {env: (first[env], second[env]) for env in first}
    rows = []
    for env, (one, other) in parts.items():
        row: dict[str, Any] = {"first": targets[a].name, "second": targets[b].name, "environment": env}
        try:
            row |= eval_report.compare(other, one)
        except UserError as error:
            row |= {"verdict": f"not compared: {error}", "refused": True}
        if targets[a].stored is not None or targets[b].stored is not None:
            row["verdict"] += " (evaluated apart: hidden cases differ)"
        row["verdict"] += f" on {env}" if env else ""
        rows.append(row)
    return rows


def dump(report: Mapping[str, Any]) -> str:
    """Write the report for programs."""
    return json.dumps(report, indent=1)
