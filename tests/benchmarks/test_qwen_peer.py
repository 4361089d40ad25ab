"""TRL's trainer on our environments, as the comparison with it sets it up."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from agentrl import envs
from agentrl.envs.tools import tools_of
from agentrl.recipe import Recipe
from agentrl.rollout.render import Renderer
from agentrl.types import Message
from benchmarks._peer import Stopwatch, clock
from benchmarks.qwen.peer import config, reader, trainer_of

TEMPLATE = Path(__file__).parents[1] / "rollout" / "templates" / "qwen3.jinja"
THOUGHT = "{%- if loop.index0 > last.question and (loop.last or thought) -%}"
"""Qwen2.5 writes no thoughts; TRL refuses templates that take them out again."""
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """A small tokenizer with the template of Qwen."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(["a tool with a name and arguments"], trainer)
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in CONTROL])
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in TAGS])
    made: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    made.chat_template = TEMPLATE.read_text().replace(THOUGHT, "{%- if false -%}")
    return made


def doubled(name: str, arguments: dict[str, Any]) -> str:
    """A call as Qwen2.5-Coder writes it."""
    return "<tool_call>\n{" + json.dumps({"name": name, "arguments": arguments}) + "}\n</tool_call>"


def test_turns_are_read_as_in_our_episodes(tokenizer: Any) -> None:
    """Calls in doubled braces, calls in Markdown, and an answer; a broken call says what was wrong as its type."""
    read = reader(Renderer(tokenizer), ["run"])
    call = {"type": "function", "function": {"name": "run", "arguments": {"command": "ls"}}}
    for text in (doubled("run", {"command": "ls"}), '```json\n{"name": "run", "arguments": {"command": "ls"}}\n```'):
        ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
        assert read(ids) == {"role": "assistant", "content": "", "tool_calls": [call]}
    assert read(tokenizer.encode("done", add_special_tokens=False)) == {"role": "assistant", "content": "done"}
    broken = read(tokenizer.encode('<tool_call>{"name": run}</tool_call>', add_special_tokens=False))["tool_calls"]
    assert len(broken) == 1 and broken[0]["type"].startswith("this tool call was not carried out: not valid JSON")


def test_two_steps(tokenizer: Any, tmp_path: Path) -> None:
    """Prompts are ours token by token, an episode that a limit ended counts as failed, and every step is written down.

    The turns of a tiny random model are replaced: in each group one episode does as the expert, one stops in the middle
    of its last turn.
    """
    import transformers
    from trl.trainer.grpo_trainer import GRPOTrainer

    hub: Any = transformers  # its classes are not annotated
    start, out = tmp_path / "model", tmp_path / "out"
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    shape |= {"num_key_value_heads": 2, "vocab_size": len(tokenizer), "max_position_embeddings": 8192}
    hub.Qwen2ForCausalLM(hub.Qwen2Config(**shape)).save_pretrained(start)
    tokenizer.save_pretrained(start)
    recipe = Recipe.model_validate(
        {
            "run": {"name": "peer", "seed": 0, "steps": 2},
            "model": {"path": str(start)},
            "envs": [{"name": "files", "levels": [1, 2]}],
            "rollout": {"group_size": 2, "max_tokens": 2000, "max_turn_tokens": 1000},
            "group_filter": {"overlong": "fail"},
            "learner": {"lr": 3e-3, "warmup": 2, "groups_per_step": 2},
        }
    )
    renderer, kind = Renderer(tokenizer), envs.load("files")
    schemas = [tool.schema() for tool in tools_of(kind).values()]
    tasks = [kind().task("train", level, index) for level in (1, 2) for index in (0, 1)]
    prompts = {}
    for task in tasks:
        opening = (Message(role="system", content=kind().system), Message(role="user", content=task.prompt))
        prompts[renderer.prompt(opening, schemas).token_ids] = kind().expert(task)

    class Scripted(GRPOTrainer):
        """Says what the expert would say; every second episode of a group is cut off at its last turn."""

        def _generate_single_turn(self, prompt_ids: Any, *args: Any, **options: Any) -> Any:
            turns = []
            for number, ids in enumerate(prompt_ids):
                script = next(said for prompt, said in prompts.items() if tuple(ids[: len(prompt)]) == prompt)
                action: Any = script[min(tokenizer.decode(ids).count("<tool_response>"), len(script) - 1)]
                last = isinstance(action, str)
                text = action if last else doubled(action.name, dict(action.arguments))
                end = [] if last and number % 2 else [tokenizer.eos_token_id]
                turns.append([*tokenizer.encode(text, add_special_tokens=False), *end])
            return turns, None

    watch = Stopwatch()
    callback = clock(out, minutes=5, steps=2, every=1, watch=watch)
    args = config(recipe, "files", out, "generate", batch=2, memory=0.2)
    trainer_of(recipe, "files", start, args, watch, kind=Scripted, callbacks=[callback]).train()
    rows = [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
    assert [row["trl"]["reward"] for row in rows] == [0.5, 0.5]
    assert [row["trl"]["learning_rate"] for row in rows] == pytest.approx([1e-3, 2e-3])
    assert all({"rollout_s", "generate_s", "tools_s", "reset_s", "grade_s"} <= set(row) for row in rows)
    assert all(row["sampled_tokens"] > 0 for row in rows)
    times = json.loads((out / "times.json").read_text())
    assert [row["step"] for row in times] == [1, 2]
    assert all((out / f"step-{step}" / "model.safetensors").is_file() for step in (1, 2))
