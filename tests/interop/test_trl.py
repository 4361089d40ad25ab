"""Environments in TRL's own GRPOTrainer: its tool loop, its loss, our sandboxes and our verdicts."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl import envs
from agentrl.envs import Environment, tool
from agentrl.envs.schema_tools import attach, foreign_tool
from agentrl.errors import InfraError, UserError
from agentrl.interop import trl
from agentrl.rollout.render import Renderer
from agentrl.types import Split, Task, Verdict
from agentrl.verifiers.base import Context, Submission, Verifier

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"


class Counted(Verifier):
    """1 for the answer "yes"."""

    down = False

    async def verify(self, submission: Submission, context: Context) -> Verdict:
        return Verdict(score=float(submission.answer == "yes"))

    async def probe(self, context: Context) -> None:
        if self.down:
            raise InfraError("the system is down")


class Fragile(Environment):
    """A tool that breaks as often as it is told, and one that ends the episode."""

    verifier = Counted()
    left = 0
    calls = 0
    max_turns = 4

    def task(self, split: Split, level: int, index: int) -> Task:
        return Task(id=f"fragile/{split}/{level}/{index}", split=split, level=level, prompt=f"Say yes, {index}.")

    @tool
    def touch(self, times: int = 1) -> str:
        """Touch it.

        Args:
            times: how often
        """
        type(self).calls += 1
        if type(self).left:
            type(self).left -= 1
            raise InfraError("gone")
        return f"touched {times}"

    @tool(terminal=True)
    def submit(self, answer: str) -> str:
        """Give the answer.

        Args:
            answer: the answer
        """
        return answer


@pytest.fixture
def fragile(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """A factory over the environment above, without any folder."""
    monkeypatch.setattr(envs, "load", lambda name, options=None: Fragile)
    kind = trl.factory("fragile", sandbox="process")

    def make() -> Any:
        environment = kind()
        assert environment.reset(prompt=[], index=3) is None
        return environment

    return make


def said(text: str) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": text}]


def test_a_rollout_is_graded_by_its_final_message(fragile: Callable[[], Any]) -> None:
    """A message, a terminal tool, a rollout that was cut off, and one that talks on after its end."""
    plain, terminal, cut, late = (fragile() for _ in range(4))
    assert plain.touch(times=2) == "<out>touched 2</out>"
    assert terminal.submit(answer="yes") == trl.OVER
    assert late.submit("no") == trl.OVER and late.touch() == trl.OVER
    ended = [said("yes"), said(""), [{"role": "tool", "content": "..."}], said("yes")]
    assert trl.reward(completions=ended, environments=[plain, terminal, cut, late]) == [1.0, 1.0, 0.0, 0.0]


def test_bad_calls_are_observations_and_turns_are_limited(fragile: Callable[[], Any]) -> None:
    """What TRL lets through is validated as in training; the environment's own limit of turns holds."""
    environment = fragile()
    assert environment.touch(times="many").startswith("error: touch: times")
    assert [environment.touch() for _ in range(4)][2:] == [trl.OVER, trl.OVER]
    assert trl.reward([said("yes")], [environment]) == [0.0]


@pytest.mark.parametrize(("times", "down", "score"), [(1, False, 1.0), (2, False, 0.0), (2, True, None)])
def test_trouble_gives_no_reward_unless_the_policy_caused_it(
    fragile: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, times: int, down: bool, score: float | None
) -> None:
    """Once: repeated. Again while the system works: 0. Again while it is down: None, which TRL leaves out."""
    monkeypatch.setattr(Fragile, "left", times)
    monkeypatch.setattr(Counted, "down", down)
    environment = fragile()
    environment.touch()
    assert trl.reward([said("yes")], [environment]) == [score]


def test_schemas_are_those_of_the_environment() -> None:
    """TRL reads the tool's own signature and docstring."""
    from transformers.utils.chat_template_utils import get_json_schema

    kind = trl.factory("files", level=3)
    function = get_json_schema(kind().run)["function"]
    ours = envs.tools_of(envs.load("files"))["run"].schema()["function"]
    assert (function["name"], function["description"]) == (ours["name"], ours["description"])
    assert function["parameters"]["properties"] == ours["parameters"]["properties"]


