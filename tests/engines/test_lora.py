"""LoRA on a real SGLang server: only the adapter travels, and what it says is what the learner computes."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl import metrics
from agentrl.engines.base import Sampling, Weights
from agentrl.engines.sglang.engine import SglangEngine
from agentrl.engines.sglang.server import Server
from agentrl.errors import EngineError
from agentrl.learn.model import adapter_state
from agentrl.loop import train

PROMPT = [5, 17, 99, 201, 7, 42]
ON_GPU = os.environ.get("AGENTRL_DEVICE") == "cuda"
TOLERANCE = 0.15 if ON_GPU else 1e-4

pytestmark = [
    pytest.mark.xdist_group("sglang"),
    pytest.mark.timeout(600),  # a busy machine starts a server slowly
    pytest.mark.skipif(not os.environ.get("AGENTRL_FULL"), reason="starts one more SGLang server; set AGENTRL_FULL"),
]


def close(one: Any, other: Any) -> bool:
    return len(one) == len(other) and all(abs(a - b) < TOLERANCE for a, b in zip(one, other, strict=True))


def adapted(lora: Any, version: int) -> Weights:
    found = adapter_state(lora)
    assert found is not None
    return Weights(version=version, adapter=found[0], tensors=found[1])


def test_an_adapter_takes_effect_under_running_requests(kept: Any, lora: Any, model: Any, forward: Any) -> None:
    """The request ends under the base model and goes on under the adapter; each token says which it was."""

    async def main() -> None:
        server: Server = await kept.started("lora")
        wait = 0.1
        while True:
            engine = SglangEngine(urls=[server.url], vocabulary=310, max_context=4096)
            await engine.start()
            assert engine.adapters
            try:
                task = asyncio.ensure_future(engine.generate(PROMPT, Sampling(max_tokens=400)))
                await asyncio.sleep(wait)
                await engine.publish(adapted(lora, 1))
                mixed = await task
                if set(mixed.versions) != {0, 1}:
                    wait = wait / 2 if 1 not in mixed.versions else wait * 2
                    continue
                old = mixed.versions.count(0)
                base, new = (forward(PROMPT, mixed.token_ids, by=by) for by in (model, lora))
                assert close(mixed.logprobs[:old], base[:old])
                assert close(mixed.logprobs[old:], new[old:])
                assert not close(mixed.logprobs, base)
                with torch.no_grad():
                    for name, parameter in lora.named_parameters():
                        if "lora_B" in name:
                            parameter.mul_(-1.0)
                await engine.publish(adapted(lora, 2))
                after = await engine.generate(PROMPT, Sampling(max_tokens=20))
                assert set(after.versions) == {2}
                assert close(after.logprobs, forward(PROMPT, after.token_ids, by=lora))
                return
            finally:
                await engine.close()

    asyncio.run(main())


def test_training_sends_adapters(kept: Any, small_recipe: Any, tmp_path: Path) -> None:
    """The server keeps the base model; after every step learner and engine agree on what the policy is."""
    server = asyncio.run(kept.started("lora"))
    changes = {"model": {"lora": {"rank": 8, "alpha": 16}}, "learner": {"lr": 0.03}}
    assert train(small_recipe(server.url, **changes)) == 0
    rows = list(metrics.read(tmp_path / "r" / "metrics.jsonl", "step"))
    assert [row["learn/version"] for row in rows] == [1, 2, 3]
    assert [row["learn/on_policy"] for row in rows] == [1.0] * 3
    assert max(row["learn/mismatch_mean"] for row in rows) < (0.05 if ON_GPU else 1e-4)


def living(group: int) -> list[str]:
    """Processes of a group that are more than an unreaped entry."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, process_group = stat.read_text().rsplit(")", 1)[1].split()[:3]
            if int(process_group) == group and state != "Z":
                found.append(stat.parent.name)
    return found


def test_closing_ends_the_whole_server(kept: Any) -> None:
    async def main() -> None:
        server: Server = await kept.started("lora")
        engine = SglangEngine(servers=[server], vocabulary=310, max_context=4096)
        await engine.start()
        assert server._process is not None
        group = server._process.pid
        assert len(living(group)) > 1
        await engine.close()
        assert not server.alive
        assert living(group) == []
        with pytest.raises(EngineError, match="not running"):
            await engine.generate(PROMPT, Sampling(max_tokens=1))

    asyncio.run(main())
