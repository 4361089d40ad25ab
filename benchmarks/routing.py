"""How requests of many players reach many SGLang servers: a group hashed to a server beside SGLang's own gateway.

    python -m benchmarks.routing --router-python PYTHON [--servers 2] [--rounds 3] [--device cpu|cuda] [--out FILE]

PYTHON is an interpreter that has `sglang-router` (pip install sglang-router, best in an environment of its own). The
servers, the gateway and all ways run in one run on one machine, in turn, round after round, each with empty caches:

group      what players do: the requests of a group go to the server that rendezvous hashing names; no memory
gateway    `sglang_router` with its policy `cache_aware` in front of the same servers
prefix     agentrl's own router of one process, which remembers every prompt: what no player can know of the others
random     any server, for comparison

The load: groups of episodes that share a prompt, several turns each, every turn with all tokens before it. Counted are
the share of prompt tokens that the servers had in their caches, sampled tokens per second, and the turns' latency.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from agentrl.engines.base import Sampling
from agentrl.engines.sglang import install
from agentrl.engines.sglang.client import Client
from agentrl.engines.sglang.routing import Router, of_group
from agentrl.engines.sglang.server import Server, free_port

Row = dict[str, Any]
Choose = Callable[[int, Sequence[int]], Client]
"""Returns where a prompt of a group goes."""
VOCABULARY = 310
START_S = 400.0


class Settings(argparse.Namespace):
    """What the command line says."""

    servers: int
    groups: int
    size: int
    turns: int
    prompt: int
    sampled: int
    observed: int
    concurrency: int
    rounds: int
    device: str


def write_model(folder: Path) -> None:
    """Write a small random Llama: routing does not depend on what the tokens are."""
    import torch
    import transformers

    hub: Any = transformers  # its classes are not annotated
    torch.manual_seed(0)
    config = hub.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, bos_token_id=None, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    hub.LlamaForCausalLM(config).save_pretrained(folder)


@asynccontextmanager
async def started(settings: Settings, folder: Path) -> AsyncIterator[list[Client]]:
    """Start the servers."""
    write_model(folder / "model")
    flags = ("--dtype", "float32", "--max-total-tokens", "32768", "--skip-tokenizer-init")
    async with AsyncExitStack() as stack:
        servers = [
            Server(
                folder / "model",
                python=install.python(settings.device == "cpu"),
                device=settings.device,
                log=folder / f"sglang-{number}.log",
                flags=flags,
                memory_fraction=0.1,
                timeout_s=START_S,
            )
            for number in range(settings.servers)
        ]
        for server in servers:
            stack.push_async_callback(server.stop)
        await asyncio.gather(*(server.start() for server in servers))
        clients = [Client(server.url) for server in servers]
        for client in clients:
            stack.push_async_callback(client.close)
        yield clients


@asynccontextmanager
async def gateway(python: Path, urls: Sequence[str], log: Path) -> AsyncIterator[Client]:
    """Start SGLang's gateway in front of the servers."""
    port = free_port("127.0.0.1")
    command = [str(python), "-m", "sglang_router.launch_router", "--worker-urls", *urls, "--host", "127.0.0.1"]
    command += ["--port", str(port), "--policy", "cache_aware", "--prometheus-port", str(free_port("127.0.0.1"))]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    client = Client(f"http://127.0.0.1:{port}")
    try:
        await _answers(client.url, process, log)
        yield client
    finally:
        await client.close()
        process.terminate()
        try:
            process.wait(10.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def _answers(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 120.0
    async with httpx.AsyncClient(base_url=url, timeout=5.0, trust_env=False) as client:
        while time.monotonic() < deadline and process.poll() is None:
            try:
                if (await client.get("/readiness")).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            await asyncio.sleep(0.25)
    raise RuntimeError(f"the gateway does not answer:\n{log.read_text(errors='replace')[-2000:]}")


async def play(settings: Settings, choose: Choose, seed: int) -> Row:
    """Play all groups by one way of choosing servers; return what was counted."""
    places, latencies = asyncio.Semaphore(settings.concurrency), list[float]()
    prompts = cached = sampled = 0

    async def episode(group: int, index: int) -> None:
        nonlocal prompts, cached, sampled
        draw = random.Random(f"{seed} {group}")
        tokens = [draw.randrange(2, VOCABULARY) for _ in range(settings.prompt)]
        own = random.Random(f"{seed} {group} {index}")
        async with places:
            for turn in range(settings.turns):
                began = time.monotonic()
                name = f"{group}-{index}-{turn}-{seed}"
                sampling = Sampling(max_tokens=settings.sampled, temperature=1.0)
                reply = await choose(group, tokens).generate(tokens, sampling, name)
                latencies.append(time.monotonic() - began)
                prompts, cached = prompts + len(tokens), cached + reply.cached_tokens
                sampled += len(reply.token_ids)
                tokens = [*tokens, *reply.token_ids, *(own.randrange(2, VOCABULARY) for _ in range(settings.observed))]

    began = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        for group in range(settings.groups):
            for index in range(settings.size):
                tasks.create_task(episode(group, index))
    seconds = time.monotonic() - began
    return {
        "seconds": seconds,
        "prompt_tokens": prompts,
        "cached_share": cached / prompts,
        "sampled_tokens_per_s": sampled / seconds,
        "turn_s_p50": statistics.median(latencies),
        "turn_s_p95": statistics.quantiles(latencies, n=20)[-1],
    }


async def compare(settings: Settings, router_python: Path, folder: Path) -> list[Row]:
    """Measure every way in turn."""
    rows: list[Row] = []
    async with AsyncExitStack() as stack:
        servers = await stack.enter_async_context(started(settings, folder))
        urls = [client.url for client in servers]
        front = await stack.enter_async_context(gateway(router_python, urls, folder / "gateway.log"))

        def ways(seed: int) -> dict[str, Choose]:
            router, draw = Router(len(servers)), random.Random(seed)
            return {
                "group": lambda group, _: servers[of_group(f"{seed}/{group}", urls)],
                "gateway": lambda group, _: front,
                "prefix": lambda _, tokens: servers[router.choose(tokens, [client.load for client in servers])],
                "random": lambda group, _: draw.choice(servers),
            }

        for round_ in range(-1, settings.rounds):  # the first one warms everything up, and does not count
            for way, choose in ways(round_).items():
                for client in servers:
                    await client.call("/flush_cache?timeout=60", {})
                row = {"way": way, "round": round_, **await play(settings, choose, round_)}
                print(json.dumps(row), file=sys.stderr, flush=True)
                rows += [row] if round_ >= 0 else []
    return rows


def summary(rows: Sequence[Row]) -> dict[str, Row]:
    """Return the median of each figure per way."""
    names = ("cached_share", "sampled_tokens_per_s", "turn_s_p50", "turn_s_p95")
    return {
        way: {name: statistics.median(row[name] for row in rows if row["way"] == way) for name in names}
        for way in dict.fromkeys(row["way"] for row in rows)
    }


def main() -> int:
    """Measure, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--router-python", type=Path, required=True, help="an interpreter that has sglang-router")
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--groups", type=int, default=24, help="groups in each round")
    parser.add_argument("--size", type=int, default=8, help="episodes of a group")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a group's prompt")
    parser.add_argument("--sampled", type=int, default=16, help="tokens sampled per turn")
    parser.add_argument("--observed", type=int, default=48, help="tokens that come back per turn")
    parser.add_argument("--concurrency", type=int, default=32, help="episodes at once")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--out", type=Path, help="write JSON there")
    settings = parser.parse_args(namespace=Settings())
    with tempfile.TemporaryDirectory(prefix="agentrl-routing-") as folder:
        rows = asyncio.run(compare(settings, settings.router_python, Path(folder)))
    from benchmarks._players import machine

    load = {name: value for name, value in vars(settings).items() if name not in ("out", "router_python")}
    results = {"machine": machine(), "load": load, "summary": summary(rows), "rows": rows}
    text = json.dumps(results, indent=2) + "\n"
    if settings.out:
        settings.out.write_text(text, encoding="utf-8")
    print(json.dumps(results["summary"], indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
