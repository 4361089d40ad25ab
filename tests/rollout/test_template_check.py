"""A template is shown to append only, or the report says exactly where it does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentrl.rollout.render import Renderer
from agentrl.types import Message

TEMPLATES = Path(__file__).parent / "templates"


def test_what_each_family_does(renderers: dict[str, Renderer]) -> None:
    assert {
        name: (r.report.tool_format, r.report.native, sorted(r.report.rewrites)) for name, r in renderers.items()
    } == {
        "chatml": ("hermes", False, []),
        "qwen3": ("hermes", True, [("user", True)]),
        "llama3": ("llama", True, [("tool", True)]),
        "mistral": ("mistral", True, [("tool", True), ("user", False)]),
        "gemma": ("hermes", False, []),
    }
    assert all(r.report.conversations >= 8 for r in renderers.values())


def test_the_message_quotes_what_changed(renderers: dict[str, Renderer]) -> None:
    report = str(renderers["qwen3"].report)
    assert "tool calls: hermes format (the chat template's own)" in report
    assert "when a user message follows a turn that held thinking" in report
    assert "after turn 1 it renders '|>assistant\\nI say 0.<|im_end|>" in report
    assert "where '|>assistant\\n<think>\\nLet me see." in report
    assert "[AVAILABLE_TOOLS]" in str(renderers["mistral"].report)


LOOP = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


@pytest.mark.parametrize(
    ("template", "rewrites"),
    [
        (LOOP + ASK, []),
        # A generation prompt that a finished turn does not begin with.
        (
            LOOP + "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}",
            ["tool", "user"],
        ),
        # The number of messages stands at the top.
        ("{{ messages | length }}" + LOOP + ASK, ["tool", "user"]),
        # Only the last two messages are shown.
        (LOOP.replace("in messages", "in messages[-2:]") + ASK, ["tool", "user"]),
        # A reminder that travels with the last message.
        (LOOP.replace("<|im_end|>", "{% if loop.last %} (last){% endif %}<|im_end|>") + ASK, ["tool", "user"]),
    ],
)
def test_every_way_of_rewriting_is_found(families: dict[str, Any], template: str, rewrites: list[str]) -> None:
    report = Renderer(families["chatml"].tokenizer(template)).report
    assert sorted({role for role, _ in report.rewrites}) == rewrites


@pytest.mark.parametrize(
    ("file", "family", "tool_format", "native"),
    [
        ("qwen2_5", "qwen3", "hermes", True),
        ("qwen3", "qwen3", "hermes", True),
        ("qwen3_instruct_2507", "qwen3", "hermes", True),
        ("llama3", "llama3", "hermes", False),
        ("llama3_1", "llama3", "llama", True),
        ("llama3_2", "llama3", "llama", True),
        ("gemma", "gemma", "hermes", False),
        ("gemma3", "gemma", "hermes", False),
    ],
)
def test_published_templates(families: dict[str, Any], file: str, family: str, tool_format: str, native: bool) -> None:
    """The originals, as TRL ships them: same findings as for our short forms of their rules."""
    trl = pytest.importorskip("trl", reason="TRL (the extra `train`) carries the published templates")
    template = (Path(trl.__file__).parent / "chat_templates" / f"{file}.jinja").read_text()
    renderer = Renderer(families[family].tokenizer(template))
    rewrites = {"qwen3": [("user", True)], "llama3_1": [("tool", True)], "llama3_2": [("tool", True)]}
    assert (renderer.report.tool_format, renderer.report.native) == (tool_format, native)
    assert sorted(renderer.report.rewrites) == rewrites.get(file, [])
    span = renderer.bridge([Message(role="tool", content="x <end_of_turn><|im_end|><|eot_id|>", name="look")])
    assert span is not None
    outside = [t for t, s in zip(span.token_ids, span.sources, strict=True) if s]
    assert outside and not renderer.encoder.control_ids & set(outside)
