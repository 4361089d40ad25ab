"""The sharded learner against the plain one, and the estimate of memory against measured peaks, in one run.

    python -m benchmarks.ranks [--cases NAME,...] [--seconds 540] [--json] [--out FILE] [--model FOLDER]

Random weights in real shapes: nothing is downloaded. Every case has a process, hence peaks, of its own.

    pair-*      the same batches through `Learner` and through `RankLearner` with one rank (FSDP2; more GPUs are not
                used): seconds per step, peak memory, and the losses
    fit-*       one model and setting each: does it fit, the measured peak, and the estimate by part
    curve-*     how likely a text becomes over 50 steps: the plain learner twice, with the sequences in another order,
                and one rank; the difference of the first two is the noise
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
import sys
import tempfile
import time
from functools import partial
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
from benchmarks._forked import forked

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
EIGHT = {"optimizer": "adamw8bit"}
CASES: dict[str, dict[str, Any]] = {
    "pair-1.5B-8k": {"do": "pair", "shape": "1.5B", "longest": 8192, "learner": {"micro_tokens": 16_384}, "steps": 12},
    "fit-1.5B-8k": {"do": "fit", "shape": "1.5B", "longest": 8192, "learner": SHORT},
    "fit-1.5B-32k": {"do": "fit", "shape": "1.5B", "longest": 32_768, "learner": LONG},
    "fit-8B-lora-8k": {"do": "fit", "shape": "8B", "longest": 8192, "lora": 16, "learner": SHORT},
    "fit-8B-lora-32k": {"do": "fit", "shape": "8B", "longest": 32_768, "lora": 16, "learner": LONG},
    "fit-4B-8k-8bit": {"do": "fit", "shape": "4B", "longest": 8192, "learner": SHORT | EIGHT},
    "fit-4B-32k-8bit": {"do": "fit", "shape": "4B", "longest": 32_768, "learner": LONG | EIGHT},
    "curve-smollm2": {"do": "curve", "shape": "tiny", "longest": 512, "learner": {"micro_tokens": 4096}},
    "fit-rank-1.5B-8k": {"do": "fit", "shape": "1.5B", "longest": 8192, "learner": SHORT, "rank": True},
    "fit-1.5B-16k": {"do": "fit", "shape": "1.5B", "longest": 16_384, "learner": {"micro_tokens": 16_384}},
    "stream": {"do": "stream", "shape": "1.5B", "longest": 1024},
    "fit-4B-8k-offload": {"do": "fit", "shape": "4B", "longest": 8192, "learner": SHORT | {"offload": True}},
    "fit-4B-32k-offload": {"do": "fit", "shape": "4B", "longest": 32_768, "learner": LONG | {"offload": True}},
    "checkpoint": {"do": "checkpoint", "shape": "0.5B", "longest": 1024},
    "pair-0.5B-8k": {"do": "pair", "shape": "0.5B", "longest": 8192, "learner": {"micro_tokens": 16_384}},
}  # fmt: skip
"""The most important ones first: those at the end are left out when the time is up."""
TINY_CASES: dict[str, dict[str, Any]] = {
    "pair-tiny": {"do": "pair", "shape": "tiny", "longest": 256, "steps": 5, "learner": {"micro_tokens": 512}},
    "fit-tiny": {"do": "fit", "shape": "tiny", "longest": 256, "learner": {"micro_tokens": 256, "checkpointing": True}},
    "fit-tiny-lora": {"do": "fit", "shape": "tiny", "longest": 256, "lora": 4, "learner": {"micro_tokens": 512}},
    "fit-tiny-rank": {"do": "fit", "shape": "tiny", "longest": 256, "rank": True, "learner": {"micro_tokens": 512}},
    "fit-tiny-offload": {"do": "fit", "shape": "tiny", "longest": 256, "learner": {"offload": True}},
    "curve-tiny": {"do": "curve", "shape": "tiny", "longest": 64, "steps": 12, "learner": {"micro_tokens": 256}},
    "stream-tiny": {"do": "stream", "shape": "tiny", "longest": 64},
    "checkpoint-tiny": {"do": "checkpoint", "shape": "tiny", "longest": 64},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", help="comma-separated; by default all")
    parser.add_argument("--seconds", type=float, default=540.0, help="start nothing new after this long")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds that one case may take")
    parser.add_argument("--json", action="store_true", help="print JSON; rows still appear on stderr as they come")
    parser.add_argument("--out", type=Path, help="write the JSON here after each case too")
    parser.add_argument("--model", help="a transformers folder for curve-*; random weights without it")
    options = parser.parse_args()
    cases = CASES if torch.cuda.is_available() else TINY_CASES
    names = options.cases.split(",") if options.cases else list(cases)
    if unknown := [name for name in names if name not in cases]:
        parser.error(f"no case {unknown[0]!r}; there are {', '.join(cases)}")
    began = time.perf_counter()
    rows: list[Row] = []
    result = {"machine": platform.machine(), "torch": torch.__version__, "rows": rows}
    if torch.cuda.is_available():
        result |= forked(lambda: {"machine": torch.cuda.get_device_name()}, 60.0)
    for name in names:
        started = time.perf_counter()
        left = min(options.limit, options.seconds - (started - began))
        case = cases[name] | {"model": options.model}
        if left < 5:
            row = {"error": "no time"}
        else:
            row = pair(case, left) if case["do"] == "pair" else forked(partial(run, case), left)
        rows.append({"case": name} | row | {"took_s": round(time.perf_counter() - started, 1)})
        print(json.dumps(rows[-1]), file=sys.stderr if options.json else sys.stdout, flush=True)
        if options.out:
            options.out.write_text(json.dumps(result, indent=1))
    if options.json:
        print(json.dumps(result, indent=1))


def run(case: dict[str, Any]) -> Row:
    """Run a case here; running out of memory is a result too."""
    jobs = {"fit": fit, "curve": curve, "stream": stream, "checkpoint": save_and_load}
    try:
        return jobs[case["do"]](case)
    except torch.OutOfMemoryError as error:
        return {"fits": False, "error": str(error).splitlines()[0][:300]}


def device() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def recipe_of(case: dict[str, Any]) -> Recipe:
    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    learner = {"lr": 1e-5, "max_mismatch": 1e9, "device": device().type} | case.get("learner", {})
    if case["do"] == "curve":
        learner["old_logprobs"] = "recompute"
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
    lengths = [case["longest"]] * 2  # two micro-batches: the second one's pass finds gradients of the first
    if case["do"] != "fit":
        tail = np.clip(random.lognormal(np.log(case["longest"] / 4), 0.7, 7), 16, case["longest"])
        lengths = [case["longest"], *tail]
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
    seconds, losses, peak, reserved = [], [], 0.0, 0.0
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
        reserved = max(reserved, report.memory_held_gb)
    return {
        "seconds": round(float(np.median(seconds[2:] or seconds)), 4), "peak_gib": round(peak, 3), "losses": losses,
        "reserved_gib": round(reserved, 3), "tokens": batch.tokens, "each": [round(s, 4) for s in seconds],
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


def half(case: dict[str, Any], rank: bool) -> Row:
    """Train one of the two learners of a pair."""
    recipe, steps = recipe_of(case), case.get("steps", 50)
    model = model_of(case, recipe, device())
    if not rank:
        return train(Learner(model, None, recipe), case, steps)
    with one_rank() as exchange:
        return train(RankLearner(model.to("cpu"), None, recipe, device=device(), exchange=exchange), case, steps)


def pair(case: dict[str, Any], seconds: float) -> Row:
    """Train the plain and the sharded learner on the same batches, each in a process of its own."""
    began = time.perf_counter()
    plain = forked(partial(half, case, False), seconds)
    sharded = forked(partial(half, case, True), max(5.0, seconds - (time.perf_counter() - began)))
    if "error" in plain or "error" in sharded:
        return {"plain": plain, "sharded": sharded, "error": plain.get("error") or sharded.get("error")}
    apart = [abs(a - b) for a, b in zip(plain["losses"], sharded["losses"], strict=True)]
    return {
        "time_ratio": round(sharded["seconds"] / plain["seconds"], 4),
        "memory_ratio": round(sharded["peak_gib"] / plain["peak_gib"], 4) if plain["peak_gib"] else None,
        "largest_loss_difference": max(apart), "first_loss_difference": apart[0], "plain": plain, "sharded": sharded,
    }  # fmt: skip


def fit(case: dict[str, Any]) -> Row:
    """Train three steps; compare the peak with the estimate."""
    recipe = recipe_of(case)
    steps = 2 if recipe.learner.offload else 3
    model = model_of(case, recipe, device())
    estimated = memory.parts(model, recipe, device(), sharded=bool(case.get("rank")))
    if case.get("rank"):
        with one_rank() as exchange:
            learner = RankLearner(model.to("cpu"), None, recipe, device=device(), exchange=exchange)
            trained = train(learner, case, steps)
    else:
        trained = train(Learner(model, None, recipe), case, steps)
    total, peak = sum(estimated.values()) / 2**30, trained["peak_gib"]
    return {
        "fits": True, "peak_gib": peak, "estimate_gib": round(total, 3),
        "estimate_over_peak": round(total / peak, 3) if peak else None,
        "parts": {name: round(size / 2**30, 4) for name, size in estimated.items()},
        "reserved_gib": trained["reserved_gib"], "seconds": trained["seconds"],
    }  # fmt: skip


def curve(case: dict[str, Any]) -> Row:
    """Compare how a text's mean logprob rises: plain, plain in another order, one rank, one after the other."""
    curves = {"plain": _curve(case, 0, False), "noise": _curve(case, 1, False), "rank": _curve(case, 0, True)}
    plain = np.array(curves["plain"])
    apart = {name: np.abs(np.array(curves[name]) - plain) for name in ("noise", "rank")}
    return {
        "plain": curves["plain"][::7], "last": {name: values[-1] for name, values in curves.items()},
        **{f"{name}_{kind}": float(getattr(d, kind)()) for name, d in apart.items() for kind in ("mean", "max")},
        "curves": curves,
    }  # fmt: skip


