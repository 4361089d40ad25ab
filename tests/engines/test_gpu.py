"""What only a GPU shows: memory given back and taken again around the learner's step, and weights through NCCL."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.engines.base import Sampling, Weights
from agentrl.engines.sglang.engine import SglangEngine

PROMPT = [5, 17, 99, 201, 7, 42]
TOLERANCE = 0.15
Record = Callable[[str, Any], None]

pytestmark = [
    pytest.mark.skipif(
        os.environ.get("AGENTRL_DEVICE") != "cuda",
        reason="needs a CUDA GPU with an SGLang for it: AGENTRL_DEVICE=cuda AGENTRL_SGLANG_PYTHON=its interpreter",
    ),
    pytest.mark.timeout(300),
]

NCCL = """
import asyncio, sys, time
from pathlib import Path
import torch
from safetensors.torch import load_file
from agentrl.engines.base import Sampling, Weights
from agentrl.engines.sglang import buckets
from agentrl.engines.sglang.engine import SglangEngine

buckets._backend = lambda tensor, clients, address: "nccl"

async def main(url, folder):
    tensors = {name: t.cuda() * 1.25 for name, t in load_file(Path(folder) / "model.safetensors").items()}
    engine = SglangEngine(urls=[url], sync="distributed", vocabulary=310, max_context=4096, update_timeout_s=40.0)
    await engine.start()
    for version in (1, 2):
        began = time.perf_counter()
        await engine.publish(Weights(version=version, tensors=tensors))
        print(f"update {version}: {time.perf_counter() - began:.3f} s", flush=True)
    assert engine._sync.used == "distributed"
    done = await engine.generate([5, 17, 99], Sampling(max_tokens=4, temperature=0.0))
    assert done.versions == (2,) * 4, done
    await engine.close()
    print("sent through NCCL", flush=True)

asyncio.run(main(*sys.argv[1:]))
"""


def free_gib() -> float:
    return torch.cuda.mem_get_info()[0] / 2**30


def test_memory_is_given_back_and_taken_again(kept: Any, model: Any, forward: Any, record_property: Record) -> None:
    """While paused the server's key-value memory is free for the learner; afterwards everything is as before."""

    async def main() -> None:
        server = await kept.started("memory")
        engine = SglangEngine(urls=[server.url], vocabulary=310, max_context=4096, release_memory=True)
        await engine.start()
        try:
            await engine.publish(Weights(version=0, tensors=dict(model.named_parameters())))
            await engine.generate(PROMPT, Sampling(max_tokens=8))
            before, began = free_gib(), time.perf_counter()
            await engine.pause()
            released, paused = free_gib(), time.perf_counter() - began
            ballast = torch.ones(int((released - before) * 2**30 * 0.9 / 4), device="cuda")  # as a learner would
            assert float(ballast.sum(dtype=torch.float64)) == len(ballast)
            del ballast
            torch.cuda.empty_cache()
            scaled = {name: p.detach() * 1.25 for name, p in model.named_parameters()}
            waiting = asyncio.ensure_future(engine.generate(PROMPT, Sampling(max_tokens=4, temperature=0.0)))
            await asyncio.sleep(0.2)
            assert not waiting.done()
            began = time.perf_counter()
            await engine.resume()
            resumed = time.perf_counter() - began
            assert len((await waiting).token_ids) == 4
            await engine.publish(Weights(version=1, tensors=scaled))
            record_property("released_gib", round(released - before, 3))
            record_property("release_s", round(paused, 3))
            record_property("resume_s", round(resumed, 3))
            assert released - before > 0.4
            assert free_gib() < released - 0.4
            after = await engine.generate(PROMPT, Sampling(max_tokens=20))
            assert set(after.versions) == {1}
            with torch.no_grad():
                other = type(model)(model.config).to(model.device, model.dtype).eval()
                other.load_state_dict(scaled)
            expected = forward(PROMPT, after.token_ids, by=other)
            assert max(abs(a - b) for a, b in zip(after.logprobs, expected, strict=True)) < TOLERANCE
        finally:
            await engine.close()

    asyncio.run(main())


def test_weights_through_nccl(kept: Any, model_folder: Path, record_property: Record) -> None:
    """NCCL refuses two processes on one GPU of one host, so the learner's side calls itself another host."""
    server = asyncio.run(kept.started("plain"))
    command = [sys.executable, "-c", NCCL, server.url, str(model_folder)]
    env = {**os.environ, "NCCL_HOSTID": "agentrl-learner"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    record_property("said", done.stdout.strip().splitlines())
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "sent through NCCL"
