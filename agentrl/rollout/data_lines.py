"""Reads the lines of a data file: JSON lines or parquet rows, checked before anything is made of them.

Messages and tools are written as for OpenAI's API. A line that could be understood in two ways is refused.
"""

from __future__ import annotations

import gzip
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from agentrl.errors import UserError
from agentrl.rollout.tool_formats import call_of
from agentrl.types import Message, ToolCall

T = TypeVar("T")

MAX_LINE = 32 << 20
"""Bytes of one line."""
MAX_DEPTH = 64
"""How deeply values may be nested."""
SHOWN = 10
"""Lines that a message names."""
SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")
ROLES = ("system", "user", "assistant", "tool")
MESSAGE_KEYS = ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content")
NOT_UNDERSTOOD = (
    "mask", "masks", "loss_mask", "assistant_mask", "assistant_masks", "completion_mask", "weight", "weights",
    "token_ids", "input_ids", "labels", "sources", "logprobs", "functions", "function_call", "images", "videos",
    "audio",
)  # fmt: skip
"""Keys that say what is trained on or shown, in ways that are not ours: ignoring one would train on something else."""
_SURROGATE = re.compile("[\ud800-\udfff]")


class LineError(ValueError):
    """Says what is wrong with one line."""


def read_lines(path: Path, use: Callable[[int, dict[str, Any]], T]) -> list[T]:
    """Return what `use` makes of each line, by its number from 1; UserError names every line that it refuses."""
    results: list[T] = []
    bad: list[str] = []
    count = 0
    word = "row" if path.suffix == ".parquet" else "line"
    try:
        for number, parse in _numbered(path):
            count += 1
            try:
                results.append(use(number, check(parse())))
            except LineError as error:
                bad.append(f"{word} {number}: {error}")
                if len(bad) > SHOWN:
                    break
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    except EOFError:
        raise UserError(f"{path}: the file ends in the middle; is the copy complete?") from None
    if bad:
        more = [f"and more after {word} {number}"] if len(bad) > SHOWN else []
        raise UserError("\n  ".join([f"{path} cannot be trained on:", *bad[:SHOWN], *more]))
    if not count:
        raise UserError(f"{path}: the file holds no lines")
    return results


def _numbered(path: Path) -> Iterator[tuple[int, Callable[[], Any]]]:
    """Yield each line's number, with what parses it."""
    if not path.name.endswith(SUFFIXES):
        raise UserError(f"{path}: a data file ends in {', '.join(SUFFIXES)}")
    if path.suffix == ".parquet":
        yield from _rows(path)
        return
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_LINE + 1):
            number += 1
            if len(line) > MAX_LINE:
                raise UserError(f"{path} cannot be trained on:\n  line {number}: longer than {MAX_LINE >> 20} MiB")
            if line.strip():
                yield number, partial(_json, line)


def _rows(path: Path) -> Iterator[tuple[int, Callable[[], Any]]]:
    import pyarrow.parquet as parquet
    from pyarrow.lib import ArrowException

    try:
        number = 0
        for batch in parquet.ParquetFile(path).iter_batches(batch_size=64):
            for row in batch.to_pylist():
                number += 1
                yield number, partial(_as_it_is, row)
    except ArrowException as error:
        raise UserError(f"{path}: no parquet file that can be read: {error}") from None


def _as_it_is(row: Any) -> Any:
    return row


