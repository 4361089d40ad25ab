"""Runs jobs on ranks for test_ranks.py: one process imports everything, then forks the ranks of every job."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from conftest import make_samples  # type: ignore[import-not-found]
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from agentrl.errors import EngineError, RecipeError
from agentrl.learn import memory, rank_checkpoint, rank_learner
from agentrl.learn.attention import packed
from agentrl.learn.learner import Learner
from agentrl.learn.model import _with_lora, load_model
from agentrl.learn.pack import Batch, divide
from agentrl.learn.rank_learner import Exchange, RankLearner
from agentrl.recipe import LoraSection, Recipe
from agentrl.types import Segment

SAMPLES = make_samples.__wrapped__()


class Side:
    """What a job runs with: this rank's learner (0 ranks: the learner of one process)."""

    def __init__(self, job: dict[str, Any], number: int, ranks: int) -> None:
        self.job, self.number, self.ranks = job, number, ranks
        self.learner = self.build()

    def build(self) -> Learner:
        recipe = Recipe.model_validate(self.job["recipe"])
        model = self._model(recipe)
        if not self.ranks:
            return Learner(model, None, recipe)
        exchange = Exchange(dist.group.WORLD)
        return RankLearner(model, None, recipe, device=torch.device("cpu"), exchange=exchange)

    def _model(self, recipe: Recipe) -> Any:
        if self.job.get("kind"):
            torch.manual_seed(0)
            config = AutoConfig.for_model(self.job["kind"], **self.job["shape"])
            model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")  # type: ignore[no-untyped-call]
            model.eval()
        else:
            model, _ = load_model(recipe.model, device="cpu")
        if self.job.get("lora"):
            torch.manual_seed(1)
            model = _with_lora(model, LoraSection(rank=2), None)
            for name, parameter in model.named_parameters():
                if "lora_B" in name:  # a fresh adapter adds nothing
                    parameter.data.normal_(0.0, 0.1)
        return model.double() if self.job.get("double") else model

    def share(self, batch: Batch) -> Batch:
        return divide(batch, self.ranks)[self.number] if self.ranks else batch

    def batch(self, seed: int = 1) -> Batch:
        samples = SAMPLES(12, seed=seed)
        if self.learner.recipe.learner.routing == "replay":
            samples = [replace(s, segment=replace(s.segment, experts=self._experts(s.segment))) for s in samples]
        return self.learner.pack(samples)

    def _experts(self, segment: Segment) -> Any:
        """Two different experts of four for every token and layer, the same wherever the same tokens come first."""
        first = segment.token_ids[:, None] + np.arange(self.job["shape"]["num_hidden_layers"])
        return np.stack((first % 4, (first + 1) % 4), -1).astype(np.int8)

    def step(self, seed: int = 1) -> dict[str, Any]:
        report = self.learner.step(self.share(self.batch(seed))).metrics()
        return {k: v for k, v in report.items() if "second" not in k and "micro_batches" not in k}

    def weights(self) -> dict[str, torch.Tensor]:
        if isinstance(self.learner, RankLearner):
            return {n: t.clone() for bucket in self.learner.buckets() for n, t in bucket.items()}
        return {n: t.detach().clone() for n, t in self.learner.weights().items()}


def gradients(side: Side) -> dict[str, Any]:
    """Accumulate the gradient of a minibatch, then train two steps."""
    learner = side.learner
    share = side.share(side.batch())
    found: dict[str, Any] = {}
    for minibatch in share.minibatches[:1]:
        with packed(learner._inner):
            (reference,) = learner._reference_logprobs([minibatch])
            old = [learner._old_logprobs(micro, 1) for micro in minibatch]
            total = learner._accumulate(minibatch, old, reference, learner._new_statistics(), first=True)
        found = {"loss": learner._whole_loss(total), "norm": float(learner.optimizer.norm())}
        own = {n: learner.optimizer.gradient(n) for n in learner.optimizer.parameters}
        found["gradients"] = {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in own.items()}
        found["places"] = [micro.place for micro in minibatch]
    learner.optimizer.zero()
    return found | {"reports": [side.step(), side.step(2)], "weights": side.weights()}


