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
from pathlib import Path
from typing import Any

from agentrl import recipe
from agentrl.interop import trl
from agentrl.recipe import Recipe
from benchmarks._peer import clock, dataset, judge, settings

ENV = "countdown"
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


def warm_started(run: Path) -> Path:
    """The model that a run wrote after its warm start."""
    return next(path for path in sorted((run / "checkpoints").iterdir()) if (path / "model").is_dir()) / "model"


def config(made: Recipe, out: Path, engine: str, liger: bool) -> Any:
    """Return GRPOTrainer's settings for what the recipe asks for."""
    from trl.trainer.grpo_config import GRPOConfig

    rollouts = made.rollout
    at_once = min(64, made.learner.groups_per_step * rollouts.group_size)
    return GRPOConfig(
        **settings(made, ENV, out, batch=at_once, observation=40),
        generation_kwargs={"max_new_tokens": rollouts.max_turn_tokens or rollouts.max_tokens},
        use_transformers_continuous_batching=engine == "continuous",
        use_liger_kernel=liger,
    )


def train(run: Path, out: Path, minutes: float, engine: str, liger: bool, every: int) -> None:
    """Train for so many minutes, leaving weights in `out`/step-N with the seconds of training in times.json."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import chat_template_utils
    from trl.trainer.grpo_trainer import GRPOTrainer

    made = recipe.load(run / "recipe.yaml")
    start = warm_started(run)
    tokenizer = AutoTokenizer.from_pretrained(start)
    tasks = dataset(made, ENV, tokenizer, 4096)
    tokenizer.chat_template = TEMPLATE
    if chat_template_utils._SUPPORTS_RESPONSE_TEMPLATE:
        tokenizer.response_template = chat_template_utils.qwen3_template
    else:
        tokenizer.response_schema = chat_template_utils.qwen3_schema
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32),
        reward_funcs=trl.reward,
        args=config(made, out, engine, liger),
        train_dataset=tasks,
        processing_class=tokenizer,
        environment_factory=trl.factory(ENV, sandbox="process", max_turns=made.rollout.max_turns),
        callbacks=[clock(out, minutes=minutes, steps=made.run.steps, every=every)],
    )
    trainer.train()


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
    made, start = recipe.load(arguments.run / "recipe.yaml"), warm_started(arguments.run)
    rows = asyncio.run(judge(made, ENV, start, arguments.out, arguments.url))
    if arguments.json:
        arguments.json.write_text(json.dumps({"run": arguments.run.resolve().name, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
