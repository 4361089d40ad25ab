"""The closed vocabulary of the low levels, and names that do not repeat within a task."""

from __future__ import annotations

import random
from collections.abc import Callable

_WORDS = """
ant apple bag ball bean bell bird blue boat book box bread cake card cat chair clay cloud coin cook corn cup
desk dog door drum duck egg farm fish flag fox frog game gift glass gold green hat hill horse jam key king
lake lamp leaf lemon map milk moon nest nut oak pen pink rain red rice ring road rock sand tree
"""
WORDS = tuple(_WORDS.split())
"""64 short words: stems of file names, and texts to write into files."""
ENDINGS = ("txt", "csv", "log", "md")
FILES = tuple(f"{word}.{ending}" for word in WORDS for ending in ENDINGS)
"""The 256 file names of the low levels."""
_FOLDERS = """
src doc data lib tmp out old new bin etc work home web app api img css bak raw misc
temp main core util test demo mail user team plan room shop
"""
FOLDERS = tuple(_FOLDERS.split())


class Names:
    """Draw names from a random source, none twice."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self._taken: set[str] = set()

    def _fresh(self, draw: Callable[[], str]) -> str:
        while (name := draw()) in self._taken:
            pass
        return self.take(name)

    def file(self, ending: str | None = None) -> str:
        """Return a file name that was not used yet."""
        return self._fresh(lambda: f"{self.rng.choice(WORDS)}.{ending or self.rng.choice(ENDINGS)}")

    def folder(self) -> str:
        """Return a folder name that was not used yet."""
        return self._fresh(lambda: self.rng.choice(FOLDERS))

    def word(self) -> str:
        """Return a word to write; words may repeat."""
        return self.rng.choice(WORDS)

    def words(self, count: int) -> list[str]:
        """Return distinct words."""
        return self.rng.sample(WORDS, count)

    def take(self, name: str) -> str:
        """Reserve a name that was chosen elsewhere."""
        self._taken.add(name)
        return name
