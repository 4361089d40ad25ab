"""Reference programs: reading small languages."""

from __future__ import annotations

import random

from ..program import Probe, Program, call, word


def _cells(rng: random.Random) -> Probe:
    cells = []
    for _ in range(rng.randint(1, 4)):
        if rng.random() < 0.5:
            cells.append(word(rng, "ab 1", 0, 3))
        else:
            cells.append('"' + word(rng, 'ab,"', 0, 4).replace('"', '""') + '"')
    return call("cells", ",".join(cells))


CELLS = Program(
    name="cells",
    kind="parsers",
    source='''\
def cells(line):
    """Split a line of comma separated values. A cell in "quotes" may hold commas; "" inside it stands for a quote.

    cells('a,"b,c","d""e"') == ["a", "b,c", 'd"e']
    """
    found, cell, quoted = [], "", False
    i = 0
    while i < len(line):
        char = line[i]
        if quoted and char == '"' and line[i + 1 : i + 2] == '"':
            cell += '"'
            i += 1
        elif char == '"':
            quoted = not quoted
        elif char == "," and not quoted:
            found.append(cell)
            cell = ""
        else:
            cell += char
        i += 1
    return found + [cell]
''',
    edges=(
        call("cells", ""),
        call("cells", ","),
        call("cells", 'a,"b,c","d""e"'),
        call("cells", '"",x'),
        call("cells", '""""'),
        call("cells", '"a","b"'),
    ),
    draw=_cells,
)


def _settings(rng: random.Random) -> Probe:
    lines = []
    for _ in range(rng.randint(0, 7)):
        lines.append(
            rng.choice(
                [
                    f"[{word(rng, 'xyz', 1, 1)}]",
                    f"{word(rng, 'ab', 1, 1)} = {word(rng, 'pq=', 0, 3)}",
                    f"{word(rng, 'ab', 1, 1)}={word(rng, 'pq', 0, 2)}",
                    "# note = 1",
                    "  ",
                ]
            )
        )
    return call("parse", "\n".join(lines))


SETTINGS = Program(
    name="settings",
    kind="parsers",
    source='''\
def parse(text):
    """Settings by section: {"section": {"key": "value"}}.

    "[name]" begins a section; what comes before the first belongs to section "". "key = value" is a setting, split at
    the first "=" and without the spaces around either. Empty lines and lines that begin with "#" say nothing; of two
    settings with one key the later counts. A section without settings is there too, "" only when it has some.
    """
    found = {}
    section = ""
    for line in text.split("\\n"):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        if line.startswith("[") and line.endswith("]"):
            section = line[1:-1]
            found.setdefault(section, {})
        else:
            key, _, value = line.partition("=")
            found.setdefault(section, {})[key.strip()] = value.strip()
    return found
''',
    edges=(
        call("parse", ""),
        call("parse", "a = 1"),
        call("parse", "[x]"),
        call("parse", "# a = 1\n\n[x]\n b = c = d \nb=2"),
        call("parse", "a=1\n[x]\na=2\n[y]\na=3\n[x]\nb=4"),
        call("parse", "a=[1]\nb=x]\n[c = 1"),
    ),
    draw=_settings,
)


def _sum(rng: random.Random, depth: int = 0) -> str:
    if depth > 2 or rng.random() < 0.25:
        return str(rng.randint(0, 20))
    left, right = _sum(rng, depth + 1), _sum(rng, depth + 1)
    text = f"{left}{rng.choice(['+', '-', '*', ' + ', ' - ', '*'])}{right}"
    return f"({text})" if rng.random() < 0.4 else text


CALC = Program(
    name="calc",
    kind="parsers",
    source='''\
def tokens(text):
    """Numbers, operators and parentheses of a sum, as a list of texts; spaces only separate."""
    found = []
    for char in text:
        if char.isdigit() and found and found[-1].isdigit() and not spaced:
            found[-1] += char
        elif char != " ":
            found.append(char)
        spaced = char == " "
    return found


def value(text):
    """The value of a sum of whole numbers with + - * and parentheses; * binds tighter, else from left to right."""
    rest = tokens(text)

    def factor():
        token = rest.pop(0)
        if token == "(":
            inner = total()
            rest.pop(0)
            return inner
        return int(token)

    def product():
        result = factor()
        while rest and rest[0] == "*":
            rest.pop(0)
            result *= factor()
        return result

    def total():
        result = product()
        while rest and rest[0] in "+-":
            sign = 1 if rest.pop(0) == "+" else -1
            result += sign * product()
        return result

    return total()
''',
    edges=(
        call("value", "7"),
        call("value", "10-2-3"),
        call("value", "2+3*4"),
        call("value", "2*3*4"),
        call("value", "(2+3)*4"),
        call("value", "8-(2+1)*2"),
        call("tokens", "12 +3*(4)"),
        call("tokens", "1 2"),
        call("tokens", "12 34"),
    ),
    draw=lambda rng: call("value", _sum(rng)),
)


def _durations(rng: random.Random) -> Probe:
    if rng.random() < 0.5:
        return call("seconds", "".join(f"{rng.randint(1, 70)}{u}" for u in "dhms" if rng.random() < 0.6) or "5s")
    return call("spell", rng.choice([rng.randint(0, 200), rng.randint(0, 10_000), rng.randint(0, 400_000)]))


