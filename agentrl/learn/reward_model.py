"""A reward model as a judge's backend: a transformers model for sequence classification with one output.

problem, submission ── chat template, control tokens of both kept out ── one forward pass ── a number in [0, 1]
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Sequence
from typing import Any

import torch

from agentrl.engines.openai import Answer
from agentrl.errors import EngineError, RecipeError
from agentrl.learn.hub import model_folder
from agentrl.learn.model import device_of, hide_progress_bars, precision
from agentrl.recipe import RewardModelJudge
from agentrl.rollout.encoder import Encoder, Marks
from agentrl.types import Message


class RewardModel:
    """Answers a conversation with its reward, as text; one conversation at a time, so that no other one changes it."""

    def __init__(self, section: RewardModelJudge) -> None:
        self._section = section
        self._model, self._tokenizer = _loaded(section)
        self._encoder = Encoder(
            self._tokenizer.backend_tokenizer,
            self._tokenizer.all_special_ids,
            getattr(self._tokenizer, "unk_token_id", None),
        )
        context = int(getattr(self._model.config.get_text_config(), "max_position_embeddings", None) or 1 << 30)
        self._context = min(section.max_context or context, context)
        self._one = threading.Lock()

    async def start(self) -> None:
        """Need nothing more: the model is loaded."""

    async def chat(
        self, messages: Sequence[Message], *, max_tokens: int, temperature: float = 1.0, seed: int | None = None
    ) -> Answer:
        """Return the reward of a conversation; EngineError for one that the model's context does not hold."""
        tokens = self._tokens(messages)
        if len(tokens) > self._context:
            raise EngineError(f"{len(tokens)} tokens do not fit the reward model's context of {self._context}")
        output = await asyncio.to_thread(self._output, tokens)
        score = normalised(output, self._section.bounds)
        message = Message(role="assistant", content=f"{score:.12f}" if math.isfinite(score) else "nan")
        return Answer(message=message, finish="stop", prompt_tokens=len(tokens), completion_tokens=0)

    async def close(self) -> None:
        """Let the weights go."""
        self._model = None

    def _tokens(self, messages: Sequence[Message]) -> tuple[int, ...]:
        marks = Marks.absent_from([message.content for message in messages])
        entries = [{"role": message.role, "content": marks.around(message.content)} for message in messages]
        text = self._tokenizer.apply_chat_template(entries, tokenize=False)
        return self._encoder.span(text, marks).token_ids

    def _output(self, tokens: Sequence[int]) -> float:
        with self._one, torch.inference_mode():
            model = self._model
            if model is None:
                raise EngineError("the reward model is closed")
            ids = torch.tensor([list(tokens)], device=model.device)
            return float(model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, 0].float())


def normalised(output: float, bounds: tuple[float, float] | None) -> float:
    """Map an output to [0, 1]: by the logistic function, or in proportion between bounds. Not finite stays so."""
    if not math.isfinite(output):
        return math.nan
    if bounds is not None:
        return min(1.0, max(0.0, (output - bounds[0]) / (bounds[1] - bounds[0])))
    return 1.0 / (1.0 + math.exp(-output)) if output >= 0 else math.exp(output) / (1.0 + math.exp(output))


def _loaded(section: RewardModelJudge) -> tuple[Any, Any]:
    """Load the model and its tokenizer; RecipeError for anything that gives no trained reward."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    hide_progress_bars()
    folder = model_folder(section.path)
    if not (folder / "config.json").is_file():
        raise RecipeError(f"judge.engine.path: {folder} is no transformers folder: there is no config.json in it")
    device = device_of(section.device)
    try:
        model, info = AutoModelForSequenceClassification.from_pretrained(
            folder, dtype=precision(section.dtype, device, folder), output_loading_info=True
        )
        tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise RecipeError(f"judge.engine.path: {folder} cannot be loaded as a reward model: {error}") from error
    if missing := sorted(info["missing_keys"]):
        raise RecipeError(f"judge.engine.path: {folder} is no reward model: it has no weights for {missing[0]}")
    if model.config.num_labels != 1:
        raise RecipeError(f"judge.engine.path: {folder} has {model.config.num_labels} outputs; a reward model has one")
    if not getattr(tokenizer, "chat_template", None) or getattr(tokenizer, "backend_tokenizer", None) is None:
        raise RecipeError(f"judge.engine.path: {folder} needs a fast tokenizer with a chat template")
    return model.to(device).eval(), tokenizer
