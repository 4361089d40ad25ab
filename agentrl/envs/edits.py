"""Edits of a file by its lines, as coding tools make them: one place replaced, or what to write instead."""

from __future__ import annotations

import difflib

NEAR_FILE, NEAR_OLD, NEAR_LINE = 8_000, 1_000, 120
"""Characters of a file, of an old text and of a line that are compared, so that it takes milliseconds for any text."""
NEAR_SHOWN = 320
"""Characters of the nearest lines that are shown: they fit into an error."""


def substituted(path: str, text: str, old: str, new: str, *, looked_at: int = NEAR_FILE) -> str:
    """Return a file's text with one place replaced; raise ValueError with what to write instead."""
    count = text.count(old) if old else 0
    if count == 0:
        lines = nearest(text, old, looked_at)
        if not lines:
            raise ValueError(f"the old text is not in {path}; read the file and copy the lines to change from it")
        raise ValueError(f"the old text is not in {path}; copy it from the file, where the nearest lines are:\n{lines}")
    if count > 1:
        raise ValueError(f"the old text stands {count} times in {path}; copy more lines around it")
    if new == old:
        raise ValueError("the old text and the new one are the same; write the new one as it should be")
    return text.replace(old, new)


def nearest(text: str, old: str, looked_at: int = NEAR_FILE) -> str:
    """Return the lines of a file that are most like the old text of an edit; "" where none is."""
    lines, wanted = text[:looked_at].splitlines(), old[:NEAR_OLD].splitlines()
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
