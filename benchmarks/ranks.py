"""The sharded learner against the plain one, and the estimate of memory against measured peaks, in one run.

    python benchmarks/ranks.py [--cases NAME,...] [--seconds 540] [--json]

Random weights in real shapes: nothing is downloaded. Every case has a process, hence peaks, of its own.

    pair-*      the same batches through `Learner` and through `RankLearner` with one rank (FSDP2; more GPUs are not
                used): seconds per step, peak memory, and the loss of each of 50 steps
    fit-*       one model and setting each: does it fit, the measured peak, and the estimate by part
    stream      whole tensors from the shards bucket by bucket, as they go to an engine: seconds and bytes
    checkpoint  shards and model written, read back, and the same weights

On a CPU the cases are tiny ones that show that the script works.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from agentrl.engines.transformers.decoding import checksum
from agentrl.learn import memory, rank_checkpoint
from agentrl.learn.learner import Learner
from agentrl.learn.pack import divide
from agentrl.learn.rank_learner import Exchange, RankLearner
from agentrl.recipe import Recipe
from agentrl.types import Segment, TrainingSample

Row = dict[str, Any]
QWEN2 = {"vocab_size": 151_936, "max_position_embeddings": 40_960, "pad_token_id": None, "eos_token_id": None}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "0.5B": ("qwen2", QWEN2 | {
        "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
        "num_key_value_heads": 2, "tie_word_embeddings": True,
    }),
    "1.5B": ("qwen2", QWEN2 | {
        "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
        "num_key_value_heads": 2, "tie_word_embeddings": True,
    }),
    "4B": ("qwen3", QWEN2 | {
        "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
    }),
    "8B": ("qwen3", QWEN2 | {
        "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False,
    }),
    "tiny": ("llama", {
        "vocab_size": 1024, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    }),
}  # fmt: skip
SHORT = {"micro_tokens": 8192}
LONG = {"micro_tokens": 32_768, "checkpointing": True}
CASES: dict[str, dict[str, Any]] = {
    "pair-0.5B-8k": {"do": "pair", "shape": "0.5B", "longest": 8192, "learner": {"micro_tokens": 16_384}},
    "pair-1.5B-8k": {"do": "pair", "shape": "1.5B", "longest": 8192, "learner": {"micro_tokens": 16_384}, "steps": 10},
    "fit-1.5B-8k": {"do": "fit", "shape": "1.5B", "longest": 8192, "learner": {"micro_tokens": 8192}},
    "fit-1.5B-32k": {"do": "fit", "shape": "1.5B", "longest": 32_768, "learner": LONG},
    "fit-4B-8k-offload": {"do": "fit", "shape": "4B", "longest": 8192, "learner": SHORT | {"offload": True}},
    "fit-4B-32k-offload": {"do": "fit", "shape": "4B", "longest": 32_768, "learner": LONG | {"offload": True}},
    "fit-8B-lora-8k": {"do": "fit", "shape": "8B", "longest": 8192, "lora": 16, "learner": {"micro_tokens": 8192}},
    "fit-8B-lora-32k": {"do": "fit", "shape": "8B", "longest": 32_768, "lora": 16, "learner": LONG},
    "stream": {"do": "stream", "shape": "1.5B", "longest": 1024},
    "checkpoint": {"do": "checkpoint", "shape": "0.5B", "longest": 1024},
}  # fmt: skip
TINY_CASES: dict[str, dict[str, Any]] = {
    "pair-tiny": {"do": "pair", "shape": "tiny", "longest": 256, "steps": 5, "learner": {"micro_tokens": 512}},
    "fit-tiny-lora": {"do": "fit", "shape": "tiny", "longest": 256, "lora": 4, "learner": {"micro_tokens": 512}},
    "stream-tiny": {"do": "stream", "shape": "tiny", "longest": 64},
    "checkpoint-tiny": {"do": "checkpoint", "shape": "tiny", "longest": 64},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", help="comma-separated; by default all")
    parser.add_argument("--seconds", type=float, default=540.0, help="start nothing new after this long")
    parser.add_argument("--json", action="store_true", help="print JSON; rows still appear on stderr as they come")
    parser.add_argument("--case", help=argparse.SUPPRESS)  # one case, in the process of its own
    options = parser.parse_args()
    cases = CASES if torch.cuda.is_available() else TINY_CASES
    if options.case:
        print(json.dumps(run(cases[options.case])))
        return
    names = options.cases.split(",") if options.cases else list(cases)
    if unknown := [name for name in names if name not in cases]:
        parser.error(f"no case {unknown[0]!r}; there are {', '.join(cases)}")
    began = time.perf_counter()
    rows: list[Row] = []
    for name in names:
        left = options.seconds - (time.perf_counter() - began)
        rows.append({"case": name} | (child(name, left) if left > 0 else {"error": "left out: the time was up"}))
        print(json.dumps(rows[-1]), file=sys.stderr if options.json else sys.stdout, flush=True)
    if options.json:
        machine = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
        print(json.dumps({"machine": machine, "torch": torch.__version__, "rows": rows}, indent=1))


def child(name: str, seconds: float) -> Row:
    """Run one case in a process of its own."""
    command = [sys.executable, __file__, "--case", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return {"error": "the time was up"}
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["no reason given"])[-1][:300]}
    row: Row = json.loads(done.stdout.strip().splitlines()[-1])
    return row


def run(case: dict[str, Any]) -> Row:
    """Run a case here; running out of memory is a result too."""
    try:
        return {"pair": pair, "fit": fit, "stream": stream, "checkpoint": save_and_load}[case["do"]](case)
    except torch.OutOfMemoryError as error:
        return {"fits": False, "error": str(error).splitlines()[0][:200]}


def device() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def recipe_of(case: dict[str, Any]) -> Recipe:
    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    learner = {"lr": 1e-5, "max_mismatch": 1e9, "device": device().type} | case.get("learner", {})
    model: dict[str, Any] = {"type": "pretrained", "path": "random", "dtype": dtype}
    if case.get("lora"):
        model["lora"] = {"rank": case["lora"]}
    data = {"run": {"name": "ranks", "steps": 1000}, "model": model, "envs": [{"name": "none"}], "learner": learner}
    return Recipe.model_validate(data)


def model_of(case: dict[str, Any], recipe: Recipe, place: torch.device) -> Any:
    """Draw random weights in the case's shape."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from agentrl.learn.model import _with_lora

    kind, shape = SHAPES[case["shape"]]
    torch.manual_seed(0)
    with place:
        config = AutoConfig.for_model(kind, **shape)
        make: Any = AutoModelForCausalLM.from_config
        model: Any = make(config, attn_implementation="sdpa", dtype=getattr(torch, recipe.model.dtype))
    model.eval()
    lora = getattr(recipe.model, "lora", None)
    return _with_lora(model, lora, None) if lora else model


