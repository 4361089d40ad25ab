"""Checks of scores and secrets: ceiling, floor, leaks, robustness, the verifier."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from typing import Any

from agentrl.check.context import CANARIES, RANDOM_EPISODES, SEED, CheckContext, check
from agentrl.check.faults import Failed, verdict_of
from agentrl.check.giveaways import TASKS, Seen, giveaways
from agentrl.check.leaks import canaries, distinctive, find_in
from agentrl.envs.episode import Episode
from agentrl.envs.play import play
from agentrl.envs.tools import tool, tools_of
from agentrl.hashing import canonical
from agentrl.redteam.attack import attacks
from agentrl.redteam.suite import AttackTarget, run
from agentrl.sandboxes.base import off_loop
from agentrl.types import Task, ToolCall
from agentrl.verifiers.grade import grade

CUT_OFF_S = 10.0
"""How long a tool with a limit of 0.3 seconds may hold an episode, on a busy machine."""

GIVEN_FILES = 8
"""Tasks of each level whose sandboxes are looked into for a solution in the open."""

# Ceiling and floor ----------------------------------------------------------------------------------------------


@check("write `async def verify(self, submission, context)` that returns Verdict(score=...) for every submission")
async def verifier_contract(context: CheckContext) -> str:
    """Call verify() directly: what it raises or returns is then seen as it is."""
    verifier = context.kind.verifier
    tasks = context.tasks(per_level=1)
    for task in tasks:
        for actions in (list(context.make().expert(task)), [""]):
            played = await context.play(task, actions)
            if played.submission is not None:
                await verdict_of(verifier, played.submission, context.where.context(task.id))
    return f"{type(verifier).__name__}.verify returns a Verdict for {2 * len(tasks)} submissions"


@check("let expert(task) really solve the task, or fix the verifier that does not accept its solution")
async def oracle_max(context: CheckContext) -> str:
    tasks = [task for split in context.kind.splits for task in context.tasks(split, context.per_level)]
    for played in await context.plays([(task, list(context.make().expert(task))) for task in tasks]):
        if played.score != 1.0:
            why = played.verdict.evidence if played.verdict else played.outcome.fault
            turns = context.kind.max_turns
            raise Failed(f"the expert scores {played.score} on {played.task.id} within {turns} turns: {why}")
    return f"the expert scores 1.0 on {len(tasks)} tasks of all splits, within {context.kind.max_turns} turns"


@check("a task must start unsolved: compare its start with what the verifier accepts")
async def floor_gap(context: CheckContext) -> str:
    tasks = context.tasks()
    for played in await context.plays([(task, actions) for task in tasks for actions in ([], [""])]):
        if played.score != 0.0:
            raise Failed(f"doing nothing scores {played.score} on {played.task.id}")
    scripts = [(task, context.random_actions(task, number)) for task in tasks for number in range(RANDOM_EPISODES)]
    scores = [played.score or 0.0 for played in await context.plays(scripts)]
    mean = statistics.fmean(scores)
    if mean > 0.05:
        raise Failed(
            f"random actions score {mean:.3f} on average over {len(scores)} episodes",
            "ask for something that chance cannot hit, or grade more strictly",
        )
    return f"doing nothing scores 0; random actions {mean:.3f} over {len(scores)} episodes; the expert 1.0"


@check("make the verifier read the answer strictly: what is ambiguous, empty or merely claims success scores 0")
async def canary_floor(context: CheckContext) -> str:
    tasks = context.tasks(per_level=1)
    claims = [(task, canary) for task in tasks for canary in (*CANARIES, task.prompt)]
    results = await context.plays([(task, [canary]) for task, canary in claims])
    for (task, canary), played in zip(claims, results, strict=True):
        if played.score != 0.0:
            raise Failed(f"the message {canary[:60]!r} alone scores {played.score} on {task.id}")
    return f"{len(CANARIES) + 1} empty claims score 0 on {len(tasks)} tasks"


@check("return scores in [0, 1]; catch what the verifier fails on and score it 0")
async def reward_range(context: CheckContext) -> str:
    pairs: list[tuple[Task, list[Any]]] = []
    for task in context.tasks(per_level=1):
        pairs += [(task, a) for a in (list(context.make().expert(task)), [], ["\0\ufffd" * 50], ["x" * 100_000])]
    scores = []
    for played in await context.plays(pairs, max_turns=64):
        outcome = played.outcome
        if outcome.grade != "graded" or outcome.score is None:
            raise Failed(f"{played.task.id}: grade {outcome.grade}, {outcome.fault}")
        if outcome.alarm:
            raise Failed(f"{played.task.id}: the submission broke grading: {outcome.fault}")
        scores.append(outcome.score)
    return f"{len(scores)} scores, all finite and in [0, 1]: from {min(scores)} to {max(scores)}"


# Secrets --------------------------------------------------------------------------------------------------------


@check("put what only the verifier may know in Task.secret, and use it nowhere but there and in expert()")
async def oracle_containment(context: CheckContext) -> str:
    """Replace the secret by canaries: none may appear in anything that the episode shows or prepares."""
    count = 0
    for task in context.tasks(per_level=1):
        marked, marks = canaries(task)
        count += len(marks)
        if not marks:
            continue
        for where, text in (await context.at_start(marked, _visible)).items():
            if find_in(text, marks):
                raise Failed(f"{task.id}: a value of the secret reaches {where}")
    return f"{count} marks in the secrets; none in messages, schemas, files, variables or process lists"


@check("keep solutions out of prompts, setup and sandboxes; beware of tools that call self.task() or read class state")
async def no_solution_leakage(context: CheckContext) -> str:
    """Keep the true secret: values that the task itself does not give away must not be readable at the start."""
    await _in_the_open(context)
    count = 0
    for task in context.tasks(per_level=1):
        values = distinctive(task)
        count += len(values)
        for where, text in (await context.at_start(task, _visible)).items():
            leaked = find_in(text, values)
            if leaked:
                raise Failed(f"{task.id}: the secret value {leaked[:60]!r} can be read in {where}")
    return f"{count} values that only the secrets hold; none can be read before the first action, none can be copied"


async def _in_the_open(context: CheckContext) -> None:
    """Look for a place in prompt, setup or files that gives the solution, and play what can be copied from there."""
    for level in context.levels:
        seen = []
        for index in range(min(TASKS, context.kind.size or TASKS)):
            task = context.task(context.split, level, index)
            files = await context.at_start(task, _files) if index < GIVEN_FILES else {}
            seen.append(Seen(task, tuple(context.make().expert(task)), files))
        for giveaway in giveaways(seen):
            scripts = giveaway.scripts[:2]
            scores = [(await context.play(task, list(script), max_turns=64)).score for task, script in scripts]
            if all(score is not None and score >= 1.0 for score in scores):
                raise Failed(
                    f"level {level}: {giveaway.path} can be copied from {giveaway.rule} in {giveaway.count} of "
                    f"{len(giveaway.scripts)} tasks, and submitting it alone scores 1.0",
                    f"take the solution out of {giveaway.rule}; what tools need from setup, let the verifier "
                    "read there too (submission.task.setup), and keep it out of the secret",
                )


async def _files(episode: Episode) -> dict[str, str]:
    """Return the text of every small file of the workspace."""
    if episode.environment._box is None:
        return {}
    tree = await off_loop(episode.environment.box.collect)
    small = {path: entry for path, entry in tree.items() if entry.kind == "file" and len(entry.content) < 4_000}
    return {path: entry.content.decode("utf-8", "replace") for path, entry in small.items()}


async def _visible(episode: Episode) -> dict[str, str]:
    """Return all that a policy can see or read when an episode begins, by where."""
    texts = {
        "the messages": "\n".join(m.content for m in episode.transcript),
        "the tool schemas": json.dumps(episode.schemas),
        "the task as logs print it": repr(episode.task),
        "the task as episodes get it": canonical(episode.environment.given),
    }
    if episode.environment._box is not None:
        tree = await off_loop(episode.environment.box.collect)
        files = [f"{path}\n{entry.content.decode('utf-8', 'replace')}" for path, entry in tree.items()]
        texts["the workspace"] = "\n".join(files)
        command = (
            "env; cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ; ls -laR /tmp /dev/shm /run /home /var/tmp; "
            "cat /tmp/* /dev/shm/*"
        )
        output = await _shell(episode, f"({command}) 2>/dev/null; true")
        texts["the sandbox's variables, processes and temporary files"] = output
    return texts


async def _shell(episode: Episode, command: str, timeout: float | None = None) -> str:
    result = await off_loop(episode.environment.box.exec, ["sh", "-c", command], timeout=timeout)
    return result.stdout.decode("utf-8", "replace")


@check("use an image whose root holds nothing of agentrl; for `host`, keep site-packages and /usr/local masked")
async def sealed_root(context: CheckContext) -> str:
    return await context.at_start(context.tasks(per_level=1)[0], _sealed)


async def _sealed(episode: Episode) -> str:
    if episode.environment._box is None:
        return "no sandbox: the tools run on the host side, nothing of the policy's does"
    search = "find / -path /proc -prune -o -iname '*agentrl*' -print 2>/dev/null | head -5"
    files = (await _shell(episode, search, timeout=60.0)).split()
    if files:
        raise Failed(f"files of agentrl can be read inside the sandbox: {', '.join(files)}")
    network = "cat /proc/net/route /proc/net/ipv6_route 2>/dev/null | grep -v -e Iface -e ' lo$' | head -3"
    routes = (await _shell(episode, network)).strip()
    if routes:
        raise Failed(f"the sandbox has a network route: {routes.splitlines()[0]}")
    return f"no file of agentrl in the sandbox, no network; root {episode.root[:16]}"


# Robustness -----------------------------------------------------------------------------------------------------


@check("raise ValueError (or a subclass) with a clear text for input that a tool cannot take")
async def bad_calls(context: CheckContext) -> str:
    task = context.tasks(per_level=1)[0]
    calls = [ToolCall(name="no_such_tool"), ToolCall(name="", error="not JSON")]
    junks: tuple[Any, ...] = ("", "\0", "\ud800", "é\u202e" * 20, "x" * 20_000, -1, 1e308, None, [], {"a": [1]})
    for name, offered in tools_of(context.kind).items():
        fields = list(offered.schema()["function"]["parameters"].get("properties", {}))
        calls += [ToolCall(name=name, arguments={"no_such_argument": 1})]
        calls += [ToolCall(name=name, arguments=dict.fromkeys(fields, junk)) for junk in junks]
    rest = list(calls)
    while rest:  # as many as possible in one episode: some calls end it
        try:
            played = await context.play(task, rest, max_turns=len(rest))
        except Exception:
            await _culprit(context, task, rest)
            raise
        used = sum(message.role == "assistant" for message in played.messages)
        if played.score != 0.0:
            raise Failed(f"bad calls alone score {played.score}, the last being {_brief(rest[used - 1])}")
        rest = rest[used:]
    return f"{len(calls)} bad calls: each answered, none raised, none scored"


async def _culprit(context: CheckContext, task: Task, calls: list[ToolCall]) -> None:
    """Play one episode per call, to name the one that raises."""
    for call in calls:
        try:
            await context.play(task, [call])
        except Exception as error:
            raise Failed(f"{_brief(call)} raises {type(error).__name__}: {error}") from error


def _brief(call: ToolCall) -> str:
    return f"{call.name}({str(dict(call.arguments))[:60]})"


@check("give tools a timeout_s, pass it to what they wait for, and use a sandbox that enforces it")
async def timeouts(context: CheckContext) -> str:
    class Hung(context.kind):  # type: ignore[misc, name-defined]
        """The environment with two more tools that never come back by themselves."""

        @tool(timeout_s=0.3)
        def hang_in_the_box(self) -> str:
            """Sleep in the box."""
            return str(self.box.exec(["sleep", "20"]).text)

        @tool(timeout_s=0.3)
        async def hang_outside(self) -> str:
            """Sleep on the host."""
            await asyncio.sleep(20)
            return ""

    task = context.tasks(per_level=1)[0]
    names = ["hang_outside"]
    probe = context.make()
    probe.given = task.public()
    if probe.prepare(probe.given, random.Random(0)) is not None:
        names.insert(0, "hang_in_the_box")
    times = []
    for name in names:
        began = time.perf_counter()
        played = await play(Hung(**context.options), task, [ToolCall(name=name)], context.where, seed=SEED)
        held = time.perf_counter() - began - played.seconds["start"] - played.seconds["verifier"]
        times.append(held)  # neither a large sandbox nor a long verdict is the tool's doing
        if times[-1] > CUT_OFF_S:
            raise Failed(f"a tool with timeout_s=0.3 held the episode for {times[-1]:.1f} s ({name})")
    limit = max((offered.timeout_s for offered in tools_of(context.kind).values()), default=0.0)
    return f"hanging tools are cut off after {max(times):.1f} s; the environment's own limit is {limit:g} s per call"


# The verifier ---------------------------------------------------------------------------------------------------


@check("let verify() depend on the submission and context.secret alone; sort what has no order")
async def verifier_determinism(context: CheckContext) -> str:
    tasks = context.tasks(per_level=1)
    for task in tasks:
        for actions in (list(context.make().expert(task)), ["nothing was done"]):
            played = await context.graded(await context.play(task, actions, max_turns=64))
            if played.submission is None:
                raise Failed(f"{task.id} left nothing to grade: {played.outcome.fault}")
            verdicts = [(played.outcome, played.verdict)]
            for group in (0, 0, 1, 2):
                secret = context.where.context(task.id, group)
                verdicts.append(await grade(context.kind.verifier, played.submission, secret))
            same = {(v.score, tuple(sorted(v.breakdown.items()))) if v else None for _, v in verdicts[:3]}
            scores = {outcome.score for outcome, _ in verdicts}
            if len(same) != 1 or len(scores) != 1:
                raise Failed(f"{task.id}: one submission, graded again, scored {sorted(map(str, scores))}")
    return f"{2 * len(tasks)} submissions graded five times, under three secrets: one score each"


@check("run `agentrl redteam` on the environment for the transcript of each breach, and fix the verifier")
async def red_team(context: CheckContext) -> str:
    task = context.tasks(per_level=1)[0]
    await context.graded(await context.play(task, list(context.make().expert(task))))
    corpus = [attack for attack in attacks().values() if not attack.slow]
    attack_target = AttackTarget.of(context.name, context.make, levels=context.levels[:1])
    report = await run(attack_target, context.where.boxes, backend=context.sandbox, chosen=corpus, coverage=True)
    breaches = [f"{f.id} scored {f.score}" for f in report.breaches]
    wrong = [f"control {c.name} scored {c.score}" for c in report.controls if not c.ok]
    if breaches or wrong:
        raise Failed("; ".join([*wrong, *breaches][:5]))
    if report.gaps:
        raise Failed("; ".join(report.gaps), "let the red team reach what the policy can reach, as the evidence says")
    return f"none succeeded at level {context.levels[0]}: {report.coverage}"
