"""One module from a micro-batch to logprobs: embeddings, layers and head in one forward pass.

With `learner.ranks` this is the root that is sharded, so that the head and the embeddings, which may be one tensor, are
whole whenever one of them is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from agentrl.learn.attention import Kind, model_inputs
from agentrl.learn.logprobs import HeadValues, head
from agentrl.learn.pack import MicroBatch


class Scorer(torch.nn.Module):
    """Evaluates a policy on the sampled tokens of a micro-batch; call it inside `packed(model)`."""

    def __init__(self, model: Any, *, temperature: float, candidates: int, float32: bool) -> None:
        super().__init__()
        self.model = model
        self.options: dict[str, Any] = {"temperature": temperature, "candidates": candidates, "float32": float32}
        self.smoothing = 0.0
        """Label smoothing of the logprobs, for supervised training at temperature 1."""
        self.value_head: torch.nn.Module | None = None
        """A critic's head, where there is one."""

    @contextmanager
    def at(self, *, temperature: float, smoothing: float = 0.0) -> Iterator[None]:
        """Compute logprobs at another temperature, with smoothed labels, inside the block."""
        before = self.options, self.smoothing
        self.options, self.smoothing = {**self.options, "temperature": temperature}, smoothing
        try:
            yield
        finally:
            self.options, self.smoothing = before

    def forward(self, micro: MicroBatch, kind: Kind) -> HeadValues:
        """Return the fields of `HeadOutput`, as a tuple because FSDP looks for tensors there."""
        inputs = model_inputs(micro.token_ids, micro.positions, micro.layout, kind)
        hidden = self.model.get_decoder()(**inputs)[0]
        weight = self.model.get_output_embeddings().weight
        rows = _rows(hidden[0], micro.predictors)
        output = head(rows, weight, micro.targets, **self.options)
        logprobs = output.logprobs
        if self.smoothing:
            logprobs = (1 - self.smoothing) * logprobs + self.smoothing * _mean_logprobs(rows, weight, micro, logprobs)
        values = None if self.value_head is None else self.value_head(rows)
        return logprobs, output.entropy, output.candidates, output.likeliest, values


def _mean_logprobs(rows: Tensor, weight: Tensor, micro: MicroBatch, logprobs: Tensor) -> Tensor:
    """Return the mean logprob over the vocabulary: the mean logit less the normaliser, which the target's give."""
    wide = logprobs.dtype
    mean_logit = rows.to(wide) @ weight.to(wide).mean(0)
    target_logit = (rows.to(wide) * weight[micro.targets].to(wide)).sum(-1)
    return mean_logit - (target_logit - logprobs)


def _rows(hidden: Tensor, places: Tensor) -> Tensor:
    """Return rows of the hidden states, some of them several times.

    On the CPU the gradient of `hidden[places]` adds up what comes back to one row in an order that depends on which
    thread is first, hence on the machine's load; that of `index_select` always adds in the order of `places`.
    """
    return hidden.index_select(0, places) if hidden.device.type == "cpu" else hidden[places]
