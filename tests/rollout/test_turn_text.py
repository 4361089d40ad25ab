"""What is told of a turn on the way is always the beginning of what the whole turn is parsed as."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentrl.interop.branches import returned
from agentrl.rollout.render import Renderer
from agentrl.rollout.tool_formats import Hermes
from agentrl.rollout.turn_text import TurnText
from tests.pace import within

FULL = os.environ.get("AGENTRL_FULL") == "1"
TOOLS = ("run", "look")
CALL = '{"name": "run", "arguments": {"command": "ls"}}'
PIECES = (
    *("<think>", "</think>", "\n", "\n\n", " ", "\t", "<tool_call>", "</tool_call>", "<tool_call>\n", "[TOOL_CALLS]"),
    *(CALL, f"[{CALL}]", '{"name": "run", "parameters": {"command": "ls"}}', '{"name": "no", "arguments": {}}'),
    *('{"type": "function", "name": "look", "arguments": {}}', '{"tool": "run", "arguments": {', "{", "}", '{"', '"'),
    *("```json\n", "```", "`", "``", "<json>", "<", "<to", "</", "<|python_tag|>", "<|im_start|>", "name", '"name"'),
    *(
        "word",
        "Hello, ",
        "naïve café",
        "日本語",
        "🙂",
        "\ufffd",
        "\u3000",
        "\x1c",
        "<a>",
        '{"name": "x", "arguments": ',
    ),
    *(': "run"', ', "arguments": {', "text}", '{"name": "y", "arguments": {"name": "run", "arguments": {'),
)
some_text = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=12).map("".join)


def told(renderer: Renderer, ids: list[int], cuts: list[int], tools: tuple[str, ...]) -> list[tuple[str, str]]:
    """What is settled after each chunk of a turn's tokens."""
    text, decoder = renderer.turn_text(tools), renderer.token_decoder()
    states = []
    for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        text.add(decoder.add(ids[start:end]))
        states.append((text.thinking, text.content))
    return states


def check(renderer: Renderer, ids: list[int], cuts: list[int], tools: tuple[str, ...]) -> None:
    whole = returned(renderer.parse(ids, tools), (str(n) for n in range(100)))
    states = told(renderer, ids, cuts, tools)
    for (thinking, content), (longer, more) in zip(states, [*states[1:], (whole.thinking, whole.content)], strict=True):
        assert longer.startswith(thinking) and more.startswith(content), (renderer.decode(ids), states, whole)


@settings(max_examples=2000 if FULL else 30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=some_text, seed=st.integers(0, 1 << 30), tools=st.sampled_from([(), TOOLS]), ended=st.booleans())
def test_what_was_told_is_never_taken_back(
    renderer: Renderer, text: str, seed: int, tools: tuple[str, ...], ended: bool
) -> None:
    """Text of calls, tags, space and many scripts, in tokens that no tokenizer would choose and in random chunks."""
    draws = random.Random(seed)
    ids: list[int] = []
    place = 0
    while place < len(text):
        step = draws.choice((1, 1, 2, 3, 8))
        ids += renderer.encoder.encode(text[place : place + step] if draws.random() < 0.7 else text[place:])
        place += step if ids else len(text)
    ids += [renderer.end_of_turn] * ended
    cuts = sorted(draws.sample(range(len(ids) + 1), min(len(ids), draws.randrange(12))))
    check(renderer, ids, cuts, tools)


@settings(max_examples=1000 if FULL else 15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1 << 30), length=st.integers(0, 60))
def test_random_tokens_are_decoded_as_all_at_once(renderer: Renderer, seed: int, length: int) -> None:
    """Halves of characters, bytes that are none, control tokens: what is decoded is the whole's beginning."""
    draws = random.Random(seed)
    backend = renderer.encoder._backend
    single = [i for i in range(backend.get_vocab_size()) if len(renderer.encoder.token(i)) in (1, 6)]
    every = range(backend.get_vocab_size())
    ids = [draws.choice(single if draws.random() < 0.8 else every) for _ in range(length)]
    while ids and ids[-1] in renderer.stop_token_ids:
        ids.pop()
    decoder, text = renderer.token_decoder(), ""
    for token in ids:
        text += decoder.add([token])
        assert renderer.decode(ids).startswith(text)
    check(renderer, ids, list(range(1, len(ids))), TOOLS)