def _curve(case: dict[str, Any], order: int, rank: bool) -> list[float]:
    """Train on texts; return the mean negative logprob of each step's tokens before its update."""
    recipe = recipe_of(case)
    learner: Any
    model: Any
    group: Any = one_rank() if rank else contextlib.nullcontext()
    with group as exchange:
        if case["model"]:
            from transformers import AutoModelForCausalLM

            dtype: Any = getattr(torch, recipe.model.dtype)
            model = AutoModelForCausalLM.from_pretrained(case["model"], dtype=dtype, attn_implementation="sdpa")
        else:
            model = model_of(case, recipe, torch.device("cpu"))
        model.eval()
        learner = (
            RankLearner(model, None, recipe, device=device(), exchange=exchange)
            if rank
            else Learner(model.to(device()), None, recipe)
        )
        texts = _texts(case, int(model.config.vocab_size))
        values = []
        for step in range(case.get("steps", 50)):
            chosen = texts[16 * step : 16 * step + 16]
            random = np.random.default_rng((order, step))
            batch = learner.pack([_text_sample(chosen[i], i) for i in (random.permutation(16) if order else range(16))])
            report = learner.step(divide(batch, 1)[0] if rank else batch)
            values.append(report.mismatch.mean)  # the engine's logprobs are said to be 0
        del learner, model
    gc.collect()
    if device().type == "cuda":
        torch.cuda.empty_cache()
    return values


