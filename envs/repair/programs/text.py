"""Reference programs: words, lines and letters."""

from __future__ import annotations

import random

from ..program import Probe, Program, call, word


def _runs(rng: random.Random) -> Probe:
    if rng.random() < 0.5:
        return call(
            "encode", "".join(rng.choice("abc") * rng.choice([1, 1, 2, 3, 12]) for _ in range(rng.randint(0, 5)))
        )
    return call(
        "decode", "".join(f"{rng.choice([1, 2, 3, 10, 11])}{rng.choice('abc')}" for _ in range(rng.randint(0, 5)))
    )


RUNS = Program(
    name="runs",
    kind="text",
    source='''\
def encode(text):
    """Run lengths: each run of one letter becomes its length and the letter; encode("aab") == "2a1b"."""
    parts = []
    start = 0
    for i in range(1, len(text) + 1):
        if i == len(text) or text[i] != text[start]:
            parts.append(f"{i - start}{text[start]}")
            start = i
    return "".join(parts)


def decode(code):
    """The text that `encode` made this code from: decode("12a1b") is twelve a and one b."""
    text, count = "", 0
    for char in code:
        if char.isdigit():
            count = count * 10 + int(char)
        else:
            text += char * count
            count = 0
    return text
''',
    edges=(
        call("encode", ""),
        call("encode", "a"),
        call("encode", "aab"),
        call("encode", "abbb"),
        call("decode", ""),
        call("decode", "12a1b"),
        call("decode", "1a10b"),
    ),
    draw=_runs,
)


def _wrap(rng: random.Random) -> Probe:
    return call("wrap", " ".join(word(rng, "abcde", 1, 7) for _ in range(rng.randint(0, 8))), rng.randint(5, 14))


WRAP = Program(
    name="wrap",
    kind="text",
    source='''\
def wrap(text, width):
    """Break a text at spaces into lines of at most `width` letters; longer words get a line of their own.

    Returns the list of lines: wrap("ab cd efg", 5) == ["ab cd", "efg"]
    """
    lines = []
    line = ""
    for word in text.split():
        if not line:
            line = word
        elif len(line) + 1 + len(word) <= width:
            line += " " + word
        else:
            lines.append(line)
            line = word
    if line:
        lines.append(line)
    return lines
''',
    edges=(
        call("wrap", "", 5),
        call("wrap", "ab cd efg", 5),
        call("wrap", "abcdefgh ij", 5),
        call("wrap", "ab cde", 5),
        call("wrap", "a b", 3),
    ),
    draw=_wrap,
)


def _caesar(rng: random.Random) -> Probe:
    return call("shift", word(rng, "abcxyzABCXYZ ,!9", 0, 12), rng.randint(-30, 30))


CAESAR = Program(
    name="caesar",
    kind="text",
    source='''\
def shift(text, by):
    """Move each letter a-z and A-Z `by` places on in the alphabet, round and round; leave all else as it is."""
    moved = []
    for char in text:
        if "a" <= char <= "z":
            moved.append(chr((ord(char) - ord("a") + by) % 26 + ord("a")))
        elif "A" <= char <= "Z":
            moved.append(chr((ord(char) - ord("A") + by) % 26 + ord("A")))
        else:
            moved.append(char)
    return "".join(moved)
''',
    edges=(
        call("shift", "", 3),
        call("shift", "azAZ", 1),
        call("shift", "azAZ", -1),
        call("shift", "a `{@[", 27),
        call("shift", "Hello, World!", 0),
    ),
    draw=_caesar,
)


def _slug(rng: random.Random) -> Probe:
    return call("slug", word(rng, "abAB12  --!?_.", 0, 16), rng.randint(4, 14))


SLUG = Program(
    name="slug",
    kind="text",
    source='''\
def slug(title, limit):
    """A title for a web address: letters a-z and digits in lower case, every run of other characters as one "-".

    No "-" stands at either end. A slug longer than `limit` is cut there, and loses a "-" left at its end.
    """
    made = ""
    for char in title.lower():
        if char.isascii() and char.isalnum():
            made += char
        elif made and made[-1] != "-":
            made += "-"
    return made[:limit].rstrip("-")
''',
    edges=(
        call("slug", "", 5),
        call("slug", "Hello, World!", 20),
        call("slug", "  a  b  ", 20),
        call("slug", "abc def", 4),
        call("slug", "abcdef", 6),
        call("slug", "Über 9", 9),
        call("slug", "--a", 9),
    ),
    draw=_slug,
)


def _anagrams(rng: random.Random) -> Probe:
    return call("groups", [word(rng, "abA", 1, 3) for _ in range(rng.randint(0, 8))])


ANAGRAMS = Program(
    name="anagrams",
    kind="text",
    source='''\
def groups(words):
    """Groups of at least two words made of the same letters, upper and lower case being alike.

    Groups are in the order of their first word, the words of a group in the given order, repeats included.
    """
    found = {}
    for word in words:
        key = "".join(sorted(word.lower()))
        found.setdefault(key, []).append(word)
    return [group for group in found.values() if len(group) > 1]
''',
    edges=(
        call("groups", []),
        call("groups", ["ab", "ba"]),
        call("groups", ["ab", "Ba", "c", "AB"]),
        call("groups", ["c", "ab", "cc", "ba", "c"]),
        call("groups", ["a", "b"]),
    ),
    draw=_anagrams,
)


def _table(rng: random.Random) -> Probe:
    width = rng.randint(1, 3)
    return call("align", [[word(rng, "abcd", 0, 5) for _ in range(width)] for _ in range(rng.randint(0, 4))])


ALIGN = Program(
    name="align",
    kind="text",
    source='''\
def align(rows):
    """Lay out rows of cells in columns: each cell filled up with spaces to its column's width, joined by " | ".

    Returns a list of lines, without spaces at their ends. All rows have the same number of cells.
    """
    if not rows:
        return []
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths)]
        lines.append(" | ".join(cells).rstrip())
    return lines
''',
    edges=(
        call("align", []),
        call("align", [["a"]]),
        call("align", [["a", "bb"], ["ccc", "d"]]),
        call("align", [["aaa", "b", "c"], ["a", "bbb", ""]]),
    ),
    draw=_table,
)


def _common(rng: random.Random) -> Probe:
    return call("top", " ".join(word(rng, "abAB", 1, 2) for _ in range(rng.randint(0, 12))), rng.randint(0, 4))


WORDS = Program(
    name="commonest",
    kind="text",
    source='''\
def top(text, count):
    """The `count` commonest words of a text, as lists [word, how often], in lower case.

    The commonest comes first; of equally common words, the one that comes first in the alphabet.
    """
    seen = {}
    for word in text.lower().split():
        seen[word] = seen.get(word, 0) + 1
    ranked = sorted(seen.items(), key=lambda pair: (-pair[1], pair[0]))
    return [[word, often] for word, often in ranked[:count]]
''',
    edges=(
        call("top", "", 3),
        call("top", "b a B", 1),
        call("top", "b a", 2),
        call("top", "c b a c b c", 2),
        call("top", "a b", 0),
    ),
    draw=_common,
)

PROGRAMS = (RUNS, WRAP, CAESAR, SLUG, ANAGRAMS, ALIGN, WORDS)
