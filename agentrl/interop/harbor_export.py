"""`agentrl env export ENV DIR --to harbor`: writes tasks as Harbor task folders (schema 1.4).

    task.toml  instruction.md  environment/: Dockerfile, workspace.tar    what the agent gets, in /app
    solution/solve.sh                                                     what our expert changed there
    tests/: test.sh, grade.py, task.json, grader/                         our verifier, its source, and the hidden cases

The verifier is declared `separate`: Harbor then grades in a fresh container that gets /app alone. `grade.py` runs there
as root and compares; submitted code runs in processes of other users, who can read neither /tests nor /logs/verifier.
Only what is decided by files can be expressed: every task is played first, and one that our own verifier does not score
1 for the expert and 0 for an untouched workspace, from the files alone, is not written.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import io
import json
import os
import shlex
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agentrl import __version__, envs
from agentrl.envs.base import Environment
from agentrl.envs.episode import Episode
from agentrl.envs.play import Stage, message_of, stage
from agentrl.errors import AgentRLError, AuthoringError, UserError
from agentrl.interop import harbor_repository
from agentrl.interop.harbor_grader import GRADE, TEST, bundle
from agentrl.sandboxes.base import MTIME, Entry
from agentrl.types import Split, Task
from agentrl.verifiers.base import Submission
from agentrl.verifiers.grade import grade

WORKDIR = "/app"
IMAGE = "python:3.12-slim"
"""The image that tasks start from unless another is named: it must have python3 (3.11 or later), bash and tar."""
MAX_SCRIPT = 100_000
"""Bytes of a solution: it is one argument of a shell."""
TRIES = 20
"""How many tasks are looked at for each one that is wanted."""
CONFIG = """schema_version = "1.4"
artifacts = ["{workdir}"]

[task]
name = "agentrl/{name}"
description = {about}
keywords = ["agentrl", {environment}]

[metadata]
environment = {environment}
split = "{split}"
level = {level}
index = {index}
agentrl = "{version}"

[agent]
timeout_sec = 1800.0

[verifier]
timeout_sec = 600.0
environment_mode = "separate"

[environment]
network_mode = "no-network"
workdir = "{workdir}"
cpus = 1
memory_mb = 2048
"""
INSTRUCTION = """{prompt}

Your files ({names}) are in {workdir}, where commands start; what you leave there is graded, and nothing else.