def _json(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_number)
    except UnicodeDecodeError as error:
        raise LineError(f"not UTF-8 (byte {error.start})") from None
    except RecursionError:
        raise LineError("nested too deeply") from None
    except LineError:
        raise
    except ValueError as error:
        raise LineError(f"not JSON: {error}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        raise LineError(f"the key {next(n for n in names if names.count(n) > 1)!r} stands twice in one object")
    return value


def _no_number(text: str) -> Any:
    raise LineError(f"{text} is not a number of JSON")


def check(value: Any) -> dict[str, Any]:
    """Return a line that is an object of plain, finite values; walk it without recursion."""
    if not isinstance(value, dict):
        raise LineError(f"a line must be a JSON object, found {type(value).__name__}")
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        deeper: list[Any] = []
        for item in level:
            if isinstance(item, float) and not math.isfinite(item):
                raise LineError(f"{item} is not a finite number")
            if isinstance(item, str) and _SURROGATE.search(item):
                raise LineError("half of a surrogate pair is not a character")
            if isinstance(item, dict):
                deeper += [*item, *item.values()]
            elif isinstance(item, list):
                deeper += item
        level = deeper
        if not level:
            break
    else:
        raise LineError(f"nested more than {MAX_DEPTH} levels deep")
    for key in NOT_UNDERSTOOD:
        if value.get(key) is not None:
            raise LineError(f"the key {key!r} is not understood, and may say what to train on; convert or remove it")
    return {key: item for key, item in value.items() if item is not None}


def listed(value: Any, name: str) -> list[Any]:
    """Return a list of a line; parquet files hold some as JSON text."""
    if isinstance(value, str):
        value = _json(value.encode("utf-8", "replace"))
    if not isinstance(value, list):
        raise LineError(f"{name} must be a list, found {type(value).__name__}")
    return value


def messages_of(value: Any, name: str) -> tuple[Message, ...]:
    """Read a conversation."""
    return tuple(_message(item, f"{name}[{place}]") for place, item in enumerate(listed(value, name)))


def _message(value: Any, where: str) -> Message:
    if not isinstance(value, dict):
        raise LineError(f"{where} must be an object, found {type(value).__name__}")
    value = {key: item for key, item in value.items() if item is not None}
    unknown = [key for key in value if key not in MESSAGE_KEYS]
    if unknown:
        raise LineError(
            f"{where} has the key {unknown[0]!r}, which is not understood; allowed: {', '.join(MESSAGE_KEYS)}"
        )
    role = value.get("role")
    if role not in ROLES:
        raise LineError(f"{where}.role must be one of {', '.join(ROLES)}, found {role!r}")
    own = {"assistant": ("tool_calls", "reasoning_content"), "tool": ("tool_call_id", "name")}
    for key in MESSAGE_KEYS[2:]:
        if value.get(key) and key not in own.get(role, ()):
            raise LineError(f"{where} has role {role!r} and the key {key!r}, which belongs to another role")
    texts = {key: value.get(key, "") for key in ("content", "tool_call_id", "name", "reasoning_content")}
    for key, text in texts.items():
        if not isinstance(text, str):
            raise LineError(f"{where}.{key} must be a text, found {type(text).__name__}")
    calls = [_call(call, f"{where}.tool_calls") for call in listed(value.get("tool_calls", []), f"{where}.tool_calls")]
    return Message(
        role=role,
        content=texts["content"],
        tool_calls=tuple(calls),
        tool_call_id=texts["tool_call_id"],
        name=texts["name"],
        thinking=texts["reasoning_content"],
    )


def _call(value: Any, where: str) -> ToolCall:
    function = value.get("function") or value if isinstance(value, dict) else None
    if not isinstance(function, dict):
        raise LineError(f"{where} must hold objects with a `function`")
    name, arguments, identifier = function.get("name"), function.get("arguments"), value.get("id") or ""
    error = value.get("error")
    if not isinstance(name, str) or not isinstance(identifier, str) or not isinstance(error, str | None):
        raise LineError(f"{where}: a call's name, id and error must be texts")
    if isinstance(arguments, Mapping):
        arguments = json.dumps(arguments, ensure_ascii=False)
    if not isinstance(arguments, str | None):
        raise LineError(f"{where}: the arguments of {name!r} must be an object, or JSON text of one")
    if error is not None:  # a call that could not be read, as a run keeps it
        return ToolCall(name=name, arguments=_object(arguments or "{}", where), id=identifier, error=error)
    call = call_of(name, arguments or "{}", identifier)
    if call.error is not None:
        raise LineError(f"{where}: {call.error.partition('. Write')[0]}")
    return call


def _object(text: str, where: str) -> dict[str, Any]:
    value = _json(text.encode("utf-8", "replace"))
    if not isinstance(value, dict):
        raise LineError(f"{where}: arguments must be an object")
    return value


def tools_of(value: Any) -> tuple[dict[str, Any], ...]:
    """Read the tools of a line: JSON schemas with names of their own."""
    tools = listed(value, "tools")
    names = []
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise LineError("tools must be a list of functions, each with a name")
        names.append(function["name"])
    if len(set(names)) < len(names):
        raise LineError("tools lists one name twice")
    return tuple(tools)


def tool_names(schemas: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of some tools."""
    return [schema.get("function", schema)["name"] for schema in schemas]


# Writing -----------------------------------------------------------------------------------------------------------


def as_data(message: Message) -> dict[str, Any]:
    """Write a message so that `messages_of` reads the same."""
    data: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.thinking:
        data["reasoning_content"] = message.thinking
    if message.tool_calls:
        data["tool_calls"] = [_call_data(call) for call in message.tool_calls]
    if message.role == "tool":
        data |= {"tool_call_id": message.tool_call_id, "name": message.name}
    return data


def _call_data(call: ToolCall) -> dict[str, Any]:
    arguments = json.dumps(dict(call.arguments), ensure_ascii=False)
    data = {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
    return data if call.error is None else {**data, "error": call.error}
