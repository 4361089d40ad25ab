"""How much of SGLang's speed is left when whole episodes are played: rollouts beside the engine alone.

    python -m benchmarks.smollm2.engine --url http://127.0.0.1:30000 --recipe recipes/smollm2-countdown.yaml

`--url` again for each further server. Episodes are played with what they hold, or with `--weights`. `--players 4` has
that many players on Ray play them, 0 this process; given more than once, one after the other. Then the requests that
the episodes made are sent again out of this process, turn after turn, with nothing in between: same prompts, same
number of sampled tokens, same number of episodes at once. (Out of eight processes, each with its share of the episodes,
they took longer.) Then once more, with pauses as long as each episode spent outside the engine: what the engine gives
when requests come as they do. All `--passes` times, in turns; each is told as it ends.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from agentrl import recipe, serving
from agentrl.evaluation import evaluate, problems
from agentrl.initial_policy import load_policy
from agentrl.learn.weights import hand_over
from agentrl.recipe import Recipe
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


async def alone(
    urls: Sequence[str],
    episodes: Sequence[list[Turn]],
    concurrency: int,
    temperature: float,
    pauses: Sequence[float] | None = None,
) -> float:
    """Seconds that the servers take for the same requests, an episode after the other each; `pauses`: how long each
    episode waits after each of its requests."""
    await flush(urls)
    places = asyncio.Semaphore(concurrency)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=600)) as session:

        async def one(url: str, turns: list[Turn], pause: float) -> None:
            async with places:
                for prompt, length in turns:
                    params = {"max_new_tokens": length, "ignore_eos": True, "temperature": temperature}
                    body = {"input_ids": prompt, "sampling_params": params, "return_logprob": True}
                    async with session.post(f"{url}/generate", json=body) as response:
                        response.raise_for_status()
                        await response.read()
                    await asyncio.sleep(pause)

        began = time.perf_counter()
        each = zip(episodes, pauses or [0.0] * len(episodes), strict=True)
        await asyncio.gather(*(one(urls[i % len(urls)], turns, pause) for i, (turns, pause) in enumerate(each)))
        return time.perf_counter() - began


async def flush(urls: Sequence[str]) -> None:
    """Forget cached prefixes, so that every pass starts alike."""
    async with aiohttp.ClientSession() as session:
        for url in urls:
            async with session.post(f"{url}/flush_cache") as response:
                await response.read()


async def measure(
    urls: list[str],
    made: Recipe,
    worlds: Mapping[str, EnvRuntime],
    episodes: int,
    passes: int,
    weights: Path | None,
    players: int,
) -> dict[str, Any]:
    """Play and send again, a few times; return both speeds."""
    (world, *_) = worlds.values()
    levels = made.envs[0].levels or list(world.make().levels)
    tasks = problems(world, "train", levels, episodes)
    rows: list[dict[str, float]] = []
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        policy = load_policy(made, worlds, folder=weights, say=lambda text: None)
        engine, player, _ = serving.open_engine(made, policy, worlds, stack, folder=folder, say=lambda text: None)
        await engine.start()
        if weights is not None:
            await hand_over(engine, made.rollout.engine, policy.model)
        for number in range(passes):
            await flush(urls)
            began = time.perf_counter()
            played = await evaluate(
                player, tasks, samples=1, seed=number, key=b"benchmark", concurrency=made.rollout.concurrency
            )
            wall = time.perf_counter() - began
            requests = [turns_of(t) for t in played.trajectories]
            tokens = sum(t.sampled_tokens for t in played.trajectories)
            asked = partial(alone, urls, requests, made.rollout.concurrency, made.rollout.temperature)
            outside = [t.timings["total"] - t.timings["engine"] for t in played.trajectories]
            pauses = [spent / max(1, len(turns)) for spent, turns in zip(outside, requests, strict=True)]
            again, paused = await asked(), await asked(pauses)
            row = {"rollouts_s": wall, "engine_s": again, "engine_with_pauses_s": paused}
            row |= {"outside_s_per_episode": statistics.mean(outside), "tokens": tokens}
            rows.append({"turns": sum(map(len, requests)), **row})
            took = f"rollouts {wall:.2f} s, the engine alone {again:.2f} s, with the episodes' pauses {paused:.2f} s"
            print(f"{by(players)}: {took}", file=sys.stderr)
    return {
        "servers": len(urls),
        "players": players,
        "episodes": episodes,
        "concurrency": made.rollout.concurrency,
        "passes": rows,
        "share": statistics.mean(row["engine_s"] / row["rollouts_s"] for row in rows),
    }


def by(players: int) -> str:
    """Who plays."""
    return f"{players} players" if players else "one process"


def line(found: Mapping[str, Any]) -> str:
    """One measurement in words."""

    def speeds(of: str) -> str:
        return " and ".join(f"{row['tokens'] / row[of]:,.0f}" for row in found["passes"])

    return (
        f"{by(found['players'])}: rollouts {speeds('rollouts_s')} tokens/s, the engine alone {speeds('engine_s')}: "
        f"{found['share']:.0%}; with the episodes' pauses it gives {speeds('engine_with_pauses_s')}"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", action="append", required=True, help="a running SGLang server")
    parser.add_argument("--recipe", type=Path, required=True, help="whose tasks, budgets and concurrency are used")
    parser.add_argument("--weights", type=Path, help="a model folder that the servers are to load first")
    parser.add_argument("--players", type=int, action="append", help="processes that play; 0, the default: this one")
    parser.add_argument("--episodes", type=int, default=2048)
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--set", action="append", default=[], help="override a key of the recipe")
    parser.add_argument("--json", action="store_true", help="print JSON lines instead")
    arguments = parser.parse_args()
    for players in arguments.players or [0]:
        cluster = f"cluster={{type: ray, players: {players}}}" if players else "cluster=null"
        engine = f"rollout.engine={{type: sglang, urls: {json.dumps(arguments.url)}}}"
        made = recipe.load(arguments.recipe, [engine, *arguments.set, cluster])
        with serving.runtimes(made) as worlds:
            work = measure(
                arguments.url, made, worlds, arguments.episodes, arguments.passes, arguments.weights, players
            )
            found = asyncio.run(work)
        print(json.dumps(found) if arguments.json else line(found), flush=True)


if __name__ == "__main__":
    main()
