"""Tool calls: read strictly, answered with errors a model can learn from, never half executed."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.envs.tool_output import harmless
from agentrl.rollout.strict_json import MAX_DEPTH
from agentrl.rollout.tool_formats import (
    MAX_CALLS,
    PROBE,
    Hermes,
    Llama,
    Mistral,
    Read,
    ToolFormat,
    escape_tags,
    instructions,
    recognise,
    split_thinking,
    stray_calls,
)
from agentrl.types import ToolCall
from tests.pace import within

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


def test_arguments_may_be_an_object_that_is_written_as_a_text() -> None:
    text = '<tool_call>{"name": "look", "arguments": " {\\"path\\": \\"a\\"} "}</tool_call>'
    assert hermes.read(text).calls == (ToolCall(name="look", arguments={"path": "a"}),)


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
        ('{"name": "look", "path": "a"}', "the call of 'look' has no \"arguments\""),
        ('{"name": "look", "arguments": "{} {}"}', '"arguments" must be a JSON object, got a string'),
        ('{"name": "look", "arguments": "at it"}', '"arguments" must be a JSON object, got a string'),
        ('{"name": "look", "arguments": "{\\"a\\": 1, \\"a\\": 2}"}', "the key 'a' appears twice in one object"),
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
        (f"<tool_call>{GOOD} and so on", "it does not end with </tool_call>"),
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
                        assert "<tool_call>" in said


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
        ('[TOOL_CALLS] [{"name": "x", "y": 1}]', 'has no "arguments"'),
    ):
        (call,) = mistral.read(text).calls
        assert call.error is not None and reason in call.error


def test_llama() -> None:
    assert llama.read('<|python_tag|>{"name": "look", "parameters": {"path": "a"}}').calls == (CALL,)
    assert llama.read('{"answer": 3}') == Read('{"answer": 3}', ())
    for text, reason in (
        ('{"name": "look", "parameters": {"path": "a"', "not valid JSON"),
        ('{"name": "look", "parameters": {}} and', "nothing may follow the call, found 'and'"),
        ('{"name": "look", "path": "a"}', 'has no "parameters"'),
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


def hermes_call(text: str) -> str:
    return f"<tool_call>{text}</tool_call>"


@pytest.mark.parametrize(
    "inside",
    [
        '"name": "look\\ud800", "%s": {"path": "a"}',
        '"name": "look", "%s": {"path": "a\\udfffb"}',
        '"name": "look", "%s": {"a\\uDC00": 1}',
        '"name": "look", "%s": {"path": [{"x": ["\\ude00\\ud83d"]}]}',
        '"name": "look", "%s": {"path": "\ud800"}',
    ],
)
def test_half_a_character_is_refused_wherever_it_stands(inside: str) -> None:
    """No tokenizer and no file takes a lone surrogate: the call is refused, and its error spells none."""
    said: list[tuple[ToolFormat, str]] = [
        (hermes, hermes_call("{" + inside % "arguments" + "}")),
        (mistral, "[TOOL_CALLS] [{" + inside % "arguments" + "}]"),
        (llama, "{" + inside % "parameters" + "}"),
    ]
    for tool_format, text in said:
        (call,) = tool_format.read(text).calls
        assert (call.name, call.arguments) == ("", {})
        assert call.error is not None and "half of a surrogate pair" in call.error
        call.error.encode()


def test_a_whole_surrogate_pair_is_a_character() -> None:
    (call,) = hermes.read(hermes_call('{"name": "look", "arguments": {"path": "\\ud83d\\ude42"}}')).calls
    assert call == ToolCall(name="look", arguments={"path": "🙂"})


@pytest.mark.parametrize(
    "identifier",
    ["x", "", "abcdefgh", "abcdefghij", "ééééééééé", "abcdefgh\\n", "[INST]abc", "\\u0000bcdefghi", "x" * 10**5],
)
def test_an_id_that_a_template_would_not_take_is_refused(identifier: str) -> None:
    """Mistral's template raises for any other than nine letters and digits; the other formats have no ids."""
    text = f'{{"name": "look", "arguments": {{"path": "a"}}, "id": "{identifier}"}}'
    (call,) = mistral.read(f"[TOOL_CALLS] [{text}]").calls
    assert call.error is not None and '"id" must be nine letters or digits' in call.error and len(call.error) < 300
    assert hermes.read(hermes_call(text)).calls == (CALL,)
    assert llama.read(text.replace("arguments", "parameters")).calls == (CALL,)


