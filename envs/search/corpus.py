"""Make an invented corpus for each question: a chain of facts that answers it, and documents that mislead.

start ─r1─> . ─r2─> . ─r3─> answer      each fact has its own document: no document shows two of them
twin  ─r1─> . ─r2─> . ─r3─> other       the same relations, from names that share a word with the chain's
          stale ─r2─> . ─r3─> other     what an older document says, continued to a wrong answer
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from agentrl import seeds
from agentrl.envs.splits import Shuffle
from agentrl.types import Split

from .relations import BY_KEY, FROM, KINDS, Relation, asked

_CONSONANTS = "bdfghklmnprstv"
_VOWELS = "aeiou"
_OPEN = tuple(c + v for c in _CONSONANTS for v in _VOWELS)
_CLOSED = tuple(c + v + e for c in "bdgklmnrtv" for v in "aeio" for e in ("n", "r", "s", "l", "th"))
WORDS = len(_OPEN) * len(_OPEN) * len(_CLOSED)
"""The number of invented words. Each question of a level starts from a different one."""
_STARTS = Shuffle(WORDS, "search")
_PAIRS = (("Upper", "Lower"), ("Old", "New"), ("East", "West"), ("Great", "Little"), ("Inner", "Outer"))


@dataclass(frozen=True, slots=True)
class Level:
    """What the corpora of a level are like."""

    hops: int
    documents: int
    twins: bool = False
    """Whether there is a second chain whose names share a word with the first, and documents have further facts."""
    paraphrase: bool = False
    """Whether questions and documents use different words, and a fact may be in the document about its object."""
    stale: int = 0
    """How many facts of the chain are contradicted by older documents."""


LEVELS = {
    1: Level(hops=1, documents=8),
    2: Level(hops=2, documents=16),
    3: Level(hops=2, documents=28, twins=True),
    4: Level(hops=3, documents=36, twins=True, paraphrase=True),
    5: Level(hops=3, documents=44, twins=True, paraphrase=True, stale=1),
    6: Level(hops=4, documents=60, twins=True, paraphrase=True, stale=2),
}

Fact = tuple[str, str, str, int]
"""Relation, subject, object, and which of the relation's sentences states it."""


@dataclass(slots=True)
class Document:
    """A document of the corpus, before it is put into words."""

    title: str
    date: str
    facts: list[Fact]
    step: int = -1
    """Which step of the chain it states, whether current or outdated; -1 for none."""


@dataclass(slots=True)
class Problem:
    """A question with its corpus."""

    question: str
    answer: str
    chain: list[str]
    """Names from the start to the answer."""
    relations: list[str]
    documents: list[Document]
    """In the order of their ids, from 1."""

    def steps(self) -> list[tuple[str, list[int]]]:
        """Return for each step the name to search for, and the documents that state it."""
        return [
            (name, [at for at, document in enumerate(self.documents, 1) if document.step == step])
            for step, name in enumerate(self.chain[:-1])
        ]


def word(number: int) -> str:
    """Return the invented word with that number."""
    rest, last = divmod(number, len(_CLOSED))
    first, middle = divmod(rest, len(_OPEN))
    return (_OPEN[first] + _OPEN[middle] + _CLOSED[last]).capitalize()


def problem(split: Split, level: int, index: int) -> Problem:
    """Return the problem with that index."""
    number = _STARTS.number(split, index)
    return _Maker(LEVELS[level], number, seeds.generator(0, "search", level, number)).problem()