def samples(case: dict[str, Any], seed: int, vocabulary: int) -> list[TrainingSample]:
    """Sequences of heavy-tailed lengths, the longest as the case says; three quarters of each are sampled."""
    random = np.random.default_rng(seed)
    lengths = [case["longest"], *np.clip(random.lognormal(np.log(case["longest"] / 4), 0.7, 7), 16, case["longest"])]
    made = []
    for number, length in enumerate(int(n) for n in lengths):
        sampled = np.arange(length) >= length // 4
        segment = Segment(
            random.integers(0, vocabulary, length).astype(np.int32),
            np.where(sampled, -np.log(vocabulary), 0).astype(np.float32),
            np.where(sampled, 0, -1).astype(np.int32),
            np.where(sampled, 2, 0).astype(np.uint8),
        )
        advantages = np.where(sampled, random.normal(), 0).astype(np.float32)
        made.append(TrainingSample(segment=segment, advantages=advantages, weight=1.0, group=number, trajectory=0))
    return made


def train(learner: Learner, case: dict[str, Any], steps: int) -> Row:
    """Train some steps on the same batches; return times, peak and losses."""
    vocabulary = SHAPES[case["shape"]][1]["vocab_size"]
    seconds, losses, peak = [], [], 0.0
    for step in range(steps):
        batch = learner.pack(samples(case, step, vocabulary))
        batch = divide(batch, 1)[0] if isinstance(learner, RankLearner) else batch
        began = time.perf_counter()
        report = learner.step(batch)
        if device().type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        losses.append(report.loss)
        peak = max(peak, report.memory_gb if step else 0.0)  # the first step compiles
    return {
        "seconds": round(float(np.median(seconds[2:] or seconds)), 4), "peak_gib": round(peak, 3), "losses": losses,
        "tokens": batch.tokens,
    }  # fmt: skip


