"""The embedded engine: a transformers model in this process, sharing its weights with the learner.

event loop                          worker thread
generate() ── inbox ──────────────> Batch.step() again and again: prefill, one token for every request
    ^                                  │
    └──────── request.future ──────────┘
publish() and pause() take the lock between two steps; cancelling generate() cancels the request's future
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch

from agentrl.engines.base import NO_ROOM, Sampling, Weights, room
from agentrl.engines.transformers.batching import Batch, Request
from agentrl.engines.transformers.decoding import checksum, twin
from agentrl.errors import EngineError
from agentrl.types import Completion


class TransformersEngine:
    """Any transformers causal language model, decoded with continuous batching."""

    by_checksum = True
    """A copy of the weights is compared with the publisher's hash."""

    def __init__(
        self,
        model: Any,
        *,
        max_batch: int = 64,
        max_context: int | None = None,
        deterministic: bool = False,
        share: bool = True,
        version: int = 0,
        experts: bool = False,
    ) -> None:
        """`share`: sample from the model's own tensors, so that `publish` moves nothing. Right when learner and
        engine take turns; when they run at the same time, the engine needs its own tensors (share=False).
        `experts`: completions say which experts a mixture of experts chose."""
        text = model.config.get_text_config()
        limit = int(getattr(text, "max_position_embeddings", 0) or 1 << 20)
        self.context = min(limit, max_context or limit)
        self.vocabulary = int(text.vocab_size)
        self._model = twin(model, own=not share)
        if deterministic and any(type(module).__name__.endswith("Experts") for module in self._model.modules()):
            # Others multiply all tokens of an expert at once: how many these are depends on the batch.
            self._model.set_experts_implementation("batched_mm")
        self._shared = share
        self._batch = Batch(self._model, size=max_batch, context=self.context, exact=deterministic, experts=experts)
        self._batch.version = version
        self._inbox: deque[Request] = deque()
        self._wake = threading.Condition()
        self._computing = threading.Lock()
        self._paused = False
        self._waiting = 0
        self._stopping = False
        self._thread: threading.Thread | None = None

    @property
    def version(self) -> int:
        """The policy version that new tokens are sampled with."""
        return self._batch.version

    async def start(self) -> None:
        """Start the worker thread."""
        if self._thread is None:
            self._stopping = False
            self._thread = threading.Thread(target=self._work, name="agentrl-engine", daemon=True)
            self._thread.start()

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str = "") -> Completion:
        """Continue `token_ids`. A prompt that leaves no room in the context gives no tokens and finish `length`."""
        prompt = tuple(map(int, token_ids))
        if self._thread is None:
            raise EngineError("the transformers engine is not running; call start() first")
        limit = room(prompt, sampling, vocabulary=self.vocabulary, context=self.context, request_id=request_id)
        if limit <= 0:
            return NO_ROOM
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed & (1 << 64) - 1
        request = Request(prompt, replace(sampling, max_tokens=limit), seed)
        if sampling.on_tokens is not None:
            request.tell = _teller(sampling.on_tokens)
        with self._wake:
            self._inbox.append(request)
            self._wake.notify()
        return await asyncio.wrap_future(request.future)

    async def publish(self, weights: Weights) -> None:
        """Take new weights between two tokens; when they are shared, only the version changes. Running requests keep
        their tokens, and their keys and values are computed again with the new weights."""
        await asyncio.to_thread(self._publish, weights)

    async def pause(self) -> None:
        """Stop between two tokens."""
        await asyncio.to_thread(self._pause)

    async def resume(self) -> None:
        """Continue after `pause`."""
        with self._wake:
            self._paused = False
            self._wake.notify()

    def statistics(self) -> Mapping[str, float]:
        """Return counters since the start."""
        return dict(self._batch.counters)

    async def close(self) -> None:
        """Stop the worker thread; open requests fail."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        with self._wake:
            self._stopping = True
            self._wake.notify()
        await asyncio.to_thread(thread.join)

    # The worker thread ------------------------------------------------------------------------------------------

    def _work(self) -> None:
        with torch.inference_mode():
            while True:
                with self._wake:
                    while not self._stopping and (
                        self._paused or self._waiting or (not self._inbox and self._batch.idle)
                    ):
                        self._wake.wait()
                    arrived = list(self._inbox)
                    self._inbox.clear()
                    stopping = self._stopping
                for request in arrived:
                    self._batch.submit(request)
                if stopping:
                    self._batch.fail(EngineError("the transformers engine was closed while this request ran"))
                    return
                self._step()

    def _step(self) -> None:
        with self._computing:
            if self._paused:  # since the worker thread last looked
                return
            try:
                self._batch.step()
            except Exception as error:
                failure = EngineError(f"the transformers engine failed: {type(error).__name__}: {error}")
                failure.__cause__ = error
                self._batch.fail(failure)

    @contextmanager
    def _between_steps(self) -> Iterator[None]:
        """Hold the worker thread between two steps; a lock alone would go to that thread again and again."""
        with self._wake:
            self._waiting += 1
        try:
            with self._computing:
                yield
        finally:
            with self._wake:
                self._waiting -= 1
                self._wake.notify()

    def _pause(self) -> None:
        with self._between_steps():
            self._paused = True

    def _publish(self, weights: Weights) -> None:
        with self._between_steps(), torch.no_grad():
            if not self._shared:
                if weights.tensors is None:
                    raise EngineError("this transformers engine has its own weights: publish needs their tensors")
                self._copy(weights, weights.tensors)
            self._batch.renew(weights.version)

    def _copy(self, weights: Weights, tensors: Mapping[str, Any]) -> None:
        mine = {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}
        unknown = [name for name in tensors if name not in mine]
        if unknown:
            raise EngineError(f"published weights hold {len(unknown)} unknown names, first {unknown[0]!r}")
        for name, tensor in tensors.items():
            if mine[name].data_ptr() != tensor.data_ptr():
                mine[name].copy_(tensor)
        if weights.checksum and all(mine[name].dtype == tensor.dtype for name, tensor in tensors.items()):
            held = checksum({name: mine[name] for name in tensors})
            if held != weights.checksum:
                raise EngineError("the weights changed while they were copied: publish between two learner steps")


def _teller(on_tokens: Callable[[Sequence[int]], None]) -> Callable[[list[int]], None]:
    """Return what tells the event loop of new tokens from another thread; what it has not heard yet comes together."""
    loop = asyncio.get_running_loop()
    waiting = threading.Event()

    def heard(tokens: list[int]) -> None:
        waiting.clear()
        on_tokens(tokens)

    def tell(tokens: list[int]) -> None:
        if not waiting.is_set():
            waiting.set()
            with suppress(RuntimeError):  # the loop is closed, and nobody listens
                loop.call_soon_threadsafe(heard, tokens)

    return tell
