"""`agentrl train --dry-run`: tries everything a run will need, before it costs time. Trains nothing."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

from agentrl import assembly, seeds
from agentrl.errors import AgentRLError
from agentrl.recipe import OpenaiEngine, Recipe, SglangEngine
from agentrl.report import episode
from agentrl.rollout.rollout import Budget, EnvRuntime, RolloutId, rollout
from agentrl.rollout.scripted import ScriptedEngine

OPTIMIZER_BYTES = 12
"""What a trained parameter costs beside itself and its gradient: float32 master, two moments of AdamW."""


def preflight(recipe: Recipe, say: Callable[[str], None] = print) -> int:
    """Check each part in the order in which a run meets it; return 0 when all are well, 1 at the first that is not."""
    with ExitStack() as stack:
        steps = _steps(recipe, stack)
        while True:
            try:
                name, seen = next(steps)
            except StopIteration:
                say("ready to train")
                return 0
            except AgentRLError as error:
                say(f"failed   {error}")
                return 1
            say(f"ok       {name}: {seen}")


def _steps(recipe: Recipe, stack: ExitStack) -> Iterator[tuple[str, str]]:
    folder = recipe.run.out / recipe.run.name
    there = (folder / "recipe.yaml").exists()
    parent = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    free = shutil.disk_usage(parent).free / 2**30
    yield "run folder", f"{folder} {'exists: needs --resume' if there else 'is free'}; {free:.0f} GiB of disk left"
    runtimes = stack.enter_context(assembly.runtimes(recipe))
    yield "environments", ", ".join(f"{s.name} in {s.sandbox} sandboxes" for s in recipe.envs)
    yield "engine", _engine(recipe)
    if recipe.cluster is not None:
        yield "cluster", _cluster(recipe)
    policy = assembly.load_policy(recipe, runtimes, say=lambda text: None)
    yield "template", str(policy.renderer.report)
    yield "memory", _memory(recipe, policy.model)
    for name, runtime in runtimes.items():
        yield f"episode in {name}", _episode(recipe, runtime, policy)


def _engine(recipe: Recipe) -> str:
    engine = recipe.rollout.engine
    if isinstance(engine, OpenaiEngine):
        raise AgentRLError(
            "rollout.engine: an OpenAI endpoint gives no logprobs to train on; use transformers or sglang"
        )
    if isinstance(engine, SglangEngine):
        from agentrl.engines.sglang import install

        if not engine.launch:
            return f"sglang at {', '.join(engine.urls)}"
        python = engine.python or install.python(engine.device == "cpu")
        if not python.exists():
            flag = " --cpu" if engine.device == "cpu" else ""
            raise AgentRLError(
                f"rollout.engine: there is no SGLang at {python}; run `agentrl engine install sglang{flag}`, or name "
                "the interpreter of its environment in rollout.engine.python"
            )
        return f"sglang, started with {python}"
    return "transformers, in this process" if recipe.cluster is None else "transformers, in every player"


def _cluster(recipe: Recipe) -> str:
    """Join the cluster, or start Ray here, and leave again."""
    from agentrl.cluster import connect

    assert recipe.cluster is not None
    said: list[str] = []
    with connect.connected(recipe.cluster, say=said.append):
        return f"{said[-1] if said else 'Ray runs already'}; {recipe.cluster.players} players wanted"


def _memory(recipe: Recipe, model: Any) -> str:
    """Compare what weights, gradients and optimizer will take with what the device has."""
    import torch

    parameters = list(model.parameters())
    weights = sum(p.numel() * p.element_size() for p in parameters)
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    config = model.config.get_text_config()
    layers, width = config.num_hidden_layers, config.hidden_size
    activations = recipe.learner.micro_tokens * width * layers * (4 if recipe.learner.checkpointing else 36) * 2
    need = (weights + trained * (OPTIMIZER_BYTES + 4) + activations) / 2**30
    device = parameters[0].device
    if device.type == "cuda":
        have = torch.cuda.mem_get_info(device)[0] / 2**30 + weights / 2**30
        if isinstance(recipe.rollout.engine, SglangEngine):
            have *= 1 - recipe.rollout.engine.memory_fraction
    else:
        have = _available_memory()
    text = f"about {need:.1f} GiB of {have:.1f} GiB ({trained / 1e6:.1f} M trained parameters, {device})"
    if need > have:
        raise AgentRLError(
            f"memory: {text}; lower learner.micro_tokens, set learner.checkpointing: true, or add model.lora"
        )
    return text


def _available_memory() -> float:
    with open("/proc/meminfo", encoding="ascii") as file:
        fields = dict(line.split(":", 1) for line in file)
    return int(fields["MemAvailable"].split()[0]) / 2**20


def _episode(recipe: Recipe, runtime: EnvRuntime, policy: Any) -> str:
    """Play the expert's solution of one task through renderer, sandbox and verifier."""
    section = next(s for s in recipe.envs if s.name == runtime.name)
    environment = runtime.make()
    levels = section.levels or list(environment.levels)
    task = environment.task(section.split, levels[0], 0)
    try:
        actions = environment.expert(task)
    except NotImplementedError:
        return "not tried: the environment has no expert()"
    script = ScriptedEngine(policy.renderer, actions)
    budget = Budget(context=policy.context, tokens=policy.context)
    rollout_id = RolloutId(seed=recipe.run.seed, group=0, index=0, secret=seeds.secret(b"", task.id, 0))
    played = asyncio.run(rollout(script, policy.renderer, runtime, task, rollout_id=rollout_id, budget=budget))
    if played.outcome.score != 1.0:
        fault = f" ({played.outcome.fault.cause})" if played.outcome.fault else ""
        raise AgentRLError(f"{runtime.name}: the expert's episode did not score 1{fault}:\n{episode.show(played)}")
    limit = recipe.rollout.max_tokens
    note = f"; rollout.max_tokens ({limit}) is less than the expert needs" if played.sampled_tokens > limit else ""
    return f"the expert scores 1 in {played.tokens} tokens, {played.sampled_tokens} of them sampled{note}"
