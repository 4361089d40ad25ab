"""Plays every environment and level with an untrained model and keeps every episode, to see what the model does there.

    python -m benchmarks.qwen.first_contact MODEL --url http://127.0.0.1:31000 --out FOLDER [--tasks 20] [--envs files]

MODEL is a transformers folder, the URL an SGLang server that has it. FOLDER gets one JSONL file of episodes per
environment and summary.json: success per level, how episodes ended, tool errors, tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

from agentrl import envs, serving
from agentrl.evaluation import Evaluation, evaluate, problems
from agentrl.recipe import Recipe
from agentrl.rollout import render
from agentrl.types import Trajectory

ALL = ("files", "sql", "service", "gym", "countdown", "search", "repair", "reasoning")


def recipe_of(model: str, names: list[str], tokens: int) -> Recipe:
    """Return a recipe that evaluates the model on these environments."""
    return Recipe.model_validate(
        {
            "run": {"name": "first-contact", "seed": 0, "steps": 1},
            "model": {"path": model},
            "envs": [{"name": name, "sandbox": "namespace"} for name in names],
            "rollout": {
                "engine": {"type": "sglang"},
                "max_tokens": tokens,
                "concurrency": 192,
                "episode_seconds": 400.0,
            },
            "algorithm": {"type": "dapo"},
            "learner": {"lr": 1e-6},
            "curriculum": {"type": "learnability"},
            "sandboxes": {"boxes": 192},
        }
    )


def row(t: Trajectory) -> dict[str, Any]:
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


def summary(result: Evaluation) -> dict[str, Any]:
    """Return the figures of one environment."""
    figures = result.summary([1])
    figures.pop("passes")
    figures.pop("family", None)
    figures["endings"] = dict(Counter(t.outcome.ending for t in result.trajectories))
    return figures


async def play(recipe: Recipe, url: str, names: list[str], tasks: int, out: Path) -> dict[str, Any]:
    """Play all environments, one after another, and write what came of it."""
    out.mkdir(parents=True, exist_ok=True)
    figures: dict[str, Any] = {}
    with serving.runtimes(recipe) as runtimes:
        async with serving.open_player(recipe, runtimes, url=url, folder=out, say=print) as player:
            for name in names:
                began = time.monotonic()
                levels = list(envs.load(name).levels)
                chosen = problems(runtimes[name], "heldout", levels, tasks * len(levels))
                result = await evaluate(player, chosen, samples=1, seed=0, key=os.urandom(32), concurrency=192)
                with gzip.open(out / f"{name}.jsonl.gz", "wt", encoding="utf-8") as file:
                    file.writelines(json.dumps(row(t)) + "\n" for t in result.trajectories)
                figures[name] = {**summary(result), "seconds": round(time.monotonic() - began, 1)}
                print(name, json.dumps(figures[name]), flush=True)
                (out / "summary.json").write_text(json.dumps(figures, indent=1) + "\n")
    return figures


def main() -> None:
    """Read the command line and play."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--url", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tasks", type=int, default=20, help="tasks of each level")
    parser.add_argument("--tokens", type=int, default=1500, help="sampled tokens of an episode")
    parser.add_argument("--envs", nargs="*", default=list(ALL))
    parser.add_argument("--strict", action="store_true", help="calls outside their tags are answers, as before")
    args = parser.parse_args()
    if args.strict:
        setattr(render, "stray_calls", lambda text, tools, form: None)  # noqa: B010
    recipe = recipe_of(args.model, args.envs, args.tokens)
    asyncio.run(play(recipe, args.url, args.envs, args.tasks, args.out))


if __name__ == "__main__":
    main()