def skip(side: Side) -> dict[str, Any]:
    """Make one advantage, hence one rank's loss, not a number."""
    batch = side.batch()
    first = batch.minibatches[0][0]
    advantages = first.advantages.clone()
    advantages[0] = float("nan")
    spoiled = replace(batch, minibatches=((replace(first, advantages=advantages), *batch.minibatches[0][1:]),))
    before = side.weights()
    report = side.learner.step(side.share(spoiled))
    same = all(torch.equal(before[n], t) for n, t in side.weights().items())
    return {"skipped": report.skipped, "updates": report.updates, "same": same, "after": side.step()["learn/updates"]}


def mismatch(side: Side) -> dict[str, Any]:
    """Have an engine that disagrees on the samples of one rank."""
    try:
        side.step()
    except EngineError as error:
        return {"error": str(error)}
    return {"error": ""}


def save(side: Side) -> dict[str, Any]:
    """Train, write a checkpoint, train on."""
    assert isinstance(side.learner, RankLearner)
    side.step()
    folder = Path(side.job["folder"])
    if side.number == 0:
        for name in ("shards", "model"):
            (folder / name).mkdir(parents=True)
    dist.barrier()
    saved = side.weights()
    sealed = rank_checkpoint.write(folder, side.learner, side.number, side.ranks)
    return {"saved": saved, "report": side.step(2), "weights": side.weights(), "sealed": sorted(sealed)}


def load(side: Side) -> dict[str, Any]:
    """Resume from that checkpoint on another number of ranks."""
    folder = Path(side.job["folder"]) / "shards"
    if isinstance(side.learner, RankLearner):
        rank_checkpoint.load(folder, side.learner, side.number, side.ranks)
        side.learner.version = side.learner.steps = 1
    else:
        side.learner.load_state_dict({"version": 1, "steps": 1, "skipped": 0, "shards": str(folder)})
    loaded = side.weights()
    return {"saved": loaded, "report": side.step(2), "weights": side.weights()}


def wrong(side: Side) -> dict[str, Any]:
    """Shard in ways that must be refused."""
    messages = []

    def below_the_root(scorer: Any, mesh: Any, dtype: Any, **options: Any) -> None:
        fully_shard(scorer.model.get_decoder(), mesh=mesh)

    def untied(scorer: Any, mesh: Any, dtype: Any, **options: Any) -> None:
        head = scorer.model.get_output_embeddings()
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
        right(scorer, mesh, dtype, **options)

    def changed(scorer: Any, mesh: Any, dtype: Any, **options: Any) -> None:
        scorer.model.get_output_embeddings().weight.data.mul_(1.5)
        right(scorer, mesh, dtype, **options)

    right: Callable[..., None] = rank_learner.shard
    for way in (below_the_root, untied, changed):
        vars(rank_learner)["shard"] = way
        try:
            side.build()
        except RecipeError as error:
            messages.append(str(error))
    vars(rank_learner)["shard"] = right
    return {"messages": messages}


def rank(job: dict[str, Any], name: str, out: Path, number: int, ranks: int) -> None:
    """Run one rank of a job and write what rank 0 got."""
    torch.set_num_threads(1)
    if job.get("large"):  # as for a model that is large for the memory: every layer is gathered for each pass
        vars(memory)["GATHERED_SHARE"] = 0.0
    if ranks:
        store = dist.FileStore(str(out / f"{name}-{ranks}.store"), ranks)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=number, world_size=ranks)
    found = {"gradients": gradients, "skip": skip, "mismatch": mismatch, "save": save, "load": load, "wrong": wrong}[
        job["do"]
    ](Side(job, number, ranks))
    if number == 0:
        torch.save(found, out / f"{name}-{ranks}.pt")


def main(path: Path, out: Path) -> None:
    """Run all jobs, one after the other."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    jobs = json.loads(path.read_text())
    for job in jobs.values():
        Side(job, 0, 0)  # the check of a model's structure is known to its ranks then
    for name, job in jobs.items():
        for ranks in job["ranks"]:
            children = []
            for number in range(max(1, ranks)):
                child = os.fork()
                if child == 0:
                    code = 1
                    try:
                        rank(job, name, out, number, ranks)
                        code = 0
                    except BaseException:
                        traceback.print_exc()
                    sys.stderr.flush()
                    os._exit(code)
                children.append(child)
            codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
            if any(codes):
                raise SystemExit(f"{name} on {ranks} ranks: exit codes {codes}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
