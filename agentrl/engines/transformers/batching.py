"""Continuous batching: requests join and leave the running batch of the transformers engine at any token.

    submit ──> waiting ──admit──> slot: copy a known prefix, prefill the rest chunk by chunk
                                    │
                                    └──> decode: one token per forward pass for every ready slot ──> finished

A slot keeps its keys and values after its request has ended, so the next turn of a conversation, or the next rollout
of a group, starts from them. Only one thread may call a `Batch`.
"""

from __future__ import annotations

import concurrent.futures
import math
import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from agentrl.engines.base import Sampling
from agentrl.engines.transformers.batch_invariance import ROWS, BatchShapes, agreeing
from agentrl.engines.transformers.decoding import BLOCK, Masks, SlotCache, draw, uniforms
from agentrl.engines.transformers.routers import Recorder
from agentrl.errors import EngineError
from agentrl.types import Completion, Finish

CHUNK = 512
"""Prompt tokens that one forward pass computes, unless the batch is exact."""
COUNTERS = (
    "requests", "aborted", "tokens", "prompt_tokens", "prefilled_tokens", "cached_tokens", "steps", "rows", "busy_s",
)  # fmt: skip
"""What a batch counts from its start."""


@dataclass(eq=False, slots=True)
class Request:
    """One turn that is being sampled."""

    prompt: tuple[int, ...]
    sampling: Sampling
    seed: int
    future: concurrent.futures.Future[Completion] = field(default_factory=concurrent.futures.Future)
    """Set once, in the batch's thread. A request whose future is cancelled leaves the batch before the next token."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    experts: NDArray[np.signedinteger[Any]] | None = None
    """The experts chosen for its tokens, where they are recorded."""
    tell: Callable[[list[int]], None] | None = None
    """Called after each token, in the batch's thread."""

    def settle(self, result: Finish | EngineError) -> None:
        """Give the tokens sampled so far, or an error, to the caller, unless it has cancelled the request."""
        if not self.future.set_running_or_notify_cancel():
            return
        if isinstance(result, EngineError):
            self.future.set_exception(result)
        else:
            self.future.set_result(
                Completion(
                    token_ids=tuple(self.tokens),
                    logprobs=tuple(self.logprobs),
                    versions=tuple(self.versions),
                    finish=result,
                    experts=self.experts,
                )
            )


@dataclass(eq=False, slots=True)
class Slot:
    """A row of the key-value block."""

    index: int
    request: Request | None = None
    ids: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """The tokens of its request, or of its last one, with room for those still to come."""
    length: int = 0
    """How many of `ids` are known."""
    filled: int = 0
    """How many of them have their keys and values in the block."""
    exact: int = 0
    """How many of those were computed in whole prefill chunks, and so have the same bits in every slot."""
    leader: Slot | None = None
    """The slot that is computing a prefix of this one's prompt."""
    shared: int = 0
    """Length of that prefix."""
    used: int = 0
    """When it was last in use; the oldest free slot is taken first."""


