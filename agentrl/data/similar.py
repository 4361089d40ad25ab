"""Finds texts that say the same: duplicates within a data set, and tasks that it must not hold.

exact   the same text
near    word shingles in common: MinHash finds candidates, the exact Jaccard index decides
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl.envs.task_check import task_of
from agentrl.errors import UserError
from agentrl.evaluation import seen_hashes
from agentrl.recipe import Recipe
from agentrl.rollout.data_lines import LineError, messages_of, read_lines
from agentrl.rollout.runtimes import makers
from agentrl.types import Split, Task

DUPLICATE_WORDS = 5
"""Words of a shingle by which near duplicates are told."""
BANDS, ROWS = 16, 4
"""Two texts are compared where one of 16 bands of 4 hashes agrees: at a Jaccard index of 0.9 practically always."""
OVERLAP_WORDS = 8
"""Words of a shingle by which contamination is told, as usual for benchmarks."""
OVERLAP = 0.8
"""Share of the shorter text's shingles that the other must hold."""
HELDOUT_TASKS = 1000
"""Tasks of each held-out split and level that are looked at, where there is no end of them."""
HELDOUT: tuple[Split, ...] = ("heldout", "test")
TEXT_KEYS = ("prompt", "question", "problem", "instruction", "input", "text", "query")
_WORD = re.compile(r"\w+|[^\w\s]")


def words_of(text: str) -> list[str]:
    """Return a text's words and signs, in lower case."""
    return _WORD.findall(text.lower())


def shingles(words: Sequence[str], size: int) -> NDArray[np.uint64]:
    """Return the hashes of a text's runs of words; a shorter text is one run."""
    runs = {" ".join(words[i : i + size]) for i in range(max(1, len(words) - size + 1))}
    hashes = [int.from_bytes(hashlib.blake2b(run.encode(), digest_size=8).digest(), "big") for run in runs]
    return np.array(sorted(hashes), dtype=np.uint64)


def distinct(texts: Sequence[str], near: float = 0.9) -> tuple[list[int], Counter[str]]:
    """Return the places of texts that differ, the first of each kind, and how many were left out: `exact`, `near`.

    Texts whose Jaccard index reaches `near` count as duplicates; 1 leaves out exact ones only.
    """
    if not 0.5 <= near <= 1.0:
        raise UserError(f"near duplicates are told by a share from 0.5 to 1, got {near}")
    counts: Counter[str] = Counter()
    kept: list[int] = []
    seen: set[str] = set()
    sets: dict[int, NDArray[np.uint64]] = {}
    bands: dict[tuple[int, bytes], list[int]] = defaultdict(list)
    for place, text in enumerate(texts):
        if text in seen:
            counts["exact"] += 1
            continue
        seen.add(text)
        if near < 1.0:
            own = shingles(words_of(text), DUPLICATE_WORDS)
            keys = _bands(own)
            candidates = dict.fromkeys(other for key in keys for other in bands[key])
            if any(_jaccard(own, sets[other]) >= near for other in candidates):
                counts["near"] += 1
                continue
            sets[place] = own
            for key in keys:
                bands[key].append(place)
        kept.append(place)
    return kept, counts


_RANDOM = np.random.default_rng(27)
_FACTORS = _RANDOM.integers(1, 2**63, BANDS * ROWS, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
_ADDED = _RANDOM.integers(0, 2**63, BANDS * ROWS, dtype=np.uint64)


def _bands(hashes: NDArray[np.uint64]) -> list[tuple[int, bytes]]:
    least = (hashes[None, :] * _FACTORS[:, None] + _ADDED[:, None]).min(axis=1)  # modulo 2**64
    return [(band, part.tobytes()) for band, part in enumerate(least.reshape(BANDS, ROWS))]


def _jaccard(a: NDArray[np.uint64], b: NDArray[np.uint64]) -> float:
    common = len(np.intersect1d(a, b, assume_unique=True))
    return common / (len(a) + len(b) - common)


class Contamination:
    """Tells whether a task is one that a policy will be judged by."""

    def __init__(self) -> None:
        self._tasks: set[str] = set()
        """Hashes of held-out tasks."""
        self._texts: set[str] = set()
        self._sizes: list[int] = []
        """Shingles of each text."""
        self._holders: dict[int, list[int]] = defaultdict(list)
        """Texts by shingle."""

    def add_heldout(self, recipe: Recipe) -> None:
        """Add the held-out tasks of a recipe's environments: of both held-out splits, at every level it names."""
        wanted = max(HELDOUT_TASKS, recipe.eval.tasks if recipe.eval else 0)
        made = {name: make() for name, make in makers(recipe).items()}
        for section in recipe.envs:
            environment = made[section.name]
            chosen = {*(section.levels or environment.levels), *((recipe.eval.levels if recipe.eval else None) or ())}
            for split in HELDOUT:
                for level in sorted(chosen) if split in environment.splits else ():
                    size = environment.size_of(split, level)
                    tasks = (task_of(environment, split, level, i) for i in range(min(wanted, size or wanted)))
                    self._tasks |= seen_hashes(tasks)

    def add_file(self, path: Path) -> None:
        """Add the texts of a file: JSON lines or parquet with prompts, or plain text with one per line."""
        if path.suffix == ".txt":
            try:
                lines = path.read_text(encoding="utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise UserError(f"{path}: cannot be read: {error}") from None
            texts: Iterable[str] = [line for line in lines if line.strip()]
        else:
            texts = [text for some in read_lines(path, lambda _, line: list(_texts(line))) for text in some]
        for text in texts:
            self._add(text)

    def _add(self, text: str) -> None:
        words = words_of(text)
        if not words or " ".join(words) in self._texts:
            return
        self._texts.add(" ".join(words))
        if len(words) >= OVERLAP_WORDS:
            own = shingles(words, OVERLAP_WORDS).tolist()
            for shingle in own:
                self._holders[shingle].append(len(self._sizes))
            self._sizes.append(len(own))

    def why(self, task: Task) -> str:
        """Return why a task must be left out; nothing where it may stay."""
        if task.split != "train":
            return "held-out split"
        if not self._tasks.isdisjoint(seen_hashes([task])):
            return "held-out task"
        words = words_of(task.prompt)
        if not self._texts:
            return ""
        if " ".join(words) in self._texts:
            return "given file"
        if len(words) < OVERLAP_WORDS:
            return ""
        own = shingles(words, OVERLAP_WORDS).tolist()
        hits = Counter(text for shingle in own for text in self._holders.get(shingle, ()))
        near = any(count >= OVERLAP * min(len(own), self._sizes[text]) for text, count in hits.items())
        return "given file" if near else ""


def _texts(line: dict[str, Any]) -> Iterator[str]:
    """Yield what a line of somebody's file asks: its first user message, or its question."""
    for key in ("messages", "prompt"):
        if isinstance(line.get(key), list):
            yield from (message.content for message in messages_of(line[key], key) if message.role == "user")
            return
    known = [line[key] for key in TEXT_KEYS if isinstance(line.get(key), str)]
    if not known:
        raise LineError(f"no text to compare with; it needs `messages` or one of {', '.join(TEXT_KEYS)}")
    yield from known
