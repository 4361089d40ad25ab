"""How fast the embedded engine samples.

    python benchmarks/engine.py [--only engine,exact] [--json]

engine      tokens/s of the embedded transformers engine against model.generate in batches of the same size, on the same
            heavy-tailed lengths with a small random model
exact       the same engine in exact mode (the same bits for any concurrency) against the plain one, 64 rows
Two things that are compared run in one process, one after the other, several times in turn; the table shows medians.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from agentrl.engines.base import Sampling
from benchmarks._parts import report, seconds


def small_model() -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    torch.set_num_threads(1)  # a model this small gains nothing from more, and waits for them on a busy machine
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
    )
    make: Any = LlamaForCausalLM
    return make(config).eval()


def heavy_tail(requests: int) -> list[tuple[list[int], int]]:
    """Prompts of 8 to 64 tokens and lengths of outputs from a heavy tail (Pareto, shape 1.2, at most 256)."""
    rng = random.Random(0)
    return [
        ([rng.randrange(10, 4096) for _ in range(rng.randint(8, 64))], min(256, int(16 * rng.paretovariate(1.2))))
        for _ in range(requests)
    ]


async def sampled(made: Any, work: Sequence[tuple[list[int], int]]) -> None:
    """All requests at once, by an engine that was started."""
    done = await asyncio.gather(
        *(made.generate(prompt, Sampling(max_tokens=length, seed=i)) for i, (prompt, length) in enumerate(work))
    )
    assert sum(len(completion.token_ids) for completion in done) == sum(length for _, length in work)


def engine(*, requests: int = 64, batch: int = 16, repeats: int = 3) -> dict[str, float]:
    """Tokens/s on the same heavy-tailed work."""
    import torch

    from agentrl.engines.transformers.engine import TransformersEngine

    model, work = small_model(), heavy_tail(requests)
    tokens = sum(length for _, length in work)

    def generated() -> None:
        """Batches in order of arrival, left-padded; a batch runs until its longest output is done."""
        for first in range(0, requests, batch):
            part = work[first : first + batch]
            width = max(len(prompt) for prompt, _ in part)
            ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt, _ in part])
            with torch.inference_mode():
                model.generate(
                    input_ids=ids,
                    attention_mask=(ids != 0).long(),
                    max_new_tokens=max(length for _, length in part),
                    do_sample=True,
                    top_k=0,
                    pad_token_id=0,
                    eos_token_id=None,
                )

    async def ours() -> None:
        made = TransformersEngine(model, max_batch=batch)
        await made.start()
        await sampled(made, work)
        await made.close()

    asyncio.run(ours())
    slow, fast = [], []
    for _ in range(repeats):
        slow.append(seconds(generated))
        fast.append(seconds(lambda: asyncio.run(ours())))
    return {
        "tokens": tokens,
        "generate_tokens_per_s": tokens / statistics.median(slow),
        "engine_tokens_per_s": tokens / statistics.median(fast),
        "times_faster": statistics.median(slow) / statistics.median(fast),
        "target_times": 1.5,
    }


def exact(*, requests: int = 192, batch: int = 64, repeats: int = 5) -> dict[str, float]:
    """Tokens/s with and without exact mode, once it has tried which shapes agree, and what it costs."""
    from agentrl.engines.transformers.engine import TransformersEngine

    model, work = small_model(), heavy_tail(requests)
    tokens = sum(length for _, length in work)

    async def main() -> dict[str, float]:
        engines = []
        for deterministic in (False, True):
            made = TransformersEngine(model, max_batch=batch, deterministic=deterministic)
            await made.start()
            await sampled(made, work)
            engines.append(made)
        seconds: list[list[float]] = [[], []]
        busy: list[list[float]] = [[], []]
        for _ in range(repeats):
            for made, taken, worked in zip(engines, seconds, busy, strict=True):
                began, spent = time.perf_counter(), time.process_time()
                await sampled(made, work)
                taken.append(time.perf_counter() - began)
                worked.append(time.process_time() - spent)
        for made in engines:
            await made.close()
        plain, careful = map(statistics.median, seconds)
        plain_cpu, careful_cpu = map(statistics.median, busy)
        return {
            "tokens": tokens,
            "plain_tokens_per_s": tokens / plain,
            "exact_tokens_per_s": tokens / careful,
            "cost": careful / plain - 1.0,
            "cpu_cost": careful_cpu / plain_cpu - 1.0,
        }

    return asyncio.run(main())


if __name__ == "__main__":
    sys.exit(report(__doc__, {"engine": engine, "exact": exact}))