def test_a_tool_that_has_only_a_schema_gets_a_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a peer announced can be called from TRL too."""
    from transformers.utils.chat_template_utils import get_json_schema

    schema = {
        "properties": {"to": {"type": "string", "enum": ["left", "right"]}, "steps": {"type": "integer"}},
        "required": ["to"],
    }
    body: dict[str, Any] = {"verifier": Counted(), "task": Fragile.task, "__doc__": "Moves."}

    async def move(self: Any, **arguments: Any) -> str:
        return json.dumps(arguments)

    attach(body, foreign_tool("move", "Move it.", schema, peer="p"), move)
    moves = type("Moves", (Environment,), body)
    monkeypatch.setattr(envs, "load", lambda name, options=None: moves)
    environment = trl.factory("moves", sandbox="process")()
    environment.reset()
    assert environment.move(to="left") == '<out>{"to": "left"}</out>'
    assert environment.move(to="up").startswith("error: move: to: 'up' is not one of")
    assert get_json_schema(environment.move)["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "to": {"type": "string", "description": "to (one of left, right)"},
            "steps": {"type": "integer", "description": "steps"},
        },
        "required": ["to"],
    }
    trl.close()


def test_data_for_evaluation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has no training tasks is not trained on through TRL either."""
    monkeypatch.setattr(Fragile, "splits", ("test",))
    monkeypatch.setattr(envs, "load", lambda name, options=None: Fragile)
    for work in (trl.factory, trl.dataset):
        with pytest.raises(UserError, match="fragile is for evaluation only"):
            work("fragile", split="test")


def test_two_steps_of_grpo(renderer: Renderer, tmp_path: Path) -> None:
    """TRL's trainer plays files through its own tool loop, with a tiny random model whose turns a script replaces:
    experts score 1, the others 0, one gets None; the loss is finite and the weights move."""
    import torch
    import transformers
    from trl import chat_template_utils
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    hub: Any = transformers  # its classes are not annotated

    level = 2
    tokenizer: Any = renderer.tokenizer
    tokenizer.chat_template = chat_template_utils.qwen3_chat_template
    if chat_template_utils._SUPPORTS_RESPONSE_TEMPLATE:
        tokenizer.response_template = chat_template_utils.qwen3_template
    else:
        tokenizer.response_schema = chat_template_utils.qwen3_schema
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = hub.LlamaForCausalLM(hub.LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=4096, **shape))
    kind = envs.load("files")
    tasks = [kind().task("train", level, index) for index in range(4)]
    experts = {task.prompt: kind().expert(task) for task in tasks}
    rng, seen = random.Random(0), []

    class Scripted(GRPOTrainer):
        """Says what the expert would say, or gives up."""

        def _generate_single_turn(self, prompt_ids: Any, *args: Any, **options: Any) -> Any:
            out = []
            for ids in prompt_ids:
                text = tokenizer.decode(ids)
                script = next(s for prompt, s in experts.items() if prompt in text)
                action: Any = script[min(text.count("<tool_response>"), len(script) - 1)]
                if rng.random() < 0.3:
                    action = "I give up."
                if not isinstance(action, str):
                    call = {"name": action.name, "arguments": dict(action.arguments)}
                    action = f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
                out.append([*tokenizer.encode(action, add_special_tokens=False), tokenizer.eos_token_id])
            return out, None

    def watched(completions: Any, environments: Any, **rest: Any) -> list[float | None]:
        environments[0]._trouble = InfraError("pulled the plug")
        seen.extend(trl.reward(completions, environments))
        return seen[-len(environments) :]

    before = [parameter.detach().clone() for parameter in model.parameters()]
    args = GRPOConfig(
        output_dir=str(tmp_path),
        max_steps=2,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=1024,
        max_tool_calling_iterations=kind.max_turns - 1,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        learning_rate=1e-3,
    )
    trainer = Scripted(
        model=model,
        reward_funcs=watched,
        args=args,
        train_dataset=trl.dataset("files", level=level, count=4),
        processing_class=tokenizer,
        environment_factory=trl.factory("files", level=level, limit=8),
    )
    trainer.train()
    assert len(seen) == 16 and (seen[0], seen[8]) == (None, None)
    assert set(seen) == {None, 0.0, 1.0}
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert len(losses) == 2 and all(loss == loss for loss in losses)
    assert any(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
