"""Continuous batching: requests join and leave the running batch of the transformers engine at any token.

    submit ──> waiting ──admit──> slot: copy a known prefix, prefill the rest chunk by chunk
                                    │
                                    └──> decode: one forward pass a token for every ready slot ──> finished

A slot keeps its keys and values after its request has ended, so the next turn of a conversation, or the next rollout
of a group, starts from them. Only one thread may call a `Batch`.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from agentrl.engines.base import Sampling
from agentrl.engines.transformers.batch_invariance import ROWS, BatchShapes, agreeing
from agentrl.engines.transformers.decoding import BLOCK, Masks, SlotCache, draw, uniforms
from agentrl.errors import EngineError
from agentrl.types import Completion, Finish


@dataclass(eq=False, slots=True)
class Request:
    """One turn that is being sampled."""

    prompt: tuple[int, ...]
    sampling: Sampling
    seed: int
    finished: Callable[[Request, Completion | EngineError], None]
    """Called once, in the batch's thread."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    cancelled: bool = False
    """Set by whoever submitted it; it leaves the batch before the next token."""

    def completion(self, finish: Finish) -> Completion:
        """What it has so far."""
        return Completion(
            token_ids=tuple(self.tokens),
            logprobs=tuple(self.logprobs),
            versions=tuple(self.versions),
            finish=finish,
        )


@dataclass(eq=False, slots=True)
class Slot:
    """A row of the key-value block."""

    index: int
    request: Request | None = None
    ids: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """The tokens of its request, or of its last one; room for those still to come."""
    length: int = 0
    """How many of `ids` are known."""
    filled: int = 0
    """How many of them have their keys and values in the block."""
    exact: int = 0
    """How many of those were computed in whole prefill chunks, and so are the same bits whoever computes them."""
    leader: Slot | None = None
    """The slot that is computing a prefix of this one's prompt."""
    shared: int = 0
    """Length of that prefix."""
    used: int = 0
    """When it was last in use; the oldest free slot is taken first."""


@dataclass(slots=True)
class Counters:
    """What the batch has done since it was made."""

    requests: int = 0
    aborted: int = 0
    sampled: int = 0
    prompt: int = 0
    prefilled: int = 0
    reused: int = 0
    steps: int = 0
    rows: int = 0
    busy_s: float = 0.0