@dataclass(slots=True)
class _Maker:
    level: Level
    number: int
    rng: random.Random
    words: set[str] = field(default_factory=set)
    told: set[tuple[str, str]] = field(default_factory=set)
    """(subject, relation) pairs that are already used."""

    def problem(self) -> Problem:
        rng, level = self.rng, self.level
        path = self._path()
        self.words.add(word(self.number))
        kinds = [path[0].source, *(relation.target for relation in path)]
        pairs = [self._pair(kind, word(self.number) if at == 0 else None) for at, kind in enumerate(kinds)]
        chain = [one for one, _ in pairs]
        self.told |= {(name, relation.key) for name, relation in zip(chain[:-1], path, strict=True)}
        documents = [self._step(chain, path, step) for step in range(level.hops)]
        if level.twins:
            twins = [other for _, other in pairs]
            documents += [self._page(r, *twins[at : at + 2]) for at, r in enumerate(path)]
        for step in rng.sample([at for at, r in enumerate(path) if r.changes], level.stale):
            documents += self._stale(chain, path, step, documents[step])
        documents += self._crowd(path, level.documents - len(documents))
        if level.twins:
            for document in documents:
                self._fill(document)
        rng.shuffle(documents)
        start = chain[0] if kinds[0] == "person" else f"the {kinds[0]} {chain[0]}"
        keys = [relation.key for relation in path]
        return Problem(asked(start, keys, int(level.paraphrase)), chain[-1], chain, keys, documents)

    def _path(self) -> list[Relation]:
        """Return relations that follow one another, without repeats, enough of which change over time."""
        while True:
            kind, path = self.rng.choice(KINDS), []
            for _ in range(self.level.hops):
                path.append(self.rng.choice(FROM[kind]))
                kind = path[-1].target
            if len(set(path)) == len(path) and sum(relation.changes for relation in path) >= self.level.stale:
                return path

    # Names ------------------------------------------------------------------------------------------------------

    def _word(self) -> str:
        while True:
            name = word(self.rng.randrange(WORDS))
            if name not in self.words:
                self.words.add(name)
                return name

    def _pair(self, kind: str, first: str | None = None) -> tuple[str, str]:
        """Return a name, and another that shares a word with it."""
        first = first or self._word()
        if kind == "person":
            return f"{first} {self._word()}", f"{first} {self._word()}"
        if not self.level.twins:
            return first, self._word()
        one, other = self.rng.sample(self.rng.choice(_PAIRS), 2)
        return f"{one} {first}", f"{other} {first}"

    def _name(self, kind: str) -> str:
        return self._pair(kind)[0]

    # Documents --------------------------------------------------------------------------------------------------

    def _date(self, first: int = 1420, last: int = 1499) -> str:
        rng = self.rng
        return f"{rng.randint(first, last)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"

    def _fact(self, relation: Relation, subject: str, thing: str) -> Fact:
        self.told.add((subject, relation.key))
        return relation.key, subject, thing, self.rng.randint(1, 2) if self.level.paraphrase else 0

    def _step(self, chain: list[str], path: list[Relation], step: int) -> Document:
        """Return the document that states a step of the chain."""
        page = self._page(path[step], chain[step], chain[step + 1], step=step)
        if self.level.paraphrase and self.rng.random() < 0.3:
            page.title = chain[step + 1]
        return page

    def _page(self, relation: Relation, subject: str, thing: str | None = None, *, step: int = -1) -> Document:
        fact = self._fact(relation, subject, thing or self._name(relation.target))
        return Document(subject, self._date(), [fact], step)

    def _stale(self, chain: list[str], path: list[Relation], step: int, newest: Document) -> list[Document]:
        """Return an older document that contradicts a step, and documents that continue from what it says."""
        relation = path[step]
        name = self._name(relation.target)
        year = int(newest.date[:4])
        pages = [Document(chain[step], self._date(year - 9, year - 1), [self._fact(relation, chain[step], name)], step)]
        for onward in path[step + 1 :]:
            pages.append(self._page(onward, name))
            name = pages[-1].facts[0][2]
        return pages

    def _crowd(self, path: list[Relation], count: int) -> list[Document]:
        """Return documents on unrelated things, half of them on the chain's relations.

        With only a few facts of the last relation, a policy could guess among them without following the chain.
        """
        kinds = [path[-1 - at % len(path)] for at in range(count // 2)]
        kinds += [self.rng.choice(FROM[self.rng.choice(KINDS)]) for _ in range(count - len(kinds))]
        return [self._page(relation, self._name(relation.source)) for relation in kinds]

    def _fill(self, document: Document) -> None:
        """Add other facts about the document's subject. They mention nothing else of the chain."""
        kind = self._kind_of(document)
        free = [r for r in FROM[kind] if (document.title, r.key) not in self.told]
        for relation in self.rng.sample(free, min(len(free), self.rng.randint(0, 2))):
            document.facts.append(self._fact(relation, document.title, self._name(relation.target)))
        self.rng.shuffle(document.facts)

    def _kind_of(self, document: Document) -> str:
        key, subject, _, _ = document.facts[0]
        return BY_KEY[key].source if document.title == subject else BY_KEY[key].target
