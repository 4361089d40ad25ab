"""Keeps the results of a build's finished stages on disk, so that a stopped build resumes behind the last one."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Stages:
    """Results of finished stages, on disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, name: str, make: Callable[[], Any]) -> Any:
        """Return a stage's result: from disk, or made now and kept."""
        path = self.folder / f"{name}.json"
        if path.is_file():
            return json.loads(path.read_text(encoding="utf-8"))
        value = json.loads(json.dumps(make()))
        with tempfile.NamedTemporaryFile("w", dir=self.folder, delete=False, encoding="utf-8") as file:
            json.dump(value, file)
        os.replace(file.name, path)
        return value

    def items(self, name: str) -> Items:
        """Return a stage's results that are kept one by one."""
        return Items(self.folder / f"{name}.jsonl")


class Items:
    """Results that are kept as they come: a stopped stage goes on behind its last one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.done: dict[str, Any] = {}
        for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
            try:
                row = json.loads(line)
            except ValueError:
                continue  # the line that was being written when it was stopped
            self.done[row["key"]] = row["value"]

    def add(self, key: str, value: Any) -> None:
        self.done[key] = value
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"key": key, "value": value}) + "\n")