def _texts(case: dict[str, Any], vocabulary: int) -> Any:
    """Return token ids of this project's own pages, or of a made-up language without a tokenizer."""
    count, length = 16 * case.get("steps", 50), case["longest"]
    if not case["model"]:
        random = np.random.default_rng(0)
        starts = random.integers(0, vocabulary, (count, 1))
        return ((starts + 7 * np.arange(length)) % vocabulary).astype(np.int32)
    from transformers import AutoTokenizer

    files = sorted(p for p in Path(__file__).resolve().parents[1].glob("**/*.py") if p.stat().st_size < 40_000)
    text = "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in files)
    ids = np.array(AutoTokenizer.from_pretrained(case["model"])(text[: 6 * count * length])["input_ids"], np.int32)
    return np.resize(ids, (count, length))


def _text_sample(ids: Any, number: int) -> TrainingSample:
    """Return a text of which every token counts alike."""
    sampled = np.arange(len(ids)) > 0
    segment = Segment(
        ids, np.zeros(len(ids), np.float32), np.where(sampled, 0, -1).astype(np.int32),
        np.where(sampled, 2, 0).astype(np.uint8),
    )  # fmt: skip
    return TrainingSample(
        segment=segment, advantages=sampled.astype(np.float32), weight=1.0, group=number, trajectory=0
    )


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
