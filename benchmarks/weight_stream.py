"""Weights from a sharded learner into a running SGLang server, bucket by bucket: seconds, bytes and extra memory.

    python -m benchmarks.weight_stream --url http://127.0.0.1:31000 --model FOLDER [--seconds 120] [--json] [--out FILE]

The server must serve FOLDER. One rank (FSDP2) trains a step, then its weights go to the server by each way, three
times; every time the server's own hashes are compared. "whole" sends the plain learner's tensors in one piece for
comparison.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from agentrl.engines.base import Delivery, Receipt, Sampling, Weights
from agentrl.engines.sglang import buckets as sending
from agentrl.engines.sglang.engine import SglangEngine
from agentrl.learn.learner import Learner
from agentrl.learn.pack import divide
from agentrl.learn.rank_learner import RankLearner
from benchmarks._forked import attempt
from benchmarks.ranks import Row, _text_sample, device, one_rank, recipe_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--seconds", type=float, default=120.0, help="start nothing new after this long")
    parser.add_argument("--json", action="store_true", help="print JSON; rows still appear on stderr as they come")
    parser.add_argument("--out", type=Path, help="write the JSON here after each row too")
    options = parser.parse_args()
    began = time.perf_counter()
    rows: list[Row] = []
    with one_rank() as exchange:
        case = {"do": "curve", "longest": 64, "learner": {"lr": 1e-4}}
        recipe = recipe_of(case)
        sharded = RankLearner(model_of(options.model, recipe), None, recipe, device=device(), exchange=exchange)
        plain = Learner(model_of(options.model, recipe).to(device()), None, recipe)
        small = 64 << 20 if device().type == "cuda" else 100_000
        ways = (("tensor", small), ("tensor", 1 << 30), ("distributed", small), ("disk", small), ("whole", 0))
        for way, size in ways:
            if time.perf_counter() - began > options.seconds:
                break
            learner = plain if way == "whole" else sharded
            rows.append({"way": way, "bucket_bytes": size} | attempt(lambda: publish(options.url, learner, way, size)))  # noqa: B023
            print(json.dumps(rows[-1]), file=sys.stderr if options.json else sys.stdout, flush=True)
            if options.out:
                options.out.write_text(json.dumps(rows, indent=1))
    if options.json:
        print(json.dumps(rows, indent=1))


def model_of(folder: str, recipe: Any) -> Any:
    from transformers import AutoModelForCausalLM

    dtype: Any = getattr(torch, recipe.model.dtype)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    return model.eval()


def publish(url: str, learner: Any, way: str, size: int) -> Row:
    """Train a step and send the weights, three times; return what the last one took."""
    sender = sending.BucketSender(stable=way == "whole")
    receipts: list[Receipt] = []
    extra: list[int] = []

    def deliver(order: Delivery) -> Receipt:
        if way == "whole":
            receipts.append(learner.deliver(order))
            return receipts[-1]
        gpu = device().type == "cuda"
        if gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        plan = learner.plan(size)
        receipts.append(sender.send(order, learner.buckets(plan), len(plan)))
        extra.append(torch.cuda.max_memory_allocated() - before if gpu else 0)
        return receipts[-1]

    async def run() -> Row:
        engine = SglangEngine(urls=[url], sync="tensor" if way == "whole" else way)
        await engine.start()
        seconds, before = [], learner.version
        try:
            for _ in range(3):
                ids = np.random.default_rng(learner.version).integers(0, learner._head.weight.shape[0], 64)
                batch = learner.pack([_text_sample(ids.astype(np.int32), 0)])
                learner.step(divide(batch, 1)[0] if isinstance(learner, RankLearner) else batch)
                began = time.perf_counter()
                await engine.publish(Weights(version=learner.version, deliver=deliver))
                seconds.append(time.perf_counter() - began)
            reply = await engine.generate([1, 2, 3], Sampling(max_tokens=4, temperature=0.0))
        finally:
            await engine.close()
        last = receipts[-1]
        return {
            "seconds": [round(s, 4) for s in seconds], "parts": {k: round(v, 4) for k, v in last.seconds.items()},
            "buckets": last.buckets, "mib": round(last.nbytes / 2**20, 1),
            "largest_mib": round(last.largest / 2**20, 1),
            "extra_mib": round(max(extra, default=0) / 2**20, 1),
            "versions_right": reply.versions == (before + 3,) * 4,
        }  # fmt: skip

    try:
        return asyncio.run(run())
    finally:
        sender.close()


if __name__ == "__main__":
    main()
