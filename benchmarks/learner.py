"""The learner's step and its head, against TRL's loss step and a plain transformers loop, in one run on the same data.

    python benchmarks/learner.py [--sections head,qwen3-4k,smollm2-1k,smollm2-groups,qwen3-16k] [--seconds 280] [--json]

Random weights in real shapes: nothing is downloaded. Lengths are heavy-tailed (most sequences far shorter than the
longest), and every row trains on the same sequences. Tokens/s counts real tokens alone, never padding; MFU counts the
arithmetic those tokens need when each sequence is computed by itself, against a large matrix product measured in the
same run. On a CPU the default sections are `tiny` and `tiny-groups`; on a GPU all others. In the sections of groups
eight sequences each have one prompt; elsewhere no prompt comes twice. `--sections head` takes less than a minute on an
H200; Liger and cut-cross-entropy are measured beside ours where they are installed.

    ours          packed, varlen attention, chunked head, float32 masters, AdamW; "ours checkpointed" recomputes layers,
                  "ours, prompts apart" computes a prompt once for each sequence, as the others do
    trl           GRPOTrainer's own logprob and loss code on batches padded as it pads them, bf16 weights, AdamW
    plain         transformers' forward on sorted, padded micro-batches, float32 log_softmax over the full logits, AdamW
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import inspect
import json
import math
import platform
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from agentrl.learn.learner import Learner
from agentrl.learn.logprobs import head
from agentrl.recipe import Recipe
from agentrl.types import Segment, TrainingSample

Row = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """A model's shape and the data it is trained on."""

    kind: str
    config: dict[str, int]
    longest: int
    sequences: int
    micro_tokens: int
    prompt: int = 0
    """Tokens of the prompt that eight sequences have in common; 0: a quarter of each sequence, all different."""
    equal: bool = False
    """Whether every sequence is as long as the longest."""


