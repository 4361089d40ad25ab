"""Edits of a file by its lines, as coding tools make them: one place replaced, or what to write instead."""

from __future__ import annotations

import difflib

NEAR_FILE, NEAR_OLD, NEAR_LINE = 24_000, 1_000, 120
"""Characters of a file, of an old text and of a line that are compared, so that it takes milliseconds for any text."""
MOVED_LINES = 200
"""Lines of an old text that are looked for with another indentation."""
NEAR_SHOWN = 320
"""Characters of the nearest lines that are shown: they fit into an error."""


def substituted(path: str, text: str, old: str, new: str) -> str:
    """Return a file's text with one place replaced; raise ValueError with what to write instead. Lines that stand there
    once, but with another indentation, are taken for meant, and the new ones are moved alike."""
    count = text.count(old) if old else 0
    if count == 0 and (moved := indented(text[:NEAR_FILE], old, new)):
        old, new = moved
        count = text.count(old)
    if count == 0:
        lines = nearest(text, old)
        if not lines:
            raise ValueError(f"the old text is not in {path}; read the file and copy the lines to change from it")
        raise ValueError(f"the old text is not in {path}; copy it from the file, where the nearest lines are:\n{lines}")
    if count > 1:
        raise ValueError(f"the old text stands {count} times in {path}; copy more lines around it")
    if new == old:
        raise ValueError("the old text and the new one are the same; write the new one as it should be")
    return text.replace(old, new)


def indented(text: str, old: str, new: str) -> tuple[str, str] | None:
    """Return the old text of an edit as the file has it, and the new one, both as far to the right as they should be;
    None where the lines of the old text stand in no place or in several, or differ in more than their indentation."""
    wanted = old.strip("\n").splitlines()
    if not (0 < len(wanted) <= MOVED_LINES and wanted[0].strip()):
        return None
    lines, bare = text.splitlines(), [line.strip() for line in wanted]
    places = []
    for at in range(len(lines) - len(wanted) + 1):
        part = lines[at : at + len(wanted)]
        if [line.strip() for line in part] == bare:
            pairs = [(line, asked) for line, asked in zip(part, wanted, strict=True) if asked.strip()]
            places.append((part, {_indentation(line) - _indentation(asked) for line, asked in pairs}))
    if len(places) != 1 or len(places[0][1]) != 1:
        return None
    part, shifts = places[0]
    by = shifts.pop()
    replacing = new.strip("\n").splitlines()
    if any(line.strip() and _indentation(line) + by < 0 for line in replacing):
        return None
    moved = [" " * by + line if by > 0 else line[-by:] for line in replacing]
    return "\n".join(part), "\n".join(line if line.strip() else "" for line in moved)


def _indentation(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def nearest(text: str, old: str) -> str:
    """Return the lines of a file that are most like the old text of an edit; "" where none is."""
    lines, wanted = text[:NEAR_FILE].splitlines(), old[:NEAR_OLD].splitlines()
    if not wanted:
        return ""
    words, old_words = ([line[:NEAR_LINE].strip() for line in part] for part in (lines, wanted))
    missing = [at for at, line in enumerate(old_words) if line and line not in words] or range(len(old_words))
    wrong = max(missing, key=lambda at: len(old_words[at]))
    close = difflib.get_close_matches(old_words[wrong], words, n=1, cutoff=0.5)
    if not close:
        return ""
    first = max(0, words.index(close[0]) - min(wrong, 2))
    shown = [line[:NEAR_LINE] for line in lines[first : first + len(wanted)]]
    while sum(map(len, shown)) > NEAR_SHOWN:
        shown.pop()
    return "\n".join(shown)


def edits(broken: str, fixed: str) -> list[tuple[str, str]]:
    """Return edits that turn one text into the other; each old text occurs exactly once."""
    replaced: list[tuple[str, str]] = []
    after = fixed.splitlines(keepends=True)
    while broken != fixed:
        before = broken.splitlines(keepends=True)
        codes = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
        _, start, end, first, last = next(code for code in codes if code[0] != "equal")
        while start == end or broken.count("".join(before[start:end])) != 1:
            if not start:  # nothing above is left to make it unique
                return [*replaced, (broken, fixed)]
            start, first = start - 1, first - 1  # the lines above are equal already: they only make the old text unique
        old, new = "".join(before[start:end]), "".join(after[first:last])
        broken = broken.replace(old, new)
        replaced.append((old, new))
    return replaced
