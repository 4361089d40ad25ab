"""On-policy distillation: a teacher says how likely each token of the policy was to it, and the advantage follows.

    samples ── log π_T of every sampled token ── advantage = reward_weight · A + coefficient · (log π_T − log π)
                 ├─ LocalTeacher: a model in this process, packed as the learner packs
                 └─ ServedTeacher: SGLang servers, one prefill per segment; a dead one is passed over, then tried again

log π is what the engine sampled with, at the same temperature. The mean of log π − log π_T over the policy's own tokens
is the reverse KL divergence per token, `learn/teacher_kl`.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from agentrl.errors import EngineError, RecipeError
from agentrl.learn import checkpoint
from agentrl.learn.attention import choose, packed
from agentrl.learn.hub import model_folder
from agentrl.learn.logprobs import HeadOutput
from agentrl.learn.model import load_model
from agentrl.learn.model_check import check_structure, own_logprobs, probe_sequences, refuse
from agentrl.learn.pack import pack
from agentrl.learn.scorer import Scorer
from agentrl.recipe import PretrainedModel, Recipe, TeacherSection
from agentrl.rollout.sampling import BACKOFF_S
from agentrl.types import TrainingSample

if TYPE_CHECKING:
    from agentrl.engines.sglang.client import Client

Floats = NDArray[np.float32]
CONCURRENCY = 32
"""Sequences that are under way at the servers at once."""


def distilled(
    samples: Sequence[TrainingSample], logprobs: Sequence[Floats], coefficient: float, reward_weight: float
) -> list[TrainingSample]:
    """Return the samples with the teacher's part in their advantages; `logprobs` are those of the sampled tokens."""
    taught = []
    for sample, teacher in zip(samples, logprobs, strict=True):
        mask = sample.segment.loss_mask
        advantages = (reward_weight * sample.advantages).astype(np.float32)
        advantages[mask] += np.float32(coefficient) * (teacher - sample.segment.logprobs[mask])
        taught.append(replace(sample, advantages=advantages))
    return taught


class Scores(Protocol):
    """Whatever scores tokens."""

    async def score(self, samples: Sequence[TrainingSample]) -> list[Floats]:
        """Return the logprob of each sampled token of each sample."""
        ...

    async def close(self) -> None:
        """Release what it holds."""
        ...


class Teacher:
    """Gives samples their advantages by what a teacher says, and keeps the figures of the last step."""

    def __init__(self, section: TeacherSection, source: Scores) -> None:
        self.section, self.source = section, source
        self.figures: dict[str, float] = {}

    async def credit(self, samples: Sequence[TrainingSample]) -> list[TrainingSample]:
        """Return the samples that count, with the teacher's part in their advantages."""
        began = time.perf_counter()
        counting = [s for s in samples if s.weight > 0 and s.segment.loss_mask.any()]
        logprobs = await self.source.score(counting)
        gaps = [s.segment.logprobs[s.segment.loss_mask] - t for s, t in zip(counting, logprobs, strict=True)]
        mean = float(np.concatenate(gaps).mean(dtype=np.float64)) if gaps else 0.0
        self.figures = {"learn/teacher_kl": mean, "learn/teacher_seconds": time.perf_counter() - began}
        return distilled(counting, logprobs, self.section.coefficient, self.section.reward_weight)

    async def close(self) -> None:
        """Release the model or the connections."""
        await self.source.close()


# Opening -----------------------------------------------------------------------------------------------------------


def folder_of(section: TeacherSection) -> Path:
    """Return the teacher's transformers folder; refuse what is none."""
    path = section.path
    if (path / "recipe.yaml").is_file():
        saved = checkpoint.latest(path / "checkpoints")
        if saved is None:
            raise RecipeError(f"teacher.path: the run {path} has no checkpoint yet")
        folder = saved.model
    else:
        folder = path / "model" if (path / checkpoint.MARKER).is_file() else model_folder(path)
    if (folder / "adapter_config.json").is_file():
        raise RecipeError(
            f"teacher.path: {folder} holds a LoRA adapter alone; merge it first with `agentrl model export`"
        )
    if not (folder / "config.json").is_file():
        raise RecipeError(
            f"teacher.path: {path} is neither a transformers folder nor a run, a checkpoint or a Hugging Face id"
        )
    return folder


