"""The `agentrl env` commands new, list, play and replay. Each returns an exit code."""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from agentrl import catalogue, seeds
from agentrl.envs import load, tools_of
from agentrl.envs.permissions import Decision, Permissions
from agentrl.envs.play import stage
from agentrl.errors import UserError
from agentrl.types import Split


def new(name: str, root: Path) -> int:
    """Write a working environment and say what to do next."""
    from agentrl.envs.scaffold import new as write

    for path in write(name, root):
        typer.echo(f"wrote {path}")
    if root.resolve() in [folder.resolve() for folder in catalogue.roots()]:
        typer.echo(f"\nagentrl env check {name}\nagentrl env play {name}")
    else:
        typer.echo(f"\nagentrl env check {root / 'envs' / name}    # or: cd {root}, and the name alone will do")
    return 0


def new_project(folder: Path, name: str | None) -> int:
    """Write a project and say what to do next."""
    from agentrl.envs.scaffold import project

    paths = project(folder, name)
    for path in paths:
        typer.echo(f"wrote {path}")
    env = paths[0].parent.name
    steps = [f"cd {shlex.quote(str(folder))}", "pytest", f"agentrl env check {env}", "agentrl train recipe.yaml"]
    typer.echo("\n" + "\n".join(steps))
    return 0


def list_(as_json: bool) -> int:
    """List every environment that can be found; one that does not load is listed with the reason."""
    rows = []
    for name, member in catalogue.members("envs").items():
        row: dict[str, Any] = {"name": name, "where": member.where}
        try:
            kind = load(name)
            levels = [kind.levels.start, kind.levels[-1]]
            about = " ".join((kind.__doc__ or "").split("\n\n")[0].split())
            row |= {"levels": levels, "tools": list(tools_of(kind)), "about": about}
        except Exception as error:  # one broken member must not hide the others
            row["error"] = f"{type(error).__name__}: {error}"
        rows.append(row)
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return 0
    bridges = ", ".join(sorted(catalogue.BRIDGES))
    width = max((len(row["name"]) for row in rows), default=0)
    for row in rows:
        if "error" in row:
            typer.echo(f"{row['name']:{width}}  does not load: {row['error']}")
        else:
            first, last = row["levels"]
            typer.echo(f"{row['name']:{width}}  levels {first}-{last}  {', '.join(row['tools'])}  {row['about']}")
    typer.echo(f"over what others made (docs/bridges.md): {bridges}")
    return 0


def play(
    name: str,
    *,
    split: Split,
    level: int | None,
    index: int,
    seed: int,
    sandbox: str,
    permission: Decision,
    options: Mapping[str, Any],
) -> int:
    """Let a person play; return 0 when the task was solved."""
    from agentrl.envs.hand_play import play_by_hand

    kind = load(name, options)
    name = kind.name
    chosen = kind.levels[0] if level is None else level
    if chosen not in kind.levels:
        raise UserError(f"{name} has the levels {kind.levels.start} to {kind.levels[-1]}, not {chosen}")

    def confirm(tool: str, arguments: Mapping[str, Any]) -> bool:
        typer.echo(f"{tool} {json.dumps(dict(arguments))} cannot be undone.")
        return input("Allow it? [y/N] ").strip().lower() in ("y", "yes")

    async def run() -> float | None:
        environment = kind(**options)
        task = environment.task(split, chosen, index)
        allowed = Permissions(irreversible=permission, ask=confirm)
        async with stage(sandbox, limit=4, permissions=allowed) as where:
            reset = seeds.derive(seed, "reset", task.id)
            played = await play_by_hand(environment, task, where, seed=reset, say=typer.echo, ask=input)
        return played.score

    return 0 if asyncio.run(run()) == 1.0 else 1


def replay(
    path: Path, *, group: int | None, index: int | None, limit: int, sandbox: str, options: Mapping[str, Any]
) -> int:
    """Play recorded episodes again; return 1 when any comes out different."""
    from agentrl.envs.replay import options_of, records
    from agentrl.envs.replay import replay as again

    async def run() -> int:
        different = done = 0
        trained_with = options_of(path)
        async with stage(sandbox, limit=4) as where:
            for record in records(path):
                if (group is not None and record.group != group) or (index is not None and record.index != index):
                    continue
                if done == limit:
                    break
                done += 1
                chosen = {**trained_with.get(record.env, {}), **options}
                environment = load(record.env, chosen)(**chosen)
                difference = await again(environment, record, where)
                label = f"{record.task_id} (group {record.group}, rollout {record.index})"
                typer.echo(f"{label}: {'the same' if difference is None else f'differs at {difference}'}")
                different += difference is not None
        if not done:
            raise UserError(f"{path}: no recorded episode matches")
        return 1 if different else 0

    return asyncio.run(run())


def parsed(pairs: Sequence[str]) -> dict[str, Any]:
    """Read `KEY=VALUE` options; a value that is JSON is read as such."""
    options: dict[str, Any] = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator or not key:
            raise UserError(f"an option is KEY=VALUE, got {pair!r}")
        try:
            options[key] = json.loads(value)
        except ValueError:
            options[key] = value
    return options


def numbers(text: str | None) -> list[int] | None:
    """Read `1,3-5` as [1, 3, 4, 5]."""
    if not text:
        return None
    levels: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        try:
            some = range(int(first), int(last or first) + 1)
        except ValueError:
            some = range(0)
        if not some:
            raise UserError(f"levels are numbers such as 1,3-5, got {text!r}")
        levels += some
    return list(dict.fromkeys(levels))


def one_level(text: str | None) -> int | None:
    """Read the one level that an episode has."""
    levels = numbers(text)
    if levels is not None and len(levels) > 1:
        raise UserError(f"an episode has one level, got {text!r}")
    return levels[0] if levels else None
