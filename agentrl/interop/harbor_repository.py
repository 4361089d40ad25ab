"""Tasks of `agentrl env from-repo` as Harbor tasks: the package's root travels along, and a fixed set of tests grades.

    environment/site.tar  -> /opt/site in the agent's image: what the package and its tests import, with pytest
    tests/: site.tar, pytest.zip, source.tar, task.json    the same again, the original with its tests, what to run

Where agentrl grades, the secret of each group draws the tests; a Harbor task has one draw, made here. It takes tests
that the fault breaks, tests that call the function, and as many of all others.
"""

from __future__ import annotations

import io
import random
import tarfile
from collections.abc import Mapping
from typing import Any

from agentrl.envs.base import Environment
from agentrl.interop.harbor_grader import GRADING, HEAD, sources
from agentrl.repos import grade, history, root
from agentrl.repos.environment import RepositoryEnvironment
from agentrl.repos.grade import FixedCode
from agentrl.repos.history import HistoryCode
from agentrl.repos.source import Source
from agentrl.sandboxes.base import MTIME
from agentrl.types import Task
from agentrl.verifiers.hidden_tests.bundle import pytest_zip

MAX_SITE = 200 << 20
"""Bytes of the largest root that is written into task folders."""
_IMPORTS = "".join(f"import {name}\n" for name in ("random", "subprocess", "sys", "tarfile", "tempfile"))
GRADE = (
    HEAD.replace("PLACES = 1", "PLACES = 2")
    + """

sys.path.append(os.path.join(HERE, "pytest.zip"))  # for `packaging`, which reads requirements

from agentrl.repos import grade as repository  # noqa: E402
from agentrl.repos import calls, scope  # noqa: E402
from agentrl.repos.source import Source  # noqa: E402
from agentrl.sandboxes.base import Entry  # noqa: E402
from agentrl.verifiers.base import Artifact  # noqa: E402
from agentrl.verifiers.hidden_tests import repository as proxied  # noqa: E402


def unpacked(name, folder=None):
    with tarfile.open(os.path.join(HERE, name)) as tar:
        if folder is not None:
            tar.extractall(folder)  # our own archive: plain files below it
            return {}
        return {member.name: tar.extractfile(member).read() for member in tar if member.isreg()}


async def main(site):
    with open(os.path.join(HERE, "task.json")) as file:
        about = json.load(file)
    with open(os.path.join(HERE, "pytest.zip"), "rb") as file:
        data = file.read()
    proxied.pytest_zip = lambda: data
    os.chmod(site, 0o755)
    unpacked("site.tar", site)
    files = unpacked("source.tar")
    original = Source(about["package"], about["version"], files, about["root"], tuple(about["packages"]), (), ())
    folder = os.open(about["workdir"], tree.FOLDER)
    places = [Artifact(path=path, max_bytes=32 << 20, max_files=5_000) for path in original.places]
    try:
        artifacts = {artifact.path: collected(folder, artifact) for artifact in places}
    except AgentError as error:
        print(error)
        return 0.0
    code, wrong = repository.repository_of(original, artifacts)
    changed = set()
    if about["functions"] and not wrong:
        code = {path: data for path, data in code.items() if path in original.code}
        try:
            changed = scope.rewritten(original.code, code, set(about["functions"]))
        except scope.Unchecked as error:
            wrong = str(error)
    if wrong:
        print(wrong)
        return 0.0
    tests = proxied.RepositoryTests(
        original.tests,
        about["ids"],
        packages=original.packages,
        seconds=about["seconds"],
        memory_mb=1024,
        names=about["names"],
        env={"PYTHONPATH": f"{about['root'] or '.'}:{site}", "PYTHONDONTWRITEBYTECODE": "1"},
    )
    context = Context(secret=bytes.fromhex(about["secret"]), boxes=Boxes(), deadline_s=540.0)
    entries = {path: Entry(content=data) for path, data in code.items()}
    failures = await tests.failures(entries, context)
    for key in sorted(changed & set(about["calls"])) if not any(failures) else ():
        one = calls.Calls.from_json(about["calls"][key])
        if await calls.differs(one, entries, "host", tests.env, context.boxes, random.Random(context.secret)):
            failures[0] = "not as the original"
    print(*(f"{name}: {why or 'passed'}" for name, why in zip(about["ids"], failures)), sep="\\n")
    return 0.0 if any(failures) else 1.0


with tempfile.TemporaryDirectory(prefix="site-") as place:
    score = asyncio.run(main(place))
write(score)
"""
).replace("import subprocess\nimport sys\n", _IMPORTS, 1)


