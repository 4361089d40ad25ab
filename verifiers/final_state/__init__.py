"""Grades what the agent left behind: file trees, SQLite databases, JSON documents, git repositories.

Everything is parsed on the trusted side, or in a sandbox of its own, from the bytes that were collected; nothing that
the agent supplied is ever run.
"""

from .database import DatabaseState
from .document import JsonState
from .git import GitExpected, GitState
from .gitobjects import Commit, Repository
from .tree import FinalState

__all__ = ["Commit", "DatabaseState", "FinalState", "GitExpected", "GitState", "JsonState", "Repository"]
EXPORT = FinalState
