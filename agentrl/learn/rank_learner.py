"""The learner of one rank: a shard of every parameter, gradient and moment, a share of every minibatch.

rank 0   share 0 ── forward ── backward ──┐ each layer is gathered before it is used, and its gradients are summed
rank 1   share 1 ── forward ── backward ──┤ over the ranks and divided again (FSDP2)
rank 2   share 2 ── forward ── backward ──┘
         loss, gradient norm, statistics: exchanged, so that every rank decides alike

Coefficients are those of the whole minibatch before it is divided, so gradients are summed, not averaged. Shards of a
bfloat16 policy are float32: they are its master weights, and layers are gathered in bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from agentrl.errors import RecipeError
from agentrl.learn.compile import CompiledModules
from agentrl.learn.learner import Learner
from agentrl.learn.logprobs import HeadOutput
from agentrl.learn.memory import keeps_gathered
from agentrl.learn.model import adapter_state, merged_state
from agentrl.learn.model_check import probe_sequences, refuse
from agentrl.learn.optimizer import Optimizer
from agentrl.learn.pack import MicroBatch
from agentrl.learn.scorer import Scorer
from agentrl.learn.step_report import TokenStatistics
from agentrl.recipe import LearnerSection, Recipe


class Exchange:
    """What ranks tell each other outside of FSDP: small numbers, always through the host."""

    def __init__(self, group: Any, progress: Callable[[], None] = lambda: None) -> None:
        self.progress = progress
        """Called where a rank has got on, so that one that hangs can be told."""
        self._group = group
        self._ranks = dist.get_world_size(group)

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, in the order of ranks."""
        values: list[Any] = [None] * self._ranks
        dist.all_gather_object(values, value, group=self._group)
        self.progress()
        return values

    def total(self, value: float) -> float:
        """Return the sum over ranks, the same bits on each."""
        return math.fsum(self.gather(value))


class SharedStatistics(TokenStatistics):
    """Statistics of the whole batch: every rank's numbers, in the order of the undivided batch."""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__()
        self.exchange = exchange
        self._update = -1
        self._parts: dict[str, list[tuple[int, int, Tensor]]] = {}

    def begin(self) -> None:
        """Begin the next update."""
        self._update += 1

    def add(self, place: int, **values: Tensor | None) -> None:
        """Add the numbers of a micro-batch, unless it only fills up."""
        for name, value in values.items():
            if value is not None and place >= 0:
                self._parts.setdefault(name, []).append((self._update, place, value.detach().flatten()))

    def all(self, name: str) -> Tensor:
        """Return all numbers of a name, of all ranks; every rank calls this."""
        own = [(update, place, value.cpu().numpy()) for update, place, value in self._parts.get(name, [])]
        parts = sorted((part for parts in self.exchange.gather(own) for part in parts), key=lambda part: part[:2])
        return torch.cat([torch.from_numpy(part[2]) for part in parts]) if parts else torch.zeros(0)


class ShardOptimizer(Optimizer):
    """AdamW over this rank's parts of the parameters, as plain tensors; the gradient's norm is that of all shards."""

    def __init__(
        self, learner: RankLearner, parameters: dict[str, torch.nn.Parameter], section: LearnerSection
    ) -> None:
        super().__init__(parameters, section)
        self.exchange = learner.exchange
        self._drop_gathered = learner.gather_nothing

    def _master(self, parameter: Tensor) -> Tensor:
        return super()._master(local(parameter))

    def _own(self, tensor: Tensor) -> Tensor:
        return local(tensor)

    def step(self, norm: Tensor, factor: float) -> None:
        """Update the shards; what was gathered of them is out of date then."""
        self._drop_gathered()
        super().step(norm, factor)

    def norm(self) -> Tensor:
        """Return the norm of the whole gradient."""
        local = [g.to_local() for g in map(self.gradient, self.masters) if isinstance(g, DTensor)]
        squares = [torch.linalg.vector_norm(g, dtype=torch.float64).square() for g in local if g.numel()]
        total = float(torch.stack(squares).sum()) if squares else 0.0
        wide = torch.float64 if any(m.dtype == torch.float64 for m in self.masters.values()) else torch.float32
        device = next(iter(self.parameters.values())).device
        return torch.tensor(math.sqrt(self.exchange.total(total)), dtype=wide, device=device)


