"""Fusing on a GPU: norms, MLPs and the head's elementwise work run as single kernels, made by torch.compile.

On a 0.6B model at 4k this was worth 1.4 times the speed and a quarter of the memory. Where torch.compile does not work
(no C compiler, no Triton) everything runs unfused, and a warning says so once.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

FUSED = ("RMSNorm", "MLP")
"""Modules whose class name ends so are fused: they are many, alike, and see nothing but one tensor."""


@cache
def can_fuse(device_type: str) -> bool:
    """Whether torch.compile works on the device; tried once. Not worth its time on a CPU."""
    if device_type != "cuda":
        return False
    try:
        probe = torch.compile(lambda x: (x * 2).exp().sum(-1), dynamic=True)
        probe(torch.zeros(4, 8, device=device_type))
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        warnings.warn(f"torch.compile does not work here, so the learner runs slower: {reason}", stacklevel=2)
        return False
    return True


class CompiledModules:
    """The fused forms of a model's modules; they act only while `on` is open, so copies of the model never see them."""

    def __init__(self, model: Any, device: torch.device) -> None:
        self._forms: list[tuple[Any, Any]] = []
        if can_fuse(device.type):
            alike = [m for m in model.modules() if type(m).__name__.endswith(FUSED)]
            self._forms = [(m, torch.compile(m._call_impl, dynamic=True)) for m in alike]

    @contextmanager
    def on(self, active: bool = True) -> Iterator[None]:
        """Calls of the modules go to their fused forms while this is open; with False, to the modules themselves."""
        before = [module._compiled_call_impl for module, _ in self._forms]
        for module, form in self._forms:
            module._compiled_call_impl = form if active else None
        try:
            yield
        finally:
            for (module, _), form in zip(self._forms, before, strict=True):
                module._compiled_call_impl = form