def fits(kind: type[Environment]) -> bool:
    """Return whether an environment is one of a repository whose code is graded."""
    return issubclass(kind, RepositoryEnvironment) and isinstance(kind.verifier, FixedCode | HistoryCode)


def refusal(kind: type[Environment]) -> str:
    """Return why tasks of a repository cannot be Harbor tasks, or ""."""
    if issubclass(kind, RepositoryEnvironment) and not fits(kind):
        return (
            "tests that an agent writes are graded by comparing versions of the package, which Harbor's verifier cannot"
        )
    return ""


def image_for(kind: type[Environment]) -> str:
    """Return the image with the Python that everything was verified with."""
    assert issubclass(kind, RepositoryEnvironment)
    return f"python:{'.'.join(kind.suite.lock.python.split('.')[:2])}-slim"


def parts(kind: type[Environment], task: Task, secret: bytes) -> tuple[dict[str, bytes], dict[str, Any], str]:
    """Return the files of a task, what task.json says besides, and lines of the Dockerfile."""
    assert issubclass(kind, RepositoryEnvironment)
    built = root.ready(kind.suite.lock)
    recipe: Any = kind.recipes[task.setup["recipe"]]
    source: Source = built.source
    if isinstance(kind.verifier, HistoryCode):
        before, after = history.sides(built, recipe)
        source = after.source
        files = {**before.source.code, **source.code, **source.tests}
        ids = [*recipe.fails, *recipe.covers]
    else:
        files = {**source.code, **source.tests}
        ids = _drawn(recipe, kind.suite.grading, secret)
    site = _packed({str(p.relative_to(built.site)): p.read_bytes() for p in built.site.rglob("*") if p.is_file()})
    if len(site) > MAX_SITE:
        raise ValueError(f"what the package needs has {len(site) >> 20} MiB, more than {MAX_SITE >> 20}")
    brought = {f"tests/grader/{path}": content for path, content in grader().items()}
    brought |= {"environment/site.tar": site, "tests/site.tar": site, "tests/pytest.zip": pytest_zip()}
    brought |= {"tests/source.tar": _packed(files), "tests/grade.py": GRADE.encode()}
    about: dict[str, Any] = {"package": source.name, "version": source.version, "root": source.root, "ids": ids}
    about |= {"packages": list(source.packages), "seconds": grade.TEST_SECONDS}
    broken = [] if isinstance(kind.verifier, HistoryCode) else [f"{c.file}::{c.function}" for c in recipe.changes]
    about["functions"] = broken  # a fix may write these as it likes, and nothing else
    known = {} if isinstance(kind.verifier, HistoryCode) else kind.suite.calls
    about["names"] = getattr(kind.suite, "names", {})
    about["calls"] = {key: known[key].to_json() for key in broken if key in known}
    code = f"/app/{source.root}".rstrip("/")
    lines = f"ADD site.tar {root.SITE}/\nENV PYTHONPATH={code}:{root.SITE} PYTHONDONTWRITEBYTECODE=1\n"
    return brought, about, lines


def _drawn(recipe: Any, grading: tuple[str, ...], secret: bytes) -> list[str]:
    """Return the tests of a task: as many as a verdict on code that is not the original's takes."""
    rng = random.Random(b"harbor\0" + secret)
    kinds = ((recipe.fails, grade.MAX_FAILING), (recipe.covers, len(recipe.covers)), (grading, grade.MAX_OTHERS))
    ids: list[str] = []
    for names, most in kinds:
        rest = sorted(set(names) - set(ids))
        ids += rng.sample(rest, min(len(rest), most))
    return ids


def grader() -> dict[str, bytes]:
    """Return the sources that grade."""
    return sources(("agentrl.repos.grade", *GRADING), "a repository", frozenset({"packaging"}))


def _packed(files: Mapping[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path, data in sorted(files.items()):
            member = tarfile.TarInfo(path)
            member.mode, member.mtime, member.size = 0o644, MTIME, len(data)
            tar.addfile(member, io.BytesIO(data))
    return out.getvalue()
