"""The hash that a verdict carries: over the verifier's source and its whole configuration."""

from __future__ import annotations

import hashlib
import re
import sys
from functools import cache
from pathlib import Path

from agentrl.hashing import canonical

FOLDER = Path(__file__).parent
_SHARED = re.compile(r"^\s*from agentrl\.verifiers(?:\.(\w+) import|[ ]import (\w+))", re.MULTILINE)
"""An import of code that verifiers share: how values are read and compared, and the programs for sandboxes."""


def version_of(verifier: object) -> str:
    """Return the class's name with a hash over its package's source, the shared code that this imports, and its
    instance's settings."""
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
    texts = [part.read_text(encoding="utf-8", errors="replace") for part in parts]
    return "\n".join([name, *texts, *_shared(texts, FOLDER)])


def _shared(texts: list[str], folder: Path) -> list[str]:
    """Return the sources of the shared modules that these import, and of what those import in turn, by name."""
    sources: dict[str, str] = {}
    unread = list(texts)
    while unread:
        for groups in _SHARED.findall(unread.pop()):
            name = "".join(groups)
            file = folder / f"{name}.py"
            if name not in sources and file.is_file():
                sources[name] = file.read_text(encoding="utf-8")
                unread.append(sources[name])
    return [sources[name] for name in sorted(sources)]
