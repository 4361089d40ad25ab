"""Environments of code: the tools of a programmer (view, search, edit, run), and answers that say what to do next."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from agentrl.envs import Environment, tool
from agentrl.envs.edits import substituted

MAX_FILE = 500_000
"""Bytes of the longest file that can be viewed or edited."""
MAX_LINES = 200
"""Lines that `view` shows at once."""
MAX_NAMES = 30
"""Files that are named where one is missing."""
MAX_DEFINITIONS = 20_000
"""Definitions among which similar names are looked for."""


class CodingEnvironment(Environment):
    """Files of code in a sandbox. A subclass adds `run_tests`, and says with `tested` how they ended."""

    one_call_per_message = True
    line_numbers: ClassVar[bool] = True
    """Whether `view` numbers the lines; short files need none, and lines without are easier to copy."""
    _acted = False
    """Whether an edit was made or a command run."""
    _failing = False
    """Whether tests failed when they were run last, with no edit and no command since."""
    _last: tuple[str, str, str] = ("", "", "")
    """The arguments of the last edit."""
    _worked = False
    """Whether it worked."""
    _latest: tuple[str, ...] = ()
    """The last call of `view`, `search` or `run` and its result, where no file was edited since."""

    def code(self) -> Sequence[str]:
        """Return the files and folders that hold the code, in which functions of a similar name are looked for."""
        return ["."]

    def changed(self) -> None:
        """Keep that a file was changed, and that the tests have not seen it."""
        self._acted, self._failing, self._latest = True, False, ()

    def told(self, call: Sequence[str], text: str) -> str:
        """Return a call's result, and say so where the last call was the same with the same result: small models repeat
        a call to the end of an episode."""
        again = self._latest == (*call, text)
        self._latest = (*call, text)
        return f"{text}\n(the same call again, with the same result: do something else)" if again else text

    def tested(self, passed: bool) -> None:
        """Keep how the tests ended: an end while they fail is sent back once."""
        self._failing = self._acted and not passed

    def objection(self, answer: str) -> str:
        """Send back a message that ends the episode before anything was done, or while the tests fail."""
        if self._failing:
            return "The tests that you ran last fail. Read what they say, and change what you wrote."
        return "" if self._acted else self.idle()

    def idle(self) -> str:
        """Return what to say to an agent that ends before it did anything."""
        return (
            "Nothing was changed yet, and code in a message changes nothing. Make a call now: search for a function "
            "that the report names, view its lines, then edit them."
        )

    @tool
    def view(self, path: str = "", first: int = 1, last: int = 0) -> str:
        """Show a file, or the names in a folder.

        Args:
            path: a file or folder of the repository; empty for its top
            first: the first line to show
            last: the last line to show; at most 200 lines are
        """
        place = inside(path) if path else "."
        if not path or self.box.exec(["test", "-d", f"./{place}"]).ok:
            names = self.box.exec(["ls", "-p", f"./{place}"]).stdout.decode("utf-8", "replace")
            return self.told(["view", path], names or "(empty)")
        lines = self._read(place).decode("utf-8", "replace").splitlines()
        start = max(first, 1)
        end = min(last if last >= start else len(lines), start - 1 + MAX_LINES)
        shown = lines[start - 1 : end]
        left = len(lines) - (start - 1) - len(shown)
        if self.line_numbers:
            shown = [f"{number:5} {line}" for number, line in enumerate(shown, start)]
        text = "\n".join([*shown, *([f"({left} more lines)"] if left > 0 else [])]) or "(nothing)"
        return self.told(["view", path, str(first), str(last)], text)

    def _read(self, place: str) -> bytes:
        """Return what a file holds; where there is none, say where the code is."""
        try:
            return self.box.read(place, limit=MAX_FILE)
        except FileNotFoundError:
            found = self.box.exec(["find", *(f"./{folder}" for folder in self.code()), "-name", "*.py"], timeout=10.0)
            names = [name.removeprefix("./") for name in sorted(found.stdout.decode("utf-8", "replace").splitlines())]
            listed = ", ".join([*names[:MAX_NAMES], *["..."] * (len(names) > MAX_NAMES)])
            raise ValueError(f"there is no file {place[:200]}; the code is in {listed}") from None

    @tool
    def search(self, text: str, path: str = "") -> str:
        """Find the lines that hold a text, in all files.

        Args:
            text: what to find, exactly
            path: a file or folder to look in; empty for all
        """
        where = f"./{inside(path)}" if path else "."
        if path and not self.box.exec(["test", "-e", where]).ok:
            raise ValueError(f"there is no {path[:200]!r}; leave path empty to look in all files")
        done = self.box.exec(["grep", "-rnIF", "--exclude-dir=__pycache__", "-e", text, where], timeout=10.0)
        lines = sorted(done.stdout.decode("utf-8", "replace").splitlines())
        found = "\n".join(line.removeprefix("./") for line in lines[:100]) or self._alike(text)
        return self.told(["search", text, path], found)

    def _alike(self, text: str) -> str:
        """Say that nothing was found, and which functions have a similar name."""
        places = [f"./{place}" for place in self.code()]
        done = self.box.exec(["grep", "-rnE", "--include=*.py", r"^\s*(async )?def ", *places], timeout=10.0)
        lines = sorted(done.stdout.decode("utf-8", "replace").splitlines())
        shown = [line.removeprefix("./") for line in named_like(text, lines)]
        return "\n".join(["not found; functions of a similar name:", *shown] if shown else ["not found"])

    @tool
    def edit(self, path: str, old: str, new: str) -> str:
        """Replace text in a file.

        Args:
            path: the file
            old: lines copied from the file, without line numbers, which stand there exactly once
            new: the text for their place
        """
        again = ""
        if self._last == (path, old, new):
            again = "this edit was made already; " if self._worked else "the same call again, which cannot work; "
        self._last, self._worked = (path, old, new), False
        place = inside(path)
        text = self._read(place).decode("utf-8", "surrogateescape")
        try:
            changed = substituted(path, text, old, new)
        except ValueError as error:
            raise ValueError(f"{again}{error}") from None
        self.box.write(place, changed.encode("utf-8", "surrogateescape"))
        self._worked = True
        self.changed()
        return "edited; now run the tests"

    @tool(timeout_s=60.0)
    def run(self, command: str) -> str:
        """Run a command in a shell, in the repository.

        Args:
            command: such as python3 -c "import this"
        """
        self._acted, self._failing = True, False
        text = self.box.exec(["sh", "-c", command], timeout=30.0).text or "(no output)"
        return self.told(["run", command], text)


def inside(path: str) -> str:
    """Return the path if it lies in the workspace; raise otherwise."""
    if not path or "\0" in path or path.startswith(("/", "-")) or ".." in path.split("/"):
        raise ValueError("give a path of the repository, such as lib/name.py")
    return path


def named_like(text: str, lines: Sequence[str], most: int = 5) -> list[str]:
    """Return the lines of definitions whose function shares a word of its name with the text, the most alike first."""
    asked = _words(text)
    found: list[tuple[float, int, str]] = []
    for line in lines[:MAX_DEFINITIONS]:
        name = re.search(r"\bdef (\w{1,80})", line)
        words = _words(name[1]) if name else set()
        if shared := len(words & asked):
            found.append((-shared / len(words | asked), len(found), line[:200]))
    return [line for _, _, line in sorted(found)[:most]]


def _words(text: str) -> set[str]:
    """Return the words of a text and of the names in it."""
    return {word.lower() for word in re.findall(r"[A-Za-z][a-z]{2,}", text[:200])} - {"def", "test", "class", "self"}
