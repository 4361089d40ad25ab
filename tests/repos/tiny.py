"""A tiny package as a source archive on disk, with tests of every kind that a build must cope with."""

import io
import tarfile
from pathlib import Path

CODE = '''"""Small sums."""


def clamp(value, low, high):
    """Return the value, but never less than low nor more than high."""
    if value < low:
        return low
    if value > high:
        return high
    return value


def total(numbers, start=0):
    """Return the sum of the numbers and of start."""
    result = start
    for number in numbers:
        result = result + number
    return result


def mean(numbers):
    """Return the mean; nothing has the mean 0."""
    if not numbers:
        return 0
    return total(numbers) / len(numbers)


def pairs(items):
    """Return neighbours as pairs."""
    return [(items[at], items[at + 1]) for at in range(len(items) - 1)]


def shout(text, times=1):
    """Return the text in capitals, with exclamation marks."""
    return text.upper() + "!" * times


def ends(numbers):
    """Return the least and the greatest. The tests look at the first of the two alone."""
    return [min(numbers), max(numbers)]


WORDS = {"one": 1, "two": 2}


def whisper(text):
    """Return the text in small letters. No test calls this."""
    return text.lower() + "..."
'''

TESTS = """import socket

import pytest

from tinysums import clamp, ends, mean, pairs, shout, total

SEEN = []


@pytest.mark.parametrize(
    ("value", "low", "high", "right"),
    [(5, 1, 9, 5), (0, 1, 9, 1), (10, 1, 9, 9), (1, 1, 9, 1), (9, 1, 9, 9), (2, 3, 3, 3), (3, 2, 4, 3)],
)
def test_clamp(value, low, high, right):
    assert clamp(value, low, high) == right


def test_clamp_bounds():
    assert [clamp(n, 2, 4) for n in range(7)] == [2, 2, 2, 3, 4, 4, 4]


def test_total():
    assert total([1, 2, 3]) == 6
    assert total([4], 5) == 9


def test_total_of_nothing():
    assert total([]) == 0
    assert total([], 3) == 3


def test_total_of_iterator():
    assert total(n * n for n in range(4)) == 14


def test_mean():
    assert mean([1, 2, 6]) == 3


def test_mean_of_nothing():
    assert mean([]) == 0


def test_mean_of_one():
    assert mean([7]) == 7


def test_pairs():
    assert pairs([1, 2, 3]) == [(1, 2), (2, 3)]


def test_pairs_short():
    assert pairs([]) == []
    assert pairs("ab") == [("a", "b")]


def test_ends():
    assert ends([3, 1, 2])[0] == 1
    assert ends([7, 5])[0] == 5


def test_shout():
    assert shout("hey") == "HEY!"


def test_shout_often():
    assert shout("hey", 3) == "HEY!!!"
    assert shout("", 0) == ""


def test_first_only():
    SEEN.append(1)


def test_needs_the_first():
    assert SEEN


def test_network():
    socket.create_connection(("example.org", 80), timeout=1)


def test_writes_outside():
    open("/usr/tinysums", "w")


@pytest.mark.skip(reason="not today")
def test_skipped():
    assert False


def test_subclasses():
    class Clamped:
        value = property(lambda self: clamp(5, 1, 3))

    assert isinstance(clamp, type(Clamped)) or Clamped().value == 3
"""

STAR = """from tinysums import *


def test_by_star():
    assert mean([2, 4]) == 3 and WORDS["two"] == 2
"""

PYPROJECT = """[project]
name = "tinysums"
version = "1.0"

[build-system]
requires = ["setuptools"]
"""
SETUP = "raise SystemExit('build code has run')\n"


def archive(folder: Path, files: dict[str, str] | None = None, name: str = "tinysums-1.0") -> Path:
    """Write a source archive, the package's own unless other files are named."""
    standard = {
        "tinysums/__init__.py": CODE,
        "tests/test_sums.py": TESTS,
        "tests/test_star.py": STAR,
        "setup.py": SETUP,
    }
    standard |= {"PKG-INFO": "Metadata-Version: 2.1\nName: tinysums\nVersion: 1.0\n", "pyproject.toml": PYPROJECT}
    path = folder / f"{name}.tar.gz"
    with tarfile.open(path, "w:gz") as out:
        for inside, text in (standard if files is None else files).items():
            entry = tarfile.TarInfo(f"{name}/{inside}")
            entry.size = len(text.encode())
            out.addfile(entry, io.BytesIO(text.encode()))
    return path
