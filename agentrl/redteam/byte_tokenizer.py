"""A tokenizer of bytes with two chat templates, so that the real renderer runs where no model is installed.

It offers what `agentrl.rollout.render` needs of a transformers tokenizer. The templates write tools the way ChatML and
Mistral models do; like Mistral's own, the second raises for what it does not take.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.rollout.render import Renderer

CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BRACKETS = ("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]")
MISTRAL = (*BRACKETS, "[TOOL_RESULTS]", "[/TOOL_RESULTS]")


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A control token."""

    content: str
    special: bool = True


class Encoding:
    """The tokens of a text and the characters that each covers."""

    def __init__(self, ids: list[int], text: str, pieces: Sequence[tuple[int, int, bool]]) -> None:
        self.ids = ids
        self._text, self._pieces = text, pieces

    @property
    def offsets(self) -> list[tuple[int, int]]:
        places: list[tuple[int, int]] = []
        for start, end, control in self._pieces:
            if control:
                places.append((start, end))
            else:
                for place, character in enumerate(self._text[start:end], start):
                    places += [(place, place + 1)] * len(character.encode())
        return places


class Backend:
    """What a fast tokenizer does: each byte is a token, and so is each control token."""

    def __init__(self, control: Sequence[str]) -> None:
        self.control = tuple(control)
        self._ids = {text: 256 + number for number, text in enumerate(self.control)}
        self._split = re.compile("(" + "|".join(map(re.escape, self.control)) + ")")

    @classmethod
    def from_str(cls, text: str) -> Backend:
        return cls(json.loads(text))

    def to_str(self) -> str:
        return json.dumps(self.control)

    def no_padding(self) -> None:
        """Do nothing: it never pads."""

    def no_truncation(self) -> None:
        """Do nothing: it never truncates."""

    def get_added_tokens_decoder(self) -> dict[int, AddedToken]:
        return {number: AddedToken(text) for text, number in self._ids.items()}

    def get_vocab_size(self) -> int:
        return 256 + len(self.control)

    def encode(self, text: str, add_special_tokens: bool = False) -> Encoding:
        """Tokenise; like every tokenizer, raise for half of a surrogate pair."""
        ids: list[int] = []
        pieces: list[tuple[int, int, bool]] = []
        place = 0
        for number, part in enumerate(self._split.split(text)):
            if part:
                control = number % 2 == 1
                ids += [self._ids[part]] if control else part.encode()
                pieces.append((place, place + len(part), control))
                place += len(part)
        return Encoding(ids, text, pieces)

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = False) -> list[Encoding]:
        return [self.encode(text) for text in texts]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        written = bytearray()
        for token in token_ids:
            if token < 256:
                written.append(token)
            elif token - 256 < len(self.control):
                written += self.control[token - 256].encode()
        return written.decode("utf-8", "replace")


class ByteTokenizer:
    """A tokenizer with a chat template, as the renderer takes it."""

    unk_token_id = None

    def __init__(self, control: Sequence[str], end: str, template: Callable[..., str]) -> None:
        self.backend_tokenizer = Backend(control)
        self.all_special_ids = sorted(self.backend_tokenizer.get_added_tokens_decoder())
        self.eos_token_id = self.backend_tokenizer.encode(end).ids[0]
        self.chat_template = template.__name__
        self._template = template

    def apply_chat_template(
        self, conversation: Any, tools: Any = None, add_generation_prompt: bool = False, **options: Any
    ) -> str:
        return self._template(conversation, tools, add_generation_prompt)


def chatml(conversation: Sequence[dict[str, Any]], tools: Any, generate: bool) -> str:
    """Write ChatML with tools and calls in the tags that Qwen's templates use."""
    turns = [dict(message) for message in conversation]
    if tools:
        if turns[0]["role"] != "system":
            turns.insert(0, {"role": "system", "content": ""})
        lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        turns[0]["content"] += f"\n\n# Tools\n<tools>\n{lines}\n</tools>"
    text = ""
    for message in turns:
        content = str(message.get("content") or "")
        for call in message.get("tool_calls") or ():
            function = call["function"]
            block = json.dumps({"name": function["name"], "arguments": function["arguments"]}, ensure_ascii=False)
            content += f"{chr(10) if content else ''}<tool_call>\n{block}\n</tool_call>"
        if message["role"] == "tool":
            content = f"<tool_response>\n{content}\n</tool_response>"
        text += f"<|im_start|>{message['role']}\n{content}<|im_end|>\n"
    return text + ("<|im_start|>assistant\n" if generate else "")


def mistral(conversation: Sequence[dict[str, Any]], tools: Any, generate: bool) -> str:
    """Write Mistral's format; raise where its templates do: roles that do not alternate, ids of another form."""
    text, system = "<s>", ""
    if tools:
        text += f"[AVAILABLE_TOOLS] {json.dumps(tools, ensure_ascii=False)}[/AVAILABLE_TOOLS]"
    before = ""
    for message in conversation:
        role, content = message["role"], str(message.get("content") or "")
        if role == "system":
            system = content
            continue
        if role == before == "user" or (role == "user" and before == "call"):
            raise ValueError("after the optional system message, roles must alternate")
        if role == "user":
            text += f"[INST] {system}{chr(10) * 2 if system else ''}{content}[/INST]"
            before, system = "user", ""
        elif role == "tool":
            identifier = _identifier(message.get("tool_call_id"))
            text += f'[TOOL_RESULTS] {{"content": {json.dumps(content, ensure_ascii=False)}, '
            text += f'"call_id": {json.dumps(identifier)}}}[/TOOL_RESULTS]'
            before = "tool"
        elif message.get("tool_calls"):
            calls = [{**call["function"], "id": _identifier(call["id"])} for call in message["tool_calls"]]
            text += f"{content}[TOOL_CALLS] {json.dumps(calls, ensure_ascii=False)}</s>"
            before = "call"
        else:
            text, before = f"{text}{content}</s>", "assistant"
    return text


def _identifier(identifier: Any) -> str:
    if not isinstance(identifier, str) or len(identifier) != 9:
        raise ValueError("tool call ids must be of length 9")
    return identifier


@functools.cache
def renderer(template: str = "chatml") -> Renderer:
    """Return the renderer of one of the two templates."""
    if template == "mistral":
        return Renderer(ByteTokenizer(MISTRAL, "</s>", mistral))
    return Renderer(ByteTokenizer(CHATML, "<|im_end|>", chatml))
