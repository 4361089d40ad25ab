"""One rank of a test: builds a learner from a JSON description, accumulates a gradient, writes what it got."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from conftest import make_samples
from transformers import AutoConfig, AutoModelForCausalLM

from agentrl.learn.attention import packed
from agentrl.learn.learner import Learner
from agentrl.learn.model import _with_lora, load_model
from agentrl.learn.pack import divide
from agentrl.learn.rank_learner import Exchange, RankLearner, SharedStatistics
from agentrl.learn.step_report import TokenStatistics
from agentrl.recipe import LoraSection, Recipe


def model_of(job: dict[str, Any], recipe: Recipe) -> Any:
    """Build the model of a job: the recipe's, or one of a named family."""
    if job.get("kind"):
        torch.manual_seed(0)
        config = AutoConfig.for_model(job["kind"], **job["shape"])
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")  # type: ignore[no-untyped-call]
    else:
        model, _ = load_model(recipe.model, device="cpu")
    model = model.double() if job.get("double") else model
    if job.get("lora"):
        torch.manual_seed(1)
        model = _with_lora(model, LoraSection(rank=2), None)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # a fresh adapter adds nothing
                parameter.data.normal_(0.0, 0.1)
        model = model.double() if job.get("double") else model
    return model


def gradients(learner: Learner, samples: list[Any], number: int, ranks: int) -> dict[str, Any]:
    """Accumulate the gradient of one minibatch, then train two steps; return gradients, reports and weights."""
    batch = learner.pack(samples)
    share = divide(batch, ranks)[number] if ranks else batch
    statistics: TokenStatistics = learner._new_statistics()
    (minibatch,) = share.minibatches
    with packed(learner._inner):
        (reference,) = learner._reference_logprobs([minibatch])
        old = [learner._old_logprobs(micro, 1) for micro in minibatch]
        loss = learner._whole_loss(learner._accumulate(minibatch, old, reference, statistics, first=True))
    whole = {n: learner.optimizer.gradient(n) for n in learner.optimizer.parameters}
    result: dict[str, Any] = {
        "loss": loss,
        "norm": float(learner.optimizer.norm()),
        "gradients": {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in whole.items()},
        "places": [micro.place for micro in minibatch],
    }
    learner.optimizer.zero()
    reports = []
    for _ in range(2):
        batch = learner.pack(samples)
        report = learner.step(divide(batch, ranks)[number] if ranks else batch)
        reports.append({k: v for k, v in report.metrics().items() if "second" not in k and "micro_batches" not in k})
    if isinstance(learner, RankLearner):
        weights = {n: t.clone() for bucket in learner.buckets() for n, t in bucket.items()}
    else:
        weights = {n: t.clone() for n, t in learner.weights().items()}
    return result | {"reports": reports, "weights": weights}


def main(path: Path, number: int, ranks: int) -> None:
    """Run one rank; 0 ranks stands for the learner of one process."""
    job = json.loads(path.read_text())
    torch.set_num_threads(1)
    recipe = Recipe.model_validate(job["recipe"])
    samples = make_samples.__wrapped__()(12, seed=1)  # type: ignore[attr-defined]
    if ranks:
        store = dist.FileStore(str(path.with_suffix(f".store-{ranks}")), ranks)
        dist.init_process_group("gloo", store=store, rank=number, world_size=ranks)
    model = model_of(job, recipe)
    if ranks:
        exchange = Exchange(dist.group.WORLD)
        learner: Learner = RankLearner(model, None, recipe, device=torch.device("cpu"), exchange=exchange)
        assert isinstance(learner._new_statistics(), SharedStatistics)
    else:
        learner = Learner(model, None, recipe)
    result = gradients(learner, samples, number, ranks)
    if number == 0:
        torch.save(result, path.with_suffix(f".result-{ranks}"))
    if ranks:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