class Batch:
    """The slots, and the model that fills them."""

    def __init__(self, model: Any, *, size: int, context: int, chunk: int = 512, exact: bool = False) -> None:
        """`size`: requests decoded together. `chunk`: prompt tokens of one pass. `exact`: use only shapes that give
        the same bits, so that a request's tokens do not depend on who else is in the batch."""
        parameter = next(model.parameters())
        self.model = model
        self.device = parameter.device
        self.context = context
        self.size = size
        self.chunk = BLOCK if exact else chunk
        self.version = 0
        self.waiting: deque[Request] = deque()
        self.counters = Counters()
        self._masks = Masks(model.config, parameter.dtype, self.device)
        slots = max(ROWS, size) if exact else size
        vocabulary = int(model.config.get_text_config().vocab_size)
        self.shapes: BatchShapes | None = None
        if exact:
            with torch.inference_mode():
                self.shapes = agreeing(self._forward, slots=slots, context=context, vocabulary=vocabulary)
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
        self.counters.requests += 1
        self.counters.prompt += len(request.prompt)
        self.waiting.append(request)

    def step(self) -> None:
        """Let requests in and out, compute one chunk of prompts, then one token of every ready request."""
        began = time.perf_counter()
        self._drop_cancelled()
        self._admit()
        self._prefill()
        self._decode()
        self.counters.busy_s += time.perf_counter() - began

    def renew(self, version: int) -> None:
        """The weights have changed: what was computed with the old ones is computed again, sampled tokens stay."""
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
            request = self.waiting.popleft()
            request.finished(request, error)

    # Joining and leaving ----------------------------------------------------------------------------------------

    def _drop_cancelled(self) -> None:
        for slot in self._slots:
            if slot.request is not None and slot.request.cancelled:
                self.counters.aborted += 1
                self._leave(slot, slot.request.completion("abort"))
        if any(request.cancelled for request in self.waiting):
            for request in [r for r in self.waiting if r.cancelled]:
                self.waiting.remove(request)
                self.counters.aborted += 1
                request.finished(request, request.completion("abort"))

    def _leave(self, slot: Slot, result: Completion | EngineError) -> None:
        request = slot.request
        assert request is not None
        slot.request = slot.leader = None
        self._clock += 1
        slot.used = self._clock
        request.finished(request, result)

    def _admit(self) -> None:
        while self.waiting:
            free = [slot for slot in self._slots if slot.request is None]
            if len(self._slots) - len(free) >= self.size:
                return
            request = self.waiting.popleft()
            ids = np.fromiter(request.prompt, np.int64, len(request.prompt))
            source, shared = self._known(ids)
            # A free slot that holds the prefix is taken over; otherwise the emptiest, then the one unused longest.
            takes_over = source is not None and source.request is None
            slot = source if source is not None and takes_over else min(free, key=self._worth)
            slot.request = request
            slot.ids = np.concatenate([ids, np.zeros(request.sampling.max_tokens, np.int64)])
            slot.length = len(ids)
            if takes_over:
                slot.filled, slot.exact = shared, min(slot.exact, shared)
                self.counters.reused += shared
            else:
                slot.filled = slot.exact = 0
                slot.leader, slot.shared = source, shared

    @staticmethod
    def _worth(slot: Slot) -> tuple[bool, int, int]:
        return (slot.filled > 0, slot.used if slot.filled else 0, slot.index)

    def _known(self, ids: NDArray[np.int64]) -> tuple[Slot | None, int]:
        """The slot that shares the longest useful prefix with `ids`, computed already or about to be."""
        best, longest = None, 0
        for slot in self._slots:
            usable = slot.length - 1 if slot.request is not None else slot.filled
            if self._whole_chunks:
                coming = (len(slot.request.prompt) - 1) // self.chunk * self.chunk if slot.request is not None else 0
                usable = max(slot.exact, coming)
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
        return self.shapes is not None and not self.shapes.decoded

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
        # Rows of one pass are padded to the longest: put like with like, and keep a pass near the chunk's size.
        behind.sort(key=lambda slot: slot.length - slot.filled)
        while behind:
            counts = [min(slot.length - 1 - slot.filled, self.chunk) for slot in behind]
            if self.shapes is not None:
                together = max(n for n in self.shapes.fills if n <= len(behind))
            else:
                together = sum(1 for n, count in enumerate(counts) if n == 0 or count * (n + 1) <= 2 * self.chunk)
            width = self.chunk if self.shapes is not None else max(counts[:together])
            self._fill(behind[:together], counts[:together], width)
            del behind[:together]

    def _follow(self, slot: Slot) -> bool:
        """Copy the prefix from the slot that computes it; False while it is not there yet."""
        leader = slot.leader
        assert leader is not None
        same = leader.length >= slot.shared and np.array_equal(leader.ids[: slot.shared], slot.ids[: slot.shared])
        if not same:  # it has been given to another request meanwhile
            slot.leader = None
            return True
        have = leader.exact if self._whole_chunks else leader.filled
        if have < slot.shared and leader.request is not None:
            return False
        common = min(have, slot.shared)
        if common:
            self._cache.copy(leader.index, slot.index, common)
            slot.filled = common
            slot.exact = min(leader.exact, common)
            self.counters.reused += common
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
            self.counters.prefilled += count

    def _reach(self, tokens: int) -> int:
        """How far attention looks when the longest request has `tokens` tokens."""
        return -(-tokens // BLOCK) * BLOCK if self.shapes is None else self.shapes.reach(tokens, self.context)

    # Tokens -----------------------------------------------------------------------------------------------------

    def _decode(self) -> None:
        ready = [s for s in self._slots if s.request is not None and s.filled == s.length - 1 and s.leader is None]
        if not ready:
            return
        rows = self._packed(ready)
        if self.shapes is not None:
            rows = next(n for n in self.shapes.rows if n >= rows)
        # Every row below `rows` takes part: those that are not ready write one token of rubbish behind what they hold.
        ids = np.zeros((rows, 1), np.int64)
        places = np.zeros((rows, 1), np.int64)
        width = self._reach(max(slot.filled for slot in ready) + 1)
        for slot in self._slots[:rows]:
            places[slot.index] = slot.filled
        for slot in ready:
            ids[slot.index] = slot.ids[slot.filled]
        logits = self._forward(self._cache, torch.from_numpy(ids), torch.from_numpy(places), slice(0, rows), width)
        self._sample(ready, logits)
        self.counters.steps += 1
        self.counters.rows += rows

    def _packed(self, ready: list[Slot]) -> int:
        """Move ready requests down into free slots, so that the batch is as small as it can be."""
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
        self.counters.sampled += len(ready)
        for slot, request, token, logprob in zip(ready, requests, tokens, logprobs, strict=True):
            slot.filled += 1
            if not math.isfinite(logprob):
                self._leave(slot, EngineError(_not_finite(request, self.version)))
                continue
            request.tokens.append(token)
            request.logprobs.append(logprob)
            request.versions.append(self.version)
            slot.ids[slot.length] = token
            slot.length += 1
            if token in request.sampling.stop_token_ids:
                self._leave(slot, request.completion("stop"))
            elif len(request.tokens) >= request.sampling.max_tokens:
                self._leave(slot, request.completion("length"))

    def _forward(
        self, cache: SlotCache, ids: torch.Tensor, positions: torch.Tensor, slots: slice | torch.Tensor, width: int
    ) -> torch.Tensor:
        """Logits of each row's last token; keys and values go to `positions` of `slots`."""
        cache.reserve(max(width, int(positions.max()) + 1))
        if isinstance(slots, slice):
            index = torch.arange(slots.start, slots.stop)
        else:
            index, slots = slots, slots.to(self.device)
        targets = (index[:, None] * cache.capacity + positions).reshape(-1)
        cache.aim(targets.to(self.device), slots, width)
        # Padding behind the context's end must not make a model with growing position codes change them.
        places = positions.clamp(max=self.context - 1).to(self.device)
        output = self.model(
            input_ids=ids.to(self.device),
            position_ids=places,
            attention_mask=self._masks(places, width),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: torch.Tensor = output.logits[:, -1]
        return logits


def _not_finite(request: Request, version: int) -> str:
    return (
        f"the model gives no finite probabilities after {len(request.prompt)} prompt and {len(request.tokens)} sampled "
        f"tokens (policy version {version}); its weights are probably NaN, look at the last learner step"
    )
