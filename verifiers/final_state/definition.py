"""Compare how two SQLite schemas define a table, an index or a trigger, in whatever words each of them says it.

Only what provably means the same counts as the same: spaces, comments, the case of names and keywords, quotes around a
name, and whether a constraint of one column stands with the column or at the end of the table. A view must agree to the
letter, because its text gives names to its columns; so must a virtual table, whose module reads the text.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

LONGEST = 100_000
"""The most characters of a definition that are parsed; a longer one must agree to the letter."""
_TOKEN = re.compile(
    r"""(?P<space>[ \t\n\f\r]+|--[^\n]*|/\*.*?(?:\*/|\Z))
    |(?P<text>[xX]?'(?:[^']|'')*+')
    |(?P<quoted>"(?:[^"]|"")*+"|`(?:[^`]|``)*+`|\[[^\]]*\])
    |(?P<number>(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?\w*)
    |(?P<word>[^\W\d][\w$]*)
    |(?P<other>\|\||<<|>>|<=|>=|==|<>|!=|->>|->|[^\s'"`\[\]])""",
    re.VERBOSE | re.DOTALL,
)
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LOWER = {code: code + 32 for code in range(ord("A"), ord("Z") + 1)}
"""SQLite folds the case of ASCII letters alone."""
_ALL_WORDS = """
    abort action add after all alter always analyze and as asc attach autoincrement before begin between by cascade
    case cast check collate column commit conflict constraint create cross current current_date current_time
    current_timestamp database default deferrable deferred delete desc detach distinct do drop each else end escape
    except exclude exclusive exists explain fail false filter first following for foreign from full generated glob group
    groups having if ignore immediate in index indexed initially inner insert instead intersect into is isnull join key
    last left like limit match materialized natural no not nothing notnull null nulls of offset on or order others outer
    over partition plan pragma preceding primary query raise range recursive references regexp reindex release rename
    replace restrict returning right rollback row rows savepoint select set table temp temporary then ties to
    transaction trigger true unbounded union unique update using vacuum values view virtual when where window with
    without"""
_KEYWORDS = frozenset(_ALL_WORDS.split())
_NEVER_NAMES = """
    add all alter and as autoincrement between case check collate commit constraint create default deferrable delete
    distinct drop else escape exists foreign from group having in index insert into is isnull join limit not notnull
    null on or order primary references select set table then to transaction union unique update using values when
    where"""
_RESERVED = frozenset(_NEVER_NAMES.split())
"""Keywords that SQLite never takes for a name."""
_CONSTANTS = frozenset({"null", "true", "false", "current_date", "current_time", "current_timestamp"})
_STARTS = frozenset(
    {"constraint", "primary", "not", "null", "unique", "check", "default", "collate", "references", "generated", "as"}
)
_OF_TABLES = frozenset({"constraint", "primary", "unique", "check", "foreign"})


def same_definition(kind: str, one: str, columns: Collection[str], other: str, other_columns: Collection[str]) -> bool:
    """Return whether two definitions of that kind (table, index, view, trigger) say the same.

    `columns` are the columns of the table that each is about: a double-quoted name of one is not a string.
    """
    if one == other:
        return True
    if kind == "view" or max(len(one), len(other)) > LONGEST:
        return False
    form = canonical(kind, one, columns)
    return form is not None and form == canonical(kind, other, other_columns)


def canonical(kind: str, sql: str, columns: Collection[str]) -> Any:
    """Return a form that two definitions share only if they mean the same; None where the text is not understood."""
    tokens = _tokens(sql)
    if tokens is None or kind not in ("table", "index", "trigger"):
        return None
    if kind == "trigger":
        lowered = [text.translate(_LOWER) if kind == "word" else text for kind, text in tokens]
        return [low if low in _RESERVED else text for (_, text), low in zip(tokens, lowered, strict=True)]
    words = _folded(tokens, {column.translate(_LOWER) for column in columns})
    if kind == "index":
        return words
    return _table(words) if words[:2] == ["create", "table"] else None


def _tokens(sql: str) -> list[tuple[str, str]] | None:
    tokens, at = [], 0
    while at < len(sql):
        match = _TOKEN.match(sql, at)
        if match is None:
            return None
        if match.lastgroup != "space":
            tokens.append((str(match.lastgroup), match.group()))
        at = match.end()
    return tokens


def _folded(tokens: Sequence[tuple[str, str]], columns: Collection[str]) -> list[str]:
    """Return the tokens with names and keywords in lower case, and without quotes around what can only be a name."""
    words: list[str] = []
    depth, default = 0, 0  # brackets that are open, and that of a DEFAULT expression, where columns have no names
    for kind, text in tokens:
        before = words[-1] if words else ""
        depth += (text == "(") - (text == ")")
        if text == "(" and before == "default":
            default = depth
        elif depth < default:
            default = 0
        if kind == "word":
            low = text.translate(_LOWER)
            # DEFAULT word is a string: its case counts
            words.append(text if before == "default" and low not in _CONSTANTS else low)
        elif kind == "quoted":
            mark = text[0]
            name = text[1:-1].replace(mark * 2, mark) if mark != "[" else text[1:-1]
            low = name.translate(_LOWER)
            named = before in ("table", "index", "on", "references", "constraint")
            named = named or (before == "(" and words[-3:-2] == ["references"])
            certain = mark != '"' or named or (low in columns and before != "default" and not default)
            plain = _PLAIN.fullmatch(name) and low not in _KEYWORDS
            words.append(low if certain and plain else '"' + name.replace('"', '""') + '"')
        else:
            words.append(text)
    return words


def _table(words: Sequence[str]) -> Any:
    """Return the columns, the constraints and the options of a table."""
    end = _closing(words, 3)
    if end is None or "conflict" in words:  # the order of constraints decides between conflict clauses
        return list(words)
    columns: list[Any] = []
    constraints: list[list[str]] = []
    for part in _split(words[4:end]):
        if not part or part[0] in _OF_TABLES:
            constraints.append(part)
            continue
        name = part[0]
        kind, own = _column(part)
        kept = []
        for constraint in own:
            first = constraint[0]
            if constraint == ["primary", "key"] or constraint == ["unique"]:
                constraints.append([*constraint, "(", name, ")"])
            elif first == "check":
                constraints.append(constraint)
            elif first == "references":
                constraints.append(["foreign", "key", "(", name, ")", *constraint])
            else:
                kept.append(constraint)
        once = len({constraint[0] for constraint in kept}) == len(kept)  # of two defaults the last one counts
        columns.append([name, kind, sorted(kept) if once else kept])
    return [words[2], columns, sorted(constraints), sorted(_split(words[end + 1 :]))]


def _column(part: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Return the type of a column and its constraints, each as its words."""
    kind: list[str] = []
    constraints: list[list[str]] = []
    depth = 0
    for at in range(1, len(part)):
        word, before = part[at], part[at - 1]
        goes_on = (
            (word == "null" and before in ("not", "set", "default"))
            or (word == "default" and before == "set")
            or (word == "as" and before == "always")
            or (word == "not" and part[at + 1 : at + 2] == ["deferrable"])
            or (len(constraints) > 0 and constraints[-1][0] == "constraint" and len(constraints[-1]) <= 2)
            or before == "default"
        )
        if depth == 0 and word in _STARTS and not goes_on:
            constraints.append([word])
        elif constraints:
            constraints[-1].append(word)
        else:
            kind.append(word)
        depth += (word == "(") - (word == ")")
    return kind, constraints


def _closing(words: Sequence[str], at: int) -> int | None:
    """Return where the bracket that opens at `at` is closed."""
    depth = 0
    for end in range(at, len(words)):
        depth += (words[end] == "(") - (words[end] == ")")
        if depth == 0:
            return end if end > at else None
    return None


def _split(words: Sequence[str]) -> list[list[str]]:
    """Return the parts between commas that stand outside all brackets."""
    parts: list[list[str]] = [[]]
    depth = 0
    for word in words:
        depth += (word == "(") - (word == ")")
        if word == "," and depth == 0:
            parts.append([])
        else:
            parts[-1].append(word)
    return parts
