"""Tokens a second of the embedded engine against `model.generate`, on the same heavy-tailed workload in one run.

python benchmarks/engine_speed.py [--requests 128] [--batch 32] [--threads 1]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, StoppingCriteria, StoppingCriteriaList

from agentrl.rollout.engine import Sampling
from agentrl.rollout.transformers_engine import TransformersEngine


@dataclass(frozen=True)
class Job:
    """One rollout: a prompt and how many tokens it will take."""

    prompt: list[int]
    length: int
    seed: int


def workload(requests: int, vocabulary: int, *, group: int = 8, longest: int = 400, seed: int = 0) -> list[Job]:
    """Groups that share a prompt of 50 to 200 tokens; lengths follow a Pareto tail cut at `longest`."""
    rng = random.Random(seed)
    jobs: list[Job] = []
    while len(jobs) < requests:
        prompt = [rng.randrange(2, vocabulary) for _ in range(rng.randrange(50, 200))]
        for _ in range(group):
            length = min(longest, int(15 * rng.paretovariate(1.1)))
            jobs.append(Job(prompt, length, len(jobs)))
    return jobs[:requests]


class _Lengths(StoppingCriteria):
    """Each row ends at its own length, as an end-of-turn token would end it."""

    def __init__(self, start: int, lengths: list[int]) -> None:
        self.ends = torch.tensor([start + length for length in lengths])

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        return input_ids.shape[1] >= self.ends.to(input_ids.device)


def by_generate(model: Any, jobs: list[Job], batch: int) -> float:
    """Seconds that `model.generate` takes, batch after batch, prompts padded on the left."""
    began = time.perf_counter()
    for first in range(0, len(jobs), batch):
        some = jobs[first : first + batch]
        width = max(len(job.prompt) for job in some)
        ids = torch.zeros(len(some), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, job in enumerate(some):
            ids[row, width - len(job.prompt) :] = torch.tensor(job.prompt)
            mask[row, width - len(job.prompt) :] = 1
        lengths = [job.length for job in some]
        model.generate(
            ids.to(model.device),
            attention_mask=mask.to(model.device),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            max_new_tokens=max(lengths),
            stopping_criteria=StoppingCriteriaList([_Lengths(width, lengths)]),
            eos_token_id=None,
            pad_token_id=0,
        )
    return time.perf_counter() - began


def by_engine(model: Any, jobs: list[Job], batch: int, *, deterministic: bool = False) -> float:
    """Seconds that the embedded engine takes for the same jobs, at the same number of rows."""

    async def main() -> float:
        engine = TransformersEngine(model, max_batch=batch, deterministic=deterministic)
        await engine.start()
        await engine.generate([1, 2, 3], Sampling(max_tokens=2, seed=0))
        began = time.perf_counter()
        done = await asyncio.gather(
            *(engine.generate(job.prompt, Sampling(max_tokens=job.length, seed=job.seed)) for job in jobs)
        )
        seconds = time.perf_counter() - began
        await engine.close()
        assert [len(c.token_ids) for c in done] == [job.length for job in jobs]
        return seconds

    return asyncio.run(main())


def against_generate(model: Any, *, requests: int = 128, batch: int = 32) -> dict[str, float]:
    """Sampled tokens a second of each, and how many times faster the engine is; processor seconds tell the same on a
    machine that is busy with other things."""
    jobs = workload(requests, model.config.vocab_size)
    tokens = sum(job.length for job in jobs)
    by_generate(model, jobs[:4], batch)  # warm up
    cpu = [time.process_time()]
    plain = by_generate(model, jobs, batch)
    cpu.append(time.process_time())
    engine = by_engine(model, jobs, batch)
    cpu.append(time.process_time())
    exact = by_engine(model, jobs, batch, deterministic=True)
    return {
        "tokens": tokens,
        "generate_tokens_s": round(tokens / plain, 1),
        "engine_tokens_s": round(tokens / engine, 1),
        "deterministic_tokens_s": round(tokens / exact, 1),
        "speedup": round(plain / engine, 2),
        "speedup_cpu_seconds": round((cpu[1] - cpu[0]) / (cpu[2] - cpu[1]), 2),
        "deterministic_cost": round(exact / engine, 3),
    }


def tiny_llama(width: int = 192, layers: int = 4, vocabulary: int = 1024) -> Any:
    """About 2 million parameters, random."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=width * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=6,
        num_key_value_heads=3,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.06,
    )
    hub: Any = transformers  # its classes are not annotated
    return hub.LlamaForCausalLM(config).eval()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(json.dumps(against_generate(tiny_llama(), requests=options.requests, batch=options.batch)))
