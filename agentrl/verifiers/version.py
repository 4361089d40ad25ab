"""The hash that a verdict carries: over the verifier's source and its whole configuration."""

from __future__ import annotations

import hashlib
import sys
from functools import cache
from pathlib import Path

from agentrl.hashing import canonical


def version_of(verifier: object) -> str:
    """Return the class's name with a hash over its package's source and its instance's settings."""
    digest = hashlib.sha256(_source(type(verifier).__module__, type(verifier).__qualname__).encode())
    digest.update(canonical(vars(verifier)).encode())
    return f"{type(verifier).__name__}-{digest.hexdigest()[:12]}"


@cache
def _source(module: str, name: str) -> str:
    """Return the source of a module, and of its whole folder if that is a package: its other modules matter too."""
    path = getattr(sys.modules.get(module), "__file__", None)
    if path is None:
        return name
    file = Path(path)
    parts = sorted(file.parent.glob("*.py")) if (file.parent / "__init__.py").is_file() else [file]
    return "\n".join([name, *(part.read_text(encoding="utf-8", errors="replace") for part in parts)])