@pytest.mark.parametrize("levels", [MAX_DEPTH, 100, 400, 900, 1_100, 100_000])
def test_deep_arguments_are_refused(levels: int) -> None:
    """The decoder takes nearly a thousand levels, which nothing that comes after it can walk through."""
    for value in ("[" * levels + "]" * levels, '{"a":' * levels + "1" + "}" * levels):
        (error,) = errors(hermes_call(f'{{"name": "look", "arguments": {{"path": {value}}}}}'))
        assert error is not None and "nested too deeply" in error
    shallow = "[" * (MAX_DEPTH - 2) + '"' + "[" * 200 + '"' + "]" * (MAX_DEPTH - 2)
    assert errors(hermes_call(f'{{"name": "look", "arguments": {{"path": {shallow}}}}}')) == [None]


def test_errors_stay_short() -> None:
    """A name or a key of 100,000 characters is not repeated in the error."""
    long = "k" * 100_000
    for inside in (
        f'{{"name": "{long}", "x": 1}}',
        f'{{"name": "look", "arguments": {{}}, "{long}": 1}}',
        f'{{"{long}": 1, "{long}": 2}}',
        f'{{"name": "look", "arguments": {{"x": {"9" * 100_000}e999}}}}',
        f'{{"name": "look", "arguments": {{"x": {"9" * 100_000}}}}}',
    ):
        (error,) = errors(hermes_call(inside))
        assert error is not None and len(error) < 400


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>" * 18_000,
        "</tool_call>" * 17_000,
        "<tool_call></tool_call>" * 9_000,
        "<tool_call>{</tool_call>\n" * 9_000,
        '<tool_call>["</tool_call>",["' * 7_000,
        hermes_call(GOOD) * 100_000,
        "[TOOL_CALLS]" * 17_000,
        "[TOOL_CALLS] [" + ",".join([GOOD] * 100_000) + "]",
        "[TOOL_CALLS] [" + "1," * 100_000 + "1]",
        "{" * 200_000,
        "[" * 200_000,
        '{"name":' * 25_000,
        '{"name": "look", "parameters": {' + ",".join(f'"{i}": {i}' for i in range(15_000)) + "}}",
        "<think>" * 30_000,
        "</think>" * 25_000,
        " " * 200_000,
        "<" + " " * 200_000,
        "< / " * 50_000,
        "<|python_tag|>" + " " * 200_000,
        '{"name": "look", "parameters": {"x": ' + "9" * 200_000 + "}}",
        '{"name": "look", "parameters": {"x": "' + "\\u0061" * 30_000 + "\\",
    ],
    ids=lambda text: f"{text[:12]}-{len(text)}",
)
def test_long_hostile_texts_are_read_in_no_time(text: str) -> None:
    """Reading, thinking and escaping take time in proportion to the text."""
    with within(2.0):
        for tool_format in (hermes, mistral, llama):
            assert len(tool_format.read(text).calls) <= MAX_CALLS + 1
        split_thinking(text)
        escape_tags(text)
        harmless(text)


STRAY = '{"name": "read", "arguments": {"path": "a.py"}}'


@pytest.mark.parametrize(
    "text",
    [
        STRAY,
        f"I look at it first.\n\n```json\n{STRAY}\n```",
        f"```\n{STRAY}\n```\nThen I will fix it.",
        f"<tools>\n{STRAY}\n</tools>",
        STRAY.replace("arguments", "parameters"),
        STRAY.replace('"name"', '"type": "function", "function"'),
        STRAY.replace('"name"', '"function_name"'),
    ],
)
def test_a_call_of_a_known_tool_in_any_wrapping_is_a_call(text: str) -> None:
    """A right call without the tags of the template is carried out: it is not a final answer."""
    parsed = stray_calls(text, {"read", "write"}, Hermes.form)
    assert parsed is not None
    assert parsed.calls == (ToolCall(name="read", arguments={"path": "a.py"}),)
    assert parsed.content == ("I look at it first." if text.startswith("I look") else "")


def test_several_stray_calls_are_read_in_order() -> None:
    """All of them are carried out, in the order in which they stand."""
    other = STRAY.replace("a.py", "b.py")
    parsed = stray_calls(f"```json\n{STRAY}\n```\n```json\n{other}\n```", {"read"}, Hermes.form)
    assert parsed is not None
    assert [call.arguments["path"] for call in parsed.calls] == ["a.py", "b.py"]


