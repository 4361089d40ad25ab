"""The top-k routers of a mixture of experts: their choices are seen, and may be replaced, while a model runs.

    scores of all experts ── topk ── chosen experts, and their scores ── the model's own gate weights
                               │
                    choose(layer, own choice) ── the choice that is taken

Only the one call of `topk` in a router is touched: whatever a model makes of the scores (softmax, a norm over those
that were chosen) stays its own, with its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from agentrl.errors import RecipeError

Choose = Callable[[int, Tensor, int], Tensor]
"""(number of the router, its own choice (tokens, k), number of experts) → the choice that is taken."""


def routers_of(model: Any) -> list[Any]:
    """Return a model's routers, first layer first; raise RecipeError where it has none that can be replayed."""
    modules = list(model.modules())
    routers = [module for module in modules if type(module).__name__.lower().endswith("topkrouter")]
    experts = [module for module in modules if type(module).__name__.endswith("Experts")]
    if not routers or len(routers) != len(experts):
        what = f"{len(experts)} layers of experts with {len(routers)} routers" if experts else "no experts"
        raise _refused(model, f"it has {what}")
    return routers


@contextmanager
def choosing(routers: list[Any], choose: Choose) -> Iterator[None]:
    """Ask `choose` for every choice of these routers inside the block."""
    before = [router.__dict__.get("forward") for router in routers]
    for number, router in enumerate(routers):
        router.forward = _asking(router, number, choose)
    try:
        yield
    finally:
        for router, forward in zip(routers, before, strict=True):
            if forward is None:
                del router.forward
            else:
                router.forward = forward


def _asking(router: Any, number: int, choose: Choose) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        mode = _TopK(number, choose)
        with mode:
            output = type(router).forward(router, *args, **kwargs)
        parts = output if isinstance(output, tuple) else (output,)
        if len(mode.taken) != 1 or not any(part is mode.taken[0] for part in parts):
            raise _refused(router, "it does not choose by one call of torch.topk, or changes what that chose")
        return output

    return forward


class _TopK(TorchFunctionMode):
    """Replaces what `topk` chooses."""

    def __init__(self, number: int, choose: Choose) -> None:
        super().__init__()
        self._number, self._choose = number, choose
        self.taken: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not torch.topk and func is not Tensor.topk:
            return result
        scores: Tensor = args[0] if args else kwargs["input"]
        taken = self._choose(self._number, result.indices, scores.shape[-1])
        self.taken.append(taken)
        values = result.values if taken is result.indices else scores.gather(-1, taken)
        return torch.return_types.topk((values, taken))


def _refused(model: Any, reason: str) -> RecipeError:
    return RecipeError(
        f"learner.routing: replay cannot be used with {type(model).__name__}: {reason}. Train a Qwen2-MoE, Qwen3-MoE, "
        "Mixtral or OLMoE model, or set learner.routing: recompute"
    )


class Recorder:
    """Keeps the choices of one forward pass after the other."""

    def __init__(self, model: Any) -> None:
        self._routers = routers_of(model)
        self._choices: list[Tensor] = []

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Keep the choices of the forward pass inside the block, in place of those before."""
        self._choices = []
        with choosing(self._routers, self._keep):
            yield

    def _keep(self, number: int, own: Tensor, experts: int) -> Tensor:
        self._choices.append(own.to(torch.int8 if experts <= 128 else torch.int16))
        return own

    def choices(self) -> Tensor:
        """Return the experts chosen for each token: (tokens, layers, k)."""
        return torch.stack(self._choices, 1)
