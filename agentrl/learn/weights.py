"""Publishes the learner's weights to an engine, within a time limit and checked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from agentrl import recipe
from agentrl.engines.base import Delivery, Engine, Receipt, Weights
from agentrl.engines.transformers.decoding import checksum
from agentrl.errors import EngineError, RecipeError
from agentrl.learn.model import base_tensors, merged_state


def stale(order: Delivery, version: int) -> Receipt | None:
    """Return the receipt of an order for weights that the learner has no more; None where it has them."""
    if order.version == version:
        return None
    return Receipt(
        stale=True, error=f"policy version {order.version} is gone: the learner has {version}, and will publish it"
    )


def buckets(model: Any, size: int) -> tuple[int, Iterator[Mapping[str, torch.Tensor]]]:
    """Return how many buckets a model's tensors make, and the buckets. LoRA is merged one bucket at a time."""
    from agentrl.engines.sglang.buckets import split

    names = [set(bucket) for bucket in split(base_tensors(model), size)]
    return len(names), (merged_state(model, only=wanted) for wanted in names)


def refuse_fused_experts(section: recipe.Engine, model: torch.nn.Module) -> None:
    """Raise RecipeError where SGLang would be sent the fused experts of a mixture: its loader takes them one by one
    (`experts.0.gate_proj.weight`) and passes over other names in silence, so that it would sample with old experts."""
    fused = [name for name, p in model.named_parameters() if ".experts." in name and p.dim() == 3]
    if fused and isinstance(section, recipe.SglangEngine):
        raise RecipeError(
            "rollout.engine.type: sglang cannot be trained with a mixture of experts: SGLang leaves out "
            f"{fused[0]} when new weights are sent, and would go on with the old ones; use rollout.engine.type: "
            "transformers"
        )


class Publisher:
    """Sends a learner's tensors to an engine."""

    def __init__(
        self,
        engine: Engine,
        tensors: Callable[[], Mapping[str, torch.Tensor]],
        *,
        adapter: Callable[[], tuple[Mapping[str, Any], Mapping[str, torch.Tensor]] | None] = lambda: None,
        deliver: Callable[[Delivery], Receipt] | None = None,
        shared: bool = False,
        timeout_s: float = 900.0,
    ) -> None:
        """Take callables that are called at each publication.

        `tensors` returns the policy by the names of a transformers folder, `adapter` configuration and tensors of a
        LoRA adapter, for an engine that loads it beside the base model. `deliver` sends the policy to servers bucket by
        bucket, for an engine that streams. `shared` means that the engine samples from the
        same tensors, so that nothing is sent.
        """
        self.engine = engine
        self.seconds = 0.0
        """How long the last publication took."""
        self._tensors = tensors
        self._adapter = adapter
        self._deliver = deliver
        self._shared = shared
        self._timeout_s = timeout_s

    async def publish(self, version: int) -> None:
        """Publish the weights; every token sampled after this returns carries `version`."""
        began = time.perf_counter()
        adapter = self._adapter() if getattr(self.engine, "adapters", False) else None
        if self._shared:
            weights = Weights(version=version)
        elif adapter is not None:
            weights = Weights(version=version, adapter=adapter[0], tensors=adapter[1])
        elif self._deliver is not None and getattr(self.engine, "streams", False):
            weights = Weights(version=version, deliver=self._deliver)
        else:
            tensors = dict(self._tensors())
            by_checksum = getattr(self.engine, "by_checksum", False)  # other engines check in their own way
            expected = await asyncio.to_thread(checksum, tensors) if by_checksum else ""
            weights = Weights(version=version, tensors=tensors, checksum=expected)
        try:
            await asyncio.wait_for(self.engine.publish(weights), self._timeout_s)
        except TimeoutError as error:
            raise EngineError(
                f"the engine did not take policy version {version} within {self._timeout_s:.0f} s; "
                "it hangs or has died; see its log in the run folder"
            ) from error
        if self.engine.version != version:
            raise EngineError(f"the engine reports policy version {self.engine.version} after {version} was published")
        self.seconds = time.perf_counter() - began


async def hand_over(engine: Engine, section: recipe.Engine, model: torch.nn.Module) -> None:
    """Send the weights of `model` to a server that was already running: it may hold any weights."""
    if isinstance(section, recipe.SglangEngine) and not section.launch:
        refuse_fused_experts(section, model)
        await Publisher(engine, lambda: merged_state(model)).publish(engine.version)
