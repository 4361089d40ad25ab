"""How much of SGLang's speed is left when whole episodes are played: rollouts beside the engine alone.

    python -m benchmarks.smollm2.engine --url http://127.0.0.1:30000 --recipe recipes/smollm2-countdown.yaml

`--url` again for each further server. Episodes are played with what they hold, or with `--weights`. Then the requests
that the episodes made are sent again, turn after turn, with nothing in between: same prompts, same number of sampled
tokens, same number of episodes at once. Both `--passes` times, in turns; each is told as it ends.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
from safetensors.torch import load_file

from agentrl import recipe, serving
from agentrl.engines.base import Weights
from agentrl.engines.sglang.engine import SglangEngine
from agentrl.evaluation import evaluate, problems
from agentrl.recipe import Recipe
from agentrl.rollout.player import make_player
from agentrl.rollout.render import Renderer
from agentrl.rollout.request import EnvRuntime
from agentrl.types import Trajectory

Turn = tuple[list[int], int]
"""A prompt, and how many tokens were sampled after it."""


def turns_of(trajectory: Trajectory) -> list[Turn]:
    """The requests that an episode made."""
    found: list[Turn] = []
    for segment in trajectory.segments:
        ids, turns = segment.token_ids.tolist(), segment.turns
        for number in range(int(turns.max()) + 1 if len(turns) else 0):
            places = (turns == number).nonzero()[0]
            found.append((ids[: int(places[0])], len(places)))
    return found


async def alone(urls: list[str], episodes: list[list[Turn]], concurrency: int, temperature: float) -> float:
    """Seconds that the servers take for the same requests, an episode after the other each, with nothing in between."""
    places = asyncio.Semaphore(concurrency)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=600)) as session:

        async def one(url: str, turns: list[Turn]) -> None:
            async with places:
                for prompt, length in turns:
                    params = {"max_new_tokens": length, "ignore_eos": True, "temperature": temperature}
                    body = {"input_ids": prompt, "sampling_params": params, "return_logprob": True}
                    async with session.post(f"{url}/generate", json=body) as response:
                        response.raise_for_status()
                        await response.read()

        began = time.perf_counter()
        await asyncio.gather(*(one(urls[i % len(urls)], turns) for i, turns in enumerate(episodes)))
        return time.perf_counter() - began


async def flush(urls: list[str]) -> None:
    """Forget cached prefixes, so that every pass starts alike."""
    async with aiohttp.ClientSession() as session:
        for url in urls:
            async with session.post(f"{url}/flush_cache") as response:
                await response.read()


async def measure(
    urls: list[str],
    made: Recipe,
    world: EnvRuntime,
    renderer: Renderer,
    context: int,
    episodes: int,
    passes: int,
    weights: Path | None,
) -> dict[str, Any]:
    engine = SglangEngine(urls=urls)
    levels = made.envs[0].levels or list(world.make().levels)
    tasks = problems(world, "train", levels, episodes)
    rollouts: list[float] = []
    engines: list[float] = []
    tokens = turns = 0
    try:
        await engine.start()
        if weights is not None:
            await engine.publish(Weights(version=1, tensors=load_file(weights / "model.safetensors")))
        for number in range(passes):
            await flush(urls)
            began = time.perf_counter()
            played = await evaluate(
                make_player(made, engine, renderer, context, {world.name: world}),
                tasks,
                samples=1,
                seed=number,
                key=b"benchmark",
                concurrency=made.rollout.concurrency,
            )
            wall = time.perf_counter() - began
            requests = [turns_of(t) for t in played.trajectories]
            tokens = sum(t.sampled_tokens for t in played.trajectories)
            turns = sum(map(len, requests))
            rollouts.append(tokens / wall)
            await flush(urls)
            engines.append(tokens / await alone(urls, requests, made.rollout.concurrency, made.rollout.temperature))
            print(f"rollouts {rollouts[-1]:,.0f} tokens/s, the engine alone {engines[-1]:,.0f}", file=sys.stderr)
    finally:
        await engine.close()
    return {
        "servers": len(urls),
        "episodes": episodes,
        "concurrency": made.rollout.concurrency,
        "turns": turns,
        "tokens": tokens,
        "rollout_tokens_per_s": rollouts,
        "engine_tokens_per_s": engines,
        "share": statistics.mean(rollouts) / statistics.mean(engines),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", action="append", required=True, help="a running SGLang server")
    parser.add_argument("--recipe", type=Path, required=True, help="whose tasks, budgets and concurrency are used")
    parser.add_argument("--weights", type=Path, help="a model folder that the server is to load first")
    parser.add_argument("--episodes", type=int, default=2048)
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--set", action="append", default=[], help="override a key of the recipe")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a line")
    arguments = parser.parse_args()
    made = recipe.load(arguments.recipe, arguments.set)
    with serving.runtimes(made) as worlds:
        from transformers import AutoConfig, AutoTokenizer

        assert made.model.type == "pretrained"
        renderer = Renderer(AutoTokenizer.from_pretrained(made.model.path))
        context = int(AutoConfig.from_pretrained(made.model.path).max_position_embeddings)
        world = worlds[made.envs[0].name]
        work = measure(
            arguments.url, made, world, renderer, context, arguments.episodes, arguments.passes, arguments.weights
        )
        found = asyncio.run(work)
    if arguments.json:
        print(json.dumps(found, indent=1))
        return
    per = " and ".join(f"{x:,.0f}" for x in found["rollout_tokens_per_s"])
    ceiling = " and ".join(f"{x:,.0f}" for x in found["engine_tokens_per_s"])
    print(f"rollouts {per} tokens/s, the engine alone {ceiling}: {found['share']:.0%}")


if __name__ == "__main__":
    main()
