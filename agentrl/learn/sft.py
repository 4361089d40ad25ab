"""The warm start: supervised fine-tuning on expert demonstrations with TRL's SFTTrainer and our loss masks.

A demonstration is a trajectory like any other, played by a scripted engine in a real episode: its tokens, masks and
observations are those of RL.
"""

from __future__ import annotations

import copy
import gc
import math
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import PrinterCallback

from agentrl.errors import UserError
from agentrl.recipe import WarmStartSection
from agentrl.types import Trajectory

IGNORED = -100
"""The label of a token that is not trained on."""


def rows(trajectories: Sequence[Trajectory]) -> list[dict[str, list[int]]]:
    """Return SFTTrainer's rows: input_ids, and labels that are the sampled tokens and -100 elsewhere."""
    result = []
    for trajectory in trajectories:
        if trajectory.usage is not None:
            raise ValueError(f"{trajectory.task.id} was played by a chat endpoint: it has no token ids to train on")
        for segment in trajectory.segments:
            labels = [t if m else IGNORED for t, m in zip(segment.token_ids.tolist(), segment.loss_mask, strict=True)]
            result.append({"input_ids": segment.token_ids.tolist(), "labels": labels})
    return result


def solved(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Return the demonstrations that solve their task; UserError where none does."""
    right = [t for t in trajectories if t.outcome.score == 1.0]
    if not right:
        raise UserError(
            "no demonstration solved its task; does the environment's expert() work? Try `agentrl env check`"
        )
    return right


def warm_start(
    model: Any,
    tokenizer: Any,
    trajectories: Sequence[Trajectory],
    section: WarmStartSection,
    *,
    seed: int,
    micro_tokens: int,
    say: Callable[[str], None] = print,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> float:
    """Train `model` in place; return the last mean loss. Same seed, machine and threads give the same weights.

    Training uses a float32 copy, because small updates would be lost in bfloat16 weights. About `micro_tokens` go
    through it at once, because their activations take most of the memory.
    """
    from datasets import Dataset, disable_progress_bars

    dataset = rows(solved(trajectories))
    disable_progress_bars()
    heard = _Listener(say, progress)
    student = copy.deepcopy(model).float()
    with tempfile.TemporaryDirectory() as temporary:
        trainer = _trainer_class(section.smoothing)(
            model=student,
            args=_config(
                section, dataset, seed, micro_tokens, Path(temporary), next(model.parameters()).device.type == "cuda"
            ),
            train_dataset=Dataset.from_list(dataset),
            processing_class=tokenizer,
            callbacks=[heard],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    check_applied(heard.steps, heard.skipped)
    model.load_state_dict(student.state_dict())  # into the same tensors: an engine may sample from them
    model.eval()
    del trainer, student
    gc.collect()
    torch.cuda.empty_cache()  # so that a server on the same GPU can use the memory
    return heard.losses[-1] if heard.losses else float("nan")


def _at_once(batch: int, longest: int, micro_tokens: int) -> int:
    """Return how many sequences go through the model together: a divisor of the batch within the token budget."""
    return max(n for n in range(1, batch + 1) if batch % n == 0 and (n == 1 or n * longest <= micro_tokens))


def _config(
    section: WarmStartSection,
    dataset: Sequence[dict[str, list[int]]],
    seed: int,
    micro_tokens: int,
    folder: Path,
    cuda: bool,
) -> Any:
    from trl.trainer.sft_config import SFTConfig

    at_once = _at_once(section.batch, max(len(row["input_ids"]) for row in dataset), micro_tokens)
    return SFTConfig(
        output_dir=str(folder),
        num_train_epochs=section.epochs,
        per_device_train_batch_size=at_once,
        gradient_accumulation_steps=section.batch // at_once,
        learning_rate=section.lr,
        lr_scheduler_type="cosine",
        warmup_steps=10,
        weight_decay=0.0,
        bf16=cuda and torch.cuda.is_bf16_supported(),
        use_cpu=not cuda,
        gradient_checkpointing=False,
        logging_strategy="steps",
        logging_nan_inf_filter=False,
        logging_steps=max(1, int(len(dataset) * section.epochs / section.batch / 10)),
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=seed % 2**31,
        data_seed=seed % 2**31,
        max_length=None,
        packing=False,
        dataloader_num_workers=0,
    )


class _Listener(TrainerCallback):
    """Keeps and reports the losses, and skips updates whose gradients are no numbers: one would spoil all weights."""

    def __init__(self, say: Callable[[str], None], progress: Callable[[int, int], None]) -> None:
        self._say, self._progress = say, progress
        self.losses: list[float] = []
        self.steps = self.skipped = 0

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        self.steps += 1
        if not torch.stack(torch._foreach_norm(gradients)).isfinite().all():
            self.skipped += 1
            model.zero_grad(set_to_none=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._progress(state.global_step, state.max_steps)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if logs and math.isfinite(loss := float(logs.get("loss", math.nan))):
            self.losses.append(loss)
            self._say(f"warm start: step {state.global_step} of {state.max_steps}, loss {loss:.4f}")


def check_applied(steps: int, skipped: int) -> None:
    """Warn of updates that were skipped because their gradients were not finite; where all were, raise UserError."""
    if skipped and skipped == steps:
        raise UserError(
            f"warm start: none of its {steps} updates had finite gradients; lower warm_start.lr, or try "
            "model.dtype: float32"
        )
    if skipped:
        warnings.warn(
            f"warm start: {skipped} of {steps} updates were skipped: their gradients were not finite", stacklevel=2
        )


def _trainer_class(smoothing: float) -> Any:
    """Return TRL's SFTTrainer, with label smoothing where the recipe sets it."""
    from trl.trainer.sft_trainer import SFTTrainer

    class Smoothed(SFTTrainer):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            labels = inputs.pop("labels")[:, 1:].flatten()
            outputs = model(**inputs)
            logits = outputs.logits[:, :-1].flatten(0, 1).float()
            total = torch.nn.functional.cross_entropy(
                logits, labels, ignore_index=IGNORED, label_smoothing=smoothing, reduction="sum"
            )
            loss = total / (num_items_in_batch if num_items_in_batch is not None else (labels != IGNORED).sum())
            return (loss, outputs) if return_outputs else loss

    return Smoothed if smoothing else SFTTrainer
