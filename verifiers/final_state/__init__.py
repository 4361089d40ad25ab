"""Grades what the agent left behind: file trees, SQLite databases, JSON documents, git repositories.

Everything is parsed on the trusted side from the bytes that were collected; nothing the agent supplied is ever run.
"""

from .tree import FinalState

__all__ = ["FinalState"]
EXPORT = FinalState
