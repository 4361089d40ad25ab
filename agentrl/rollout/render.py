"""Messages and tools to token ids through the model's own chat template, appended only.

    prompt(messages, tools)   the template's text up to the first generation prompt, tokenised once
    (the engine samples)      kept verbatim: a sampled token is never tokenised again
    bridge(observations)      end of turn, results and next generation prompt: the only text tokenised after the prompt

Text from outside (user messages, tool output) passes through the template between marks. Behind the template the
marks tell which tokens carry it, and wherever it spells a control token it is cut in two and tokenised piece by
piece: it reads the same, and no control token comes out. How a template is proven to append only: proof.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from agentrl.errors import UserError
from agentrl.rollout.encoder import Encoder, Marks, Span
from agentrl.rollout.tool_formats import (
    PROBE,
    Hermes,
    ToolFormat,
    dump,
    framed,
    instructions,
    neutral,
    recognise,
    split_thinking,
)
from agentrl.types import Message, Role, ToolCall

__all__ = ["Marks", "Renderer", "Span", "Tokenizer"]


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
    """One chat template with its tokenizer: finds out what they can do, then renders without surprises."""

    def __init__(self, tokenizer: Tokenizer, *, template_options: Mapping[str, Any] | None = None) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise UserError(
                f"{type(tokenizer).__name__} is a slow tokenizer; load the model's fast one (tokenizer.json)"
            )
        if not getattr(tokenizer, "chat_template", None):
            raise UserError(
                "the tokenizer has no chat template; put chat_template.jinja beside it, or take an instruct model"
            )
        self.tokenizer = tokenizer
        self.encoder = Encoder(backend, tokenizer.all_special_ids, getattr(tokenizer, "unk_token_id", None))
        # A date in the prompt would make two runs of one recipe differ.
        self._options = {"date_string": "01 Jan 2025", **(template_options or {})}
        self._frames: dict[tuple[tuple[Any, ...], ...], list[str] | None] = {}
        self._setting: dict[Role, str] = {}
        self._openings: dict[tuple[tuple[Message, ...], str], Span] = {}

        self._system = self._speaks([_plain("system", "probe-system"), _plain("user", "x")], "probe-system")
        self.end_of_turn, self.end_of_turn_text = self._find_end()
        eos = tokenizer.eos_token_id
        self.stop_token_ids = tuple(dict.fromkeys([self.end_of_turn, *([eos] if isinstance(eos, int) else [])]))
        native = self._native_dialect()
        self.native = native is not None
        """Whether the template renders tools itself; otherwise our dialect does."""
        self.dialect: ToolFormat = native or Hermes()
        opened = self._raw([_plain("user", "x")], None, True).rstrip()
        self._thinks = opened.endswith("<think>")
        self._fields = "reasoning_content" in str(getattr(tokenizer, "chat_template", ""))
        from agentrl.rollout.template_check import prove

        self.report = prove(self)

    # Rendering -------------------------------------------------------------------------------------------------

    def prompt(self, messages: Sequence[Message], schemas: Sequence[dict[str, Any]] = ()) -> Span:
        """A whole conversation up to the generation prompt. Assistant messages in it are rendered anew.

        The rollouts of a task begin alike, so openings are kept for a while.
        """
        if any(message.role == "assistant" for message in messages):
            return self._prompt(messages, schemas)
        opening = (tuple(messages), dump(list(schemas)))
        if opening not in self._openings:
            if len(self._openings) >= 1024:
                self._openings.clear()
            self._openings[opening] = self._prompt(messages, schemas)
        return self._openings[opening]

    def _prompt(self, messages: Sequence[Message], schemas: Sequence[dict[str, Any]]) -> Span:
        text, marks = self.text(messages, schemas)
        return self.encoder.span(text, marks)

    def bridge(
        self, observations: Sequence[Message], last_token: int | None = None, *, aside: bool = False
    ) -> Span | None:
        """What follows a sampled turn: the rest of its end, the observations, the next generation prompt.

        `last_token` is the last one sampled: the end of turn is added where the policy did not sample it. `aside`
        says whether any turn so far held thinking or words beside its calls (`Renderer.aside`). None when the template
        rewrites history for such observations: render a new segment with `prompt` then.
        """
        if any((m.role, past) in self.report.rewrites for m in observations for past in (False, aside)):
            return None
        text, marks = self.bridge_text(observations)
        span = self.encoder.span(self.end_of_turn_text + text, marks)
        if last_token == self.end_of_turn:
            return Span(span.token_ids[1:], span.sources[1:])
        return span

    @staticmethod
    def aside(turn: Message) -> bool:
        """Whether a turn holds text that some templates take out of history: thinking, or words beside its calls."""
        return bool(turn.thinking or (turn.content and turn.tool_calls))

    def parse(self, token_ids: Sequence[int]) -> Message:
        """A sampled turn as a message; what cannot be read exactly as a call carries an error instead."""
        ids = list(token_ids)
        while ids and ids[-1] in self.stop_token_ids:
            ids.pop()
        text = self.decode(ids)
        thinking, said = split_thinking("<think>" + text if self._thinks else text)
        found = self.dialect.read(said)
        broken = any(call.error is not None for call in found.calls)  # then the text itself is the only record of it
        content = said.strip() if broken else found.content
        return Message(role="assistant", content=content, tool_calls=found.calls, thinking=thinking)

    def write(self, message: Message) -> tuple[int, ...]:
        """The tokens of an assistant message as a policy would sample them, end of turn included."""
        return (*self.encoder.encode(self.spoken(message)), self.end_of_turn)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, control tokens included."""
        return self.encoder.decode(token_ids)

    # Text ------------------------------------------------------------------------------------------------------

    def spoken(self, message: Message) -> str:
        """An assistant message as the text a policy would sample."""
        text = self.dialect.write(message.content, message.tool_calls)
        if not message.thinking:
            return text
        return f"{'' if self._thinks else '<think>'}\n{message.thinking}\n</think>\n\n{text}"

    def text(
        self, messages: Sequence[Message], schemas: Sequence[dict[str, Any]] = (), generate: bool = True
    ) -> tuple[str, Marks]:
        """The template's text with the marks still in it."""
        calls = [dump([[c.name, c.id, dict(c.arguments)] for c in m.tool_calls]) for m in messages if m.tool_calls]
        texts = [m.content + m.thinking + m.name + m.tool_call_id for m in messages]
        marks = Marks.absent_from([*texts, *calls, dump(list(schemas))])
        tools = None
        if schemas and self.native:
            tools = [self.encoder.harmless(schema, marks) for schema in schemas]
        return self._raw(self._dicts(messages, schemas, marks), tools, generate), marks

    def bridge_text(self, observations: Sequence[Message]) -> tuple[str, Marks]:
        """What follows the end of a turn, from a short stand-in conversation: its cost does not grow with history.

        The template runs once for each shape of observations; after that their text is put into the frame it made.
        """
        texts = [neutral(m.content) for m in observations]
        marks = Marks.absent_from([*texts, *(m.name + m.tool_call_id for m in observations)])
        cores = [text.strip() for text in texts]
        shape = tuple(
            (m.role, *(text.split(core, 1) if core else (text, None)), m.name, m.tool_call_id)
            for m, text, core in zip(observations, texts, cores, strict=True)
        )
        if shape not in self._frames:
            if len(self._frames) >= 1024:
                self._frames.clear()
            self._frames[shape] = self._frame(observations, shape)
        frame = self._frames[shape]
        fills = [self._fill(m.role, core) for m, core in zip(observations, cores, strict=True) if core]
        if frame is None or None in fills or marks != Marks():
            return self._after_turn(observations, marks), marks
        parts = [frame[0]]
        for fill, literal in zip(fills, frame[1:], strict=True):
            parts += [fill or "", literal]
        return "".join(parts), marks

    def _frame(self, observations: Sequence[Message], shape: tuple[tuple[Any, ...], ...]) -> list[str] | None:
        """The bridge around the observations' text; None when the template does more than set it in place."""
        slot = Marks().slot
        held = [
            replace(m, content=lead if trail is None else lead + slot + trail)
            for m, (_, lead, trail, _, _) in zip(observations, shape, strict=True)
        ]
        parts = self._after_turn(held, Marks()).split(slot)
        return parts if len(parts) == 1 + sum(trail is not None for _, _, trail, _, _ in shape) else None

    def _fill(self, role: Role, core: str) -> str | None:
        """Text as the template sets it in place for this role: as it is, or as JSON; None when neither."""
        if role not in self._setting:
            probe = "a \"b\" \\ 'c'\n\td é <x> {{ y }} & 🙂"
            marked = self._after_turn([Message(role=role, content=probe)], Marks())
            inside = marked.partition(Marks().open)[2].partition(Marks().close)[0]
            self._setting[role] = {probe: "plain", dump(probe)[1:-1]: "json"}.get(inside, "")
        setting = self._setting[role]
        return core if setting == "plain" else dump(core)[1:-1] if setting == "json" else None

    def _after_turn(self, observations: Sequence[Message], marks: Marks) -> str:
        """The template's own text after the end of a turn that these observations follow."""
        said = marks.turn
        calls = tuple(
            ToolCall(name=said, id=m.tool_call_id or "call00000", arguments={})
            for m in observations
            if m.role == "tool"
        )
        turn = Message(role="assistant", content=said, tool_calls=calls if self.native else ())
        base = [Message(role="user", content="x"), turn]
        text = self._raw(self._dicts([*base, *observations], (), marks), None, True)
        end = text.find(self.end_of_turn_text, text.rfind(said))
        return text[end + len(self.end_of_turn_text) :]

    def _dicts(
        self, messages: Sequence[Message], schemas: Sequence[dict[str, Any]], marks: Marks
    ) -> list[dict[str, Any]]:
        """Messages as the template takes them, in the roles it knows, text from outside between marks."""
        out: list[dict[str, Any]] = []
        pending: list[Message] = []  # tool results waiting to be carried by one user message
        system, plain = "", False

        def add(role: str, content: str) -> None:
            if role == "user" and out and out[-1]["role"] == "user":
                out[-1]["content"] += "\n\n" + content  # many templates insist that roles alternate
            else:
                out.append(_plain(role, content))

        def flush() -> None:
            if pending:
                add("user", framed(pending))
                pending.clear()

        for message in messages:
            content = marks.around(neutral(message.content)) if message.role in ("user", "tool") else message.content
            if message.role == "tool" and (plain or not self.native):
                pending.append(replace(message, content=content))
                continue
            flush()
            if message.role == "system":
                system = "\n\n".join(part for part in (system, marks.around(content)) if part)
            elif message.role == "user":
                add("user", content)
            elif message.role == "tool":
                # Names and ids are the policy's own words: they too must not turn into control tokens here.
                name, identifier = (self.encoder.cut(text, marks) for text in (message.name, message.tool_call_id))
                entry = _plain("tool", content) | {"tool_call_id": identifier or "call00000"}
                out.append(entry | ({"name": name} if name else {}))
            else:
                # A turn whose calls could not be read has none that a template could show results of.
                plain = any(call.error is not None for call in message.tool_calls)
                out.append(self._assistant(message, marks))
        flush()
        if schemas and not self.native:
            rules = instructions([self.encoder.harmless(schema, marks) for schema in schemas])
            system = "\n\n".join(part for part in (system, rules) if part)
        if system and self._system:
            return [_plain("system", system), *out]
        if system and out and out[0]["role"] == "user":
            out[0]["content"] = f"{system}\n\n{out[0]['content']}"
        elif system:
            out.insert(0, _plain("user", system))
        return out

    def _assistant(self, message: Message, marks: Marks) -> dict[str, Any]:
        """A past turn. A message with a call that could not be read holds its whole text as content."""
        readable = all(call.error is None for call in message.tool_calls)
        structured = self.native and readable and bool(message.tool_calls)
        said = message.content
        if message.tool_calls and readable and not structured:
            said = self.dialect.write(said, message.tool_calls)
        entry = _plain("assistant", marks.around(said) if said != marks.turn else said)
        if message.thinking and self._fields:
            entry["reasoning_content"] = marks.around(message.thinking)
        elif message.thinking:
            entry["content"] = f"<think>\n{marks.around(message.thinking)}\n</think>\n\n{entry['content']}"
        if structured:
            cut = self.encoder.cut
            entry["tool_calls"] = [
                {
                    "type": "function",
                    "id": cut(call.id, marks) or "call00000",
                    "function": {
                        "name": cut(call.name, marks),
                        "arguments": self.encoder.harmless(dict(call.arguments), marks),
                    },
                }
                for call in message.tool_calls
            ]
        return entry

    def _raw(self, conversation: list[dict[str, Any]], tools: list[Any] | None, generate: bool) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                conversation, tools=tools, add_generation_prompt=generate, tokenize=False, **self._options
            )
        )

    # What the template can do ----------------------------------------------------------------------------------

    def _speaks(self, conversation: list[dict[str, Any]], *needles: str, tools: list[Any] | None = None) -> bool:
        """Whether the template takes the conversation and shows the needles; it may raise anything of its own."""
        try:
            text = self._raw(conversation, tools, False)
        except Exception:
            return False
        return all(needle in text for needle in needles)

    def _find_end(self) -> tuple[int, str]:
        """The control token that ends an assistant's turn, as the template writes it."""
        text = self._raw([_plain("user", "x"), _plain("assistant", "probe-turn")], None, False)
        match = self.encoder.control.search(text, text.rfind("probe-turn"))
        if match is None:
            raise UserError(
                "the chat template writes no control token after an assistant's turn, so a turn has no end that a "
                "policy could sample; add the end-of-turn token to the template and to the tokenizer's added tokens"
            )
        return self.encoder.literals[match.group(1)], match.group(1)

    def _native_dialect(self) -> ToolFormat | None:
        """How the template itself writes tools, calls and results, where it does all three and we can read it."""
        schema = {
            "type": "function",
            "function": {"name": "probe_tool", "description": "x", "parameters": {"type": "object", "properties": {}}},
        }
        function = {"name": PROBE.name, "arguments": dict(PROBE.arguments)}
        calls = [{"type": "function", "id": PROBE.id, "function": function}]
        turn = _plain("assistant", "") | {"tool_calls": calls}
        result = _plain("tool", "probe-result") | {"tool_call_id": PROBE.id, "name": PROBE.name}
        talk = [_plain("user", "x"), turn, result]
        if not self._speaks(talk[:1], "probe_tool", tools=[schema]) or not self._speaks(
            talk, PROBE.name, "probe-result"
        ):
            return None
        text = self._raw(talk, None, False)
        start = self._raw(talk[:1], None, True)
        said = text[len(start) :] if text.startswith(start) else text
        return recognise(said[: said.find(self.end_of_turn_text)])


def _plain(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}
