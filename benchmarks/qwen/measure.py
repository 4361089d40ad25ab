"""Measures what a model does in every environment and level: success, tool errors, episodes cut off.

    python -m benchmarks.qwen.measure MODEL --url http://127.0.0.1:31000 --out figures.json [--episodes FOLDER]

MODEL is a transformers folder, the URL an SGLang server that has it; without a URL the model plays in this process,
which is slow but needs no GPU. All environments are played at the same time: temperature 1, 10 held-out tasks per level
and 1,500 sampled tokens per episode, unless told otherwise. The file is written even when the time is over: it then
holds the episodes that had ended. With --episodes every episode is kept for reading, one file per environment.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

from agentrl import serving
from agentrl.evaluation import Evaluation, Problem, evaluate, new_key, problems
from agentrl.recipe import Recipe
from agentrl.types import SPLITS, Trajectory

ALL = ("files", "sql", "service", "gym", "countdown", "search", "repair")


def recipe_of(args: argparse.Namespace) -> Recipe:
    """Return a recipe that evaluates the model on these environments."""
    here = {"type": "transformers", "max_batch": args.concurrency}
    model = {"path": args.model, **({} if args.url else {"dtype": "float32"})}
    return Recipe.model_validate(
        {
            "run": {"name": "measure", "seed": 0, "steps": 1},
            "model": model,
            "envs": [{"name": name, "sandbox": "namespace"} for name in args.envs],
            "rollout": {
                "engine": {"type": "sglang"} if args.url else here,
                "max_tokens": args.tokens,
                "max_turns": args.turns,
                "temperature": args.temperature,
                "top_p": args.top_p,
                "concurrency": args.concurrency,
                "episode_seconds": args.seconds,
            },
            "sandboxes": {"boxes": args.concurrency + 64},  # grading needs some while every episode has one
        }
    )


def episode(t: Trajectory) -> dict[str, Any]:
    """Return one episode as a reader wants it."""
    return {
        "task": t.task.id,
        "level": t.task.level,
        "score": t.outcome.score,
        "ending": t.outcome.ending,
        "tokens": t.sampled_tokens,
        "messages": [
            {
                "role": m.role,
                "content": m.content,
                **({"calls": [[c.name, dict(c.arguments), c.error] for c in m.tool_calls]} if m.tool_calls else {}),
            }
            for m in t.messages
        ],
        "evidence": list(t.verdict.evidence)[:3] if t.verdict else [],
    }


def figures(result: Evaluation) -> dict[str, Any]:
    """Return the figures of one environment."""
    summary = result.summary([1])
    kept = ("pass@1", "levels", "tries", "tool_errors", "truncated", "ungraded")
    endings = Counter(t.outcome.ending for t in result.trajectories)
    tokens = sum(t.sampled_tokens for t in result.trajectories) / max(1, len(result.trajectories))
    return {**{key: summary[key] for key in kept}, "endings": dict(sorted(endings.items())), "tokens": tokens}


def write(args: argparse.Namespace, played: list[tuple[Problem, Trajectory]], began: float) -> dict[str, Any]:
    """Write the figures of the episodes that have ended, and the episodes themselves where they are wanted."""
    by_env: dict[str, Any] = {}
    for name in args.envs:
        mine = [(problem, t) for problem, t in played if problem.env == name]
        if not mine:
            continue
        result = Evaluation(problems=tuple(p for p, _ in mine), trajectories=tuple(t for _, t in mine))
        by_env[name] = figures(result)
        if args.episodes:
            args.episodes.mkdir(parents=True, exist_ok=True)
            with gzip.open(args.episodes / f"{name}.jsonl.gz", "wt", encoding="utf-8") as file:
                file.writelines(json.dumps(episode(t)) + "\n" for _, t in mine)
    protocol = {
        "model": Path(args.model).name,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "tokens_per_episode": args.tokens,
        "tasks_per_level": args.tasks,
        "split": args.split,
    }
    report = {**protocol, "seconds": round(time.monotonic() - began, 1), "environments": by_env}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    return report


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Play all environments at once, and write what came of it."""
    recipe, began = recipe_of(args), time.monotonic()
    played: list[tuple[Problem, Trajectory]] = []

    async def keep(problem: Problem, trajectory: Trajectory) -> None:
        played.append((problem, trajectory))
        if not args.url:
            write(args, played, began)

    def say(text: str) -> None:
        print(text, flush=True)

    def progress(done: int, total: int) -> None:
        if done % 50 == 0 or done == total:
            say(f"{done} of {total} episodes, {time.monotonic() - began:.0f} s")

    with serving.runtimes(recipe) as runtimes:
        chosen: list[Problem] = []
        for name in args.envs:
            levels = args.levels or list(runtimes[name].make().levels)
            chosen += problems(runtimes[name], args.split, levels, args.tasks * len(levels))
        folder = args.out.parent
        async with serving.open_player(recipe, runtimes, url=args.url, folder=folder, say=say) as player:
            playing = evaluate(
                player,
                chosen,
                samples=1,
                seed=0,
                key=new_key(),
                concurrency=args.concurrency,
                progress=progress,
                record=keep,
            )
            try:
                await asyncio.wait_for(playing, args.limit)
            except TimeoutError:
                say(f"stopped after {args.limit:.0f} s: {len(played)} of {len(chosen)} episodes had ended")
    return write(args, played, began)


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--url", help="an SGLang server that has the model; without it the model plays in this process")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file that gets the figures")
    parser.add_argument("--episodes", type=Path, help="a folder for the episodes themselves")
    parser.add_argument("--envs", nargs="*", default=list(ALL))
    parser.add_argument("--levels", nargs="*", type=int, help="by default all")
    parser.add_argument("--tasks", type=int, default=10, help="tasks of each level")
    parser.add_argument("--split", default="heldout", choices=SPLITS)
    parser.add_argument("--tokens", type=int, default=1500, help="sampled tokens of an episode")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--turns", type=int, help="turns of an episode; by default the environment's own limit")
    parser.add_argument("--concurrency", type=int, default=320, help="episodes under way at once")
    parser.add_argument("--seconds", type=float, default=150.0, help="wall time of an episode")
    parser.add_argument("--limit", type=float, help="wall time of the whole measurement in seconds")
    report = asyncio.run(measure(parser.parse_args()))
    for name, row in report["environments"].items():
        levels = " ".join(f"{value:.2f}" for value in row["levels"].values())
        print(f"{name:10} {levels}   tool errors {row['tool_errors']:.2f}, cut off {row['truncated']:.2f}")


if __name__ == "__main__":
    main()
