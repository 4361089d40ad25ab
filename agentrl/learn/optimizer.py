"""What turns gradients into new weights: float32 master weights, AdamW, schedules, and a step that refuses NaN.

bf16 parameter ── gradient of each micro-batch ──> added to a float32 gradient at once, then freed
float32 master ── AdamW ── copied back, in place (an engine may be sampling from the same tensors)

With `learner.offload` the masters and AdamW's two moments lie in the host's memory, and AdamW works there: twelve bytes
a parameter less on the GPU, for one trip of the gradients and of the new weights a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from agentrl.errors import RecipeError
from agentrl.recipe import LearnerSection

Schedule = Literal["constant", "linear", "cosine"]


def schedule_factor(step: int, *, schedule: Schedule, warmup: int, total: int) -> float:
    """The learning rate's factor at a step counted from 0: a linear warm-up, then the schedule down to 0 at `total`."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if schedule == "constant":
        return 1.0
    done = min(1.0, (step - warmup) / max(1, total - warmup))
    return 1.0 - done if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))


class Optimizer:
    """AdamW over the trainable parameters by name; 16-bit parameters and offloaded ones get float32 masters."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], section: LearnerSection) -> None:
        if section.offload and section.optimizer != "adamw":
            raise RecipeError("learner.offload goes with learner.optimizer adamw: 8-bit moments stay on the GPU")
        self.parameters = dict(parameters)
        self.masters: dict[str, Tensor] = {}
        self.section = section
        self._gradients: dict[str, Tensor] = {}
        """Float32 gradients of 16-bit parameters, beside the parameter."""
        for name, parameter in self.parameters.items():
            wide = parameter.dtype in (torch.float32, torch.float64)
            self.masters[name] = self._master(parameter) if section.offload or not wide else parameter
            if not wide:
                hook = _collect_into(self._gradients, name)
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        self._adam = self._adamw()

    def _master(self, parameter: Tensor) -> Tensor:
        wide = torch.float64 if parameter.dtype == torch.float64 else torch.float32
        if not self.section.offload:
            return parameter.detach().to(wide)
        there = torch.empty(parameter.shape, dtype=wide, device="cpu", pin_memory=parameter.is_cuda)
        return there.copy_(parameter.detach())

    def _adamw(self) -> torch.optim.Optimizer:
        on_gpu = next(iter(self.parameters.values())).is_cuda
        return _adamw(list(self.masters.values()), self.section, fused=on_gpu)

    def adopt(self) -> None:
        """Start over from the parameters as they are now, with no memory of earlier steps."""
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                self.masters[name].copy_(parameter)
        self.zero()
        self._adam = self._adamw()

    def zero(self) -> None:
        """Forget all gradients."""
        self._gradients.clear()
        for tensor in (*self.parameters.values(), *self.masters.values()):
            tensor.grad = None

    def gradient(self, name: str) -> Tensor | None:
        """What has been added up for a parameter since the last step, where the parameter lies."""
        found = self._gradients.get(name)
        return self.parameters[name].grad if found is None else found

    def norm(self) -> Tensor:
        """The norm of all gradients together."""
        gradients = [g for g in map(self.gradient, self.masters) if g is not None]
        return torch.nn.utils.get_total_norm(gradients) if gradients else torch.zeros(())

    def step(self, norm: Tensor, factor: float) -> None:
        """Clip by the norm, update the masters, and copy them into the parameters in place."""
        for group in self._adam.param_groups:
            group["lr"] = self.section.lr * factor
        for name, master in self.masters.items():
            found = self.gradient(name)
            master.grad = None if found is None else found.to(master.device)
        torch.nn.utils.clip_grads_with_norm_(list(self.masters.values()), self.section.clip_norm, norm)
        self._adam.step()
        self.zero()
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                if self.masters[name] is not parameter:
                    parameter.copy_(self.masters[name])

    def state_dict(self) -> dict[str, Any]:
        """Masters and AdamW's moments."""
        return {"masters": {n: m.detach() for n, m in self.masters.items()}, "adam": self._adam.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave; parameters follow their masters."""
        if state["masters"].keys() != self.masters.keys():
            raise RecipeError("the checkpoint trains other parameters than this recipe; was the model or lora changed?")
        with torch.no_grad():
            for name, master in self.masters.items():
                master.copy_(state["masters"][name])
                if self.parameters[name] is not master:
                    self.parameters[name].copy_(master)
        self._adam.load_state_dict(state["adam"])


def _collect_into(gradients: dict[str, Tensor], name: str) -> Callable[[Tensor], None]:
    def collect(parameter: Tensor) -> None:
        assert parameter.grad is not None
        if name in gradients:
            gradients[name].add_(parameter.grad)
        else:
            gradients[name] = parameter.grad.to(torch.float32)
        parameter.grad = None

    return collect


def _adamw(masters: list[Tensor], section: LearnerSection, *, fused: bool) -> torch.optim.Optimizer:
    options: dict[str, Any] = {"lr": section.lr, "betas": section.betas, "weight_decay": section.weight_decay}
    if section.optimizer == "adamw":
        return torch.optim.AdamW(masters, fused=fused, **options)
    try:
        from bitsandbytes.optim import AdamW8bit  # type: ignore[import-not-found]
    except ImportError:
        try:
            from torchao.optim import AdamW8bit  # type: ignore[import-not-found]
        except ImportError:
            raise RecipeError(
                "learner.optimizer is adamw8bit, but neither bitsandbytes nor torchao is installed; "
                "pip install bitsandbytes, or use adamw"
            ) from None
    made: torch.optim.Optimizer = AdamW8bit(masters, **options)
    return made