@pytest.mark.parametrize(
    "text",
    [
        "\n\n```json\n" + CALL,
        " \n Sure. ```\n" + CALL + "\n```",
        "<think>\n\n a\n</think>\n\nb\n" + CALL,
        "a ```json\n<tool>\n" + CALL,
        '{"name": "x", "arguments": {"name": "y", "arguments": {"name": "run", "arguments": {}}}}',
        f"a <tool_call>{CALL}</tool_call> b <tool_call>{{</tool_call> c",
        f"a [TOOL_CALLS] [{CALL}] b",
        '<|python_tag|>{"name": "run", "parameters": {}}',
        '{"name": "run", "parameters": {}} and more',
        "a </tool_call> b " + CALL,
    ],
)
@pytest.mark.parametrize("tools", [(), TOOLS])
def test_every_place_at_which_a_call_may_begin(renderer: Renderer, text: str, tools: tuple[str, ...]) -> None:
    """Character by character."""
    ids = [token for character in text for token in renderer.encoder.encode(character)]
    check(renderer, ids, list(range(1, len(ids))), tools)


@pytest.mark.parametrize("tools", [(), TOOLS])
def test_settled_text_is_told_at_once(renderers: dict[str, Renderer], tools: tuple[str, ...]) -> None:
    """All but what may become something else: a word, thinking, code and braces do not wait for the turn's end."""

    def settled(family: str, text: str) -> tuple[str, str]:
        renderer = renderers[family]
        return told(renderer, renderer.encoder.encode(text), [], tools)[-1]

    for family in ("chatml", "llama3", "mistral", "gemma", "qwen3"):
        assert settled(family, "Hello, naïve 日本 world.") == ("", "Hello, naïve 日本 world.")
        assert settled(family, "a {x: 1} b <b>c</b> `d` e ```py\nf() g ") == (
            "",
            "a {x: 1} b <b>c</b> `d` e ```py\nf() g",
        )
        assert settled(family, 'say {"name": "x y", "age": 3} or {"name": "z"} to') == (
            "",
            'say {"name": "x y", "age": 3} or {"name": "z"} to',
        )
    assert settled("qwen3", "<think>\nLet me see.\n") == ("Let me see.", "")
    assert settled("qwen3", "<think>\nLet me see.\n</think>\n\nYes <tool_call>\n{") == ("Let me see.", "Yes")
    assert settled("chatml", "<thi") == ("", "")
    assert settled("chatml", "a <tool") == ("", "a")
    assert settled("mistral", "a [TOOL") == ("", "a")
    assert settled("llama3", '{"nam') == ("", "")
    held = settled("chatml", "a ```json\n" + CALL)
    assert held == ("", "a" if tools else "a ```json\n" + CALL)


def test_half_characters_wait(renderers: dict[str, Renderer]) -> None:
    """A character of four tokens is told when the last of them has come; in a row of bytes, when the row is over."""
    renderer = renderers["chatml"]
    ids = [renderer.encoder._backend.token_to_id(c) for c in ("a", "ð", "Ł", "Ļ", "Ĥ", "b")]
    assert [content for _, content in told(renderer, ids, [1, 2, 3, 4, 5], ())] == ["a", "a", "a", "a", "a🙂", "a🙂b"]
    renderer = renderers["gemma"]
    ids = [renderer.encoder._backend.token_to_id(c) for c in ("a", "<0xC3>", "<0xA9>", "<0xE2>", "b")]
    assert [content for _, content in told(renderer, ids, [1, 2, 3, 4], ())] == ["a", "a", "a", "a", "a���b"]


@pytest.mark.parametrize(
    "unit",
    ["{", " ", "\n", "`", "<", '{"name": "x", ', "{ ", "```json\n", "</think", "<tool_call", '{"a', "\\", "{{{ \n"],
)
def test_reading_is_linear(unit: str) -> None:
    """Whatever is repeated: a hundred thousand characters in chunks of ten take less than two seconds."""
    text = TurnText(Hermes(), TOOLS)
    piece = (unit * 10)[:10]
    with within(2.0):
        for _ in range(10_000):
            text.add(piece)


def test_a_decoder_that_may_change_its_mind_tells_nothing(monkeypatch: Any, renderers: dict[str, Renderer]) -> None:
    renderer = renderers["chatml"]
    monkeypatch.setitem(renderer.encoder.__dict__, "decoder_state", {"type": "WordPiece"})
    assert told(renderer, renderer.encoder.encode("Hello"), [], ()) == [("", "")]