@contextlib.contextmanager
def one_rank() -> Any:
    """A process group of one, as FSDP2 wants it."""
    backend = "cpu:gloo,cuda:nccl" if device().type == "cuda" else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        yield Exchange(dist.new_group(backend="gloo"))
        dist.destroy_process_group()


def pair(case: dict[str, Any]) -> Row:
    """Train the plain and the sharded learner on the same batches, one after the other."""
    recipe, steps = recipe_of(case), case.get("steps", 50)
    plain = train(Learner(model_of(case, recipe, device()), None, recipe), case, steps)
    gc.collect()
    if device().type == "cuda":
        torch.cuda.empty_cache()
    with one_rank() as exchange:
        host = model_of(case, recipe, device()).to("cpu")  # the same draws, then on the host as a rank loads it
        sharded = train(RankLearner(host, None, recipe, device=device(), exchange=exchange), case, steps)
    apart = max(abs(a - b) for a, b in zip(plain["losses"], sharded["losses"], strict=True))
    return {
        "plain": plain, "sharded": sharded, "time_ratio": round(sharded["seconds"] / plain["seconds"], 4),
        "memory_ratio": round(sharded["peak_gib"] / plain["peak_gib"], 4) if plain["peak_gib"] else None,
        "largest_loss_difference": apart, "first_loss_difference": abs(plain["losses"][0] - sharded["losses"][0]),
    }  # fmt: skip


def fit(case: dict[str, Any]) -> Row:
    """Train three steps; compare the peak with the estimate."""
    recipe = recipe_of(case)
    model = model_of(case, recipe, device())
    estimated = {name: round(size / 2**30, 4) for name, size in memory.parts(model, recipe, device()).items()}
    trained = train(Learner(model, None, recipe), case, 3)
    total = sum(estimated.values())
    peak = trained["peak_gib"]
    return {
        "fits": True, "peak_gib": peak, "estimate_gib": round(total, 3), "parts": estimated,
        "estimate_over_peak": round(total / peak, 3) if peak else None, "seconds": trained["seconds"],
    }  # fmt: skip


def stream(case: dict[str, Any]) -> Row:
    """Gather every bucket once; their hash is that of the whole model."""
    recipe = recipe_of(case)
    host = model_of(case, recipe, torch.device("cpu"))
    expected = checksum({n: p for n, p in host.named_parameters()})
    with one_rank() as exchange:
        learner = RankLearner(host, None, recipe, device=device(), exchange=exchange)
        copies: dict[str, Any] = {}
        began, sizes = time.perf_counter(), list[int]()
        for bucket in learner.buckets():
            copies |= {n: t.to("cpu", copy=True) for n, t in bucket.items()}
            sizes.append(sum(t.nbytes for t in bucket.values()))
        seconds = time.perf_counter() - began
    return {
        "seconds": round(seconds, 3), "gib": round(sum(sizes) / 2**30, 3), "buckets": len(sizes),
        "largest_gib": round(max(sizes) / 2**30, 3), "same": checksum(copies) == expected,
    }  # fmt: skip


def save_and_load(case: dict[str, Any]) -> Row:
    """Write a checkpoint's shards and model, train on, and load it again."""
    recipe = recipe_of(case)
    with one_rank() as exchange, tempfile.TemporaryDirectory() as temporary:
        host = model_of(case, recipe, torch.device("cpu"))
        learner = RankLearner(host, None, recipe, device=device(), exchange=exchange)
        train(learner, case, 1)
        folder = Path(temporary)
        for name in ("shards", "model"):
            (folder / name).mkdir()
        before = checksum({n: t.clone() for bucket in learner.buckets() for n, t in bucket.items()})
        began = time.perf_counter()
        sealed = rank_checkpoint.write(folder, learner, 0, 1)
        written = time.perf_counter()
        train(learner, case, 1)
        loading = time.perf_counter()
        rank_checkpoint.load(folder / "shards", learner, 0, 1)
        loaded = time.perf_counter()
        after = checksum({n: t.clone() for bucket in learner.buckets() for n, t in bucket.items()})
    return {
        "write_s": round(written - began, 3), "load_s": round(loaded - loading, 3), "same": before == after,
        "gib": round(sum(size for size, _ in sealed.values()) / 2**30, 3),
    }  # fmt: skip


if __name__ == "__main__":
    main()
