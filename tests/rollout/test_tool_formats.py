"""Tool calls: read strictly, answered with errors a model can learn from, never half executed."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.rollout.tool_formats import (
    MAX_CALLS,
    PROBE,
    Hermes,
    Llama,
    Mistral,
    Read,
    escape_tags,
    instructions,
    recognise,
    split_thinking,
)
from agentrl.types import ToolCall

hermes, mistral, llama = Hermes(), Mistral(), Llama()
GOOD = '{"name": "look", "arguments": {"path": "a"}}'
CALL = ToolCall(name="look", arguments={"path": "a"})


def errors(text: str) -> list[str | None]:
    return [call.error for call in hermes.read(text).calls]


def test_hermes_reads_words_and_calls() -> None:
    assert hermes.read("Just words.") == Read("Just words.", ())
    assert hermes.read(f" I look.\n<tool_call>\n{GOOD}\n</tool_call>\n<tool_call>{GOOD}</tool_call>") == Read(
        "I look.", (CALL, CALL)
    )


def test_a_closing_tag_inside_an_argument_belongs_to_the_argument() -> None:
    text = '<tool_call>{"name": "write", "arguments": {"text": "</tool_call><tool_call>"}}</tool_call>'
    assert hermes.read(text).calls == (ToolCall(name="write", arguments={"text": "</tool_call><tool_call>"}),)


@pytest.mark.parametrize(
    ("inside", "reason"),
    [
        ("", "not valid JSON: Expecting value near '</tool_call>'"),
        ('{"name": "look", "arguments": {}', "not valid JSON: Expecting ',' delimiter near '</tool_call>'"),
        ("{'name': 'look'}", "not valid JSON: Expecting property name enclosed in double quotes near \"'name': "),
        ('["look"]', "a call must be a JSON object, got a list"),
        ('{"arguments": {}}', 'the call has no "name"'),
        ('{"name": 3, "arguments": {}}', '"name" must be a string, got a number'),
        ('{"name": "look"}', "the call of 'look' has no \"arguments\""),
        ('{"name": "look", "arguments": "{}"}', '"arguments" must be a JSON object, got a string'),
        ('{"name": "look", "arguments": {}, "note": 1}', "unknown key 'note' beside"),
        ('{"name": "a", "name": "b", "arguments": {}}', "the key 'name' appears twice in one object"),
        ('{"name": "look", "arguments": {"x": NaN}}', "NaN is not JSON; numbers must be finite"),
        ('{"name": "look", "arguments": {"x": 1e999}}', "the number 1e999 is too large"),
        ('{"name": "look", "arguments": {"x": ' + "9" * 5000 + "}}", "not valid JSON: Exceeds the limit"),
        ('{"name": "look", "arguments": ' + '{"x":' * 5000 + "1", "not valid JSON: nested too deeply"),
        (GOOD + " and more", "</tool_call> expected after the JSON, found 'and more</tool_call>'"),
        (GOOD + GOOD, "</tool_call> expected after the JSON, found"),
    ],
)
def test_broken_calls_say_what_is_wrong_and_what_to_write(inside: str, reason: str) -> None:
    (error,) = errors(f"<tool_call>{inside}</tool_call>")
    assert error is not None and reason in error
    assert error.startswith("this tool call was not carried out: ")
    assert error.endswith('. Write <tool_call>{"name": "...", "arguments": {...}}</tool_call>')


def test_a_call_without_its_end_or_beginning_is_refused() -> None:
    for text, reason in (
        (f"<tool_call>{GOOD}", "it does not end with </tool_call>"),
        (f"<tool_call>{GOOD[:-9]}", "it does not end with </tool_call>"),
        ("well</tool_call>", "</tool_call> without <tool_call> before it"),
    ):
        (error,) = errors(text)
        assert error is not None and reason in error


def test_a_broken_call_does_not_take_its_neighbours_along() -> None:
    parsed = hermes.read(f"<tool_call>{{</tool_call><tool_call>{GOOD}</tool_call>")
    assert [call.error is None for call in parsed.calls] == [False, True]
    assert parsed.calls[1] == CALL


def test_a_flood_of_calls_is_bounded() -> None:
    calls = hermes.read(f"<tool_call>{GOOD}</tool_call>" * (MAX_CALLS + 5)).calls
    assert calls[:MAX_CALLS] == (CALL,) * MAX_CALLS
    assert [c.error for c in calls[MAX_CALLS:]] == ["only the first 32 of 37 tool calls were carried out"]


@given(
    text=st.text(alphabet=st.sampled_from(list('<>{}[]":, \\n/a1')) | st.characters(), max_size=60),
    cut=st.integers(0, 200),
)
@settings(max_examples=300)
def test_nothing_but_a_whole_call_is_ever_executed(text: str, cut: int) -> None:
    """A call without error is spelled, whole, in the text; reading never raises."""
    whole = f"{text}<tool_call>\n{GOOD}\n</tool_call>{text}"
    for said in (text, whole, whole[:cut], text + GOOD[:cut]):
        for tool_format in (hermes, mistral, llama):
            for call in tool_format.read(said).calls:
                if call.error is None:
                    assert f"{json.dumps(call.name, ensure_ascii=False)}" in said or "\\" in said
                    if tool_format is hermes:
                        assert "<tool_call>" in said and "</tool_call>" in said


arguments = st.dictionaries(
    st.text(max_size=5),
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**60), 2**60)
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(max_size=10),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=6,
    ),
    max_size=3,
)


@given(name=st.text(min_size=1, max_size=10), values=arguments)
@settings(max_examples=200)
def test_every_tool_format_reads_what_it_writes(name: str, values: dict[str, object]) -> None:
    call = ToolCall(name=name, arguments=values)
    for tool_format in (hermes, mistral, llama):
        assert tool_format.read(tool_format.write("", [call])) == Read("", (call,))
    assert hermes.read(hermes.write("Words.", [call, call])) == Read("Words.", (call, call))


def test_mistral() -> None:
    assert mistral.read(' [TOOL_CALLS] [{"name": "look", "arguments": {"path": "a"}, "id": "abcdefghi"}]') == Read(
        "", (ToolCall(name="look", arguments={"path": "a"}, id="abcdefghi"),)
    )
    for text, reason in (
        ("[TOOL_CALLS] {}", "a list of calls must follow [TOOL_CALLS], got an object"),
        ("[TOOL_CALLS] []", "a list of calls must follow [TOOL_CALLS], got a list"),
        ("[TOOL_CALLS] [{]", "not valid JSON"),
        (f"[TOOL_CALLS] [{GOOD}] bye", "nothing may follow the list of calls, found 'bye'"),
        ('[TOOL_CALLS] [{"name": "x"}]', 'has no "arguments"'),
    ):
        (call,) = mistral.read(text).calls
        assert call.error is not None and reason in call.error


def test_llama() -> None:
    assert llama.read('<|python_tag|>{"name": "look", "parameters": {"path": "a"}}').calls == (CALL,)
    assert llama.read('{"answer": 3}') == Read('{"answer": 3}', ())
    for text, reason in (
        ('{"name": "look", "parameters": {"path": "a"', "not valid JSON"),
        ('{"name": "look", "parameters": {}} and', "nothing may follow the call, found 'and'"),
        ('{"name": "look"}', 'has no "parameters"'),
    ):
        (call,) = llama.read(text).calls
        assert call.error is not None and reason in call.error
    with pytest.raises(ValueError, match="one call per message"):
        llama.write("", [CALL, CALL])


def test_tool_formats_are_recognised_by_how_a_template_writes_a_call() -> None:
    for tool_format in (hermes, mistral, llama):
        recognised = recognise(tool_format.write("", [PROBE]))
        assert recognised is not None and recognised.name == tool_format.name
    assert recognise("<function=probe_name><parameter=probe_key>probe value</parameter></function>") is None


def test_thinking_is_told_apart() -> None:
    assert split_thinking("<think>\na\n</think>\n\nb") == ("a", "\n\nb")
    assert split_thinking("<think>\na") == ("a", "")
    assert split_thinking("b <think>a</think>") == ("", "b <think>a</think>")


def test_the_frame_of_results_is_escaped_and_nothing_else() -> None:
    assert escape_tags("a < b </p> <tools> <tool_response") == "a < b </p> <tools> <\\tool_response"
    assert escape_tags("</TOOL_RESPONSE >< tool_call>") == "<\\/TOOL_RESPONSE ><\\ tool_call>"


def test_instructions_hold_each_schema_on_a_line() -> None:
    text = instructions([{"type": "function", "function": {"name": "look"}}, {"name": "bare"}])
    assert '<tools>\n{"name": "look"}\n{"name": "bare"}\n</tools>' in text
