"""Renders messages and tools to token ids through the model's own chat template, and only ever appends.

    prompt(messages, tools)   the template's text up to the first generation prompt, tokenised once
    (the engine samples)      kept verbatim: a sampled token is never tokenised again
    bridge(observations)      end of turn, results and next generation prompt: the only text tokenised after the prompt

Text from outside (user messages, tool output) passes through the template between marks. In the rendered text the marks
tell which tokens carry it, and wherever it spells a control token it is cut in two and tokenised piece by piece: it
reads the same, and no control token comes out. template_check.py finds out whether a template only appends.

Nothing that a policy samples or a tool returns makes rendering raise: what a template refuses is shown as text.
"""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from dataclasses import replace
from typing import Any, Protocol

from agentrl.errors import UserError
from agentrl.rollout.encoder import USUAL, Encoder, Marks, Span
from agentrl.rollout.template_check import check_template
from agentrl.rollout.tool_formats import (
    PROBE,
    Hermes,
    ToolFormat,
    dump,
    escape_tags,
    framed,
    instructions,
    recognise,
    split_thinking,
    stray_calls,
)
from agentrl.rollout.turn_text import TokenDecoder, TurnText
from agentrl.types import Message, Role, ToolCall

CACHED = 1024
"""How many renderings of one kind are kept."""
LONG = 1_000
"""Characters of names, ids and white space from which on the frame around observations is not kept."""
_TAG = re.compile(r"</?[^\s<>{}'\"]+>|\[/?[A-Z_]+\]")


class Tokenizer(Protocol):
    """What the renderer needs of a transformers tokenizer (a fast one)."""

    @property
    def backend_tokenizer(self) -> Any: ...
    @property
    def all_special_ids(self) -> list[int]: ...
    @property
    def eos_token_id(self) -> Any: ...
    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...


