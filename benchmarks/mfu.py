"""How much of the GPU the learner's step uses at 8k tokens, where the time goes, and what each setting changes.

    python -m benchmarks.mfu [--rows NAME,...] [--seconds 240] [--json] [--out FILE]

A Qwen2.5-1.5B shape with random weights; nothing is downloaded. All rows train on the same sequences, whose lengths are
heavy-tailed up to 8,192 tokens, but "all 8k", where each has 8,192. MFU counts the arithmetic that the real tokens need
when each sequence is computed by itself, against a large matrix product measured in the same run. Every row has a
process of its own. On a CPU the shapes are tiny ones, which show that the script works.

    ours            the default: packed, varlen attention, norms and MLPs compiled, micro-batches of 16,384 tokens
    profile         the same step under torch's profiler: milliseconds of GPU time by kernel class
    trl, plain      as in benchmarks/learner.py
    anything else   ours with that one setting changed
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import re
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from agentrl.learn import attention, compile, logprobs
from agentrl.learn.learner import Learner
from agentrl.recipe import Recipe
from benchmarks._forked import forked
from benchmarks.learner import (
    TINY,
    Row,
    Shape,
    flops_of,
    lengths_of,
    matrix_rate,
    model_of,
    plain_step,
    samples_of,
    timed,
    trl_step,
)

QWEN25 = {
    "vocab_size": 151_936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
    "num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 128,
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "ours": {},
    "all 8k": {"equal": True},
    "layers compiled": {"compiled": ("DecoderLayer",)},
    "micro-batches of 32k": {"learner": {"micro_tokens": 32_768}},
    "micro-batches of 8k": {"learner": {"micro_tokens": 8192}},
    "checkpointed": {"learner": {"checkpointing": True}},
    "not compiled": {"learner": {"fuse": False}},
    "sdpa": {"model": {"attention": "sdpa"}},
    "sdpa cudnn": {"model": {"attention": "sdpa"}, "cudnn": True},
    "flex": {"flex": True},
    "keys not repeated": {"grouped": True},
    "head in one chunk": {"chunk_bytes": 16 << 30},
}
ROWS = (
    "ours", "profile", "all 8k", "plain", "layers compiled", "trl", "micro-batches of 32k", "keys not repeated",
    "sdpa cudnn", "sdpa", "not compiled", "checkpointed", "head in one chunk", "flex",
    "micro-batches of 8k", "profile all 8k",
)  # fmt: skip
CLASSES = (
    ("attention", r"flash|fmha|attention|sdpa|flex"),
    ("matrix products", r"gemm|nvjet|cutlass|xmma|cublas|splitk|matmul|mma_"),
    ("optimizer", r"multi_tensor|adam|foreach"),
    ("communication", r"nccl|all_gather|reduce_scatter"),
    ("compiled by triton", r"triton"),
    ("copies and casts", r"memcpy|memset|copy|cat"),
    ("indexing", r"index|gather|scatter|embedding"),
    ("reductions", r"reduce|softmax|norm"),
    ("elementwise", r"elementwise|vectorized"),
)
"""Kernel classes by what their names contain; the first that fits counts."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", help="comma-separated; by default " + ", ".join(ROWS))
    parser.add_argument("--seconds", type=float, default=240.0, help="start nothing new after this long")
    parser.add_argument("--json", action="store_true", help="print JSON; rows still appear on stderr as they come")
    parser.add_argument("--out", type=Path, help="write the JSON here after each row too")
    options = parser.parse_args()
    gpu = torch.cuda.is_available()
    names = options.rows.split(",") if options.rows else list(ROWS)
    if unknown := [n for n in names if n not in (*ROWS, *VARIANTS)]:
        parser.error(f"no row {unknown[0]!r}; there are {', '.join(ROWS)}")
    shape = Shape("qwen2", QWEN25, 8192, 32, 16_384) if gpu else Shape("qwen2", TINY, 256, 8, 1024)
    began = time.perf_counter()
    rate = forked(partial(_rate, gpu), 120.0)
    if "error" in rate:
        sys.exit(rate["error"])
    result: dict[str, Any] = rate | {"torch": torch.__version__, "tokens": sum(lengths_of(shape)), "rows": []}
    for name in names:
        left = options.seconds - (time.perf_counter() - began)
        started = time.perf_counter()
        row = (
            forked(partial(job, name, shape, rate["matrix_tflops"] * 1e12), left) if left > 5 else {"error": "no time"}
        )
        result["rows"].append({"name": name} | row | {"took_s": round(time.perf_counter() - started, 1)})
        print(json.dumps(result["rows"][-1]), file=sys.stderr if options.json else sys.stdout, flush=True)
        if options.out:
            options.out.write_text(json.dumps(result, indent=1))
    if options.json:
        print(json.dumps(result, indent=1))


def place() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _rate(gpu: bool) -> Row:
    machine = torch.cuda.get_device_name() if gpu else platform.machine()
    return {"machine": machine, "matrix_tflops": matrix_rate(place()) / 1e12}


def job(name: str, shape: Shape, peak: float) -> Row:
    """Measure one row."""
    if name.startswith("profile"):
        return profile(shape, VARIANTS[name.removeprefix("profile").strip() or "ours"])
    if name in VARIANTS:
        changes = VARIANTS[name]
        shape = dataclasses.replace(shape, equal=True, sequences=8) if changes.get("equal") else shape
        return measured(shape, our_step(shape, changes), peak)
    make = {"trl": trl_step, "plain": plain_step}[name]
    return measured(shape, make(shape, model_of(shape, place()), place()), peak)


