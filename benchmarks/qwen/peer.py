"""TRL's GRPOTrainer on one tool environment, from the instruct model: held-out success by the clock.

    python -m benchmarks.qwen.peer train MODEL --out DIR [--env files] [--minutes 6] [--every 4] [--engine generate]
    python -m benchmarks.qwen.peer evaluate MODEL --out DIR --url http://127.0.0.1:31000 [--json FILE]

MODEL is a transformers folder of Qwen2.5-Coder-1.5B-Instruct. `train` plays the recipe's training tasks of one
environment through `environment_factory`, with the recipe's group size, groups per step, learning rate, warm-up,
clipping, temperature and limits. vLLM samples in the trainer's own process (`colocate`) unless told otherwise. DIR gets
weights every few steps with the seconds of training that they took, and steps.jsonl says what each step did and where
its time went: `generate` (with `sync`, the weights' way to vLLM), `tools`, `reset` (sandboxes), `grade`; `rollout` is
all of these and the log-probabilities of vLLM's tokens under the trained model, the rest of `step` is the update.
`evaluate` tries the weights on held-out tasks through an SGLang server, as our own runs do.

Equal: prompts and tool results token by token, and how calls are read (this model's template shows calls in doubled
braces, and the model writes them; TRL's own parser would read none). A call that cannot be read is answered with what
was wrong. Episodes that a limit ended count as failed, as the recipe asks. Master weights are float32, the forward pass
is bfloat16, and AdamW and its warm-up are the recipe's.

Not equal, because TRL has no such setting:
- tasks: level by level in turn. agentrl draws tasks by learnability and replaces groups without a signal.
- tokens: TRL limits sampled and observed tokens together. An episode may sample more than ours if it observes less.
- time: a step samples, then trains; turns wait for the slowest; tools and sandbox starts run one after another.
  agentrl samples while it trains, on weights that are some versions old (as many as its schedule allows).
- vLLM's correction: TRL's default, which drops whole episodes whose probability ratio is above 3.
- what tools return is shown as it is: agentrl escapes control tokens and the frame's own tags in it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from agentrl import recipe
from agentrl.interop import trl
from agentrl.learn.optimizer import schedule_factor
from agentrl.recipe import Recipe
from agentrl.rollout.render import Renderer
from agentrl.rollout.tool_formats import MAX_CALLS
from benchmarks._peer import Stopwatch, clock, dataset, judge, section_of, settings, turns_of

OBSERVATION = 128
"""Tokens per turn that TRL's limit allows for what tools return."""
PARTS = {
    "_generate_and_score_completions": "rollout",
    "_generate_single_turn": "generate",
    "_calculate_rewards": "grade",
}
"""The trainer's methods whose time is counted."""


def reader(renderer: Renderer, tools: Sequence[str]) -> Callable[..., dict[str, Any]]:
    """Return what stands in for the tokenizer's `parse_response`: our reading of a turn, as TRL takes it.

    TRL answers a call of an unknown type with an error that names the type: so a policy is told why its call could not
    be read, as in our episodes.
    """

    def parse(token_ids: Sequence[int], **_: Any) -> dict[str, Any]:
        turn = renderer.parse(token_ids, tools)
        calls: list[dict[str, Any]] = []
        for call in turn.tool_calls:
            if call.error is not None:
                calls.append({"type": call.error, "name": "unreadable", "arguments": {}})
            else:
                function = {"name": call.name, "arguments": dict(call.arguments)}
                calls.append({"type": "function", "function": function})
        return {"role": "assistant", "content": turn.content, **({"tool_calls": calls} if calls else {})}

    return parse


def reward(stops: Sequence[int], cut_off: bool, completions: Any, completion_ids: Any, **given: Any) -> Any:
    """Score episodes; those that a limit ended score 0 where `cut_off` says so."""
    scores = trl.reward(completions, **given)
    if not cut_off:
        return scores
    pairs = zip(scores, completions, completion_ids, strict=True)
    return [score if score is None or _ended(said, ids, stops) else 0.0 for score, said, ids in pairs]


def _ended(completion: Any, token_ids: Sequence[int], stops: Sequence[int]) -> bool:
    """Return whether the last turn is a whole one without calls."""
    last = completion[-1]
    return last["role"] == "assistant" and not last.get("tool_calls") and token_ids[-1] in stops