class Renderer:
    """One chat template with its tokenizer. The constructor finds out what they can do, and checks the template."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise UserError(
                f"{type(tokenizer).__name__} is a slow tokenizer; load the model's fast one (tokenizer.json)"
            )
        if not getattr(tokenizer, "chat_template", None):
            raise UserError(
                "the tokenizer has no chat template; put chat_template.jinja beside it, or use an instruct model"
            )
        self.tokenizer = tokenizer
        self.encoder = Encoder(backend, tokenizer.all_special_ids, getattr(tokenizer, "unk_token_id", None))
        self._frames: dict[tuple[tuple[Any, ...], ...], list[str] | None] = {}
        self._escaping: dict[Role, str] = {}
        """How the template shows text of each role: "plain", "json", or "" for anything else."""
        self._openings: dict[tuple[tuple[Message, ...], str], Span] = {}

        self._system = self._shows([_entry("system", "probe-system"), _entry("user", "x")], "probe-system")
        self.end_of_turn, self.end_of_turn_text = self._find_end()
        eos = tokenizer.eos_token_id
        self.stop_token_ids = tuple(dict.fromkeys([self.end_of_turn, *([eos] if isinstance(eos, int) else [])]))
        native = self._native_format()
        self.native = native is not None
        """Whether the template renders tools itself; otherwise our own tool format is used."""
        self.tool_format: ToolFormat = native or Hermes()
        self._thinks = self._raw([_entry("user", "x")], None, True).rstrip().endswith("<think>")
        """Whether the generation prompt opens the thinking."""
        source = str(getattr(tokenizer, "chat_template", ""))
        self._thinking_field = "reasoning_content" in source
        self.has_thinking = self._thinks or "</think>" in source
        """Whether the template knows a thinking block."""
        tags = sorted({*_TAG.findall(source), "<think>", "</think>"}, key=len, reverse=True)
        self._tags = re.compile("|".join(f"{re.escape(tag[0])}(?={re.escape(tag[1:])})" for tag in tags))
        """Finds the first character of every tag that the template names: it may split a turn's text there."""
        self.report = check_template(self)

    # Rendering -------------------------------------------------------------------------------------------------

    def prompt(self, messages: Sequence[Message], schemas: Sequence[dict[str, Any]] = ()) -> Span:
        """Render a whole conversation up to the generation prompt; assistant messages in it are tokenised again.

        The rollouts of a task begin alike, so openings are kept for a while.
        """
        if any(message.role == "assistant" for message in messages):
            try:
                return self.encoder.span(*self.text(messages, schemas))
            except Exception:  # a template raises what it likes for turns that it does not take
                return self.encoder.span(*self.text(messages, schemas, as_text=True))
        opening = (tuple(messages), dump(list(schemas)))
        if opening not in self._openings:
            if len(self._openings) >= CACHED:
                self._openings.clear()
            self._openings[opening] = self.encoder.span(*self.text(messages, schemas))
        return self._openings[opening]

    def bridge(
        self, observations: Sequence[Message], last_token: int | None = None, *, aside: bool = False
    ) -> Span | None:
        """Render what follows a sampled turn: the rest of its end, the observations, the next generation prompt.

        `last_token` is the last one sampled: the end of turn is added where the policy did not sample it. `aside`
        says whether any turn so far held thinking or words beside its calls (`Renderer.aside`). Returns None when the
        template rewrites history for such observations: render a new segment with `prompt` then.
        """
        if any((m.role, past) in self.report.rewrites for m in observations for past in (False, aside)):
            return None
        try:
            text, marks = self.bridge_text(observations)
        except Exception:  # as in `prompt`
            marks = Marks.absent_from([m.content + m.name + m.tool_call_id for m in observations])
            text = self._after_turn(observations, marks, as_text=True)
        span = self.encoder.span(self.end_of_turn_text + text, marks)
        if last_token == self.end_of_turn:
            return Span(span.token_ids[1:], span.sources[1:])
        return span

    @staticmethod
    def aside(turn: Message) -> bool:
        """Return whether a turn holds text that some templates remove from history: thinking, or words beside calls."""
        return bool(turn.thinking or (turn.content and turn.tool_calls))

    def parse(self, token_ids: Sequence[int], tools: Container[str] = ()) -> Message:
        """Read a sampled turn as a message; a call that cannot be read exactly carries an error instead.

        `tools` are the names of the episode's tools: a call of one of them is a call in whatever wrapping it stands.
        """
        ids = list(token_ids)
        while ids and ids[-1] in self.stop_token_ids:
            ids.pop()
        text = self.decode(ids)
        thinking, rest = split_thinking("<think>" + text if self._thinks else text)
        parsed = self.tool_format.read(rest)
        if not parsed.calls:
            parsed = stray_calls(rest, tools, self.tool_format.form) or parsed
        broken = any(call.error is not None for call in parsed.calls)  # then the text itself is the only record of it
        content = rest.strip() if broken else parsed.content
        return Message(role="assistant", content=content, tool_calls=parsed.calls, thinking=thinking)

    def still_thinking(self, token_ids: Sequence[int]) -> bool:
        """Return whether a turn's tokens so far end inside its thinking block, as `parse` reads it."""
        text = ("<think>" if self._thinks else "") + self.decode(token_ids)
        return text.lstrip().startswith("<think>") and "</think>" not in text

    def turn_text(self, tools: Container[str] = ()) -> TurnText:
        """Return what tells the settled beginning of `parse` while a turn is being sampled."""
        return TurnText(self.tool_format, tools, thinks=self._thinks)

    def token_decoder(self) -> TokenDecoder:
        """Return what decodes a turn's tokens as they come."""
        return TokenDecoder(self.encoder, self.stop_token_ids)

    def write(self, message: Message) -> tuple[int, ...]:
        """Return the tokens of an assistant message as a policy would sample them, end of turn included."""
        return (*self.encoder.encode(self.spoken(message)), self.end_of_turn)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, control tokens included."""
        return self.encoder.decode(token_ids)

    # Text ------------------------------------------------------------------------------------------------------

    def spoken(self, message: Message) -> str:
        """Return an assistant message as the text that a policy would sample."""
        text = self.tool_format.write(message.content, message.tool_calls)
        if not message.thinking:  # where the prompt opens a thought, an empty one is closed first
            return f"\n</think>\n\n{text}" if self._thinks else text
        return f"{'' if self._thinks else '<think>'}\n{message.thinking}\n</think>\n\n{text}"

    def text(
        self,
        messages: Sequence[Message],
        schemas: Sequence[dict[str, Any]] = (),
        generate: bool = True,
        as_text: bool = False,
    ) -> tuple[str, Marks]:
        """Render a conversation to the template's text, with the marks still in it.

        `as_text` shows calls as the policy wrote them and results in user messages, not in the template's own way.
        """
        calls = [dump([[c.name, c.id, dict(c.arguments)] for c in m.tool_calls]) for m in messages if m.tool_calls]
        texts = [m.content + m.thinking + m.name + m.tool_call_id for m in messages]
        marks = Marks.absent_from([*texts, *calls, dump(list(schemas))])
        tools = None
        if schemas and self.native:
            tools = [self.encoder.harmless(schema, marks) for schema in schemas]
        return self._raw(self._dicts(messages, schemas, marks, as_text), tools, generate), marks

    def bridge_text(self, observations: Sequence[Message]) -> tuple[str, Marks]:
        """Render what follows a turn's end, from a short stand-in conversation: the cost does not grow with history.

        The template runs once for each shape of observations; after that their text is put into the frame it made.
        """
        texts = [escape_tags(m.content) for m in observations]
        marks = Marks.absent_from([*texts, *(m.name + m.tool_call_id for m in observations)])
        cores = [text.strip() for text in texts]
        shape = tuple(
            (m.role, *(text.split(core, 1) if core else (text, None)), m.name, m.tool_call_id)
            for m, text, core in zip(observations, texts, cores, strict=True)
        )
        if shape not in self._frames:
            if sum(len(text) for part in shape for text in part if text) > LONG:
                return self._after_turn(observations, marks), marks
            if len(self._frames) >= CACHED:
                self._frames.clear()
            self._frames[shape] = self._frame(observations, shape)
        frame = self._frames[shape]
        fills = [self._fill(m.role, core) for m, core in zip(observations, cores, strict=True) if core]
        if frame is None or None in fills or marks is not USUAL:
            return self._after_turn(observations, marks), marks
        parts = [frame[0]]
        for fill, literal in zip(fills, frame[1:], strict=True):
            parts += [fill or "", literal]
        return "".join(parts), marks

    def _frame(self, observations: Sequence[Message], shape: tuple[tuple[Any, ...], ...]) -> list[str] | None:
        """Return the bridge around the observations' text; None when the template does more than insert it."""
        slot = USUAL.slot
        slotted = [
            replace(m, content=lead if trail is None else lead + slot + trail)
            for m, (_, lead, trail, _, _) in zip(observations, shape, strict=True)
        ]
        parts = self._after_turn(slotted, USUAL).split(slot)
        return parts if len(parts) == 1 + sum(trail is not None for _, _, trail, _, _ in shape) else None

    def _fill(self, role: Role, core: str) -> str | None:
        """Return text as the template inserts it for this role: as it is, or as JSON; None when neither."""
        if role not in self._escaping:
            probe = "a \"b\" \\ 'c'\n\td é <x> {{ y }} & 🙂"
            marked = self._after_turn([Message(role=role, content=probe)], USUAL)
            inside = marked.partition(USUAL.open)[2].partition(USUAL.close)[0]
            self._escaping[role] = {probe: "plain", dump(probe)[1:-1]: "json"}.get(inside, "")
        escaping = self._escaping[role]
        return core if escaping == "plain" else dump(core)[1:-1] if escaping == "json" else None

    def _after_turn(self, observations: Sequence[Message], marks: Marks, as_text: bool = False) -> str:
        """Return the template's own text after the end of a turn that these observations follow."""
        results = [m for m in observations if m.role == "tool"] if self.native and not as_text else []
        calls = tuple(ToolCall(name=marks.turn, id=m.tool_call_id or "call00000", arguments={}) for m in results)
        turn = Message(role="assistant", content=marks.turn, tool_calls=calls)
        conversation = [Message(role="user", content="x"), turn, *observations]
        text = self._raw(self._dicts(conversation, (), marks, as_text), None, True)
        end = text.find(self.end_of_turn_text, text.rfind(marks.turn))
        return text[end + len(self.end_of_turn_text) :]

    def _dicts(
        self, messages: Sequence[Message], schemas: Sequence[dict[str, Any]], marks: Marks, as_text: bool = False
    ) -> list[dict[str, Any]]:
        """Return messages as the template takes them, in the roles it knows, text from outside between marks."""
        out: list[dict[str, Any]] = []
        pending: list[Message] = []  # tool results waiting to be carried by one user message
        system, plain = "", as_text

        def add_user(content: str) -> None:
            if out and out[-1]["role"] == "user":
                out[-1]["content"] += "\n\n" + content  # many templates insist that roles alternate
            else:
                out.append(_entry("user", content))

        def flush() -> None:
            if pending:
                add_user(framed(pending))
                pending.clear()

        for message in messages:
            content = message.content
            if message.role in ("user", "tool"):
                content = marks.around(escape_tags(content))
            if message.role == "tool" and (plain or not self.native):
                pending.append(replace(message, content=content))
                continue
            flush()
            if message.role == "system":
                system = "\n\n".join(part for part in (system, marks.around(content)) if part)
            elif message.role == "user":
                add_user(content)
            elif message.role == "tool":
                # Names and ids are the policy's own words: they too must not turn into control tokens here.
                name = self.encoder.cut(message.name, marks)
                entry = _entry("tool", content) | {"tool_call_id": self._identifier(message.tool_call_id, marks)}
                out.append(entry | ({"name": name} if name else {}))
            else:
                # A turn whose calls could not be read has none that a template could show results of.
                plain = as_text or any(call.error is not None for call in message.tool_calls)
                out.append(self._assistant(message, marks, as_text))
        flush()
        if schemas and not self.native:
            rules = instructions([self.encoder.harmless(schema, marks) for schema in schemas])
            system = "\n\n".join(part for part in (system, rules) if part)
        if system and self._system:
            return [_entry("system", system), *out]
        if system and out and out[0]["role"] == "user":
            out[0]["content"] = f"{system}\n\n{out[0]['content']}"
        elif system:
            out.insert(0, _entry("user", system))
        return out

    def _identifier(self, identifier: str, marks: Marks) -> str:
        """Return an id as the template takes it: one that a cut would lengthen is replaced."""
        cut = self.encoder.cut(identifier, marks)
        return cut if identifier and (cut == identifier or not identifier.isalnum()) else "call00000"

    def _quoted(self, text: str, marks: Marks) -> str:
        """Return a turn's words between marks, with a cut in every tag at which the template could split them."""
        return marks.around(self.encoder.cut(self._tags.sub(lambda match: match[0] + marks.cut, text), marks))

    def _assistant(self, message: Message, marks: Marks, as_text: bool) -> dict[str, Any]:
        """Return a past turn. A message with a call that could not be read holds its whole text as content."""
        readable = bool(message.tool_calls) and all(call.error is None for call in message.tool_calls)
        text = message.content
        if readable and (as_text or not self.native):
            text = self.tool_format.write(text, message.tool_calls)
        entry = _entry("assistant", self._quoted(text, marks) if text != marks.turn else text)
        if message.thinking and self._thinking_field:
            entry["reasoning_content"] = self._quoted(message.thinking, marks)
        elif message.thinking:
            entry["content"] = f"<think>\n{self._quoted(message.thinking, marks)}\n</think>\n\n{entry['content']}"
        if readable and self.native and not as_text:
            harmless = self.encoder.harmless
            entry["tool_calls"] = [
                _call(
                    harmless(call.name, marks),
                    harmless(dict(call.arguments), marks),
                    self._identifier(call.id, marks),
                )
                for call in message.tool_calls
            ]
        return entry

    def _raw(self, conversation: list[dict[str, Any]], tools: list[Any] | None, generate: bool) -> str:
        # A date in the prompt would make two runs of one recipe differ.
        options = {"add_generation_prompt": generate, "tokenize": False, "date_string": "01 Jan 2025"}
        return str(self.tokenizer.apply_chat_template(conversation, tools=tools, **options))

    # What the template can do ----------------------------------------------------------------------------------

    def _shows(self, conversation: list[dict[str, Any]], *needles: str, tools: list[Any] | None = None) -> bool:
        """Return whether the template takes the conversation and shows the needles; it may raise anything."""
        try:
            text = self._raw(conversation, tools, False)
        except Exception:
            return False
        return all(needle in text for needle in needles)

    def _find_end(self) -> tuple[int, str]:
        """Return the control token that ends an assistant's turn, and its text."""
        text = self._raw([_entry("user", "x"), _entry("assistant", "probe-turn")], None, False)
        match = self.encoder.control.search(text, text.rfind("probe-turn"))
        if match is None:
            raise UserError(
                "the chat template writes no control token after an assistant's turn, so a turn has no end that a "
                "policy could sample; add the end-of-turn token to the template and to the tokenizer's added tokens"
            )
        return self.encoder.literals[match.group(1)], match.group(1)

    def _native_format(self) -> ToolFormat | None:
        """Return how the template itself writes tools, calls and results; None unless it does so and we can read it."""
        parameters = {"type": "object", "properties": {}}
        function = {"name": "probe_tool", "description": "x", "parameters": parameters}
        turn = _entry("assistant", "") | {"tool_calls": [_call(PROBE.name, dict(PROBE.arguments), PROBE.id)]}
        result = _entry("tool", "probe-result") | {"tool_call_id": PROBE.id, "name": PROBE.name}
        conversation = [_entry("user", "x"), turn, result]
        if not self._shows(conversation[:1], "probe_tool", tools=[{"type": "function", "function": function}]):
            return None
        if not self._shows(conversation, PROBE.name, "probe-result"):
            return None
        text = self._raw(conversation, None, False).removeprefix(self._raw(conversation[:1], None, True))
        return recognise(text[: text.find(self.end_of_turn_text)])


def _call(name: str, arguments: Any, identifier: str) -> dict[str, Any]:
    """Return a tool call as templates take it."""
    function = {"name": name, "arguments": arguments}
    return {"type": "function", "id": identifier or "call00000", "function": function}


def _entry(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}
