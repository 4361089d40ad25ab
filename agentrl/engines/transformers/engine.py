"""The embedded engine: a transformers model in this process, sharing its weights with the learner.

event loop                          worker thread
generate() ── inbox ──────────────> Batch.step() again and again: prefill, one token for every request
    ^                                  │
    └── call_soon_threadsafe(result) ──┘
publish(), pause() take the lock between two steps; cancelling generate() marks its request
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from agentrl.engines.base import Sampling, Weights
from agentrl.engines.transformers.batching import Batch, Request
from agentrl.engines.transformers.decoding import checksum, twin
from agentrl.errors import EngineError
from agentrl.types import Completion


class TransformersEngine:
    """Any transformers causal language model, decoded with continuous batching."""

    by_checksum = True
    """A copy of the weights is held against the publisher's hash."""

    def __init__(
        self,
        model: Any,
        *,
        max_batch: int = 64,
        max_context: int | None = None,
        chunk: int = 512,
        deterministic: bool = False,
        share: bool = True,
        dtype: torch.dtype | None = None,
        version: int = 0,
    ) -> None:
        """`share`: sample from the model's own tensors, so that `publish` moves nothing. Right when learner and
        engine take turns; where they run at once, the engine needs tensors of its own (share=False)."""
        text = model.config.get_text_config()
        limit = int(getattr(text, "max_position_embeddings", 0) or 1 << 20)
        self.context = min(limit, max_context or limit)
        self.vocabulary = int(text.vocab_size)
        own = not share or (dtype is not None and dtype != next(model.parameters()).dtype)
        self._model = twin(model, own=own, dtype=dtype)
        self._shared = not own
        self._batch = Batch(self._model, size=max_batch, context=self.context, chunk=chunk, exact=deterministic)
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
        if not prompt:
            raise EngineError("an empty prompt cannot be continued; send at least one token")
        if not 0 <= min(prompt) <= max(prompt) < self.vocabulary:
            raise EngineError(
                f"prompt {request_id!r} holds a token id outside 0..{self.vocabulary - 1}; "
                "the tokenizer does not belong to this model"
            )
        room = min(sampling.max_tokens, self.context - len(prompt))
        if room <= 0:
            return Completion(token_ids=(), logprobs=(), versions=(), finish="length")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Completion] = loop.create_future()

        def settle(result: Completion | EngineError) -> None:
            if future.done():
                return
            if isinstance(result, EngineError):
                future.set_exception(result)
            else:
                future.set_result(result)

        def finished(request: Request, result: Completion | EngineError) -> None:
            if not request.cancelled and not loop.is_closed():
                loop.call_soon_threadsafe(settle, result)

        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed & (1 << 64) - 1
        request = Request(prompt, replace(sampling, max_tokens=room), seed, finished)
        with self._wake:
            self._inbox.append(request)
            self._wake.notify()
        try:
            return await future
        except asyncio.CancelledError:
            request.cancelled = True
            raise

    async def publish(self, weights: Weights) -> None:
        """Take new weights between two tokens. Shared ones are there already: only the version changes. Running
        requests keep their tokens; their keys and values are computed again with the new weights."""
        await asyncio.to_thread(self._publish, weights)

    async def pause(self) -> None:
        """Stop at a token border."""
        await asyncio.to_thread(self._pause)

    async def resume(self) -> None:
        """Go on."""
        with self._wake:
            self._paused = False
            self._wake.notify()

    def statistics(self) -> Mapping[str, float]:
        """Counters since the start."""
        counters = self._batch.counters
        return {
            "requests": counters.requests,
            "aborted": counters.aborted,
            "tokens": counters.sampled,
            "prompt_tokens": counters.prompt,
            "prefilled_tokens": counters.prefilled,
            "cached_tokens": counters.reused,
            "steps": counters.steps,
            "rows": counters.rows,
            "busy_s": counters.busy_s,
        }

    async def close(self) -> None:
        """Stop the worker; open requests fail."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        with self._wake:
            self._stopping = True
            self._wake.notify()
        await asyncio.to_thread(thread.join)

    # The worker's side ------------------------------------------------------------------------------------------

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
            if self._paused:  # since the worker last looked
                return
            try:
                self._batch.step()
            except Exception as error:
                reason = f"the transformers engine failed: {type(error).__name__}: {error}"
                failure = EngineError(reason)
                failure.__cause__ = error
                self._batch.fail(failure)

    @contextmanager
    def _between_steps(self) -> Iterator[None]:
        """Hold the worker between two steps; it waits its turn, since a lock alone would go to it again and again."""
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
                    raise EngineError("this transformers engine has weights of its own: publish needs their tensors")
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
