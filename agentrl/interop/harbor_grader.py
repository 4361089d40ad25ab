"""What grades an exported Harbor task where agentrl is not installed: our own sources, and a program that calls them.

The verifier container has a Python and nothing else, so the tests folder brings the environment's module, its verifier,
and every module of agentrl that they import, as they are. Stand-ins take the place of the SDK's base class, which needs
pydantic and is not used in grading, and of numpy, which only annotations name.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator, Sequence, Set
from pathlib import Path

from agentrl.envs.base import Environment
from agentrl.errors import UserError

STAND_INS = {
    "agentrl": "",
    "agentrl.verifiers": "",
    "agentrl.sandboxes": "",
    "agentrl.envs": '''"""Stands in for the SDK: tasks and verifiers need no more of it."""


class Environment:
    """The base class of an environment."""

    name, levels, size, splits = "", range(1, 2), None, ("train", "heldout", "test")

    def __init__(self, **options):
        self.options = options

    def size_of(self, split, level):
        return self.size


def tool(method=None, **options):
    """Leave a tool as it is."""
    return method if method is not None else lambda method: method
''',
    "numpy": "",
    "numpy.typing": "NDArray = object\n",
}
"""Modules that are not brought as they are."""
GRADING = ("agentrl.verifiers.grade", "agentrl.sandboxes.tree", "agentrl.sandboxes.process.backend")
PLAIN = {"README.md"}
TEST = """#!/bin/bash
# Grades /app with the verifier of agentrl that lies beside this file. Submitted code runs as other users.
mkdir -p /logs/verifier
chmod 700 /tests /logs/verifier
cd /
exec python3 -I -B /tests/grade.py > /logs/verifier/grade.txt 2>&1
"""
HEAD = '''"""Grades the working folder of an agentrl task and writes /logs/verifier/reward.json. Run it as root."""

import asyncio
import importlib
import itertools
import json
import os
import resource
import subprocess
import sys
from contextlib import asynccontextmanager

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "grader"))

from agentrl.errors import AgentError  # noqa: E402
from agentrl.sandboxes import tree  # noqa: E402
from agentrl.sandboxes.process import backend  # noqa: E402
from agentrl.verifiers.base import Context, Submission  # noqa: E402
from agentrl.verifiers.grade import grade  # noqa: E402

USERS = itertools.count(50_000)
PLACES = 1


class OtherUser(backend.ProcessSandbox):
    """Runs commands as a user of its own, who can read neither the tests nor another one's files."""

    def __init__(self, spec):
        super().__init__(spec)
        self.user = next(USERS)
        for place in (self._folder, *(os.path.join(self._folder, name) for name in os.listdir(self._folder))):
            os.chown(place, self.user, self.user)

    def lay_out(self, spec):
        super().lay_out(spec)
        for folder, names, files in os.walk(self._box):
            for name in (*names, *files):
                os.chown(os.path.join(folder, name), self.user, self.user, follow_symlinks=False)

    def _launched(self, argv, **options):
        who = {"user": self.user, "group": self.user, "extra_groups": []}
        return subprocess.Popen(argv, preexec_fn=self.limit, **who, **options)

    def limit(self):
        """Limit the new process from inside: a container's root has no right to do it to another user's."""
        for kind, value in {**self._rlimits(), resource.RLIMIT_NPROC: self.spec.limits.processes}.items():
            resource.setrlimit(kind, (value, value))

    def close(self):
        """End every process of the user, also those that left their group."""
        subprocess.run([sys.executable, "-I", "-c", "import os; os.kill(-1, 9)"], user=self.user, group=self.user)
        super().close()


class Boxes:
    """Hands out so many sandboxes at once: one, unless the verifier needs two."""

    limit = max(PLACES, 2)

    def __init__(self):
        self.lock = asyncio.Semaphore(PLACES)

    @asynccontextmanager
    async def box(self, spec):
        async with self.lock:
            box = OtherUser(spec)
            try:
                box.lay_out(spec)
                yield box
            finally:
                box.close()


def collected(folder, artifact):
    try:
        return tree.collect(folder, artifact.path, max_bytes=artifact.max_bytes, max_files=artifact.max_files)
    except (FileNotFoundError, NotADirectoryError):
        return {}  # nothing was left there, which is for the verifier to judge