def config(made: Recipe, name: str, out: Path, engine: str, *, batch: int, memory: float) -> Any:
    """Return GRPOTrainer's settings for what the recipe asks for."""
    from trl.trainer.grpo_config import GRPOConfig

    rollout = made.rollout
    turn = rollout.max_turn_tokens or rollout.max_tokens
    sampling = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": memory,
        "vllm_max_model_length": rollout.max_context,
        "vllm_enable_sleep_mode": False,
        "vllm_importance_sampling_correction": True,
        "generation_kwargs": {"max_tokens": turn},
    }
    return GRPOConfig(
        **settings(made, name, out, batch=batch, observation=OBSERVATION),
        **(sampling if engine == "vllm" else {"generation_kwargs": {"max_new_tokens": turn}}),
    )


def optimizer(made: Recipe, model: Any) -> tuple[Any, Any]:
    """Return the recipe's AdamW and its warm-up (TRL's own begins with a step at rate 0)."""
    import torch

    learner = made.learner
    adam = torch.optim.AdamW(
        model.parameters(),
        lr=learner.lr,
        betas=learner.betas,
        weight_decay=learner.weight_decay,
        fused=torch.cuda.is_available(),
    )
    factor = partial(schedule_factor, schedule=learner.schedule, warmup=learner.warmup, total=made.run.steps)
    return adam, torch.optim.lr_scheduler.LambdaLR(adam, factor)


def trainer_of(made: Recipe, name: str, start: Path, args: Any, watch: Stopwatch, **options: Any) -> Any:
    """Return a GRPOTrainer that plays the environment from the model in `start`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl.trainer.grpo_trainer import GRPOTrainer

    section, rollout = section_of(made, name), made.rollout
    samples = made.learner.groups_per_step * rollout.group_size
    tokenizer: Any = AutoTokenizer.from_pretrained(start)
    tasks = dataset(made, name, tokenizer, made.run.steps * made.learner.groups_per_step)
    world = trl.factory(
        name,
        sandbox=section.sandbox,
        options=section.options,
        max_turns=turns_of(made, name) * MAX_CALLS,  # it counts calls; TRL counts the turns
        limit=samples + 64,  # TRL opens all of them at once, and grading needs some
    )
    watch.watch(world, "reset", "reset")
    watch.watch(world, "_call", "tools")
    names = [method for method in vars(world) if not method.startswith("_") and method != "reset"]
    renderer = Renderer(AutoTokenizer.from_pretrained(start))
    tokenizer.parse_response = reader(renderer, names)
    tokenizer.response_schema = {"type": "object"}  # TRL asks the tokenizer to parse only where it has one
    tokenizer.chat_template = "{%- set tools = none %}" + tokenizer.chat_template  # they are in the system message
    model: Any = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    if torch.cuda.is_available():
        model.to("cuda")
    score = partial(reward, renderer.stop_token_ids, made.group_filter.overlong == "fail")
    trainer = options.pop("kind", GRPOTrainer)(
        model=model,
        reward_funcs=score,
        args=args,
        train_dataset=tasks,
        processing_class=tokenizer,
        environment_factory=world,
        optimizers=optimizer(made, model),
        **options,
    )
    for method, part in PARTS.items():
        watch.watch(trainer, method, part)
    if args.use_vllm:
        watch.watch(trainer.vllm_generation, "sync_weights", "sync")
    return trainer


def main() -> None:
    """Read the command line; train or evaluate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("train", "evaluate"))
    parser.add_argument("model", type=Path)
    parser.add_argument("--recipe", type=Path, default=Path("recipes/qwen-tools.yaml"))
    parser.add_argument("--env", default="files")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--every", type=int, default=4, help="steps between weights that are kept")
    parser.add_argument("--engine", choices=("generate", "vllm"), default="vllm")
    parser.add_argument("--batch", type=int, default=8, help="episodes that go through the trained model at once")
    parser.add_argument("--memory", type=float, default=0.2, help="vLLM's share of the GPU's memory")
    parser.add_argument("--url", default="")
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    made, name, out = recipe.load(arguments.recipe), arguments.env, arguments.out
    if arguments.action == "train":
        os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
        watch = Stopwatch()
        callback = clock(out, minutes=arguments.minutes, steps=made.run.steps, every=arguments.every, watch=watch)
        args = config(made, name, out, arguments.engine, batch=arguments.batch, memory=arguments.memory)
        trainer_of(made, name, arguments.model, args, watch, callbacks=[callback]).train()
        return
    rows = asyncio.run(judge(made, name, arguments.model, out, arguments.url))
    if arguments.json:
        arguments.json.write_text(json.dumps({"model": arguments.model.name, "env": name, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