QWEN = {
    "vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip
SMOLLM = {
    "vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
}  # fmt: skip
TINY = {
    "vocab_size": 1024, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32,
}  # fmt: skip
SHAPES = {
    "qwen3-4k": Shape("qwen3", QWEN, 4096, 64, 16_384),
    "qwen3-16k": Shape("qwen3", QWEN, 16_384, 24, 32_768),
    "smollm2-1k": Shape("llama", SMOLLM, 1024, 256, 32_768),
    "smollm2-groups": Shape("llama", SMOLLM, 1024, 256, 32_768, prompt=384),
    "tiny": Shape("llama", TINY, 256, 16, 1024),
    "tiny-groups": Shape("llama", TINY, 256, 16, 1024, prompt=96),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", help="comma-separated: head, " + ", ".join(SHAPES))
    parser.add_argument("--seconds", type=float, default=280.0, help="start nothing new after this long")
    parser.add_argument("--json", action="store_true", help="print JSON; the rows still appear on stderr as they come")
    options = parser.parse_args()
    gpu = torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    default = ["head", "qwen3-4k", "smollm2-1k", "smollm2-groups", "qwen3-16k"] if gpu else ["tiny", "tiny-groups"]
    sections = options.sections.split(",") if options.sections else default
    unknown = [s for s in sections if s != "head" and s not in SHAPES]
    if unknown:
        parser.error(f"no section {unknown[0]!r}; there are head, {', '.join(SHAPES)}")
    began = time.perf_counter()
    peak = matrix_rate(device)
    machine = torch.cuda.get_device_name() if gpu else platform.processor() or platform.machine()
    say = sys.stderr if options.json else sys.stdout
    print(f"{machine}, torch {torch.__version__}, matrix product {peak / 1e12:.1f} TFLOP/s", file=say, flush=True)
    rows: list[Row] = []
    for section in sections:
        jobs = head_jobs(device) if section == "head" else step_jobs(section, SHAPES[section], device, peak)
        for name, job in jobs:
            if time.perf_counter() - began > options.seconds:
                rows.append({"section": section, "name": name, "error": "left out: the time was up"})
            else:
                rows.append({"section": section, "name": name} | attempt(job))
            print(json.dumps(rows[-1]), file=say, flush=True)
    if options.json:
        result = {"machine": machine, "torch": torch.__version__, "matrix_tflops": peak / 1e12, "rows": rows}
        print(json.dumps(result, indent=1))


def attempt(job: Callable[[], Row]) -> Row:
    """The job's row; running out of memory or a missing package is a result too."""
    try:
        return job()
    except (torch.cuda.OutOfMemoryError, ImportError, RuntimeError) as error:
        return {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def timed(work: Callable[[], object], device: torch.device, *, repeat: int, warm: int = 1) -> tuple[float, float]:
    """Median seconds and peak GiB (0 on a CPU) of `work`, after warm-up."""
    for _ in range(warm):
        work()
    seconds = []
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    for _ in range(repeat):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    memory = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    return statistics.median(seconds), memory


def matrix_rate(device: torch.device) -> float:
    """FLOP/s of one large product in the precision the models run in."""
    n, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    a, b = torch.randn(n, n, device=device, dtype=dtype), torch.randn(n, n, device=device, dtype=dtype)
    seconds, _ = timed(lambda: [a @ b for _ in range(5)], device, repeat=3)
    return 5 * 2 * n**3 / seconds


# The head ---------------------------------------------------------------------------------------------------------


def head_jobs(device: torch.device) -> list[tuple[str, Callable[[], Row]]]:
    """Forward and backward of the head at 8,192 tokens and a vocabulary of 152k, and how far gradients are from the
    naive head's. The two packages compute a cross entropy alone, without the entropy that ours gives as well."""
    rows, vocabulary, dtype = (8192, 151_936, torch.bfloat16) if device.type == "cuda" else (512, 8192, torch.float32)
    names = ("three products", "naive", "ours", "ours with entropy", "liger", "cut cross entropy", "cce unfiltered")

    def job(width: int, name: str) -> Row:
        torch.manual_seed(0)
        hidden = torch.randn(rows, width, device=device, dtype=dtype).requires_grad_()
        weight = (torch.randn(vocabulary, width, device=device, dtype=dtype) * 0.02).requires_grad_()
        targets = torch.randint(0, vocabulary, (rows,), device=device)
        loss = head_loss(name, hidden, weight, targets)

        def work() -> None:
            hidden.grad = weight.grad = None
            if loss is not None:
                loss().backward()  # type: ignore[no-untyped-call]
                return
            logits = hidden.detach() @ weight.detach().t()
            logits @ weight.detach()
            logits.t() @ hidden.detach()

        base = torch.cuda.memory_allocated() / 2**30 if device.type == "cuda" else 0.0
        seconds, memory = timed(work, device, repeat=7, warm=3)
        row: Row = {"tokens": rows, "ms": round(1e3 * seconds, 2), "gib": round(memory - base, 2)}
        if name in names[2:] and name != "ours with entropy":
            found = hidden.grad
            hidden.grad = weight.grad = None
            naive = head_loss("naive", hidden, weight, targets)
            assert naive is not None and found is not None
            naive().backward()  # type: ignore[no-untyped-call]
            assert hidden.grad is not None
            row["difference"] = float(f"{float((found - hidden.grad).norm() / hidden.grad.norm()):.2g}")
        return row

    return [(f"H={w} {n}", lambda w=w, n=n: job(w, n)) for w in (1024, 4096) for n in names]  # type: ignore[misc]


def head_loss(
    name: str, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor
) -> Callable[[], torch.Tensor] | None:
    """The negative sum of the targets' logprobs, by one way or another; None for bare products."""
    if name == "naive":
        return lambda: -(hidden @ weight.t()).float().log_softmax(-1).gather(1, targets[:, None]).sum()
    if name == "ours":
        return lambda: -head(hidden, weight, targets).logprobs.sum()
    if name == "ours with entropy":

        def both() -> torch.Tensor:
            found = head(hidden, weight, targets)
            return -found.logprobs.sum() - 0.01 * found.entropy.sum()

        return both
    if name == "liger":
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        liger = LigerFusedLinearCrossEntropyLoss(reduction="sum")
        return lambda: liger(weight, hidden, targets)
    if name.startswith("c"):
        from cut_cross_entropy import linear_cross_entropy

        # By default it leaves gradients out that are too small for the dtype.
        options = {"filter_eps": None} if name == "cce unfiltered" else {}
        return lambda: linear_cross_entropy(hidden, weight, targets, reduction="sum", **options)
    return None


# The whole step -----------------------------------------------------------------------------------------------------


def lengths_of(shape: Shape) -> list[int]:
    """A common prompt, then heavy-tailed: lognormal around an eighth of the longest, one as long as they come."""
    if shape.equal:
        return [shape.longest] * shape.sequences
    random = np.random.default_rng(0)
    drawn = shape.prompt + random.lognormal(math.log(shape.longest / 8), 0.9, shape.sequences - 1)
    return [shape.longest, *np.clip(drawn, shape.prompt + 32, shape.longest).astype(int).tolist()]


def prompt_of(shape: Shape, length: int) -> int:
    """How many tokens of a sequence are prompt."""
    return shape.prompt or length // 4


def samples_of(shape: Shape) -> list[TrainingSample]:
    """Prompts, and what was sampled after them."""
    random = np.random.default_rng(1)
    made = []
    prompt = np.zeros(0, np.int32)
    for index, length in enumerate(lengths_of(shape)):
        sources = np.where(np.arange(length) < prompt_of(shape, length), 0, 2).astype(np.uint8)
        on = sources == 2
        if index % 8 == 0:
            prompt = random.integers(0, shape.config["vocab_size"], shape.prompt).astype(np.int32)
        own = random.integers(0, shape.config["vocab_size"], length - shape.prompt).astype(np.int32)
        segment = Segment(
            np.concatenate((prompt, own)),
            np.where(on, -math.log(shape.config["vocab_size"]), 0.0).astype(np.float32),
            np.where(on, 0, -1).astype(np.int32),
            sources,
        )
        advantages = np.where(on, random.normal(), 0.0).astype(np.float32)
        made.append(
            TrainingSample(segment=segment, advantages=advantages, weight=1.0, group=index // 8, trajectory=index % 8)
        )
    return made


def flops_of(shape: Shape) -> float:
    """Arithmetic the data needs, forward and backward: matrices, the head on sampled tokens, causal attention."""
    c, lengths = shape.config, lengths_of(shape)
    q, kv = (c[name] * c["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    layer = c["hidden_size"] * (2 * q + 2 * kv + 3 * c["intermediate_size"])
    sampled = sum(n - prompt_of(shape, n) for n in lengths)
    matrices = sum(lengths) * layer * c["num_hidden_layers"] + sampled * c["hidden_size"] * c["vocab_size"]
    attention = c["num_hidden_layers"] * q * sum(n * n for n in lengths)
    return 6.0 * (matrices + attention)


def model_of(shape: Shape, device: torch.device) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        shape.kind, **shape.config, max_position_embeddings=shape.longest, tie_word_embeddings=True, pad_token_id=0
    )
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32, attn_implementation="sdpa"
        )
    return model


def step_jobs(section: str, shape: Shape, device: torch.device, peak: float) -> list[tuple[str, Callable[[], Row]]]:
    """Each way of doing one whole training step on the same sequences."""
    repeat = 2 if device.type == "cuda" else 5

    def finish(work: Callable[[], object], **more: object) -> Row:
        seconds, memory = timed(work, device, repeat=repeat)
        tokens = sum(lengths_of(shape))
        return {
            "tokens": tokens,
            "seconds": round(seconds, 3),
            "tokens_per_s": round(tokens / seconds),
            "gib": round(memory, 2),
            "mfu": round(flops_of(shape) / seconds / peak, 4),
        } | more

    def ours(checkpointing: bool, sharing: bool = True) -> Row:
        recipe = Recipe.model_validate(
            {
                "run": {"name": section},
                "model": {"path": ".", "dtype": "bfloat16" if device.type == "cuda" else "float32"},
                "envs": [{"name": "none"}],
                "algorithm": {"type": "dapo"},
                "learner": {
                    "micro_tokens": shape.micro_tokens,
                    "checkpointing": checkpointing,
                    "old_logprobs": "recompute",
                    "max_mismatch": 1e3,
                    "lr": 1e-9,
                },
            }
        )
        learner = Learner(model_of(shape, device), None, recipe)
        samples = samples_of(shape)
        if not sharing:
            samples = [dataclasses.replace(s, group=index) for index, s in enumerate(samples)]
        batch = learner.pack(samples)
        return finish(lambda: learner.step(batch), computed=batch.computed, micro_batches=len(batch.minibatches[0]))

    apart: list[tuple[str, Callable[[], Row]]] = [("ours, prompts apart", lambda: ours(False, sharing=False))]
    return [
        ("ours", lambda: ours(False)),
        *(apart if shape.prompt else []),
        ("ours checkpointed", lambda: ours(True)),
        ("trl", lambda: finish(trl_step(shape, model_of(shape, device), device))),
        ("plain", lambda: finish(plain_step(shape, model_of(shape, device), device))),
    ]


def padded(samples: Sequence[TrainingSample], width: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Right-padded matrices of the samples."""
    shape = (len(samples), width)
    made = {n: np.zeros(shape, d) for n, d in (("ids", np.int64), ("seen", np.int64), ("sampled", np.int64))}
    for row, sample in enumerate(samples):
        n = len(sample.segment)
        made["ids"][row, :n] = sample.segment.token_ids
        made["seen"][row, :n] = 1
        made["sampled"][row, :n] = sample.segment.loss_mask
    tensors = {name: torch.from_numpy(value).to(device) for name, value in made.items()}
    tensors["advantages"] = torch.tensor([float(s.advantages[-1]) for s in samples], device=device)
    return tensors


def update(model: Any, optimizer: torch.optim.Optimizer) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def trl_step(shape: Shape, model: Any, device: torch.device) -> Callable[[], None]:
    """GRPOTrainer's own code. It pads to the longest of the whole generation batch, then splits by rows."""
    from trl.trainer.grpo_trainer import GRPOTrainer
    from trl.trainer.utils import add_fused_lm_head

    samples = samples_of(shape)
    rows = max(1, shape.micro_tokens // shape.longest)
    add_fused_lm_head(model, temperature=1.0, outputs=("log_probs", "entropy"))
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-9, fused=device.type == "cuda")
    parts = [padded(samples[i : i + rows], shape.longest, device) for i in range(0, len(samples), rows)]
    accelerator = SimpleNamespace(
        num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x, autocast=contextlib.nullcontext,
        sync_gradients=True,
    )  # fmt: skip
    stub = SimpleNamespace(
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=len(parts)),
        aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None, beta=0.0, loss_type="dapo",
        importance_sampling_level="token", epsilon_low=0.2, epsilon_high=0.28, use_vllm=False, model=model,
        vllm_importance_sampling_correction=False, current_gradient_accumulation_steps=len(parts),
        max_completion_length=shape.longest, accelerator=accelerator, _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
    )  # fmt: skip
    logprobs = inspect.unwrap(GRPOTrainer._get_per_token_logps_and_entropies)  # without its profiler
    stub._get_per_token_logps_and_entropies = lambda *a, **k: logprobs(stub, *a, **k)
    total = torch.tensor(float(sum(s.segment.loss_mask.sum() for s in samples)), device=device)

    def step() -> None:
        for part in parts:
            inputs = {
                "prompt_ids": part["ids"][:, :1],
                "prompt_mask": part["seen"][:, :1],
                "completion_ids": part["ids"][:, 1:],
                "completion_mask": part["seen"][:, 1:],
                "tool_mask": part["sampled"][:, 1:],
                "advantages": part["advantages"],
                "num_items_in_batch": total,
            }
            loss: Any = GRPOTrainer._compute_loss(stub, model, inputs)  # type: ignore[arg-type, no-untyped-call]
            loss.backward()
        update(model, optimizer)

    return step


def plain_step(shape: Shape, model: Any, device: torch.device) -> Callable[[], None]:
    """What one would write first, sorted by length so that little is padded."""
    samples = sorted(samples_of(shape), key=lambda s: -len(s.segment))
    parts, start = [], 0
    while start < len(samples):
        width = len(samples[start].segment)
        rows = max(1, shape.micro_tokens // width)
        parts.append(padded(samples[start : start + rows], width, device))
        start += rows
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-9, fused=device.type == "cuda")
    total = float(sum(s.segment.loss_mask.sum() for s in samples))

    def step() -> None:
        for part in parts:
            logits = model(input_ids=part["ids"], attention_mask=part["seen"], use_cache=False).logits[:, :-1]
            logp = logits.float().log_softmax(-1).gather(-1, part["ids"][:, 1:, None])[..., 0]
            ratio = (logp - logp.detach()).exp()
            advantages = part["advantages"][:, None]
            losses = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)
            ((losses * part["sampled"][:, 1:]).sum() / total).backward()  # type: ignore[no-untyped-call]
        update(model, optimizer)

    return step


if __name__ == "__main__":
    main()
