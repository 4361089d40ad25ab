"""pytest for a sandbox that has none: the installed one, as a zip file that Python imports from."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import io
import marshal
import zipfile
from functools import cache
from pathlib import Path

from agentrl.errors import AuthoringError

PARTS = ("pytest", "pluggy", "iniconfig", "packaging")
_STUBS = {
    "pygments/__init__.py": "",
    "pygments/util.py": "class ClassNotFound(ValueError): ...\nclass OptionError(Exception): ...\n",
    "pygments/lexer.py": "class Lexer: ...\n",
    "pygments/lexers/__init__.py": "",
    "pygments/lexers/diff.py": "class DiffLexer: ...\n",
    "pygments/lexers/python.py": "class PythonLexer: ...\n",
    "pygments/formatters/__init__.py": "",
    "pygments/formatters/terminal.py": "class TerminalFormatter: ...\n",
}
"""pytest imports pygments to colour output that nobody will see; it needs no more than these names."""


@cache
def pytest_zip() -> bytes:
    """Return a few hundred kilobytes; the same bytes for the same installed versions."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as bundle:

        def add(name: str, content: bytes) -> None:
            bundle.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
            if name.endswith(".py"):
                bundle.writestr(zipfile.ZipInfo(name + "c"), _compiled(name, content), zipfile.ZIP_DEFLATED)

        for part in PARTS:
            try:
                files = importlib.metadata.files(part) or []
            except importlib.metadata.PackageNotFoundError:
                raise AuthoringError(f"RepositoryTests needs the package {part}: pip install pytest") from None
            for file in files:
                name = str(file)
                if not name.startswith("..") and "__pycache__" not in name and not name.endswith((".pyi", ".typed")):
                    add(name, Path(file.locate()).read_bytes())
        for name, text in _STUBS.items():
            add(name, text.encode())
    return buffer.getvalue()


def _compiled(name: str, source: bytes) -> bytes:
    """Return a .pyc for an interpreter of this version; any other falls back to the source beside it."""
    code = marshal.dumps(compile(source, name, "exec", dont_inherit=True))
    return importlib.util.MAGIC_NUMBER + (1).to_bytes(4, "little") + importlib.util.source_hash(source) + code