class Batch:
    """The slots, and the model that fills them."""

    def __init__(self, model: Any, *, size: int, context: int, exact: bool = False, experts: bool = False) -> None:
        """`size`: requests decoded together. `exact`: use only batch shapes that give the same bits, so that a
        request's tokens do not depend on the other requests in the batch. `experts`: record which are chosen."""
        parameter = next(model.parameters())
        self.model = model
        self.device = parameter.device
        self.context = context
        self.size = size
        self.chunk = BLOCK if exact else CHUNK
        self.version = 0
        self.waiting: deque[Request] = deque()
        self.counters: dict[str, float] = dict.fromkeys(COUNTERS, 0)
        self._masks = Masks(model.config, parameter.dtype, self.device)
        self._recorder = Recorder(model) if experts else None
        slots = max(ROWS, size) if exact else size
        vocabulary = int(model.config.get_text_config().vocab_size)
        self.batch_shapes: BatchShapes | None = None
        if exact:
            with torch.inference_mode():
                self.batch_shapes = agreeing(self._forward, slots=slots, context=context, vocabulary=vocabulary)
        self._slots = [Slot(index) for index in range(slots)]
        self._cache = SlotCache(slots, context)
        self._clock = 0

    # What the engine calls --------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self.waiting and all(slot.request is None for slot in self._slots)

    def submit(self, request: Request) -> None:
        """Queue a request; it joins at the next step."""
        self.counters["requests"] += 1
        self.counters["prompt_tokens"] += len(request.prompt)
        self.waiting.append(request)

    def step(self) -> None:
        """Admit and drop requests, compute one chunk of prompts, then one token of every ready request."""
        began = time.perf_counter()
        self._drop_cancelled()
        self._admit()
        self._prefill()
        self._decode()
        self.counters["busy_s"] += time.perf_counter() - began

    def renew(self, version: int) -> None:
        """Drop what was computed with the old weights, so that it is computed again; sampled tokens stay."""
        self.version = version
        for slot in self._slots:
            slot.filled = slot.exact = 0
            slot.leader = None
            if slot.request is None:
                slot.length = 0

    def fail(self, error: EngineError) -> None:
        """End every request with an error."""
        for slot in self._slots:
            if slot.request is not None:
                self._leave(slot, error)
            slot.length = slot.filled = slot.exact = 0
        while self.waiting:
            self.waiting.popleft().settle(error)

    # Joining and leaving ----------------------------------------------------------------------------------------

    def _drop_cancelled(self) -> None:
        for slot in self._slots:
            if slot.request is not None and slot.request.future.cancelled():
                self.counters["aborted"] += 1
                self._leave(slot, "abort")

    def _leave(self, slot: Slot, result: Finish | EngineError) -> None:
        assert slot.request is not None
        request, slot.request, slot.leader = slot.request, None, None
        self._clock += 1
        slot.used = self._clock
        if self._recorder is not None and slot.filled:
            request.experts = self._cache.experts[0][slot.index, : slot.filled].cpu().numpy().copy()
        request.settle(result)

    def _admit(self) -> None:
        while self.waiting:
            free = [slot for slot in self._slots if slot.request is None]
            if len(self._slots) - len(free) >= self.size:
                return
            request = self.waiting.popleft()
            if request.future.cancelled():
                self.counters["aborted"] += 1
                continue
            ids = np.fromiter(request.prompt, np.int64, len(request.prompt))
            source, shared = self._longest_prefix(ids)
            # A free slot that holds the prefix is taken over; otherwise an empty one, then the least recently used.
            takes_over = source is not None and source.request is None
            slot = source if source is not None and takes_over else min(free, key=_worth)
            slot.request = request
            slot.ids = np.concatenate([ids, np.zeros(request.sampling.max_tokens, np.int64)])
            slot.length = len(ids)
            if takes_over:
                slot.filled, slot.exact = shared, min(slot.exact, shared)
                self.counters["cached_tokens"] += shared
            else:
                slot.filled = slot.exact = 0
                slot.leader, slot.shared = source, shared

    def _longest_prefix(self, ids: NDArray[np.int64]) -> tuple[Slot | None, int]:
        """Return the slot that shares the longest useful prefix with `ids`, computed or about to be, and its length."""
        best, longest = None, 0
        for slot in self._slots:
            usable = slot.length - 1 if slot.request is not None else slot.filled
            if self._whole_chunks:
                planned = (len(slot.request.prompt) - 1) // self.chunk * self.chunk if slot.request is not None else 0
                usable = max(slot.exact, planned)
            usable = min(usable, len(ids) - 1)
            if usable <= longest:
                continue
            differs = np.flatnonzero(slot.ids[:usable] != ids[:usable])
            common = int(differs[0]) if len(differs) else usable
            if self._whole_chunks:
                common = common // self.chunk * self.chunk
            if common > longest:
                best, longest = slot, common
        return best, longest

    @property
    def _whole_chunks(self) -> bool:
        """Whether only whole chunks of a prompt may be reused, since a sampled token's keys have other bits."""
        return self.batch_shapes is not None and not self.batch_shapes.decoded

    # Prompts ----------------------------------------------------------------------------------------------------

    def _prefill(self) -> None:
        """Fill one chunk of the prompts that are not ready; a prompt's last token is left to the decoding step."""
        behind: list[Slot] = []
        for slot in self._slots:
            if slot.request is None or slot.filled >= slot.length - 1:
                continue
            if slot.leader is not None and not self._follow(slot):
                continue
            if slot.filled < slot.length - 1:
                behind.append(slot)
        # Rows of one pass are padded to the longest: group similar lengths, and keep a pass near the chunk's size.
        behind.sort(key=lambda slot: slot.length - slot.filled)
        while behind:
            counts = [min(slot.length - 1 - slot.filled, self.chunk) for slot in behind]
            if self.batch_shapes is not None:
                together = max(n for n in self.batch_shapes.fills if n <= len(behind))
            else:
                together = sum(1 for n, count in enumerate(counts) if n == 0 or count * (n + 1) <= 2 * self.chunk)
            width = self.chunk if self.batch_shapes is not None else max(counts[:together])
            self._fill(behind[:together], counts[:together], width)
            del behind[:together]

    def _follow(self, slot: Slot) -> bool:
        """Copy the prefix from the slot that computes it; return False while it is not ready."""
        leader = slot.leader
        assert leader is not None
        same = leader.length >= slot.shared and np.array_equal(leader.ids[: slot.shared], slot.ids[: slot.shared])
        if not same:  # the leader has taken another request meanwhile
            slot.leader = None
            return True
        ready = leader.exact if self._whole_chunks else leader.filled
        if ready < slot.shared and leader.request is not None:
            return False
        common = min(ready, slot.shared)
        if common:
            self._cache.copy(leader.index, slot.index, common)
            slot.filled = common
            slot.exact = min(leader.exact, common)
            self.counters["cached_tokens"] += common
        slot.leader = None
        return True

    def _fill(self, slots: list[Slot], counts: list[int], width: int) -> None:
        ids = np.zeros((len(slots), width), np.int64)
        for row, (slot, count) in enumerate(zip(slots, counts, strict=True)):
            ids[row, :count] = slot.ids[slot.filled : slot.filled + count]
        positions = torch.tensor([slot.filled for slot in slots])[:, None] + torch.arange(width)
        reach = self._reach(int(positions[:, -1].max()) + 1)
        index = torch.tensor([slot.index for slot in slots])
        self._forward(self._cache, torch.from_numpy(ids), positions, index, reach)
        for slot, count in zip(slots, counts, strict=True):
            if count == self.chunk and slot.exact == slot.filled:
                slot.exact += count
            slot.filled += count
            self.counters["prefilled_tokens"] += count

    def _reach(self, tokens: int) -> int:
        """Return how far attention looks when the longest request has `tokens` tokens."""
        if self.batch_shapes is None:
            return -(-tokens // BLOCK) * BLOCK
        return self.batch_shapes.reach(tokens, self.context)

    # Tokens -----------------------------------------------------------------------------------------------------

    def _decode(self) -> None:
        ready = [s for s in self._slots if s.request is not None and s.filled == s.length - 1 and s.leader is None]
        if not ready:
            return
        rows = self._packed(ready)
        if self.batch_shapes is not None:
            rows = next(n for n in self.batch_shapes.rows if n >= rows)
        # Every row below `rows` takes part: those that are not ready write one garbage token behind what they hold.
        ids = np.zeros((rows, 1), np.int64)
        positions = np.zeros((rows, 1), np.int64)
        width = self._reach(max(slot.filled for slot in ready) + 1)
        for slot in self._slots[:rows]:
            positions[slot.index] = slot.filled
        for slot in ready:
            ids[slot.index] = slot.ids[slot.filled]
        logits = self._forward(self._cache, torch.from_numpy(ids), torch.from_numpy(positions), slice(0, rows), width)
        self._sample(ready, logits)
        self.counters["steps"] += 1
        self.counters["rows"] += rows

    def _packed(self, ready: list[Slot]) -> int:
        """Move ready requests down into free slots, to make the batch small, and return how many rows it has."""
        top = ready[-1]
        free = [s for s in self._slots[: top.index] if s.request is None]
        if len(free) <= len(ready) // 8:
            return top.index + 1
        for target in free:
            source = ready[-1]
            if source.index < target.index:
                break
            self._cache.copy(source.index, target.index, source.filled)
            target.request, target.ids, target.length = source.request, source.ids, source.length
            target.filled, target.exact, target.leader = source.filled, source.exact, None
            source.request, source.length = None, source.filled
            for follower in self._slots:
                if follower.leader is source:
                    follower.leader = target
            ready[-1] = target
            ready.sort(key=lambda slot: slot.index)
        return ready[-1].index + 1

    def _sample(self, ready: list[Slot], logits: torch.Tensor) -> None:
        requests = [slot.request for slot in ready if slot.request is not None]
        samplings = [request.sampling for request in requests]
        counts = np.array([len(request.tokens) for request in requests], np.uint64)
        uniform = uniforms(np.array([request.seed for request in requests], np.uint64), counts)
        temperature = torch.tensor([s.temperature for s in samplings], dtype=torch.float32, device=self.device)
        filters = [(s.top_k, s.top_p) for s in samplings]
        plain = all(top_k == 0 and top_p >= 1.0 for top_k, top_p in filters)
        if len(ready) < logits.shape[0]:
            logits = logits.index_select(0, torch.tensor([slot.index for slot in ready], device=self.device))
        tokens, logprobs = draw(
            logits, torch.from_numpy(uniform).to(self.device), temperature, None if plain else filters
        )
        self.counters["tokens"] += len(ready)
        for slot, request, token, logprob in zip(ready, requests, tokens, logprobs, strict=True):
            slot.filled += 1
            if not math.isfinite(logprob):
                self._leave(slot, EngineError(_not_finite(request, self.version)))
                continue
            request.tokens.append(token)
            request.logprobs.append(logprob)
            request.versions.append(self.version)
            if request.tell is not None:
                request.tell(request.tokens)
            slot.ids[slot.length] = token
            slot.length += 1
            if token in request.sampling.stop_token_ids:
                self._leave(slot, "stop")
            elif len(request.tokens) >= request.sampling.max_tokens:
                self._leave(slot, "length")

    def _forward(
        self, cache: SlotCache, ids: torch.Tensor, positions: torch.Tensor, slots: slice | torch.Tensor, width: int
    ) -> torch.Tensor:
        """Return the logits of each row's last token; keys and values are stored at `positions` of `slots`."""
        cache.reserve(max(width, int(positions.max()) + 1))
        if isinstance(slots, slice):
            index = torch.arange(slots.start, slots.stop)
        else:
            index, slots = slots, slots.to(self.device)
        targets = (index[:, None] * cache.capacity + positions).reshape(-1)
        cache.aim(targets.to(self.device), slots, width)
        # Padding behind the context's end must not change the codes of a model with dynamic position codes.
        places = positions.clamp(max=self.context - 1).to(self.device)
        with nullcontext() if self._recorder is None else self._recorder.watch():
            output = self.model(
                input_ids=ids.to(self.device),
                position_ids=places,
                attention_mask=self._masks(places, width),
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
        if self._recorder is not None:
            cache.keep_experts(self._recorder.choices())
        logits: torch.Tensor = output.logits[:, -1]
        return logits


def _worth(slot: Slot) -> tuple[bool, int, int]:
    return (slot.filled > 0, slot.used if slot.filled else 0, slot.index)


def _not_finite(request: Request, version: int) -> str:
    return (
        f"the model gives no finite probabilities after {len(request.prompt)} prompt and {len(request.tokens)} sampled "
        f"tokens (policy version {version}); its weights are probably NaN, look at the last learner step"
    )
