"""The learner: packed batches in, new weights out, and a report of what happened.

step(batch): [reference, old logprobs] ── for each epoch and minibatch:
                for each micro-batch: forward ── head ── token losses ── Σ × coefficients ── backward
                gradient norm ── finite? clip, update : skip and count
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrl.errors import EngineError, RecipeError
from agentrl.learn.algorithms import resolve
from agentrl.learn.attention import Kind, Packing, choose, packed
from agentrl.learn.compile import CompiledModules
from agentrl.learn.logprobs import HeadOutput, head
from agentrl.learn.objective import Tokens, divergence, token_losses
from agentrl.learn.optimizer import Optimizer, schedule_factor
from agentrl.learn.pack import Batch, MicroBatch, pack
from agentrl.learn.step_report import Gathered, Mismatch, StepReport, mismatch, quantile
from agentrl.recipe import Recipe
from agentrl.types import Segment, TrainingSample


class Learner:
    """Owns the policy's weights and everything that changes them."""

    def __init__(self, model: Any, tokenizer: Any, recipe: Recipe) -> None:
        """`model` and `tokenizer` as `load_model` gives them; the model stays where it is."""
        self.model = model
        self.tokenizer = tokenizer
        self.recipe = recipe
        self.version = 0
        self.steps = 0
        """Calls of `step`: the schedule counts them."""
        self.skipped = 0
        """Updates left out over the whole run."""
        self.algorithm = resolve(recipe.algorithm)
        self._section = recipe.learner
        if self.algorithm.correction != "none" and self._section.old_logprobs == "engine":
            raise RecipeError(
                f"algorithm.correction: {self.algorithm.correction} compares the learner's old logprobs with the "
                "engine's; set learner.old_logprobs: recompute (free when a round is one update)"
            )
        # peft wraps the model; its layers are changed in place, so the inner model computes the same.
        self._inner: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._head: Any = self._inner.get_output_embeddings()
        if type(self._head) is not torch.nn.Linear or self._head.bias is not None:
            raise RecipeError("the model's output head must be a plain linear layer without bias, and no LoRA target")
        self.device: torch.device = self._head.weight.device
        self._attention: Kind = choose(recipe.model.attention, self.device, self._head.weight.dtype)
        self._fusion: CompiledModules = CompiledModules(
            self._inner if self._section.fuse else torch.nn.Module(), self.device
        )
        trainable = {n: p for n, p in self._inner.named_parameters() if p.requires_grad}
        self.optimizer: Optimizer = Optimizer(trainable, self._section)
        self._largest: int = 0
        """Tokens of the largest micro-batch so far."""
        self._reference: dict[str, Tensor] | None = None
        if self.algorithm.needs_reference:
            self.reset_reference()
        if self._section.checkpointing:
            self._inner.gradient_checkpointing_enable({"use_reentrant": False})
        self._check()

    # The loop's side ------------------------------------------------------------------------------------------------

    def pack(self, samples: Sequence[TrainingSample]) -> Batch:
        """The samples as this learner's recipe wants them packed."""
        return pack(
            samples,
            self.algorithm.aggregation,
            micro_tokens=self._section.micro_tokens,
            minibatches=self._section.minibatches,
            max_tokens=self.recipe.rollout.max_tokens,
            dtype=self._loss_dtype,
        )

    def step(self, batch: Batch) -> StepReport:
        """Train on a batch. Raises EngineError when engine and learner disagree beyond the recipe's bound."""
        with (
            packed(self._inner),
            self._fusion.on(),
        ):  # open through the backward pass: checkpointed layers run again there
            return self._step(batch)

    def _step(self, batch: Batch) -> StepReport:
        began = time.perf_counter()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self._make_room(batch)
        every = [[micro.to(self.device) for micro in minibatch] for minibatch in batch.minibatches]
        reference = [[self._reference_logprobs(m) for m in mini] for mini in every]
        old = [[self._old_logprobs(m, self._section.epochs * len(every)) for m in mini] for mini in every]
        gathered = Gathered()
        losses: list[float] = []
        norms: list[float] = []
        applied = skipped = 0
        factor = schedule_factor(
            self.steps, schedule=self._section.schedule, warmup=self._section.warmup, total=self.recipe.run.steps
        )
        found: Mismatch | None = None
        for epoch in range(self._section.epochs):
            for index, minibatch in enumerate(every):
                loss = self._accumulate(minibatch, old[index], reference[index], gathered, first=epoch == 0)
                if epoch == index == 0:
                    found = self._mismatch(gathered)
                norm = self.optimizer.norm()
                losses.append(float(loss))
                norms.append(float(norm))
                if not (math.isfinite(norms[-1]) and math.isfinite(losses[-1])):
                    self.optimizer.zero()
                    skipped += 1
                    continue
                self.optimizer.step(norm, factor)
                applied += 1
        self.steps += 1
        self.version += applied > 0
        self.skipped += skipped
        if self.algorithm.reference_reset and self.steps % self.algorithm.reference_reset == 0:
            self.reset_reference()
        ratio = gathered.all("ratio")
        return StepReport(
            version=self.version,
            updates=applied,
            skipped=skipped,
            loss=sum(losses) / len(losses) if losses else 0.0,
            grad_norm=sum(norms) / len(norms) if norms else 0.0,
            lr=self._section.lr * factor,
            entropy=gathered.mean("entropy"),
            kl=gathered.mean("policy_kl"),
            reference_kl=gathered.mean("kl") if self.algorithm.needs_reference else None,
            clip_fraction=gathered.mean("clipped"),
            ratio_low=quantile(ratio, 0.01),
            ratio_high=quantile(ratio, 0.99),
            ratio_max=float(ratio.max()) if len(ratio) else 1.0,
            correction=gathered.mean("correction") if len(ratio) else 1.0,
            mismatch=found or self._mismatch(gathered),
            tokens=batch.tokens,
            computed=batch.computed,
            sampled=batch.sampled,
            micro_batches=sum(len(mini) for mini in every),
            seconds=time.perf_counter() - began,
            memory_gb=torch.cuda.max_memory_allocated(self.device) / 2**30 if self.device.type == "cuda" else 0.0,
            memory_held_gb=torch.cuda.max_memory_reserved(self.device) / 2**30 if self.device.type == "cuda" else 0.0,
        )

    def _make_room(self, batch: Batch) -> None:
        """Let go of the blocks that smaller batches left when a larger one comes: they would not fit it, and would be
        held beside its own. Episodes grow as they are learnt: one run came to hold twice what it used."""
        largest = max((len(micro.token_ids) for minibatch in batch.minibatches for micro in minibatch), default=0)
        if largest > self._largest:
            self._largest = largest
            self.release()

    def adopt(self) -> None:
        """Begin from the model's weights as they are now: something else has trained them meanwhile."""
        self.optimizer.adopt()
        if self._reference is not None:
            self.reset_reference()

    def reset_reference(self) -> None:
        """Take the current policy as the reference (ProRL)."""
        self._reference = {n: p.detach().clone() for n, p in self.optimizer.parameters.items()}

    def weights(self) -> dict[str, Tensor]:
        """The policy's tensors by the names a transformers folder of it would have; LoRA is merged into copies."""
        from agentrl.learn.model import merged_state

        return merged_state(self.model)

    def adapter(self) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """What a server needs of a LoRA adapter: its configuration and its tensors; None without LoRA."""
        from agentrl.learn.model import adapter_state

        return adapter_state(self.model)

    def release(self) -> None:
        """Give cached GPU memory back, so that a server on the same GPU can have it."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def state_dict(self) -> dict[str, Any]:
        """Everything that changes while it learns."""
        return {
            "version": self.version,
            "steps": self.steps,
            "skipped": self.skipped,
            "optimizer": self.optimizer.state_dict(),
            "reference": self._reference,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.version, self.steps, self.skipped = state["version"], state["steps"], state["skipped"]
        if self.algorithm.needs_reference and state["reference"] is not None:
            self._reference = {n: t.to(self.device) for n, t in state["reference"].items()}

    # One pass -------------------------------------------------------------------------------------------------------

    @property
    def _loss_dtype(self) -> torch.dtype:
        return torch.float64 if self._head.weight.dtype == torch.float64 else torch.float32

    def logprobs(self, micro: MicroBatch, parameters: Mapping[str, Tensor] | None = None) -> HeadOutput:
        """What the policy says about a micro-batch's sampled tokens; with `parameters` in place of its own."""
        packing = Packing(micro.runs, self._attention)
        decoder = self._inner.get_decoder()
        inputs: dict[str, Any] = {
            "input_ids": micro.token_ids[None],
            "position_ids": micro.positions[None],
            "use_cache": False,
            "packing": packing,
        }
        weight = self._head.weight
        with packed(self._inner):
            if parameters is None:
                hidden = decoder(**inputs)[0]
            else:
                names = {id(p): n for n, p in self._inner.named_parameters()}
                weight = parameters.get(names[id(weight)], weight)
                inside = {
                    n: parameters[names[id(p)]] for n, p in decoder.named_parameters() if names[id(p)] in parameters
                }
                with self._fusion.on(False):  # a fused form knows its own weights
                    hidden = torch.func.functional_call(decoder, inside, (), inputs)[0]
        return head(
            hidden[0, micro.predictors],
            weight,
            micro.targets,
            temperature=self.recipe.rollout.temperature,
            candidates=self.algorithm.spread.candidates if self.algorithm.spread else 0,
            float32=self.recipe.model.float32_head,
        )

    def _accumulate(
        self,
        minibatch: Sequence[MicroBatch],
        old: Sequence[Tensor | None],
        reference: Sequence[Tensor | None],
        gathered: Gathered,
        *,
        first: bool,
    ) -> Tensor:
        """Add up the gradient of one optimizer step; its loss."""
        self.model.train()
        total = torch.zeros((), dtype=self._loss_dtype, device=self.device)
        for micro, old_logprobs, reference_logprobs in zip(minibatch, old, reference, strict=True):
            output = self.logprobs(micro)
            before = output.logprobs.detach() if old_logprobs is None else old_logprobs
            tokens = Tokens(
                logprobs=output.logprobs,
                entropy=output.entropy if self.algorithm.entropy_bonus else output.entropy.detach(),
                old_logprobs=before,
                engine_logprobs=micro.engine_logprobs,
                advantages=micro.advantages,
                sequence=micro.sequence,
                sequences=micro.sequences,
                reference_logprobs=reference_logprobs,
                candidates=output.candidates,
                likeliest=output.likeliest,
            )
            made = token_losses(self.algorithm, tokens)
            loss = (made.loss * micro.coefficients).sum()
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
            gathered.add(
                entropy=output.entropy,
                ratio=made.ratio,
                clipped=made.clipped.float(),
                kl=made.kl,
                correction=made.correction,
                policy_kl=divergence("k3", before, output.logprobs.detach()),
            )
            if first:
                gathered.add(
                    learner=output.logprobs,
                    engine=micro.engine_logprobs,
                    current=(micro.versions == self.version).float(),
                )
        return total

    def _old_logprobs(self, micro: MicroBatch, updates: int) -> Tensor | None:
        """What ratios compare with; None: the current logprobs themselves, when a batch is one update."""
        if self._section.old_logprobs == "engine":
            return micro.engine_logprobs
        if updates == 1:
            return None
        self.model.eval()
        with torch.no_grad():
            return self.logprobs(micro).logprobs

    def _reference_logprobs(self, micro: MicroBatch) -> Tensor | None:
        if self._reference is None:
            return None
        self.model.eval()
        with torch.no_grad():
            return self.logprobs(micro, self._reference).logprobs

    def _mismatch(self, gathered: Gathered) -> Mismatch:
        """Measured before the first update; beyond the bound the run stops here."""
        found = mismatch(gathered.all("learner"), gathered.all("engine"), gathered.all("current"))
        bound = self._section.max_mismatch
        if not found.judged <= bound:
            raise EngineError(
                f"engine and learner disagree by {found.judged:.3g} nats a token on average (learner.max_mismatch is "
                f"{bound}); {found.current:.0%} of the tokens come from the learner's own "
                f"version {self.version}. If that share is high, the engine runs other weights, another temperature, "
                "tokenizer or precision: check rollout.temperature, model.path and the engine's version. If it is "
                "low, the samples are too old: lower async.max_staleness or learner.lr"
            )
        return found

    def _check(self) -> None:
        """Packed logprobs must be those of the model run plainly, sequence by sequence; found out before training."""
        random = np.random.default_rng(0)
        first, other = random.integers(0, self._head.weight.shape[0], (2, 12), dtype=np.int32)
        sequences = [first, np.concatenate((first[:7], other)), other[:7]]  # two share their first tokens
        micro = self._probe(sequences)
        ids = [torch.tensor(s, dtype=torch.int64, device=self.device) for s in sequences]
        self.model.eval()
        temperature = self.recipe.rollout.temperature
        with torch.no_grad():
            with self._fusion.on():
                ours = self.logprobs(micro).logprobs.float()
            plain = torch.cat(
                [
                    (self._inner(input_ids=i[None]).logits[0, :-1].float() / temperature)
                    .log_softmax(-1)
                    .gather(-1, i[1:, None])[:, 0]
                    for i in ids
                ]
            )
        # Sixteen bits leave single tokens half a nat apart, since noise has very unlikely tokens: there the mean tells.
        exact = self._head.weight.dtype in (torch.float32, torch.float64)
        apart = (ours - plain).abs()
        difference = float(apart.max() if exact else apart.mean())
        if not difference < (1e-3 if exact else 0.3):
            raise RecipeError(
                f"packed sequences give {type(self._inner).__name__} other logprobs than it gives by itself (by "
                f"{difference:.3g} nats): its head or attention does something this learner does not know of. Train a "
                "Llama, Qwen, SmolLM or Mistral model"
            )

    def _probe(self, sequences: Sequence[NDArray[np.int32]]) -> MicroBatch:
        """Sequences, the first two of one group, of which every token but the first counts as sampled."""
        samples = []
        for index, ids in enumerate(sequences):
            sampled = np.arange(len(ids)) > 0
            segment = Segment(ids, np.where(sampled, -1.0, 0.0), np.where(sampled, 0, -1), np.where(sampled, 2, 0))
            samples.append(
                TrainingSample(
                    segment=segment,
                    advantages=sampled.astype(np.float32),
                    weight=1.0,
                    group=index // 2,
                    trajectory=index,
                )
            )
        ((micro,),) = pack(samples, "token", micro_tokens=1 << 20).minibatches
        return micro.to(self.device)