def write(score):
    if score is None:
        sys.exit("it could not be graded: no reward is written")
    with open(os.path.join(*(sys.argv[1:] or ["/logs/verifier"]), "reward.json"), "w") as file:
        json.dump({"reward": score}, file)
'''
GRADE = (
    HEAD
    + """

async def main():
    with open(os.path.join(HERE, "task.json")) as file:
        about = json.load(file)
    kind = getattr(importlib.import_module(about["module"]), about["name"])
    task = kind(**about["options"]).task(about["split"], about["level"], about["index"])
    folder = os.open(about["workdir"], tree.FOLDER)
    try:
        artifacts = {artifact.path: collected(folder, artifact) for artifact in kind.verifier.artifacts}
    except AgentError as error:
        print(error)
        return 0.0
    context = Context(secret=bytes.fromhex(about["secret"]), boxes=Boxes(), deadline_s=240.0)
    outcome, verdict = await grade(kind.verifier, Submission(task=task, artifacts=artifacts), context)
    print(outcome, *(verdict.evidence if verdict else ()), sep="\\n")
    return outcome.score


write(asyncio.run(main()))
"""
)


def bundle(kind: type[Environment]) -> dict[str, bytes]:
    """Return the files that grading needs, by their paths below a folder that is put on `sys.path`."""
    return sources((kind.__module__, type(kind.verifier).__module__, *GRADING), kind.name or kind.__name__)


def sources(starts: Sequence[str], name: str, there: Set[str] = frozenset()) -> dict[str, bytes]:
    """Return these modules and all that they import, as files; the packages `there` need not be brought."""
    modules: dict[str, Path] = {}
    foreign: set[str] = set()
    for start in starts:
        _add(start, modules, foreign)
    foreign -= there
    if foreign:
        raise UserError(
            f"{name} cannot be written as Harbor tasks: its code needs "
            f"{', '.join(sorted(foreign))}, which the container of a Harbor verifier does not have"
        )
    for path in {file.parent for file in modules.values() if file.name == "__init__.py"}:
        for other in sorted(path.glob("*.py")):  # such as the programs that are sent into sandboxes
            package = next(name for name, file in modules.items() if file == path / "__init__.py")
            if other.stem != "__init__":
                _add(f"{package}.{other.stem}", modules, set())
    files = {
        f"{_path(name, package=True)}": text.encode() for name, text in STAND_INS.items() if name != "numpy.typing"
    }
    files["numpy/typing.py"] = STAND_INS["numpy.typing"].encode()
    for name, file in modules.items():
        files[_path(name, package=file.name == "__init__.py")] = file.read_bytes()
        if file.name == "__init__.py":  # with its data
            for extra in sorted(file.parent.rglob("*")):
                if extra.is_file() and extra.suffix not in (".py", ".pyc") and extra.name not in PLAIN:
                    files[f"{name.replace('.', '/')}/{extra.relative_to(file.parent)}"] = extra.read_bytes()
    return dict(sorted(files.items()))


def _path(name: str, *, package: bool) -> str:
    return name.replace(".", "/") + ("/__init__.py" if package else ".py")


def _add(name: str, modules: dict[str, Path], foreign: set[str]) -> None:
    """Add a module and all that it imports; names of other packages go to `foreign`."""
    if name in modules or name in STAND_INS:
        return
    if not name.startswith("agentrl."):
        top = name.split(".")[0]
        own = sys.modules.get(top)
        if top not in sys.stdlib_module_names and getattr(own, "__file__", None) is not None:
            foreign.add(top)
        return
    located = importlib.util.find_spec(name)
    if located is None or located.origin is None:
        return
    above = name.rpartition(".")[0]
    modules[name] = Path(located.origin)
    _add(above, modules, foreign)
    is_package = modules[name].name == "__init__.py"
    for imported in _imports(ast.parse(modules[name].read_bytes()), name if is_package else above):
        _add(imported, modules, foreign)


def _imports(tree: ast.Module, package: str) -> Iterator[str]:
    """Yield what a module imports when it is loaded, and each name that may be a module itself."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield base
            for alias in node.names:
                if base.startswith("agentrl") and _is_module(f"{base}.{alias.name}"):
                    yield f"{base}.{alias.name}"


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, AttributeError, ValueError):
        return False
