"""Warm start: supervised fine-tuning on expert demonstrations through TRL's SFTTrainer, with our masks.

A demonstration is a trajectory like any other, played by a scripted engine in a real episode: the tokens, the masks
and the observations are those that training will see.
"""

from __future__ import annotations

import copy
import gc
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import PrinterCallback

from agentrl.errors import UserError
from agentrl.evaluation import Evaluation
from agentrl.recipe import WarmStartSection
from agentrl.types import Trajectory

IGNORED = -100
"""The label of a token that is not trained on."""


def rows(trajectories: Sequence[Trajectory]) -> list[dict[str, list[int]]]:
    """What SFTTrainer takes: input_ids, and labels that are the sampled tokens and -100 elsewhere."""
    made = []
    for trajectory in trajectories:
        for segment in trajectory.segments:
            labels = [t if m else IGNORED for t, m in zip(segment.token_ids.tolist(), segment.loss_mask, strict=True)]
            made.append({"input_ids": segment.token_ids.tolist(), "labels": labels})
    return made


def warm_start(
    model: Any,
    tokenizer: Any,
    trajectories: Sequence[Trajectory],
    section: WarmStartSection,
    *,
    seed: int,
    micro_tokens: int,
    say: Callable[[str], None] = print,
) -> float:
    """Train `model` in place; returns the last mean loss. Same seed, machine and threads: the same weights.

    The work is done on a float32 copy: small updates would be lost in bfloat16 weights. About `micro_tokens` go through
    it at once: their activations are what takes memory.
    """
    from datasets import Dataset, disable_progress_bars

    solved = [t for t in trajectories if t.outcome.score == 1.0]
    if not solved:
        raise UserError(
            "no demonstration solved its task; does the environment's expert() work? try `agentrl env check`"
        )
    disable_progress_bars()
    made = rows(solved)
    losses: list[float] = []
    pupil = copy.deepcopy(model).float()
    with tempfile.TemporaryDirectory() as temporary:
        trainer = _trainer_class(section.smoothing)(
            model=pupil,
            args=_config(
                section, made, seed, micro_tokens, Path(temporary), next(model.parameters()).device.type == "cuda"
            ),
            train_dataset=Dataset.from_list(made),
            processing_class=tokenizer,
            callbacks=[_listener(losses, say)],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    model.load_state_dict(pupil.state_dict())  # into the same tensors: an engine may be sampling from them
    model.eval()
    del trainer, pupil
    gc.collect()
    torch.cuda.empty_cache()  # a server on the same GPU cannot use what this process only keeps in store
    return losses[-1] if losses else float("nan")


def _at_once(batch: int, longest: int, micro_tokens: int) -> int:
    """How many sequences go through the model together: a divisor of the batch that keeps to the token budget."""
    return max(n for n in range(1, batch + 1) if batch % n == 0 and (n == 1 or n * longest <= micro_tokens))


def _config(
    section: WarmStartSection,
    made: Sequence[dict[str, list[int]]],
    seed: int,
    micro_tokens: int,
    folder: Path,
    cuda: bool,
) -> Any:
    from trl.trainer.sft_config import SFTConfig

    at_once = _at_once(section.batch, max(len(row["input_ids"]) for row in made), micro_tokens)
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
        logging_steps=max(1, int(len(made) * section.epochs / section.batch / 10)),
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=seed % 2**31,
        data_seed=seed % 2**31,
        max_length=None,
        packing=False,
        dataloader_num_workers=0,
    )


def _listener(losses: list[float], say: Callable[[str], None]) -> TrainerCallback:
    """Keeps the losses and says them."""

    class Listener(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
            if logs and "loss" in logs:
                losses.append(float(logs["loss"]))
                say(f"warm start: step {state.global_step} of {state.max_steps}, loss {losses[-1]:.4f}")

    return Listener()


def _trainer_class(smoothing: float) -> Any:
    """TRL's SFTTrainer, with label smoothing where it is asked for."""
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


def enough(evaluation: Evaluation, group_size: int) -> str:
    """Whether RL has something to work with: calls that can be read, episodes that end, groups whose scores differ."""
    tried = [t for t in evaluation.trajectories if t.outcome.score is not None]
    calls = [call for t in tried for message in t.messages for call in message.tool_calls]
    valid = sum(call.error is None for call in calls) / len(calls) if calls else 1.0
    well = sum(t.outcome.ending == "done" for t in tried) / max(1, len(tried))
    rates = list(evaluation.summary([1])["levels"].values())
    signal = sum(1 - p**group_size - (1 - p) ** group_size for p in rates) / max(1, len(rates))
    seen = (
        f"{valid:.0%} of the tool calls can be read, {well:.0%} of the episodes end by themselves, {signal:.0%} of "
        f"groups of {group_size} would carry a signal"
    )
    if well < 0.5 or valid < 0.8:
        return f"warm start is too short: {seen}; raise warm_start.demonstrations or .epochs"
    if signal < 0.2:
        hint = "harder levels" if sum(rates) > len(rates) / 2 else "easier levels, or more demonstrations"
        return f"little for RL to work with: {seen}; choose {hint}"
    return f"warm start is enough: {seen}"