How this kind of task is meant (where a tool is named, use the shell): {system}
"""


class Refused(Exception):
    """A task that cannot be a Harbor task, and why."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """A workspace before and after the expert."""

    before: Mapping[str, Entry]
    after: Mapping[str, Entry]


def harbor(
    name: str,
    target: Path,
    options: Mapping[str, Any],
    *,
    split: Split = "train",
    level: int | None = None,
    count: int = 10,
    image: str = IMAGE,
    sandbox: str = "namespace",
    say: Callable[[str], None] = lambda text: None,
) -> list[Path]:
    """Write tasks into a folder that is new or empty; return their folders."""
    kind = envs.load(name, dict(options))
    if split not in kind.splits:
        raise UserError(f"{name} has no tasks of the split {split}; there are: {', '.join(kind.splits)}")
    if level is not None and level not in kind.levels:
        raise UserError(f"{name} has no level {level}; its levels are {kind.levels[0]} to {kind.levels[-1]}")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} is there already and not an empty folder; name another one")
    return asyncio.run(_written(kind, dict(options), target, split, level, count, image, sandbox, say))


async def _written(
    kind: type[Environment],
    options: dict[str, Any],
    target: Path,
    split: Split,
    level: int | None,
    count: int,
    image: str,
    sandbox: str,
    say: Callable[[str], None],
) -> list[Path]:
    folders: list[Path] = []
    refused: dict[str, int] = {}
    grader: dict[str, bytes] = {}
    levels = list(kind.levels) if level is None else [level]
    async with stage(sandbox, limit=16, grading_s=120.0) as where:
        for turn in range(count * TRIES):
            place, index = levels[turn % len(levels)], turn // len(levels)
            size = kind(**options).size_of(split, place)
            if len(folders) == count or (size is not None and index >= size):
                break
            task = kind(**options).task(split, place, index)
            try:
                ends = await played(kind, options, task, where)
                grader = grader or ({} if harbor_repository.fits(kind) else bundle(kind))
                files = task_files(kind, options, task, index, ends, image, grader)
            except Refused as error:
                refused[error.why] = refused.get(error.why, 0) + 1
                continue
            folder = target / f"{kind.name or kind.__name__.lower()}-{split}-{place}-{index}"
            for path, content in files.items():
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_bytes(content)
                (folder / path).chmod(0o755 if path.endswith(".sh") else 0o644)
            folders.append(folder)
    for why, times in refused.items() if folders else ():
        say(f"{times} task{'s' if times > 1 else ''} left out: {why}")
    if not folders:
        reasons = "; ".join(refused) or "there are none"
        raise UserError(f"no task of {kind.name or kind.__name__} can be written as a Harbor task: {reasons}")
    return folders


async def played(kind: type[Environment], options: Mapping[str, Any], task: Task, where: Stage) -> Ends:
    """Play the expert, and nothing; refuse a task whose files alone do not decide between them."""
    worked, after, before = await _finished(kind(**options), task, where, expert=True)
    untouched, _, _ = await _finished(kind(**options), task, where, expert=False)
    expert, nothing = [await _score(kind, submission, where) for submission in (worked, untouched)]
    if expert != 1.0:
        raise Refused(
            "its score needs the final message or what the environment keeps, which Harbor's verifier has not"
        )
    if nothing != 0.0:
        raise Refused(f"an untouched workspace scores {nothing}")
    return Ends(before=before, after=after)


async def _finished(
    environment: Environment, task: Task, where: Stage, *, expert: bool
) -> tuple[Submission, Mapping[str, Entry], Mapping[str, Entry]]:
    """Play an episode; return its submission, its workspace at the end and at the beginning."""
    episode = Episode(environment, task, seed=0, boxes=where.boxes)
    try:
        if harbor_repository.refusal(type(environment)):
            raise Refused(harbor_repository.refusal(type(environment)))
        await episode.start()
        try:
            box = environment.box
        except AuthoringError:
            raise Refused(
                "it has no sandbox: its tools are Python of this machine, which Harbor does not run"
            ) from None
        if box.spec.image not in ("host", "python") and not harbor_repository.fits(type(environment)):
            raise Refused(f"its sandboxes have the image {box.spec.image!r}; Harbor's containers start from another")
        try:
            for action in environment.expert(task) if expert else ():
                await episode.act(message_of(action))
        except NotImplementedError:
            raise Refused("it has no expert") from None
        submission = await episode.finish()
        return submission, await box.aio.collect(), box.spec.entries()
    except AgentRLError as error:
        raise Refused(f"its expert cannot be played: {error}") from None
    finally:
        await episode.close()


async def _score(kind: type[Environment], submission: Submission, where: Stage) -> float | None:
    """Grade the files of a submission, without all that Harbor does not hand over."""
    bare = replace(submission, answer="", transcript=(), ledger={}, state={})
    return (await grade(kind.verifier, bare, where.context(submission.task.id)))[0].score


def task_files(
    kind: type[Environment],
    options: Mapping[str, Any],
    task: Task,
    index: int,
    ends: Ends,
    image: str,
    grader: Mapping[str, bytes],
) -> dict[str, bytes]:
    """Return the files of a task folder by their paths."""
    name = kind.name or kind.__name__.lower()
    about = {"environment": json.dumps(name), "split": task.split, "level": task.level, "index": index}
    about |= {"name": f"{name}-{task.split}-{task.level}-{index}", "version": __version__, "workdir": WORKDIR}
    about["about"] = json.dumps(" ".join((kind.__doc__ or name).split()))
    place: dict[str, Any] = {
        "module": kind.__module__,
        "name": kind.__name__,
        "options": dict(options),
        "split": task.split,
    }
    # one for each task, random: hidden cases that could be drawn again would be a published answer sheet
    secret = os.urandom(32)
    place |= {"level": task.level, "index": index, "workdir": WORKDIR, "secret": secret.hex()}
    brought = {f"tests/grader/{path}": content for path, content in grader.items()}
    lines = ""
    if harbor_repository.fits(kind):
        image = harbor_repository.image_for(kind) if image == IMAGE else image
        try:
            brought, more, lines = harbor_repository.parts(kind, task, secret)
        except ValueError as error:
            raise Refused(str(error)) from None
        place |= more
    tops = sorted({path.split("/")[0] for path in ends.before})
    names = ", ".join([*tops[:8], *(["..."] if tops[8:] else [])]) or "none yet"
    prompt = INSTRUCTION.format(prompt=task.prompt, names=names, workdir=WORKDIR, system=kind.system)
    files = {
        "task.toml": CONFIG.format(**about).encode(),
        "instruction.md": prompt.encode(),
        "environment/Dockerfile": f"FROM {image}\nWORKDIR {WORKDIR}\n{lines}ADD workspace.tar {WORKDIR}/\n".encode(),
        "environment/workspace.tar": packed(ends.before),
        "solution/solve.sh": solution(ends),
        "tests/test.sh": TEST.encode(),
        "tests/grade.py": GRADE.encode(),
        "tests/task.json": (json.dumps(place, indent=1) + "\n").encode(),
    }
    return files | brought


def packed(entries: Mapping[str, Entry]) -> bytes:
    """Return entries as a tar with fixed times and owners, parents first."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path, entry in sorted(entries.items()):
            member = tarfile.TarInfo(path)
            member.mode, member.mtime = entry.mode, MTIME
            if entry.kind == "special":
                raise Refused(f"its workspace holds a special file, {path!r}")
            if entry.kind == "dir":
                member.type = tarfile.DIRTYPE
            elif entry.kind == "link":
                member.type, member.linkname = tarfile.SYMTYPE, os.fsdecode(entry.content)
            else:
                member.size = len(entry.content)
            tar.addfile(member, io.BytesIO(entry.content) if entry.kind == "file" else None)
    return out.getvalue()


def solution(ends: Ends) -> bytes:
    """Return a script that changes the workspace as the expert did."""
    gone = sorted((path for path in ends.before if path not in ends.after), reverse=True)
    other = [p for p in gone if p in ends.before] + [
        p for p, entry in ends.after.items() if p in ends.before and ends.before[p].kind != entry.kind
    ]
    new = {path: entry for path, entry in ends.after.items() if ends.before.get(path) != entry}
    lines = ["#!/bin/bash", "set -e", f"cd {WORKDIR}", *(f"rm -rf -- {shlex.quote(path)}" for path in other)]
    if new:
        text = base64.b64encode(gzip.compress(packed(new), mtime=0)).decode()
        lines.append(f"echo {text} | base64 -d | gzip -d | tar -x --no-same-owner -p")
    script = ("\n".join(lines) + "\n").encode()
    if len(script) > MAX_SCRIPT:
        raise Refused(f"its solution has {len(script)} bytes, more than a script can carry")
    return script
