"""Checks of what can be earned and seen: ceiling, floor, secrets, robustness, the verifier."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from dataclasses import asdict
from typing import Any

from agentrl.check.context import CANARIES, RANDOM_EPISODES, SEED, CheckContext, Failed, check
from agentrl.check.fingerprint import plain
from agentrl.check.leaks import canaries, distinctive, find_in
from agentrl.envs.episode import Episode
from agentrl.envs.play import graded, message_of, play
from agentrl.envs.tools import tool, tools_of
from agentrl.sandboxes.base import Entry, off_loop
from agentrl.types import SPLITS, Task, ToolCall

CUT_OFF_S = 10.0
"""How long a tool of 0.3 seconds may hold an episode, on a machine that has much to do."""

# Ceiling and floor ----------------------------------------------------------------------------------------------


@check("let expert(task) really solve the task, or mend the verifier that does not accept its solution")
async def oracle_max(bench: CheckContext) -> str:
    tasks = [task for split in SPLITS for task in bench.tasks(split, bench.per_level)]
    for played in await bench.plays([(task, list(bench.make().expert(task))) for task in tasks]):
        if played.score != 1.0:
            why = played.verdict.evidence if played.verdict else played.outcome.fault
            turns = bench.kind.max_turns
            raise Failed(f"the expert scores {played.score} on {played.task.id} within {turns} turns: {why}")
    return f"the expert scores 1.0 on {len(tasks)} tasks of all splits, within {bench.kind.max_turns} turns"


@check("a task must start unsolved: compare what is there at the start with what the verifier accepts")
async def floor_gap(bench: CheckContext) -> str:
    tasks = bench.tasks()
    for played in await bench.plays([(task, actions) for task in tasks for actions in ([], [""])]):
        if played.score != 0.0:
            raise Failed(f"doing nothing scores {played.score} on {played.task.id}")
    scripts = [(task, bench.random_actions(task, number)) for task in tasks for number in range(RANDOM_EPISODES)]
    scores = [played.score or 0.0 for played in await bench.plays(scripts)]
    mean = statistics.fmean(scores)
    if mean > 0.05:
        raise Failed(
            f"random actions score {mean:.3f} on average over {len(scores)} episodes",
            "ask for something that cannot be hit by chance, or grade more strictly",
        )
    return f"doing nothing scores 0; random actions {mean:.3f} over {len(scores)} episodes; the expert 1.0"


@check("make the verifier read the answer strictly: what is ambiguous, empty or merely claims success scores 0")
async def canary_floor(bench: CheckContext) -> str:
    tasks = bench.tasks(per_level=1)
    claims = [(task, canary) for task in tasks for canary in (*CANARIES, task.prompt)]
    results = await bench.plays([(task, [canary]) for task, canary in claims])
    for (task, canary), played in zip(claims, results, strict=True):
        if played.score != 0.0:
            raise Failed(f"the message {canary[:60]!r} alone scores {played.score} on {task.id}")
    return f"{len(CANARIES) + 1} empty claims score 0 on {len(tasks)} tasks"


@check("return scores in [0, 1]; catch what the verifier trips over and score it 0")
async def reward_range(bench: CheckContext) -> str:
    pairs: list[tuple[Task, list[Any]]] = []
    for task in bench.tasks(per_level=1):
        pairs += [(task, a) for a in (list(bench.make().expert(task)), [], ["\0\ufffd" * 50], ["x" * 100_000])]
    seen = []
    for played in await bench.plays(pairs, max_turns=64):
        outcome = played.outcome
        if outcome.grade != "graded" or outcome.score is None:
            raise Failed(f"{played.task.id}: grade {outcome.grade}, {outcome.fault}")
        if outcome.alarm:
            raise Failed(f"{played.task.id}: the submission broke grading: {outcome.fault}")
        seen.append(outcome.score)
    return f"{len(seen)} scores, all finite and in [0, 1]: from {min(seen)} to {max(seen)}"


# Secrets --------------------------------------------------------------------------------------------------------


@check("put what only the verifier may know in Task.secret, and use it nowhere but there and in expert()")
async def oracle_containment(bench: CheckContext) -> str:
    """The secret swapped for canaries: none may turn up in anything that the episode shows or lays out."""
    count = 0
    for task in bench.tasks(per_level=1):
        marked, marks = canaries(task)
        count += len(marks)
        if not marks:
            continue
        for where, text in (await _visible(bench, marked)).items():
            found = find_in(text, marks)
            if found:
                raise Failed(f"{task.id}: a value of the secret reaches {where}")
    return f"{count} marks in the secrets; none in messages, schemas, files, variables or process lists"


@check("keep solutions out of prompts, setup and boxes; beware of tools that call self.task() or read class state")
async def no_solution_leakage(bench: CheckContext) -> str:
    """The true secret: values that the task itself does not give away must not be readable at the start."""
    count = 0
    for task in bench.tasks(per_level=1):
        values = distinctive(task)
        count += len(values)
        for where, text in (await _visible(bench, task)).items():
            found = find_in(text, values)
            if found:
                raise Failed(f"{task.id}: the secret value {found[:60]!r} can be read in {where}")
    return f"{count} values that only the secrets hold; none can be read before the first action"


async def _visible(bench: CheckContext, task: Task) -> dict[str, str]:
    """All that a policy can see or read when an episode begins, by where."""
    episode = Episode(bench.make(), task, seed=SEED, boxes=bench.where.boxes)
    try:
        messages = await episode.start()
        found = {
            "the messages": "\n".join(m.content for m in messages),
            "the tool schemas": json.dumps(episode.schemas),
            "the task as logs print it": repr(task),
            "the task as episodes get it": json.dumps(plain(asdict(episode.environment.given))),
        }
        if episode.environment._box is not None:
            box = episode.environment.box
            tree = await off_loop(box.collect)
            found["the workspace"] = "\n".join(f"{path}\n{_text(entry)}" for path, entry in tree.items())
            command = (
                "env; cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ; ls -laR /tmp /dev/shm /run /home /var/tmp; "
                "cat /tmp/* /dev/shm/*"
            )
            result = await off_loop(box.exec, ["sh", "-c", f"({command}) 2>/dev/null; true"])
            found["the box's variables, processes and temporary files"] = result.stdout.decode("utf-8", "replace")
        return found
    finally:
        await episode.close()


def _text(entry: Entry) -> str:
    return entry.content.decode("utf-8", "replace")


@check("use an image whose root holds nothing of agentrl; for `host`, keep site-packages and /usr/local masked")
async def sealed_root(bench: CheckContext) -> str:
    task = bench.tasks(per_level=1)[0]
    episode = Episode(bench.make(), task, seed=SEED, boxes=bench.where.boxes)
    try:
        await episode.start()
        if episode.environment._box is None:
            return "no box: the tools run on the host side, nothing of the policy's does"
        box = episode.environment.box
        search = "find / -path /proc -prune -o -iname '*agentrl*' -print 2>/dev/null | head -5"
        found = (await off_loop(box.exec, ["sh", "-c", search], timeout=60.0)).stdout.decode(errors="replace").split()
        if found:
            raise Failed(f"files of agentrl can be read inside the box: {', '.join(found)}")
        network = "cat /proc/net/route /proc/net/ipv6_route 2>/dev/null | grep -v -e Iface -e ' lo$' | head -3"
        routes = (await off_loop(box.exec, ["sh", "-c", network])).stdout.decode(errors="replace").strip()
        if routes:
            raise Failed(f"the box has a network route: {routes.splitlines()[0]}")
        return f"no file of agentrl in the box, no network; root {episode.root[:16]}"
    finally:
        await episode.close()


# Robustness -----------------------------------------------------------------------------------------------------


@check("raise ValueError (or another of its family) with a clear text for input a tool cannot take")
async def bad_calls(bench: CheckContext) -> str:
    task = bench.tasks(per_level=1)[0]
    calls = [ToolCall(name="no_such_tool"), ToolCall(name="", error="not JSON")]
    for name, made in tools_of(bench.kind).items():
        fields = list(made.schema()["function"]["parameters"].get("properties", {}))
        calls += [ToolCall(name=name, arguments={"no_such_argument": 1})]
        junks: tuple[Any, ...] = ("", "\0", "\ud800", "é\u202e" * 20, "x" * 20_000, -1, 1e308, None, [], {"a": [1]})
        for junk in junks:
            calls += [ToolCall(name=name, arguments=dict.fromkeys(fields, junk))]
    rest = list(calls)
    while rest:  # as many as possible in one episode: some calls end it
        try:
            played = await bench.play(task, rest, max_turns=len(rest))
        except Exception:
            await _culprit(bench, task, rest)
            raise
        used = sum(message.role == "assistant" for message in played.messages)
        if played.score != 0.0:
            raise Failed(f"bad calls alone score {played.score}, the last being {_brief(rest[used - 1])}")
        rest = rest[used:]
    return f"{len(calls)} bad calls: each answered, none raised, none scored"


async def _culprit(bench: CheckContext, task: Task, calls: list[ToolCall]) -> None:
    """One episode a call, to name the one that raises."""
    for call in calls:
        try:
            await bench.play(task, [call])
        except Exception as error:
            raise Failed(f"{_brief(call)} raises {type(error).__name__}: {error}") from error


def _brief(call: ToolCall) -> str:
    return f"{call.name}({str(dict(call.arguments))[:60]})"


@check("give tools a timeout_s, pass it on to what they wait for, and use a sandbox that enforces it")
async def timeouts(bench: CheckContext) -> str:
    class Hung(bench.kind):  # type: ignore[misc, name-defined]
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

    task = bench.tasks(per_level=1)[0]
    names = ["hang_outside"]
    probe = bench.make()
    probe.given = task.public()
    if probe.prepare(probe.given, random.Random(0)) is not None:
        names.insert(0, "hang_in_the_box")
    took = []
    for name in names:
        began = time.perf_counter()
        await play(Hung(**bench.options), task, [ToolCall(name=name)], bench.where, seed=SEED)
        took.append(time.perf_counter() - began)
        if took[-1] > CUT_OFF_S:
            raise Failed(f"a tool with timeout_s=0.3 held the episode for {took[-1]:.1f} s ({name})")
    slow = max(made.timeout_s for made in tools_of(bench.kind).values()) if tools_of(bench.kind) else 0.0
    return f"hanging tools are cut off after {max(took):.1f} s; the environment's own limit is {slow:g} s a call"


# The verifier ---------------------------------------------------------------------------------------------------


@check("let verify() depend on the submission and context.secret alone; sort what has no order")
async def verifier_determinism(bench: CheckContext) -> str:
    tasks = bench.tasks(per_level=1)
    for task in tasks:
        for actions in (list(bench.make().expert(task)), ["nothing was done"]):
            environment = bench.make()
            episode = Episode(environment, task, seed=SEED, boxes=bench.where.boxes)
            try:
                await episode.start()
                for action in actions:
                    if (await episode.act(message_of(action))).done:
                        break
                submission = await episode.finish()
            finally:
                await episode.close()
            verdicts = [await graded(environment, submission, bench.where, group=g) for g in (0, 0, 0, 1, 2)]
            same = {(v.score, tuple(sorted(v.breakdown.items()))) if v else None for _, v in verdicts[:3]}
            scores = {outcome.score for outcome, _ in verdicts}
            if len(same) != 1 or len(scores) != 1:
                raise Failed(f"{task.id}: one submission, graded again, scored {sorted(map(str, scores))}")
    return f"{2 * len(tasks)} submissions graded five times, under three secrets: one score each"


@check("run `agentrl redteam` on the environment for the transcript of each breach, and mend the verifier")
async def red_team(bench: CheckContext) -> str:
    from agentrl.redteam.attack import attacks
    from agentrl.redteam.suite import mark, run

    corpus = [attack for attack in attacks().values() if not attack.slow]
    aim = mark(bench.name, bench.make, levels=bench.levels[:1])
    report = await run(aim, bench.where.boxes, backend=bench.sandbox, chosen=corpus)
    breaches = [f"{f.id} scored {f.score}" for f in report.breaches]
    wrong = [f"control {c.name} scored {c.score}" for c in report.controls if not c.ok]
    if breaches or wrong:
        raise Failed("; ".join([*wrong, *breaches][:5]))
    return f"{report.tried} attacks tried at level {bench.levels[0]}, none succeeded"