def measured(shape: Shape, work: Callable[[], object], peak: float) -> Row:
    """Return time, memory and MFU of a step."""
    began = time.perf_counter()
    report = work()  # compiles
    first = time.perf_counter() - began
    seconds, memory = timed(work, place(), repeat=3)
    tokens = sum(lengths_of(shape))
    return {
        "seconds": round(seconds, 4), "tokens_per_s": round(tokens / seconds), "gib": round(memory, 2),
        "mfu": round(flops_of(shape) / seconds / peak, 4), "first_s": round(first, 1),
        "gradient_norm": getattr(report, "grad_norm", None), "entropy": getattr(report, "entropy", None),
    }  # fmt: skip


def our_step(shape: Shape, changes: dict[str, Any]) -> Callable[[], object]:
    """Return one step of the learner, with some settings changed."""
    device = place()
    if "compiled" in changes:
        compile.COMPILED = changes["compiled"]
        dynamo: Any = torch._dynamo
        register(dynamo.disable(attention.packed_attention))  # lengths change with every batch
    if changes.get("flex"):
        register(flex_attention)
    if changes.get("grouped"):  # torch 2.11's function takes no enable_gqa, but its kernel may not need it
        from torch.nn.attention.varlen import varlen_attn

        kernel = lambda *tensors, enable_gqa=False, **options: varlen_attn(*tensors, **options)  # noqa: E731
        attention._varlen_kernel = lambda: (kernel, True)  # type: ignore[assignment]
    if "chunk_bytes" in changes:
        logprobs.CHUNK_BYTES, logprobs.CHUNK_SHARE = changes["chunk_bytes"], 1.0
    if changes.get("cudnn") and device.type == "cuda":
        from torch.nn.attention import SDPBackend, sdpa_kernel

        sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True).__enter__()
    learner_options = {"micro_tokens": shape.micro_tokens, "old_logprobs": "recompute", "max_mismatch": 1e3, "lr": 1e-9}
    recipe = Recipe.model_validate(
        {
            "run": {"name": "mfu"},
            "model": {"path": ".", "dtype": "bfloat16" if device.type == "cuda" else "float32"}
            | changes.get("model", {}),
            "envs": [{"name": "none"}],
            "learner": learner_options | changes.get("learner", {}),
        }
    )
    learner = Learner(model_of(shape, device), None, recipe)
    batch = learner.pack(samples_of(shape))
    return lambda: learner.step(batch)


def register(function: Any) -> None:
    """Use another attention function for packed batches."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(attention.NAME, function)


def flex_attention(module: Any, query: Any, key: Any, value: Any, mask: Any, *, packing: Any, **options: Any) -> Any:
    """Compute packed attention with flex attention, for layouts without shared prefixes."""
    from torch.nn.attention.flex_attention import create_block_mask
    from torch.nn.attention.flex_attention import flex_attention as kernel

    global _flex, _masks
    layout, length = packing.layout, query.shape[2]
    if any(prefix is not None for prefix in layout.prefixes):  # the learner's own check has some
        return attention.packed_attention(module, query, key, value, mask, packing=packing, **options)
    if _flex is None:
        _flex, _masks = torch.compile(kernel, dynamic=False), {}
    if id(layout) not in _masks:
        number = torch.repeat_interleave(torch.tensor(layout.lengths, device=query.device))

        def same(batch: Any, head: Any, row: Any, column: Any) -> Any:
            return (number[row] == number[column]) & (row >= column)

        _masks[id(layout)] = create_block_mask(same, None, None, length, length, device=query.device.type)
    output = _flex(
        query, key, value, block_mask=_masks[id(layout)], scale=options.get("scaling"),
        enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    return output.transpose(1, 2).contiguous(), None


_flex: Any = None
_masks: dict[int, Any] = {}


def profile(shape: Shape, changes: dict[str, Any]) -> Row:
    """Return the GPU's milliseconds by kernel class, and the longest kernels, of one step."""
    from torch.profiler import ProfilerActivity

    shape = dataclasses.replace(shape, equal=True, sequences=8) if changes.get("equal") else shape
    work = our_step(shape, changes)
    gpu = place().type == "cuda"
    for _ in range(2):
        work()
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA if gpu else ProfilerActivity.CPU]) as profiler:
        began = time.perf_counter()
        work()
        if gpu:
            torch.cuda.synchronize()
        wall = time.perf_counter() - began
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(f"{folder}/trace.json").read_text())["traceEvents"]
    kinds = ("kernel", "gpu_memcpy", "gpu_memset") if gpu else ("cpu_op",)
    kernels = [e for e in events if e.get("cat") in kinds and "dur" in e]
    return {"wall_ms": round(1e3 * wall, 1)} | by_class([(e["name"], e["ts"], e["dur"]) for e in kernels])


def by_class(kernels: list[tuple[str, float, float]]) -> Row:
    """Return milliseconds by class, the longest kernels, and how long no kernel ran between the first and the last.
    Kernels are names with start and duration in microseconds."""
    classes: dict[str, float] = defaultdict(float)
    single: dict[str, list[float]] = defaultdict(list)
    idle, end = 0.0, kernels[0][1] if kernels else 0.0
    for name, start, duration in sorted(kernels, key=lambda kernel: kernel[1]):
        kind = next((kind for kind, pattern in CLASSES if re.search(pattern, name, re.IGNORECASE)), "other")
        classes[kind] += duration / 1e3
        single[name].append(duration / 1e3)
        idle += max(0.0, start - end) / 1e3
        end = max(end, start + duration)
    longest = sorted(single.items(), key=lambda item: -sum(item[1]))[:16]
    return {
        "classes_ms": {k: round(v, 2) for k, v in sorted(classes.items(), key=lambda item: -item[1])},
        "idle_ms": round(idle, 2),
        "longest": [{"name": n[:100], "ms": round(sum(d), 2), "calls": len(d)} for n, d in longest],
    }


if __name__ == "__main__":
    main()
