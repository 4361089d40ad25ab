"""Full-text search over one episode's corpus: SQLite's FTS5 in memory, on the host side."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any

from .relations import told

RESULTS = 8
"""The most documents that a search returns."""
_TERM = re.compile(r"[^\W_]+")
_MAX_QUERY, _MAX_TERMS = 400, 16


class Index:
    """A corpus to search and open. Its ranking depends on the corpus and the query alone."""

    def __init__(self, documents: Sequence[Mapping[str, Any]]) -> None:
        self._pages = [
            (page["title"], page["date"], " ".join(told(*fact) for fact in page["facts"])) for page in documents
        ]
        # one episode is served by one thread at a time, but not always by the same one
        self._base = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
        self._base.execute("CREATE VIRTUAL TABLE pages USING fts5(title, text)")
        rows = [(title, text) for title, _, text in self._pages]
        self._base.execute("BEGIN")
        self._base.executemany("INSERT INTO pages(title, text) VALUES (?, ?)", rows)
        self._base.execute("COMMIT")

    def search(self, query: str) -> list[int]:
        """Return the documents that contain any of the query's words, best first. Nothing in a query is syntax."""
        terms = list(dict.fromkeys(_TERM.findall(query[:_MAX_QUERY].lower())))[:_MAX_TERMS]
        if not terms:
            raise ValueError("the query holds no word to search for")
        match = " OR ".join(f'"{term}"' for term in terms)
        # rounded, so that the last bits of a float never decide an order
        statement = "SELECT rowid FROM pages WHERE pages MATCH ? ORDER BY round(bm25(pages), 6), rowid LIMIT ?"
        return [row for (row,) in self._base.execute(statement, (match, RESULTS))]

    def heading(self, id: int) -> str:
        """Return the title and date of a document."""
        title, date, _ = self._pages[id - 1]
        return f"{title} ({date})"

    def text(self, id: int) -> str:
        """Return a whole document."""
        if not 1 <= id <= len(self._pages):
            raise LookupError(f"there is no document {id}; search gives the ids of those there are")
        return f"{self.heading(id)}\n{self._pages[id - 1][2]}"

    def close(self) -> None:
        """Close the database."""
        self._base.close()