class RankLearner(Learner):
    """A learner whose model is sharded over the ranks of a process group."""

    def __init__(self, model: Any, tokenizer: Any, recipe: Recipe, *, device: torch.device, exchange: Exchange) -> None:
        """Take the whole model on the host, the same on every rank; its shards go to `device`."""
        if recipe.learner.optimizer != "adamw":
            raise RecipeError(
                "learner.ranks needs learner.optimizer: adamw; ranks divide its memory among them, and learner.offload "
                "takes it off the GPUs"
            )
        self.exchange = exchange
        self._target = device
        self._expected: Tensor | None = None
        super().__init__(model, tokenizer, recipe)

    def _place(self, device: torch.device) -> None:
        """Use the host's kernels while the whole model is there."""
        if device.type == self._target.type:
            super()._place(device)
        else:
            self.device = device
            self._attention = "sdpa"
            self._compiled = CompiledModules(torch.nn.Module(), device)

    def _make_optimizer(self) -> Optimizer:
        """Check the whole model, shard it, and take the shards as what is trained."""
        super()._check()
        _, probe = probe_sequences(self._head.weight.shape[0])
        self._expected = self._fixed_logprobs(probe)
        if any(not torch.allclose(other, self._expected) for other in self.exchange.gather(self._expected)):
            raise refuse(self._inner, "the ranks loaded different weights; did the folder change meanwhile?")
        tied = self._inner.get_input_embeddings().weight is self._head.weight
        mesh = init_device_mesh(self._target.type, (dist.get_world_size(),))
        whole = sum(p.numel() for p in self._scorer.parameters()) * self._dtype.itemsize
        shard(self._scorer, mesh, self._dtype, keep=keeps_gathered(whole, self._target, mesh.size()))
        super()._place(self._target)
        check_sharded(self._scorer, mesh, tied=tied)
        trained = {name: p for name, p in self._inner.named_parameters() if p.requires_grad}
        return ShardOptimizer(self, trained, self._section)

    def _check(self) -> None:
        """Check that the sharded model computes what the whole one did."""
        assert self._expected is not None
        _, probe = probe_sequences(int(self._head.weight.shape[0]))
        differences = (self._fixed_logprobs(probe.to(self.device)).cpu() - self._expected).abs()
        exact = self._dtype in (torch.float32, torch.float64)
        difference = float(differences.max() if exact else differences.mean())
        self.gather_nothing()
        if not max(self.exchange.gather(difference)) < (1e-3 if exact else 0.3):
            raise refuse(self._inner, f"sharded, it gives other logprobs than whole (by {difference:.3g} nats)")

    def logprobs(self, micro: MicroBatch, parameters: Any = None) -> HeadOutput:
        """Evaluate the policy; all ranks do so at the same time, each on a micro-batch of its own."""
        assert parameters is None, "shards are exchanged in place"
        self.exchange.progress()
        return super().logprobs(micro)

    def _new_statistics(self) -> TokenStatistics:
        return SharedStatistics(self.exchange)

    def _whole_loss(self, loss: Tensor) -> float:
        return self.exchange.total(float(loss))

    # The reference --------------------------------------------------------------------------------------------------

    @property
    def reference(self) -> dict[str, Tensor] | None:
        """This rank's shards of the reference policy."""
        return self._reference

    def reset_reference(self) -> None:
        """Take the current policy as the reference: a copy of this rank's shards."""
        self.gather_nothing()
        self._reference = {n: local(p).clone() for n, p in self.optimizer.parameters.items()}

    def _reference_logprobs(self, minibatches: Sequence[Sequence[MicroBatch]]) -> list[list[Tensor | None]]:
        if self._reference is None:
            return [[None for _ in minibatch] for minibatch in minibatches]
        with self._exchanged(self._reference):
            return [[self._fixed_logprobs(micro) for micro in minibatch] for minibatch in minibatches]

    @contextmanager
    def _exchanged(self, others: dict[str, Tensor]) -> Iterator[None]:
        """Have `others` as the parameters inside the block, and the parameters in their place."""

        @torch.no_grad()
        def exchange() -> None:
            self.gather_nothing()
            for name, parameter in self.optimizer.parameters.items():
                kept = local(parameter).clone()
                local(parameter).copy_(others[name])
                others[name].copy_(kept)

        exchange()
        try:
            yield
        finally:
            exchange()

    def gather_nothing(self) -> None:
        """Drop gathered parameters: where memory allows they stay between the micro-batches of an update."""
        for module in units(self._scorer):
            module.reshard()

    # Whole tensors --------------------------------------------------------------------------------------------------

    def plan(self, size: int = 0) -> list[list[FSDPModule]]:
        """Divide what is gathered together into buckets of at least this many bytes; the same on every rank."""
        self.gather_nothing()
        *layers, root = units(self._scorer)
        sizes = [sum(p.numel() for p in layer.parameters()) for layer in layers]  # type: ignore[attr-defined]
        sizes.append(sum(p.numel() for p in root.parameters()) - sum(sizes))  # type: ignore[attr-defined]
        groups: list[list[FSDPModule]] = [[]]
        held = 0
        for module, count in zip((*layers, root), sizes, strict=True):
            if held >= max(size, 1):
                groups.append([])
                held = 0
            groups[-1].append(module)
            held += count * self._dtype.itemsize
        return groups

    @torch.no_grad()
    def buckets(self, plan: Sequence[Sequence[FSDPModule]] | None = None) -> Iterator[dict[str, Tensor]]:
        """Yield the policy's whole tensors, those of a plan's modules at a time, in the precision of the forward pass.
        All ranks iterate together; what was yielded is gone at the next turn."""
        self.gather_nothing()
        for modules in self.plan() if plan is None else plan:
            for module in modules:
                module.unshard()
            try:
                yield merged_state(self.model)  # what is sharded is left out
            finally:
                for module in modules:
                    module.reshard()
            self.exchange.progress()

    @torch.no_grad()
    def whole_adapter(self) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """Return configuration and whole tensors of the LoRA adapter; all ranks call this."""
        if not hasattr(self.model, "peft_config"):
            return None
        config, tensors = adapter_state(self.model) or ({}, {})
        self.gather_nothing()
        return config, {name: tensor.full_tensor() for name, tensor in tensors.items()}  # type: ignore[attr-defined]


