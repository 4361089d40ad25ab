"""Turn tool output into text that a policy reads as data: framed, cut to a limit, and unable to close its frame.

    <out>what the tool returned</out> [cut: 8000 of 20000 characters]

Everything between the tags is untrusted, everything outside is ours. The tags are short because every token counts for
tiny policies. The renderer escapes a tokenizer's control tokens in all text that was not sampled.
"""

from __future__ import annotations

import json
import re
from typing import Any

from pydantic import BaseModel

_TAG = re.compile(r"<(?=\s*+(?:/\s*+)?out\b)", re.IGNORECASE)  # linear in any white space
_SURROGATE = re.compile("[\ud800-\udfff]")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def text_of(result: Any) -> str:
    """Return a tool's result as text: a string as it is, None as "", anything else as JSON, or else as Python shows it.

    What cannot be shown at all (an integer of 5,000 digits, 10,000 lists in each other) is described; nothing raises.
    """
    if result is None:
        return ""
    if isinstance(result, str):
        return result
    try:
        if isinstance(result, BaseModel):
            return result.model_dump_json()
        return json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        pass
    try:
        return str(result)
    except Exception as error:
        return f"a result of type {type(result).__name__} that cannot be shown as text: {type(error).__name__}"


def well_formed(text: str) -> str:
    """Return text with every lone surrogate replaced: no tokenizer, file or process takes one."""
    return _SURROGATE.sub("\ufffd", text)


def harmless(text: str) -> str:
    """Escape what could close a frame or control a terminal."""
    text = text.replace("\r\n", "\n")
    return _TAG.sub("<\\\\", _CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text))


def frame(text: str, limit: int) -> tuple[str, bool]:
    """Return the text in its frame, and whether it was cut."""
    content = f"<out>{harmless(text[:limit])}</out>"
    if len(text) <= limit:
        return content, False
    return f"{content} [cut: {limit} of {len(text)} characters]", True
