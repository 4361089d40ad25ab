"""The closed vocabulary of the low levels, and names that do not repeat within a task."""

from __future__ import annotations

import random

_WORDS = """
ant apple bag ball bean bell bird blue boat book box bread cake card cat chair clay cloud coin cook corn cup
desk dog door drum duck egg farm fish flag fox frog game gift glass gold green hat hill horse jam key king
lake lamp leaf lemon map milk moon nest nut oak pen pink rain red rice ring road rock sand tree
"""
WORDS = tuple(_WORDS.split())
"""64 words, each short: stems of names, and what is written into files."""
ENDINGS = ("txt", "csv", "log", "md")
FILES = tuple(f"{word}.{ending}" for word in WORDS for ending in ENDINGS)
"""The 256 file names of the low levels."""
_FOLDERS = """
src doc data lib tmp out old new bin etc work home web app api img css bak raw misc
temp main core util test demo mail user team plan room shop
"""
FOLDERS = tuple(_FOLDERS.split())


class Names:
    """Hands out names from a random source, none twice."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self._taken: set[str] = set()

    def _fresh(self, make: str) -> str | None:
        if make in self._taken:
            return None
        self._taken.add(make)
        return make

    def file(self, ending: str | None = None) -> str:
        """A file name that was not used yet."""
        while True:
            name = self._fresh(f"{self.rng.choice(WORDS)}.{ending or self.rng.choice(ENDINGS)}")
            if name:
                return name

    def folder(self) -> str:
        """A folder name that was not used yet."""
        while True:
            name = self._fresh(self.rng.choice(FOLDERS))
            if name:
                return name

    def word(self) -> str:
        """A word to write; words may repeat."""
        return self.rng.choice(WORDS)

    def words(self, count: int) -> list[str]:
        """Distinct words."""
        return self.rng.sample(WORDS, count)

    def take(self, name: str) -> str:
        """Reserve a name that was chosen elsewhere."""
        self._taken.add(name)
        return name