def local(tensor: Tensor) -> Tensor:
    """Return the part of a sharded tensor that this rank has."""
    part: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part.detach()


def units(scorer: Scorer) -> list[FSDPModule]:
    """Return the modules whose parameters are gathered together: every layer, then the rest."""
    inside = [module for module in scorer.modules() if isinstance(module, FSDPModule)]
    return [*inside[1:], inside[0]]


def shard(scorer: Scorer, mesh: DeviceMesh, dtype: torch.dtype, *, keep: bool = False) -> None:
    """Shard a scorer in place: layer by layer, then what is left. `keep`: what was gathered stays until the update."""
    trained = [p for p in scorer.parameters() if p.requires_grad]
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    if all(p.dtype == dtype for p in trained) and dtype not in (torch.float32, torch.float64):
        for parameter in trained:  # the shards are master weights
            parameter.data = parameter.data.float()
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    layers = getattr(scorer.model.get_decoder(), "layers", None)
    if not isinstance(layers, torch.nn.ModuleList):
        raise refuse(scorer.model, "it has no list of layers, so it cannot be divided over learner.ranks")
    for module in (*layers, scorer):
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=not keep)
    for unit in units(scorer):
        unit.set_reshard_after_backward(not keep)
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply while it sums
        if hasattr(unit, "set_reduce_scatter_unused_params"):
            unit.set_reduce_scatter_unused_params(True)  # experts that a rank's tokens did not reach
        elif mesh.size() > 1 and getattr(scorer.model.config, "num_experts_per_tok", None):
            raise refuse(scorer.model, "its experts on several ranks need a newer torch (2.13 has what they need)")


def check_sharded(scorer: Scorer, mesh: DeviceMesh, *, tied: bool) -> None:
    """Refuse a model that is not sharded whole, from its root, with tied weights still tied."""
    model = scorer.model
    loose = [n for n, p in model.named_parameters() if not isinstance(p, DTensor) or p.placements != (Shard(0),)]
    if loose:
        raise refuse(model, f"{len(loose)} of its parameters are not sharded, first {loose[0]}")
    if any(p.device_mesh != mesh for p in model.parameters()):
        raise refuse(model, "its parameters are sharded over different ranks")
    if not isinstance(scorer, FSDPModule):
        raise refuse(model, "it is sharded below its root, so that its head would never be reduced")
    if tied != (model.get_input_embeddings().weight is model.get_output_embeddings().weight):
        raise refuse(model, "sharding separated its embeddings from its head, which are one tensor")