def vocabulary_hash(tokenizer: Any) -> str:
    """Hash which text each token id stands for."""
    pairs = sorted((int(number), token) for token, number in tokenizer.get_vocab().items())
    return hashlib.sha256(repr(pairs).encode()).hexdigest()


def same_vocabulary(student: Any, teacher: Any) -> None:
    """Refuse a teacher to which the policy's token ids mean something else."""
    if vocabulary_hash(student) == vocabulary_hash(teacher):
        return
    ours, theirs = student.get_vocab(), teacher.get_vocab()
    differ = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
    raise RecipeError(
        f"teacher.path: its vocabulary is another one than the policy's ({len(theirs)} and {len(ours)} tokens; "
        f"{len(differ)} differ, for example {differ[0]!r} is {theirs.get(differ[0])} there and {ours.get(differ[0])} "
        "here), so it cannot judge the policy's token ids; choose a teacher of the same family"
    )


async def open_teacher(recipe: Recipe, tokenizer: Any, context: int) -> Teacher | None:
    """Open the recipe's teacher, where it has one; refuse one that cannot score the policy's tokens."""
    section = recipe.teacher
    if section is None:
        return None
    from transformers import AutoConfig, AutoTokenizer

    folder = folder_of(section)
    same_vocabulary(tokenizer, AutoTokenizer.from_pretrained(folder))
    longest = int(AutoConfig.from_pretrained(folder).get_text_config().max_position_embeddings)
    if longest < context:
        raise RecipeError(
            f"teacher.path: it takes sequences of at most {longest} tokens, the policy's may have {context}; set "
            f"rollout.max_context: {longest}"
        )
    if not section.urls:
        return Teacher(section, await asyncio.to_thread(LocalTeacher, recipe, folder))
    if recipe.rollout.temperature != 1.0:
        raise RecipeError(
            f"teacher.urls: servers score at temperature 1, but rollout.temperature is {recipe.rollout.temperature:g}; "
            "set it to 1, or leave the urls out"
        )
    served = ServedTeacher(section, len(tokenizer.get_vocab()))
    try:
        await served.probe()
    except BaseException:
        await served.close()
        raise
    return Teacher(section, served)


class LocalTeacher:
    """A model in this process."""

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        assert recipe.teacher is not None
        section = PretrainedModel(path=folder, dtype=recipe.teacher.dtype)
        self._model, _ = load_model(section, folder=folder, device=recipe.teacher.device)
        self._model.requires_grad_(False).eval()
        self._micro_tokens, temperature = recipe.learner.micro_tokens, recipe.rollout.temperature
        self._scorer = Scorer(self._model, temperature=temperature, candidates=0, float32=recipe.model.float32_head)
        weight = self._model.get_output_embeddings().weight
        self._device, self._kind = weight.device, choose("auto", weight.device, weight.dtype)
        self._check(temperature, weight.shape[0], exact=weight.dtype == torch.float32)

    async def score(self, samples: Sequence[TrainingSample]) -> list[Floats]:
        """Return the logprob of each sampled token of each sample."""
        return await asyncio.to_thread(self._score, samples)

    async def close(self) -> None:
        """Leave the model to the garbage collector."""

    def _score(self, samples: Sequence[TrainingSample]) -> list[Floats]:
        logprobs: list[Floats] = [np.zeros(0, np.float32)] * len(samples)
        batch = pack(samples, "token", micro_tokens=self._micro_tokens)
        for micro in (micro for minibatch in batch.minibatches for micro in minibatch):
            counts = torch.bincount(micro.sequence, minlength=micro.sequences).tolist()
            scored = self._logprobs(micro.to(self._device)).float().cpu()
            for place, part in zip(micro.members, torch.split(scored, counts), strict=True):
                logprobs[place] = part.numpy()
        return logprobs

    def _logprobs(self, micro: Any) -> torch.Tensor:
        with torch.no_grad(), packed(self._model):
            return HeadOutput.of(self._scorer(micro, self._kind)).logprobs

    def _check(self, temperature: float, vocabulary: int, *, exact: bool) -> None:
        """Check that packed logprobs equal the model's own, as the learner does with the policy."""
        sequences, micro = probe_sequences(vocabulary)
        micro = micro.to(self._device)
        check_structure(self._model, micro, self._kind)
        differences = (self._logprobs(micro).float() - own_logprobs(self._model, sequences, temperature)).abs()
        if not float(differences.max() if exact else differences.mean()) < (1e-3 if exact else 0.3):
            raise refuse(self._model, "as a teacher it gives other logprobs packed than by itself")


