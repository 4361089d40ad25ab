"""TRL's GRPOTrainer on countdown, from the weights and on the tasks of a run of ours: held-out success by the clock.

    python -m benchmarks.smollm2.peer train RUN --out DIR --minutes 5 [--engine generate|continuous] [--liger]
    python -m benchmarks.smollm2.peer evaluate RUN --out DIR --url http://127.0.0.1:30000 [--json FILE]

`train` starts from the checkpoint that RUN wrote after its warm start and plays countdown through `environment_factory`
with RUN's group size, batch, learning rate, clipping and limits. It leaves weights every few steps, with the seconds of
training that they took; `evaluate` tries them on RUN's held-out tasks through an SGLang server, as RUN did itself.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path
from typing import Any

from agentrl import envs, recipe, seeds, serving
from agentrl.engines.base import Weights
from agentrl.engines.sglang.engine import SglangEngine
from agentrl.envs.tools import tools_of
from agentrl.evaluation import evaluate, problems
from agentrl.interop import trl
from agentrl.recipe import Recipe
from agentrl.rollout.player import make_player
from agentrl.rollout.render import Renderer
from agentrl.types import Message

TEMPLATE = """{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{{ '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
{%- else -%}
{{ '<|im_start|>' + message.role + '\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] -%}
{{ '<tool_call>\n' + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson) + '\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"""
"""What our renderer writes for SmolLM2, as a chat template; the tools stand in the system message already."""


def dataset(made: Recipe, tokenizer: Any, count: int) -> Any:
    """The training tasks of the recipe's levels, level by level in turn, with the prompts that our policy sees."""
    from datasets import Dataset

    renderer = Renderer(tokenizer)
    environment = envs.load("countdown")()
    schemas = [t.schema() for t in tools_of(type(environment)).values()]
    levels = made.envs[0].levels or list(environment.levels)
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


def warm_started(run: Path) -> Path:
    """The model that a run wrote after its warm start."""
    return next(path for path in sorted((run / "checkpoints").iterdir()) if (path / "model").is_dir()) / "model"


def config(made: Recipe, out: Path, engine: str, liger: bool) -> Any:
    """GRPOTrainer's settings for what the recipe asks for."""
    import torch
    from trl.trainer.grpo_config import GRPOConfig

    rollouts, learner = made.rollout, made.learner
    turns = rollouts.max_turns or envs.load("countdown").max_turns
    samples = learner.groups_per_step * rollouts.group_size
    at_once = min(64, samples)
    cuda = torch.cuda.is_available()
    return GRPOConfig(
        output_dir=str(out),
        max_steps=made.run.steps,
        per_device_train_batch_size=at_once,
        gradient_accumulation_steps=samples // at_once,
        num_generations=rollouts.group_size,
        max_completion_length=rollouts.max_tokens + 40 * turns,  # observations count there, not here
        generation_kwargs={"max_new_tokens": rollouts.max_turn_tokens or rollouts.max_tokens},
        max_tool_calling_iterations=turns - 1,
        temperature=rollouts.temperature,
        learning_rate=learner.lr,
        lr_scheduler_type="constant",
        max_grad_norm=learner.clip_norm,
        beta=0.0,
        loss_type="dapo",
        epsilon=0.2,
        epsilon_high=0.28,
        bf16=cuda,
        use_cpu=not cuda,
        gradient_checkpointing=False,
        use_transformers_continuous_batching=engine == "continuous",
        use_liger_kernel=liger,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        seed=seeds.derive(made.run.seed, "peer") % 2**31,
    )


def train(run: Path, out: Path, minutes: float, engine: str, liger: bool, every: int) -> None:
    """Train for so many minutes, leaving weights in `out`/step-N with the seconds of training in times.json."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import chat_template_utils
    from trl.trainer.grpo_trainer import GRPOTrainer

    made = recipe.load(run / "recipe.yaml")
    start = warm_started(run)
    tokenizer = AutoTokenizer.from_pretrained(start)
    tasks = dataset(made, tokenizer, 4096)
    tokenizer.chat_template = TEMPLATE
    if chat_template_utils._SUPPORTS_RESPONSE_TEMPLATE:
        tokenizer.response_template = chat_template_utils.qwen3_template
    else:
        tokenizer.response_schema = chat_template_utils.qwen3_schema
    out.mkdir(parents=True, exist_ok=True)
    times: list[dict[str, float]] = []

    class Clock(TrainerCallback):
        """Counts training time alone, leaves weights behind, and stops when the time is up."""

        spent, began = 0.0, 0.0

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.began = time.monotonic()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.spent += time.monotonic() - self.began
            print(f"step {state.global_step}: {self.spent:.1f} s", flush=True)
            over = self.spent > minutes * 60 or state.global_step >= made.run.steps
            if state.global_step % every == 0 or over:
                _save(kwargs["model"], out / f"step-{state.global_step}")
                row = {"step": state.global_step, "seconds": self.spent}
                if torch.cuda.is_available():
                    row["learn/memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
                    row["learn/memory_reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
                times.append(row)
                (out / "times.json").write_text(json.dumps(times))
            control.should_training_stop = over

    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32),
        reward_funcs=trl.reward,
        args=config(made, out, engine, liger),
        train_dataset=tasks,
        processing_class=tokenizer,
        environment_factory=trl.factory("countdown", sandbox="process", max_turns=made.rollout.max_turns),
        callbacks=[Clock()],
    )
    trainer.train()


def _save(model: Any, folder: Path) -> None:
    """The weights as bfloat16, the model left as it is."""
    import torch

    state = {name: tensor.detach().to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    model.save_pretrained(folder, state_dict=state)


async def judge(run: Path, out: Path, url: str) -> list[dict[str, Any]]:
    """Held-out success of each of the weights that `train` left."""
    from safetensors.torch import load_file
    from transformers import AutoTokenizer

    made = recipe.load(run / "recipe.yaml")
    assert made.eval is not None
    start = warm_started(run)
    renderer = Renderer(AutoTokenizer.from_pretrained(start))
    rows = []
    with serving.runtimes(made) as worlds:
        world = worlds["countdown"]
        levels = made.eval.levels or made.envs[0].levels or list(world.make().levels)
        tasks = problems(world, made.eval.split, levels, made.eval.tasks)
        engine = SglangEngine(urls=[url])
        try:
            await engine.start()
            for row in json.loads((out / "times.json").read_text()):
                tensors = load_file(out / f"step-{row['step']:.0f}" / "model.safetensors")
                await engine.publish(Weights(version=int(row["step"]), tensors=tensors))
                found = await evaluate(
                    make_player(made, engine, renderer, 8192, worlds).at(made.eval.temperature),
                    tasks,
                    samples=1,
                    seed=seeds.derive(made.run.seed, "eval"),
                    key=b"peer",
                    concurrency=made.rollout.concurrency,
                )
                rows.append(row | {"pass@1": found.pass_at(1).as_dict()})
                print(json.dumps(rows[-1]), flush=True)
        finally:
            await engine.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("train", "evaluate"))
    parser.add_argument("run", type=Path, help="a run folder of recipes/smollm2-countdown.yaml")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--every", type=int, default=4, help="steps between weights that are kept")
    parser.add_argument("--engine", choices=("generate", "continuous"), default="generate")
    parser.add_argument("--liger", action="store_true")
    parser.add_argument("--url", default="")
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    if arguments.action == "train":
        train(arguments.run, arguments.out, arguments.minutes, arguments.engine, arguments.liger, arguments.every)
        return
    rows = asyncio.run(judge(arguments.run, arguments.out, arguments.url))
    if arguments.json:
        arguments.json.write_text(json.dumps({"run": arguments.run.resolve().name, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
