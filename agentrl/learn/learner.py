"""The learner turns packed batches into new weights, and reports what happened.

step(batch): [reference, old logprobs] ── for each epoch and minibatch:
                for each micro-batch: forward ── head ── token losses ── Σ × coefficients ── backward
                gradient norm ── finite? clip, update : skip and count
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from agentrl.engines.base import Delivery, Receipt
from agentrl.errors import RecipeError
from agentrl.learn.algorithms import resolve
from agentrl.learn.attention import Kind, choose, packed
from agentrl.learn.coefficients import Coefficients
from agentrl.learn.compile import CompiledModules
from agentrl.learn.critic import Critic
from agentrl.learn.kl_reward import Floats, lowered, token_kl
from agentrl.learn.logprobs import HeadOutput
from agentrl.learn.model import adapter_state, merged_state, save_model
from agentrl.learn.model_check import check_logprobs, check_structure, own_logprobs, probe_sequences
from agentrl.learn.objective import Tokens, divergence, interpolated, token_losses
from agentrl.learn.optimizer import Optimizer, schedule_factor
from agentrl.learn.pack import Batch, MicroBatch, pack_samples
from agentrl.learn.routing import Replay
from agentrl.learn.scorer import Scorer
from agentrl.learn.shard_files import whole_state
from agentrl.learn.step_report import Mismatch, StepReport, TokenStatistics, judge, mismatch, quantile
from agentrl.learn.weights import buckets, stale
from agentrl.recipe import Recipe, WarmStartSection
from agentrl.types import TrainingSample, Trajectory

if TYPE_CHECKING:
    from agentrl.learn.preferences import Preferred
    from agentrl.rollout.examples import Example


class Learner:
    """Owns the policy's weights and everything that changes them."""

    def __init__(self, model: Any, tokenizer: Any, recipe: Recipe) -> None:
        """Take `model` and `tokenizer` from `load_model`; the model stays on its device."""
        self.model = model
        self.tokenizer = tokenizer
        self.recipe = recipe
        self.version = 0
        self.steps = 0
        """Calls of `step`, counted by the schedule."""
        self.skipped = 0
        """Updates skipped over the whole run."""
        self.algorithm = resolve(recipe.algorithm)
        self.coefficients: Coefficients = Coefficients(self.algorithm)
        self._reward_kl = 0.0
        """KL in the reward: the mean over the tokens of this step."""
        self._section = recipe.learner
        self._busy = threading.RLock()
        """Held while weights change, and while they are sent."""
        self._sender: Any = None
        if self.algorithm.correction not in ("none", "negative") and self._section.old_logprobs == "engine":
            raise RecipeError(
                f"algorithm.correction: {self.algorithm.correction} compares the learner's old logprobs with the "
                "engine's; set learner.old_logprobs: recompute (free when a round is one update) or interpolate"
            )
        # peft wraps the model but changes its layers in place, so the inner model computes the same.
        self._inner: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._head: Any = self._inner.get_output_embeddings()
        if type(self._head) is not torch.nn.Linear or self._head.bias is not None:
            raise RecipeError("the model's output head must be a plain linear layer without bias, and no LoRA target")
        self._dtype: torch.dtype = self._head.weight.dtype
        """Precision of the forward pass."""
        self._scorer: Scorer = Scorer(
            self._inner,
            temperature=recipe.rollout.temperature,
            candidates=self.algorithm.simko.candidates if self.algorithm.simko else 0,
            float32=recipe.model.float32_head,
        )
        self._replay: Replay = Replay(self._inner, active=self._section.routing == "replay")
        self._place(self._head.weight.device)
        self._critic: Critic | None = None
        if self.algorithm.has_critic:
            self._critic = Critic(self._head.weight, self.algorithm, self._section, self._loss_dtype)
            self._scorer.value_head = self._critic.head
        self.optimizer: Optimizer = self._make_optimizer()
        self._largest: int = 0
        """Tokens of the largest micro-batch so far."""
        self._reference: dict[str, Tensor] | None = None
        if self.algorithm.needs_reference:
            self.reset_reference()
        if self._section.checkpointing:
            self._inner.gradient_checkpointing_enable({"use_reentrant": False})
        self._check()

    def _place(self, device: torch.device) -> None:
        """Choose attention and kernels for a device."""
        self.device: torch.device = device
        self._attention: Kind = choose(self.recipe.model.attention, device, self._dtype)
        modules = self._inner if self._section.fuse else torch.nn.Module()
        self._compiled: CompiledModules = CompiledModules(modules, device)

    def _make_optimizer(self) -> Optimizer:
        return Optimizer({n: p for n, p in self._inner.named_parameters() if p.requires_grad}, self._section)

    # What the loop calls --------------------------------------------------------------------------------------------

    def pack(self, samples: Sequence[TrainingSample]) -> Batch:
        """Pack samples as this learner's recipe says."""
        return pack_samples(samples, self.recipe, self._loss_dtype, step=self.steps)

    def credit(self, samples: Sequence[TrainingSample]) -> list[TrainingSample]:
        """Have the critic turn the samples' rewards into advantages; without a critic they have them already."""
        if self._critic is None:
            return list(samples)
        if self.algorithm.kl_in_reward:
            samples = lowered(samples, self.penalties(samples))
        with self._busy, packed(self._inner), self._compiled.use():
            return self._critic.credit(samples, lambda micro: self._fixed(micro.to(self.device)))

    def penalties(self, samples: Sequence[TrainingSample]) -> list[Floats]:
        """Return what KL in the reward takes from each sampled token's reward, by the current coefficient."""
        with self._busy, packed(self._inner), self._compiled.use():
            kl = token_kl(
                self.algorithm.kl,
                samples,
                lambda micro: self._fixed_logprobs(micro.to(self.device), self._reference),
                micro_tokens=self._section.micro_tokens,
                dtype=self._loss_dtype,
            )
        self._reward_kl = sum(float(each.sum()) for each in kl) / max(1, sum(map(len, kl)))
        return [self.coefficients.kl * each for each in kl]

    def step(self, batch: Batch) -> StepReport:
        """Train on a batch. Raise EngineError when engine and learner disagree beyond the recipe's bound."""
        # The blocks include the backward pass, in which checkpointed layers run again.
        with self._busy, packed(self._inner), self._compiled.use(), self._replay.use():
            return self._step(batch)

    def _step(self, batch: Batch) -> StepReport:
        began = time.perf_counter()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self._make_room(batch)
        minibatches = [[micro.to(self.device) for micro in minibatch] for minibatch in batch.minibatches]
        updates = self._section.epochs * len(minibatches)
        reference = self._reference_logprobs(minibatches)
        old = [[self._old_logprobs(micro, updates) for micro in minibatch] for minibatch in minibatches]
        statistics = self._new_statistics()
        losses: list[float] = []
        norms: list[float] = []
        applied = skipped = 0
        factor = schedule_factor(
            self.steps, schedule=self._section.schedule, warmup=self._section.warmup, total=self.recipe.run.steps
        )
        alone = self._critic is not None and self._critic.begin(self.steps)
        first_mismatch: Mismatch | None = None
        for epoch in range(self._section.epochs):
            for index, minibatch in enumerate(minibatches):
                loss = self._accumulate(minibatch, old[index], reference[index], statistics, first=epoch == 0)
                if epoch == index == 0:
                    first_mismatch = self._mismatch(statistics)
                norm = self.optimizer.norm()
                losses.append(self._whole_loss(loss))
                norms.append(float(norm))
                if not (math.isfinite(norms[-1]) and math.isfinite(losses[-1])):
                    self.optimizer.zero()
                    if self._critic is not None:
                        self._critic.zero()
                    skipped += 1
                    continue
                if self._critic is not None:
                    self._critic.step(factor)
                if not alone:
                    self.optimizer.step(norm, factor)
                    applied += 1
        self.steps += 1
        self.version += applied > 0
        self.skipped += skipped
        if self.algorithm.reference_reset and self.steps % self.algorithm.reference_reset == 0:
            self.reset_reference()
            if self.algorithm.optimizer_reset:
                self.optimizer.forget()
        ratio, entropy, reference_kl = statistics.all("ratio"), statistics.mean("entropy"), self._kl(statistics)
        weighed = self.coefficients.figures()
        if batch.sampled:
            self.coefficients.follow(kl=reference_kl, entropy=entropy)
        return StepReport(
            version=self.version,
            updates=applied,
            skipped=skipped,
            loss=sum(losses) / len(losses) if losses else 0.0,
            grad_norm=sum(norms) / len(norms) if norms else 0.0,
            lr=self._section.lr * factor,
            entropy=entropy,
            kl=statistics.mean("policy_kl"),
            reference_kl=reference_kl,
            **weighed,
            clip_fraction=statistics.mean("clipped"),
            ratio_low=quantile(ratio, 0.01),
            ratio_high=quantile(ratio, 0.99),
            ratio_max=float(ratio.max()) if len(ratio) else 1.0,
            correction=statistics.mean("correction") if len(ratio) else 1.0,
            **(self._critic.figures(statistics) if self._critic is not None else {}),
            positive_nll=statistics.mean("nll") if self.algorithm.positive_nll else None,
            mismatch=first_mismatch or self._mismatch(statistics),
            tokens=batch.tokens,
            computed=batch.computed,
            sampled=batch.sampled,
            micro_batches=sum(len(minibatch) for minibatch in minibatches),
            seconds=time.perf_counter() - began,
            memory_gb=torch.cuda.max_memory_allocated(self.device) / 2**30 if self.device.type == "cuda" else 0.0,
            memory_held_gb=torch.cuda.max_memory_reserved(self.device) / 2**30 if self.device.type == "cuda" else 0.0,
        )

    def _make_room(self, batch: Batch) -> None:
        """Free cached memory blocks of smaller batches when a larger one comes: they do not fit it, and would be held
        beside its own. Episodes grow during training: one run came to hold twice what it used."""
        largest = max((len(micro.token_ids) for minibatch in batch.minibatches for micro in minibatch), default=0)
        if largest > self._largest:
            self._largest = largest
            self.release()

    def adopt(self) -> None:
        """Start from the model's current weights, which something else has trained meanwhile."""
        self.optimizer.adopt()
        if self._reference is not None:
            self.reset_reference()

    def reset_reference(self) -> None:
        """Take the current policy as the reference (ProRL)."""
        self._reference = {n: p.detach().clone() for n, p in self.optimizer.parameters.items()}

    def weights(self) -> dict[str, Tensor]:
        """Return the policy's tensors by their names in a transformers folder; LoRA is merged into copies."""
        return merged_state(self.model)

    def adapter(self) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """Return configuration and tensors of the LoRA adapter; None without LoRA."""
        return adapter_state(self.model)

    def deliver(self, order: Delivery) -> Receipt:
        """Send the policy to servers bucket by bucket, where it is still the version that was ordered."""
        from agentrl.engines.sglang.buckets import BucketSender

        with self._busy:
            if (receipt := stale(order, self.version)) is not None:
                return receipt
            if self._sender is None:
                self._sender = BucketSender(stable=self.model is self._inner)
            count, all_buckets = buckets(self.model, order.bucket_bytes)
            sent: Receipt = self._sender.send(order, all_buckets, count)
            return sent

    def release(self) -> None:
        """Release cached GPU memory, so that a server on the same GPU can use it."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def state_dict(self) -> dict[str, Any]:
        """Return everything that changes during training."""
        return {
            "version": self.version,
            "steps": self.steps,
            "skipped": self.skipped,
            "optimizer": self.optimizer.state_dict(),
            "reference": self._reference,
            "coefficients": self.coefficients.state_dict(),
        } | ({"critic": self._critic.state_dict()} if self._critic is not None else {})

    def fine_tune(self, demonstrations: Sequence[Trajectory], section: WarmStartSection, **options: Any) -> float:
        """Train on the demonstrations that solve their task, then start RL from there; return the last mean loss.
        Options: seed, say, progress."""
        from agentrl.learn.sft import warm_start

        micro_tokens = self._section.micro_tokens
        self.optimizer.set_aside()  # the warm start has its own float32 weights and moments
        try:
            return warm_start(self.model, self.tokenizer, demonstrations, section, micro_tokens=micro_tokens, **options)
        finally:
            self.adopt()

    def prefer(self, examples: Sequence[Example], section: WarmStartSection, **options: Any) -> Preferred:
        """Train on the preferences of a data file, then start RL from there; options as for `fine_tune`."""
        from agentrl.learn import preferences

        with self._busy:
            result = preferences.train(self, examples, section, **options)
            self.adopt()
            return result

    def write(self, folder: Path) -> dict[str, tuple[int, str]]:
        """Write the learner's part of a checkpoint: the model's folder and everything that changes."""
        save_model(self.model, self.tokenizer, folder / "model")
        torch.save(self.state_dict(), folder / "learner.pt")
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from `state_dict`, or from the shards of `learner.ranks`."""
        if "shards" in state:
            state = whole_state(state, self.optimizer.state_dict()["adam"]["param_groups"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.version, self.steps, self.skipped = state["version"], state["steps"], state["skipped"]
        if self.algorithm.needs_reference and state["reference"] is not None:
            self._reference = {n: t.to(self.device) for n, t in state["reference"].items()}
        self.coefficients.load_state_dict(state.get("coefficients") or {})
        if self._critic is not None:
            self._critic.load_state_dict(state["critic"])

    # One pass -------------------------------------------------------------------------------------------------------

    @property
    def _loss_dtype(self) -> torch.dtype:
        return torch.float64 if self._dtype == torch.float64 else torch.float32

    def logprobs(self, micro: MicroBatch, parameters: Mapping[str, Tensor] | None = None) -> HeadOutput:
        """Evaluate the policy on a micro-batch's sampled tokens, with `parameters` in place of its own."""
        with packed(self._inner), self._replay.use(micro.experts):
            if parameters is None:
                return HeadOutput.of(self._scorer(micro, self._attention))
            inside = {f"model.{name}": tensor for name, tensor in parameters.items()}
            with self._compiled.use(False):  # compiled calls hold their own weights
                outputs = torch.func.functional_call(self._scorer, inside, (micro, self._attention))
        return HeadOutput.of(outputs)

    def _accumulate(
        self,
        minibatch: Sequence[MicroBatch],
        old: Sequence[Tensor | None],
        reference: Sequence[Tensor | None],
        statistics: TokenStatistics,
        *,
        first: bool,
    ) -> Tensor:
        """Accumulate the gradient of one optimizer step; return its loss."""
        self.model.train()
        statistics.begin()
        algorithm = self.coefficients.applied()
        total = torch.zeros((), dtype=self._loss_dtype, device=self.device)
        for micro, old_logprobs, reference_logprobs in zip(minibatch, old, reference, strict=True):
            output = self.logprobs(micro)
            before = self._before(micro, output, old_logprobs)
            tokens = Tokens(
                logprobs=output.logprobs,
                entropy=output.entropy if algorithm.entropy_bonus else output.entropy.detach(),
                old_logprobs=before,
                engine_logprobs=micro.engine_logprobs,
                advantages=micro.advantages,
                sequence=micro.sequence,
                sequences=micro.sequences,
                reference_logprobs=reference_logprobs,
                candidates=output.candidates,
                likeliest=output.likeliest,
                held_back=micro.held_back,
                lag=self._lag(micro) if algorithm.staleness_decay < 1.0 else None,
            )
            losses = token_losses(algorithm, tokens)
            loss = (losses.loss * micro.coefficients).sum()
            if micro.imitation is not None:
                loss = loss - self.algorithm.positive_nll * (output.logprobs * micro.imitation).sum()
                statistics.add(micro.place, nll=-output.logprobs[micro.imitation > 0])
            if self._critic is not None:
                loss = self._critic.added_to(loss, output, micro, statistics, first=first)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
            statistics.add(
                micro.place,
                entropy=output.entropy,
                ratio=losses.ratio,
                clipped=losses.clipped.float(),
                kl=losses.kl,
                correction=losses.correction,
                policy_kl=divergence("k3", before, output.logprobs.detach()),
            )
            if first:
                statistics.add(
                    micro.place,
                    learner=output.logprobs,
                    engine=micro.engine_logprobs,
                    current=(micro.versions == self.version).float(),
                )
        return total

    def _old_logprobs(self, micro: MicroBatch, updates: int) -> Tensor | None:
        """Return what ratios compare with; None where it follows from the current logprobs: it is these when a batch is
        one update, or lies between them and the engine's."""
        if self._section.old_logprobs == "engine":
            return micro.engine_logprobs
        return None if updates == 1 or self._section.old_logprobs == "interpolate" else self._fixed_logprobs(micro)

    def _before(self, micro: MicroBatch, output: HeadOutput, old_logprobs: Tensor | None) -> Tensor:
        """Return the old logprobs that belong to a forward pass."""
        if old_logprobs is not None:
            return old_logprobs
        if self._section.old_logprobs == "interpolate":
            return interpolated(output.logprobs.detach(), micro.engine_logprobs, self._lag(micro))
        return output.logprobs.detach()

    def _lag(self, micro: MicroBatch) -> Tensor:
        """Return how many versions older than the policy each token is."""
        return (self.version - micro.versions).clamp(min=0)

    def _kl(self, statistics: TokenStatistics) -> float | None:
        """Return the divergence from the reference in this step."""
        if self.algorithm.kl_in_reward:
            return self._reward_kl
        return statistics.mean("kl") if self.algorithm.needs_reference else None

    def _reference_logprobs(self, minibatches: Sequence[Sequence[MicroBatch]]) -> list[list[Tensor | None]]:
        if self._reference is None or not self.algorithm.kl_in_loss:
            return [[None for _ in minibatch] for minibatch in minibatches]
        return [[self._fixed_logprobs(micro, self._reference) for micro in minibatch] for minibatch in minibatches]

    def _new_statistics(self) -> TokenStatistics:
        return TokenStatistics()

    def _whole_loss(self, loss: Tensor) -> float:
        """Return the loss of the whole minibatch."""
        return float(loss)

    def _fixed_logprobs(self, micro: MicroBatch, parameters: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return logprobs without a gradient."""
        return self._fixed(micro, parameters).logprobs

    def _fixed(self, micro: MicroBatch, parameters: Mapping[str, Tensor] | None = None) -> HeadOutput:
        """Evaluate the policy without a gradient."""
        self.model.eval()
        with torch.no_grad():
            return self.logprobs(micro, parameters)

    def _mismatch(self, statistics: TokenStatistics) -> Mismatch:
        """Compare engine and learner before the first update; beyond the bound the run stops here."""
        result = mismatch(statistics.all("learner"), statistics.all("engine"), statistics.all("current"))
        return judge(result, self._section.max_mismatch, self._dtype, self.version)

    def _check(self) -> None:
        """Check before training that packed logprobs equal the model's own, sequence by sequence."""
        self.model.eval()
        sequences, micro = probe_sequences(self._head.weight.shape[0])
        micro = micro.to(self.device)
        with self._compiled.use(False):
            check_structure(self._inner, micro, self._attention)
        with self._compiled.use():
            ours = self._fixed_logprobs(micro).float()
        own = own_logprobs(self._inner, sequences, self.recipe.rollout.temperature)
        check_logprobs(self._inner, ours, own, self._dtype)