DURATIONS = Program(
    name="durations",
    kind="parsers",
    source='''\
UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


def seconds(text):
    """Seconds of a duration such as "1h30m" or "2d5s"; ValueError for an unknown unit or a unit without a number."""
    total, number = 0, ""
    for char in text:
        if char.isdigit():
            number += char
        elif char in UNITS and number:
            total += int(number) * UNITS[char]
            number = ""
        else:
            raise ValueError(f"cannot read {char!r}")
    if number:
        raise ValueError("a number without a unit")
    return total


def spell(total):
    """The shortest way to write so many seconds: spell(3605) == "1h5s", spell(0) == "0s"."""
    text = ""
    for unit, size in UNITS.items():
        count, total = divmod(total, size)
        if count:
            text += f"{count}{unit}"
    return text or "0s"
''',
    edges=(
        call("seconds", ""),
        call("seconds", "1h30m"),
        call("seconds", "2d5s"),
        call("seconds", "5"),
        call("seconds", "h"),
        call("seconds", "1x"),
        call("spell", 0),
        call("spell", 3605),
        call("spell", 86400),
        call("spell", 90061),
    ),
    draw=_durations,
)

ROMAN = Program(
    name="roman",
    kind="parsers",
    source='''\
VALUES = {"M": 1000, "CM": 900, "D": 500, "CD": 400, "C": 100, "XC": 90, "L": 50, "XL": 40}
VALUES |= {"X": 10, "IX": 9, "V": 5, "IV": 4, "I": 1}


def to_roman(number):
    """The Roman numeral of a number from 1 to 3999; ValueError for any other."""
    if not 1 <= number <= 3999:
        raise ValueError("only 1 to 3999 have a numeral")
    text = ""
    for letters, value in VALUES.items():
        while number >= value:
            text += letters
            number -= value
    return text


def from_roman(text):
    """The number of a Roman numeral that `to_roman` wrote."""
    total = 0
    for i, letter in enumerate(text):
        value = VALUES[letter]
        if i + 1 < len(text) and VALUES[text[i + 1]] > value:
            total -= value
        else:
            total += value
    return total
''',
    edges=(
        call("to_roman", 0),
        call("to_roman", 1),
        call("to_roman", 3999),
        call("to_roman", 4000),
        call("to_roman", 1994),
        call("to_roman", 2648),
        call("to_roman", 555),
        call("from_roman", "MCMXCIV"),
        call("from_roman", "III"),
        call("from_roman", "CDXLIV"),
        call("from_roman", "MDCLXVI"),
    ),
    draw=lambda rng: call("to_roman", rng.randint(1, 3999)),
)


def _brackets(rng: random.Random) -> Probe:
    text = word(rng, "()[]{}", 0, 8)
    if rng.random() < 0.6:
        text = ""
        for _ in range(rng.randint(0, 4)):
            pair = rng.choice(["()", "[]", "{}"])
            at = rng.randint(0, len(text))
            text = text[:at] + pair[0] + rng.choice(["", "x"]) + pair[1] + text[at:]
    return call("problem", text)


BRACKETS = Program(
    name="brackets",
    kind="parsers",
    source='''\
PAIRS = {")": "(", "]": "[", "}": "{"}


def problem(text):
    """Index of the first closing bracket that closes nothing or the wrong one; else that of the last bracket left open.

    -1 when all brackets ( [ { of the text are in order. Other characters do not matter.
    """
    opened = []
    for i, char in enumerate(text):
        if char in PAIRS.values():
            opened.append(i)
        elif char in PAIRS:
            if not opened or text[opened[-1]] != PAIRS[char]:
                return i
            opened.pop()
    return opened[-1] if opened else -1
''',
    edges=(
        call("problem", ""),
        call("problem", "(a[b]{c})"),
        call("problem", "(]"),
        call("problem", ")"),
        call("problem", "(("),
        call("problem", "[()"),
        call("problem", "{}}"),
        call("problem", "a(b"),
    ),
    draw=_brackets,
)


def _versions(rng: random.Random) -> Probe:
    def version() -> str:
        text = ".".join(str(rng.choice([0, 1, 2, 10])) for _ in range(3))
        return text + rng.choice(["", "", "-alpha", "-beta", "-rc1"])

    return call("newest", [version() for _ in range(rng.randint(1, 5))])


VERSIONS = Program(
    name="versions",
    kind="parsers",
    source='''\
def key(version):
    """What to compare versions such as "1.10.0" or "1.10.0-beta" by.

    Numbers count as numbers. A version with a label comes before the one without; labels compare as texts.
    """
    numbers, _, label = version.partition("-")
    parts = [int(part) for part in numbers.split(".")]
    return [parts, 0 if label else 1, label]


def newest(versions):
    """The newest of some versions; of equal ones the first."""
    best = versions[0]
    for version in versions[1:]:
        if key(version) > key(best):
            best = version
    return best
''',
    edges=(
        call("key", "1.10.0-beta"),
        call("key", "1.2.3"),
        call("newest", ["1.9.0", "1.10.0"]),
        call("newest", ["1.0.0", "1.0.0-rc1"]),
        call("newest", ["1.0.0-rc1", "1.0.0", "0.9.9"]),
        call("newest", ["1.0.0", "1.00.0"]),
        call("newest", ["2.0.0"]),
    ),
    draw=_versions,
)

PROGRAMS = (CELLS, SETTINGS, CALC, DURATIONS, ROMAN, BRACKETS, VERSIONS)