def test_a_broken_stray_call_is_answered_with_what_to_write() -> None:
    """The policy is told the form of its own tool format."""
    parsed = stray_calls('```json\n{"name": "read", "arguments": {"path": }}\n```', {"read"}, Hermes.form)
    assert parsed is not None
    assert [call.error for call in parsed.calls] == [
        "this tool call was not carried out: not valid JSON: Expecting value near '}}'. "
        'Write <tool_call>{"name": "...", "arguments": {...}}</tool_call>'
    ]


@pytest.mark.parametrize(
    "text",
    [
        "done",
        '{"name": "Ada", "arguments": {"age": 3}}',
        '{"name": "read"}',
        'The tool is called "read", its "arguments" are in the manual.',
    ],
)
def test_an_answer_that_calls_no_known_tool_stays_an_answer(text: str) -> None:
    """JSON that names none of the episode's tools may be the answer that was asked for."""
    assert stray_calls(text, {"read"}, Hermes.form) is None


def test_stray_calls_are_read_in_linear_time() -> None:
    """Neither many calls, nor many beginnings, nor much white space cost more than their length."""
    texts = [
        STRAY * 40_000,
        '{"name": "read", "arguments": {' * 60_000,
        ('{"name": "no", "arguments": {' + " " * 50) * 20_000,
        "{" + " " * 1_000_000,
        '{"name"' + " " * 1_000_000 + ":",
    ]
    for text in texts:
        with within(1.0):
            stray_calls(text, {"read"}, Hermes.form)


@pytest.mark.parametrize(
    "text",
    [
        f"<tool_call>\n{{{GOOD}}}\n</tool_call>",
        f"<tool_call>\n{{{GOOD}\n</tool_call>",
        f"<tool_call>{{ {GOOD} }}</tool_call>",
        f"<tool_call>\n{GOOD}",
        f"```json\n<tool_call>\n{GOOD}\n```",
    ],
)
def test_hermes_reads_doubled_braces_and_a_whole_call_at_the_end(text: str) -> None:
    """Both are unambiguous, and a model whose template shows doubled braces writes nothing else."""
    assert hermes.read(text).calls == (CALL,)


@pytest.mark.parametrize("end", ["\n</tool_response>", "</tools>\n", "\n</tool_call>", ""])
def test_a_whole_call_may_end_with_another_tag_or_with_the_next_call(end: str) -> None:
    """A small model mixes up its closing tags, or leaves them out; a whole call says what to do all the same."""
    assert hermes.read(f"I look.\n<tool_call>\n{GOOD}{end}").calls == (CALL,)
    assert hermes.read(f"<tool_call>\n{GOOD}{end}\n<tool_call>\n{GOOD}{end}").calls == (CALL, CALL)
    (error,) = errors(f"<tool_call>{GOOD}</b></tool_call>")
    assert error is not None and "</tool_call> expected after the JSON, found '</b></tool_call>'" in error


def test_a_call_that_names_only_its_tool_has_no_arguments() -> None:
    """Models leave the arguments out where a tool takes none; elsewhere validation says which are missing."""
    call = ToolCall(name="look")
    assert hermes.read('<tool_call>{"name": "look"}</tool_call>').calls == (call,)
    assert mistral.read('[TOOL_CALLS] [{"name": "look"}]').calls == (call,)
    assert llama.read('{"name": "look"}').calls == (call,)


def test_doubled_braces_around_something_else_stay_an_error() -> None:
    """Only the braces are forgiven: what is inside must be one whole call."""
    assert errors('<tool_call>{{"name": "look", "path": "a"}}</tool_call>') == [
        "this tool call was not carried out: the call of 'look' has no \"arguments\". "
        'Write <tool_call>{"name": "...", "arguments": {...}}</tool_call>'
    ]
    assert errors(f"<tool_call>{{{GOOD}, {GOOD}}}</tool_call>")[0] is not None


def test_line_breaks_and_tabs_may_stand_in_a_string_as_they_are() -> None:
    """Models write code of several lines that way; it can mean nothing else."""
    text = '<tool_call>{"name": "edit", "arguments": {"new": "if a:\n\treturn b"}}</tool_call>'
    (call,) = Hermes().read(text).calls
    assert (call.error, call.arguments) == (None, {"new": "if a:\n\treturn b"})
    (broken,) = Hermes().read('<tool_call>{"name":\x01 "edit", "arguments": {}}</tool_call>').calls
    assert broken.error is not None
