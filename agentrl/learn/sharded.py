"""The learner of a recipe with `learner.ranks`: the same face as `Learner`, the work in rank processes.

step(batch)     ── divided over ranks ──> rank_pool ──> RankLearner on each ── one report of the whole batch
deliver(order)  ── all ranks gather a bucket, rank 0 sends it to the servers ── nothing passes through the driver
model           the policy on the driver's side, brought up to date bucket by bucket, where the embedded engine samples
                from it; with servers it is given up once they have it
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentrl.engines.base import Delivery, Receipt
from agentrl.learn import shard_files
from agentrl.learn.hub import model_folder
from agentrl.learn.learner import Learner
from agentrl.learn.model import merged_state, save_model
from agentrl.learn.pack import Batch, divide, pack_samples
from agentrl.learn.rank_pool import RankPool
from agentrl.learn.step_report import StepReport
from agentrl.recipe import PretrainedModel, Recipe, WarmStartSection
from agentrl.types import TrainingSample, Trajectory

Bucket = dict[str, Tensor]


class ShardedLearner:
    """Trains in `learner.ranks` processes: of this machine, or wherever `pool` has them."""

    def __init__(self, model: Any, tokenizer: Any, recipe: Recipe, pool: Any = None) -> None:
        """Start the ranks; `model` and `tokenizer` come from `load_model`, and stay with the driver. `pool` is a
        `RankPool` or something like it, by default processes beside this one."""
        self.model = model
        self.tokenizer = tokenizer
        self.recipe = recipe
        self.version = self.steps = self.skipped = 0
        self._mirrors = recipe.rollout.engine.type == "transformers"
        """Whether somebody on the driver's side samples from `model`."""
        section = recipe.learner
        self.pool: Any = pool or RankPool(section.ranks, timeout_s=section.rank_timeout_s)
        try:
            threads = recipe.run.threads or max(1, torch.get_num_threads() // section.ranks)
            data = recipe.model_dump(mode="json", by_alias=True)
            data["model"]["dtype"] = str(next(model.parameters()).dtype).removeprefix("torch.")  # auto is decided once
            source: Path | None = None
            if isinstance(recipe.model, PretrainedModel):  # one folder for all: a branch of the hub may move meanwhile
                folder = model_folder(recipe.model.path, recipe.model.revision)
                data["model"] |= {"path": str(folder.absolute()), "revision": None}
            else:
                source = self.pool.folder / "model"
                save_model(model, tokenizer, source)
            self.pool.start(data, source, threads)
            if source is not None:
                shutil.rmtree(source)
            self._refresh()
        except BaseException:
            self.close()
            raise

    def pack(self, samples: Sequence[TrainingSample]) -> Batch:
        """Pack samples as this learner's recipe says."""
        return pack_samples(samples, self.recipe, torch.float32, step=self.steps)

    def step(self, batch: Batch) -> StepReport:
        """Train on a batch, divided over the ranks; the report is that of the whole batch."""
        began = time.perf_counter()
        parts = divide(batch, self.recipe.learner.ranks)
        reports: list[StepReport] = self.pool.call("step", [(part,) for part in parts], each=True)
        self._count()
        self._refresh()
        return replace(
            reports[0],
            micro_batches=sum(len(minibatch) for minibatch in batch.minibatches),
            seconds=time.perf_counter() - began,
            memory_gb=max(report.memory_gb for report in reports),
            memory_held_gb=max(report.memory_held_gb for report in reports),
        )

    def _count(self) -> None:
        self.version, self.steps, self.skipped = self.pool.call("counters")[0]

    def _refresh(self) -> None:
        """Bring the driver's model up to date, where it is used."""
        if not self._mirrors:
            return
        if hasattr(self.model, "peft_config"):
            self._refresh_adapter()
            return
        own = dict(self.model.named_parameters())

        @torch.no_grad()
        def copy(bucket: Bucket) -> None:
            for name, tensor in bucket.items():
                own[name].copy_(tensor)

        self.stream(copy)

    def _refresh_adapter(self) -> None:
        from peft import set_peft_model_state_dict

        whole = self.adapter()
        assert whole is not None
        set_peft_model_state_dict(self.model, whole[1])

    def stream(self, use: Callable[[Bucket], None]) -> None:
        """Call `use` with the policy's whole tensors, a bucket at a time; they are gone when it returns."""
        self.pool.stream(use)

    def weights(self) -> dict[str, Tensor]:
        """Return the policy's tensors by their names in a transformers folder; LoRA is merged into copies."""
        assert self._mirrors, "servers get the weights from rank 0"
        return merged_state(self.model)

    def deliver(self, order: Delivery) -> Receipt:
        """Send the policy to servers bucket by bucket, from rank 0."""
        receipt: Receipt = self.pool.call("publish", (order,))[0]
        if not self._mirrors:
            self._give_up_weights()
        return receipt

    def _give_up_weights(self) -> None:
        """Free the driver's own copy of what is not an adapter: servers and ranks have the weights."""
        empty: dict[Tensor, torch.nn.Parameter] = {}  # one for tensors that are tied
        for path, module in self.model.named_modules():
            for name, own in module.named_parameters(recurse=False):
                if ".lora_" not in path and own.device.type != "meta":
                    if own not in empty:
                        without = torch.empty_like(own, device="meta")
                        empty[own] = torch.nn.Parameter(without, requires_grad=own.requires_grad)
                    setattr(module, name, empty[own])

    def adapter(self) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """Return configuration and tensors of the LoRA adapter; None without LoRA."""
        whole: tuple[dict[str, Any], dict[str, Tensor]] | None = self.pool.call("adapter")[0]
        return whole

    def adopt(self) -> None:
        """Start from the current weights."""
        self.pool.call("adopt")

    def fine_tune(
        self,
        demonstrations: Sequence[Trajectory],
        section: WarmStartSection,
        *,
        seed: int,
        say: Callable[[str], None],
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> float:
        """Train on the demonstrations that solve their task, then start RL from there; return the last mean loss."""
        from agentrl.learn.sft import solved
        from agentrl.learn.sharded_sft import samples_of

        samples = samples_of(solved(demonstrations))
        loss: float = self.pool.call("fine_tune", (samples, section, seed), say=say)[0]
        self._refresh()
        return loss

    def release(self) -> None:
        """Release the ranks' cached GPU memory."""
        self.pool.call("release")

    def write(self, folder: Path) -> dict[str, tuple[int, str]]:
        """Write the ranks' parts of a checkpoint; return sizes and hashes of the files."""
        (folder / shard_files.FOLDER).mkdir()
        (folder / "model").mkdir()
        counters: dict[str, Any] = {"version": self.version, "steps": self.steps, "skipped": self.skipped}
        counters |= {"ranks": self.recipe.learner.ranks, "coefficients": self.pool.call("coefficients")[0]}
        shard_files.write_counters(folder, counters)
        self._write_configuration(folder / "model")
        sealed: dict[str, tuple[int, str]] = {}
        for part in self.pool.call("write", (str(folder),)):
            sealed |= part
        return sealed

    def _write_configuration(self, folder: Path) -> None:
        """Write what a transformers folder has beside the weights; of LoRA all, because adapters are small."""
        if hasattr(self.model, "peft_config"):
            self._refresh_adapter()
            save_model(self.model, self.tokenizer, folder)
            return
        self.model.config.architectures = [type(self.model).__name__]
        self.model.config.dtype = next(self.model.parameters()).dtype
        self.model.config.save_pretrained(folder)
        if self.model.generation_config is not None:
            self.model.generation_config.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a checkpoint of any number of ranks."""
        counters = {name: state.get(name) for name in ("version", "steps", "skipped", "coefficients")}
        with tempfile.TemporaryDirectory(prefix="agentrl-shards-") as temporary:
            folder = Path(state["shards"]) if "shards" in state else Path(temporary)
            if "shards" not in state:
                shard_files.write_whole(folder, state)
            self.pool.call("load", (str(folder), counters))
        self._count()
        self._refresh()

    def close(self) -> None:
        """End the ranks."""
        self.pool.close()


def open_learner(model: Any, tokenizer: Any, recipe: Recipe, stack: ExitStack | Any, pool: Any = None) -> Any:
    """Return the learner of a recipe; `stack` closes it. `pool` is where its ranks are, if not on this machine."""
    if recipe.learner.ranks == 1:
        return Learner(model, tokenizer, recipe)
    learner = ShardedLearner(model, tokenizer, recipe, pool)
    stack.callback(learner.close)
    return learner