class ServedTeacher:
    """SGLang servers; made inside a running event loop."""

    def __init__(self, section: TeacherSection, vocabulary: int) -> None:
        from agentrl.engines.sglang.client import Client

        self._section, self._last = section, vocabulary - 1
        self._clients = [Client(url) for url in section.urls]
        self._places = asyncio.Semaphore(CONCURRENCY)

    async def close(self) -> None:
        """Close the connections."""
        await asyncio.gather(*(client.close() for client in self._clients))

    async def probe(self) -> None:
        """Ask every server to score a few tokens, the last of the vocabulary among them."""
        ids = [0, self._last // 2, self._last]
        for client in self._clients:
            try:
                await self._ask(client, ids, 1)
            except EngineError as error:
                raise EngineError(f"teacher.urls: {client.url} cannot score tokens: {error}") from error

    async def score(self, samples: Sequence[TrainingSample]) -> list[Floats]:
        """Return the logprob of each sampled token of each sample."""
        return list(await asyncio.gather(*(self._one(number, sample) for number, sample in enumerate(samples))))

    async def _one(self, number: int, sample: TrainingSample) -> Floats:
        mask = sample.segment.loss_mask
        ids, first = sample.segment.token_ids.tolist(), int(mask.argmax())
        failures: list[str] = []
        async with self._places:
            for attempt in range(self._section.retries + 1):
                client = self._clients[(number + attempt) % len(self._clients)]
                try:
                    scored = await self._ask(client, ids, first)
                    return scored[mask[first:]]
                except EngineError as error:
                    failures.append(str(error))
                    await asyncio.sleep(min(10.0, BACKOFF_S * 2**attempt))
        raise EngineError(
            f"the teacher did not score a sequence of {len(ids)} tokens in {len(failures)} attempts; start its servers "
            f"again (teacher.urls), then resume with --resume. The last answer: {failures[-1]}"
        )

    async def _ask(self, client: Client, ids: list[int], first: int) -> Floats:
        """Return the logprobs of the tokens from `first` on, by one prefill."""
        body = {
            "input_ids": ids,
            "sampling_params": {"max_new_tokens": 0, "temperature": 0.0},
            "return_logprob": True,
            "logprob_start_len": first - 1,
        }
        reply = await client.call("/generate", body, self._section.timeout_s)
        pairs = (reply.get("meta_info") or {}).get("input_token_logprobs") or []
        wanted = pairs[len(pairs) - (len(ids) - first) :]
        # SGLang names the last token of its vocabulary 0, since it takes it for a piece of an image.
        echoed = [
            own if own >= self._last and not pair[1] else pair[1]
            for pair, own in zip(wanted, ids[first:], strict=False)
        ]
        if echoed != ids[first:] or any(pair[0] is None for pair in wanted):
            raise EngineError(f"{client.url} gave no logprobs of the tokens that it was sent")
        logprobs = np.array([pair[0] for pair in wanted], dtype=np.float32)
        if not np.isfinite(logprobs).all():
            raise EngineError(f"{client.url} gave logprobs that are not finite")
        return logprobs
