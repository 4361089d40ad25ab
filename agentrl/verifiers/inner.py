"""The programs that verifiers run inside sandboxes, where nothing of agentrl can be imported, as text and compiled."""

from __future__ import annotations

import marshal
import re
import sys
from functools import cache
from importlib.resources import files

LOADER = """\
import marshal, sys
pipe = open(3, "rb")
tag, code, source = pipe.readline().decode().split()
code, source = pipe.read(int(code)), pipe.read(int(source))
exec(marshal.loads(code) if tag == sys.implementation.cache_tag else source)
"""
"""What a sandbox is told to run: the program at the head of its message, compiled if this is the interpreter for it.
The rest of the message is left in `pipe`."""
_FUTURE = "from __future__ import annotations\n"
_IMPORT = re.compile(r"^from (agentrl[.\w]*)\.(\w+) import .*\n", re.MULTILINE)


@cache
def source_of(package: str, name: str) -> str:
    """Return the source of a module, with the source of every agentrl module that it imports from in front."""
    source = files(package).joinpath(f"{name}.py").read_text(encoding="utf-8")
    imported = [source_of(*module) for module in _IMPORT.findall(source)]
    return _FUTURE + "".join([*imported, _IMPORT.sub("", source)]).replace(_FUTURE, "")


def compiled(package: str, name: str) -> bytes:
    """Return a program as `LOADER` reads it: compiled here once, not in every sandbox, and its source as a fallback."""
    source = source_of(package, name)
    code = marshal.dumps(compile(source, f"{name}.py", "exec", dont_inherit=True))
    return f"{sys.implementation.cache_tag} {len(code)} {len(source.encode())}\n".encode() + code + source.encode()
