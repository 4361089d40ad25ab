"""Turns gradients into new weights: float32 master weights, AdamW and schedules.

bf16 parameter ── gradient of each micro-batch ──> added to a float32 gradient at once, then freed
float32 master ── AdamW ── copied back, in place (an engine may be sampling from the same tensors)

With `learner.offload` the masters and AdamW's two moments are in the host's memory, and AdamW runs there: twelve bytes
less per parameter on the GPU, for one copy of the gradients and of the new weights per step.
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
WIDE = (torch.float32, torch.float64)
"""A parameter of another precision is trained through a master copy."""


def schedule_factor(step: int, *, schedule: Schedule, warmup: int, total: int) -> float:
    """Return the learning rate's factor at a step (from 0): linear warm-up, then the schedule down to 0 at `total`."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if schedule == "constant":
        return 1.0
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return 1.0 - progress if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))


class Optimizer:
    """AdamW over the trainable parameters by name; 16-bit parameters and offloaded ones get float32 masters."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], section: LearnerSection) -> None:
        if section.offload and section.optimizer != "adamw":
            raise RecipeError("learner.offload needs learner.optimizer: adamw, because 8-bit moments stay on the GPU")
        self.parameters = dict(parameters)
        self.masters: dict[str, Tensor] = {}
        self.section = section
        self._gradients: dict[str, Tensor] = {}
        """Float32 gradients of 16-bit parameters, on the parameter's device."""
        for name, parameter in self.parameters.items():
            self.masters[name] = self._master(parameter)
            if parameter.dtype not in WIDE:
                hook = _collect_into(self._gradients, name)
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        self._adam = self._adamw()

    def _master(self, parameter: Tensor) -> Tensor:
        """Return what AdamW changes: the parameter itself if it is wide and stays where it is, or a wide copy."""
        wide = torch.float64 if parameter.dtype == torch.float64 else torch.float32
        if not self.section.offload:
            return parameter if parameter.dtype in WIDE else parameter.detach().to(wide)
        on_host = torch.empty(parameter.shape, dtype=wide, device="cpu", pin_memory=parameter.is_cuda)
        return on_host.copy_(parameter.detach())

    def _own(self, tensor: Tensor) -> Tensor:
        """Return the part of a parameter or gradient that belongs to its master."""
        return tensor

    def _adamw(self) -> torch.optim.Optimizer:
        section, masters = self.section, list(self.masters.values())
        options: dict[str, Any] = {"lr": section.lr, "betas": section.betas, "weight_decay": section.weight_decay}
        if section.optimizer == "adamw":
            return torch.optim.AdamW(masters, fused=next(iter(self.parameters.values())).is_cuda, **options)
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
        optimizer: torch.optim.Optimizer = AdamW8bit(masters, **options)
        return optimizer

    def set_aside(self) -> None:
        """Free masters and moments while something else trains the parameters; `adopt` makes them again."""
        self.zero()
        self.masters.clear()
        self._adam.state.clear()
        self._adam.param_groups.clear()

    def adopt(self) -> None:
        """Start again from the current parameters, without the moments of earlier steps."""
        self.set_aside()
        self.masters |= {name: self._master(parameter) for name, parameter in self.parameters.items()}
        self._adam = self._adamw()

    def moments(self, name: str) -> dict[str, Tensor]:
        """Return AdamW's state of a parameter; empty before its first update."""
        return dict(self._adam.state.get(self.masters[name], {}))

    def forget(self) -> None:
        """Forget AdamW's state of all parameters."""
        self._adam.state.clear()

    def remember(self, name: str, step: Tensor, moments: Mapping[str, Tensor]) -> None:
        """Restore AdamW's state of a parameter."""
        fused = self._adam.defaults.get("fused")
        place = self.masters[name].device if fused else torch.device("cpu")
        self._adam.state[self.masters[name]] = {"step": step.to(place), **moments}

    def zero(self) -> None:
        """Clear all gradients."""
        self._gradients.clear()
        for tensor in (*self.parameters.values(), *self.masters.values()):
            tensor.grad = None

    def gradient(self, name: str) -> Tensor | None:
        """Return the gradient of a parameter accumulated since the last step, on the parameter's device."""
        wide = self._gradients.get(name)
        return self.parameters[name].grad if wide is None else wide

    def norm(self) -> Tensor:
        """Return the norm of all gradients together."""
        gradients = [g for g in map(self.gradient, self.masters) if g is not None]
        return torch.nn.utils.get_total_norm(gradients) if gradients else torch.zeros(())

    def step(self, norm: Tensor, factor: float) -> None:
        """Clip by the norm, update the masters, and copy them into the parameters in place."""
        for group in self._adam.param_groups:
            group["lr"] = self.section.lr * factor
        for name, master in self.masters.items():
            gradient = self.gradient(name)
            master.grad = None if gradient is None else self._own(gradient).to(master.device)
        torch.nn.utils.clip_grads_with_norm_(list(self.masters.values()), self.section.clip_norm, norm)
        self._adam.step()
        self.zero()
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                own, master = self._own(parameter), self.masters[name]
                if own.data_ptr() != master.data_ptr():
                    own.copy_(master)

    def state_dict(self) -> dict[str, Any]:
        """Return the masters and AdamW's moments."""
        return {"masters": {n: m.detach() for n, m in self.masters.items()}, "adam": self._adam.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; parameters are set from their masters."""
        if state["masters"].keys() != self.masters.keys():
            raise RecipeError("the checkpoint trains other parameters than this recipe; did model or its lora change?")
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
