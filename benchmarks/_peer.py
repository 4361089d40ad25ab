"""What comparisons with TRL's GRPOTrainer share: prompts, settings, a clock that keeps weights, and judging them."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from agentrl import envs, seeds, serving
from agentrl.engines.base import Weights
from agentrl.engines.sglang.engine import SglangEngine
from agentrl.envs.tools import tools_of
from agentrl.evaluation import evaluate, problems
from agentrl.recipe import EnvSection, Recipe
from agentrl.rollout.player import make_player
from agentrl.rollout.render import Renderer
from agentrl.types import Message


def section_of(recipe: Recipe, name: str) -> EnvSection:
    """Return the recipe's section of an environment."""
    return next(section for section in recipe.envs if section.name == name)


def turns_of(recipe: Recipe, name: str) -> int:
    """Return the turns that an episode may take."""
    return recipe.rollout.max_turns or envs.load(name, section_of(recipe, name).options).max_turns


def dataset(recipe: Recipe, name: str, tokenizer: Any, count: int) -> Any:
    """Return training tasks of the recipe's levels, level by level in turn, with the prompts that our policy sees."""
    from datasets import Dataset

    section = section_of(recipe, name)
    renderer = Renderer(tokenizer)
    environment = envs.load(name, section.options)(**section.options)
    schemas = [t.schema() for t in tools_of(type(environment)).values()]
    levels = section.levels or list(environment.levels)
    rows = []
    for number in range(count):
        level, index = levels[number % len(levels)], number // len(levels)
        task = environment.task("train", level, index)
        opening = (Message(role="system", content=environment.system), Message(role="user", content=task.prompt))
        text = tokenizer.decode(renderer.prompt(opening, schemas).token_ids)
        system = text.split("<|im_start|>system\n")[1].split("<|im_end|>")[0]
        messages = [{"role": "system", "content": system}, {"role": "user", "content": task.prompt}]
        rows.append({"prompt": messages, "level": level, "index": index})
    return Dataset.from_list(rows)


def settings(recipe: Recipe, name: str, out: Path, *, batch: int, observation: int) -> dict[str, Any]:
    """Return GRPOConfig's arguments for what the recipe asks for, whatever samples.

    `batch` is the number of episodes that go through the model at once. TRL's limit of tokens counts what tools
    return, ours does not: it gets `observation` tokens more per turn.
    """
    import torch

    rollout, learner = recipe.rollout, recipe.learner
    turns = turns_of(recipe, name)
    samples = learner.groups_per_step * rollout.group_size
    cuda = torch.cuda.is_available()
    return {
        "output_dir": str(out),
        "max_steps": recipe.run.steps,
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": samples // batch,
        "num_generations": rollout.group_size,
        "max_completion_length": rollout.max_tokens + observation * turns,
        "max_tool_calling_iterations": turns - 1,
        "temperature": rollout.temperature,
        "learning_rate": learner.lr,
        "lr_scheduler_type": "constant",
        "max_grad_norm": learner.clip_norm,
        "beta": 0.0,
        "loss_type": "dapo",
        "epsilon": 0.2,
        "epsilon_high": 0.28,
        "bf16": cuda,
        "use_cpu": not cuda,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "seed": seeds.derive(recipe.run.seed, "peer") % 2**31,
    }


class Stopwatch:
    """Adds up the seconds that named parts of a step take."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def watch(self, owner: Any, method: str, part: str) -> None:
        """Count the time that a method takes from now on; parts may lie within each other."""
        original: Callable[..., Any] = getattr(owner, method)

        @wraps(original)
        def timed(*args: Any, **options: Any) -> Any:
            began = time.monotonic()
            try:
                return original(*args, **options)
            finally:
                self.seconds[part] += time.monotonic() - began

        setattr(owner, method, timed)

    def read(self) -> dict[str, float]:
        """Return the seconds since the last reading."""
        read = dict(self.seconds)
        self.seconds.clear()
        return read


def clock(out: Path, *, minutes: float, steps: int, every: int, watch: Stopwatch | None = None) -> Any:
    """Return a callback that counts training time alone, keeps weights, and stops when the time is up.

    The weights are in `out`/step-N, the seconds of training that they took in times.json. With a stopwatch, what each
    step did and how long its parts took is in steps.jsonl.
    """
    import torch
    from transformers import TrainerCallback

    out.mkdir(parents=True, exist_ok=True)
    times: list[dict[str, float]] = []

    class Clock(TrainerCallback):
        spent, began, step = 0.0, 0.0, 0.0

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.began = time.monotonic()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.step = time.monotonic() - self.began
            self.spent += self.step
            print(f"step {state.global_step}: {self.spent:.1f} s", flush=True)
            over = self.spent > minutes * 60 or state.global_step >= steps
            if state.global_step % every == 0 or over:
                _save(kwargs["model"], out / f"step-{state.global_step}")
                times.append({"step": state.global_step, "seconds": self.spent, **_memory()})
                (out / "times.json").write_text(json.dumps(times))
            control.should_training_stop = over

        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            logs: dict[str, Any] = kwargs["logs"]
            if watch is None or "loss" not in logs:
                return
            samples = args.per_device_train_batch_size * args.gradient_accumulation_steps
            row = {"step": state.global_step, "seconds": self.spent, "step_s": self.step}
            row |= {f"{part}_s": seconds for part, seconds in watch.read().items()}
            row |= {"sampled_tokens": round(logs["completions/mean_length"] * samples), **_memory(), "trl": logs}
            with (out / "steps.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")

    def _memory() -> dict[str, float]:
        if not torch.cuda.is_available():
            return {}
        free, total = torch.cuda.mem_get_info()
        return {
            "learn/memory_gib": torch.cuda.max_memory_allocated() / 2**30,
            "learn/memory_reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
            "learn/memory_device_gib": (total - free) / 2**30,
        }

    return Clock()


def _save(model: Any, folder: Path) -> None:
    """Save the weights as bfloat16; the model stays as it is."""
    import torch

    state = {name: tensor.detach().to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    model.save_pretrained(folder, state_dict=state)


async def judge(recipe: Recipe, name: str, start: Path, out: Path, url: str) -> list[dict[str, Any]]:
    """Return the held-out success of each of the weights that the clock kept; `start` has the tokenizer."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoTokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"  # a server's hashes are slow to compute on a CPU
    recipe = recipe.model_copy(update={"envs": [section_of(recipe, name)]})
    assert recipe.eval is not None
    renderer = Renderer(AutoTokenizer.from_pretrained(start))
    rows = []
    with serving.runtimes(recipe) as worlds:
        world = worlds[name]
        levels = recipe.eval.levels or recipe.envs[0].levels or list(world.make().levels)
        tasks = problems(world, recipe.eval.split, levels, recipe.eval.tasks)
        engine = SglangEngine(urls=[url])
        try:
            await engine.start()
            for row in json.loads((out / "times.json").read_text()):
                tensors = load_file(out / f"step-{row['step']:.0f}" / "model.safetensors", device=device)
                await engine.publish(Weights(version=int(row["step"]), tensors=tensors))
                result = await evaluate(
                    make_player(recipe, engine, renderer, 8192, worlds).at(recipe.eval.temperature),
                    tasks,
                    samples=1,
                    seed=seeds.derive(recipe.run.seed, "eval"),
                    key=b"peer",
                    concurrency=recipe.rollout.concurrency,
                )
                rows.append(row | {"pass@1": result.pass_at(1).as_dict()})
                print(json.dumps(rows[-1]), flush=True)
        finally:
            await engine.close()
    return rows
