"""Fusing leaves a model as it was, and does nothing where it does not pay."""

from __future__ import annotations

import torch

from agentrl.learn.compile import CompiledModules, can_compile


class SmallMLP(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def test_a_cpu_is_left_alone() -> None:
    assert not can_compile("cpu")
    model = torch.nn.Sequential(SmallMLP())
    with CompiledModules(model, torch.device("cpu")).use():
        assert model(torch.ones(2)).tolist() == [2, 2]


def test_fused_forms_act_only_while_they_are_on() -> None:
    model = torch.nn.Sequential(SmallMLP())
    compiled = CompiledModules(model, torch.device("cpu"))
    compiled._calls = [(model[0], lambda x: x * 3)]  # stands for what torch.compile makes
    with compiled.use():
        assert model(torch.ones(2)).tolist() == [3, 3]
        with compiled.use(False):
            assert model(torch.ones(2)).tolist() == [2, 2]
        assert model(torch.ones(2)).tolist() == [3, 3]
    assert model(torch.ones(2)).tolist() == [2, 2]
