"""What real packages taught: several packages in src/, tests that never end, sampling, bytecode, conftest files."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl import sandboxes
from agentrl.errors import UserError
from agentrl.repos import build, grade, root, run, sample, source
from agentrl.repos.lock import lock_of
from agentrl.repos.mutate import Change
from agentrl.repos.tasks import Mutant
from agentrl.sandboxes.base import Entry
from agentrl.sandboxes.pool import Pool
from agentrl.verifiers.base import Context
from agentrl.verifiers.hidden_tests.repository import RepositoryTests
from tests.repos import tiny

NEVER_ENDING = """import time


def test_before():
    pass


def test_swallows():
    while True:
        try:
            time.sleep(60)
        except BaseException:
            pass
"""
BLOCKS = """import time

from shop import price


def test_price():
    assert price(2) == 4


def test_blocks():
    time.sleep(60)
"""


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    monkeypatch.setenv("AGENTRL_CACHE", str(tmp_path / "cache"))
    with Pool(sandboxes.load("namespace")(), limit=4) as boxes:
        yield boxes


def test_everything_in_src_belongs_to_the_package() -> None:
    """attrs installs attr too; without it no test of attrs can be imported."""
    files = {"PKG-INFO": b"Name: attrs\n", "src/attrs/__init__.py": b"", "src/attr/__init__.py": b""}
    read = source.read({**files, "tests/test_a.py": b"def test_a(): pass\n"})
    assert (read.root, read.packages, read.places) == ("src", ("attr", "attrs"), ("src/attr", "src/attrs"))


def test_plugins_that_check_types_are_no_requirements() -> None:
    """pydash lists one that makes hundreds of tests of its own, each of which runs mypy."""
    lines = ["pytest-mypy-testing", "sphinx-autodoc-typehints", "hypothesis>=6", "types-setuptools", "pytest-mock"]
    metadata = "Name: x\n" + "".join(f'Requires-Dist: {line}; extra == "dev"\n' for line in lines)
    files = {"PKG-INFO": metadata.encode(), "x/__init__.py": b"", "tests/test_x.py": b"def test_x(): pass\n"}
    assert source.read(files).test_requires == ("hypothesis>=6", "pytest-mock")


def test_a_test_that_swallows_every_exception_costs_seconds(tmp_path: Path, pool: Pool) -> None:
    """It is named at once, long before the limit of the whole run."""
    files = {"PKG-INFO": "Name: x\n", "x/__init__.py": "", "tests/test_x.py": NEVER_ENDING}
    built = root.ready(lock_of(str(tiny.archive(tmp_path, files, "x-1.0")), (), lambda text: None))
    began = time.monotonic()
    kept = {**built.source.code, **built.source.tests}
    result = run.run(built, pool, kept, ["tests/test_x.py"], test_seconds=0.2, seconds=100.0)
    assert (result.ended, result.stuck) == (False, "tests/test_x.py::test_swallows")
    assert time.monotonic() - began < 50


def test_the_test_that_hangs_a_grading_is_named(pool: Pool) -> None:
    """The others of its file can then be tried without it."""
    ids = ["test_shop.py::test_price", "test_shop.py::test_blocks"]
    tests = RepositoryTests({"test_shop.py": BLOCKS}, ids, packages=["shop"], twice=False, tests_seconds=4.0)
    code = {"shop.py": Entry(content=b"def price(count):\n    return 2 * count\n")}
    whys = asyncio.run(tests.failures(code, Context(secret=b"s", boxes=pool)))
    assert [why.split(":")[0] for why in whys] == ["the suite did not finish", "did not finish"]


def test_a_broken_conftest_is_said(tmp_path: Path, pool: Pool) -> None:
    files = {"PKG-INFO": "Name: x\n", "x/__init__.py": "", "tests/test_x.py": "def test_x(): pass\n"}
    files["tests/conftest.py"] = "import a_module_that_nobody_has\n"
    path = tiny.archive(tmp_path, files, "x-1.0")
    with pytest.raises(UserError, match="No module named 'a_module_that_nobody_has'"):
        build.build(str(path), tmp_path / "x", build.Options(), lambda text: None)


def _mutant(function: str, start: int) -> Mutant:
    change = Change("m.py", start, start + 1, "x", "operator", function)
    return Mutant((change,), ("t",), {}, ("t",), 1)


def test_tasks_are_spread_over_functions_by_a_fixed_draw() -> None:
    many = [_mutant("a", n) for n in range(30)] + [_mutant("b", 100), _mutant("c", 101), _mutant("c", 102)]
    chosen = sample.spread(many, 6)
    assert sorted(m.functions[0] for m in chosen) == ["m.py::a"] * 3 + ["m.py::b"] + ["m.py::c"] * 2
    assert [m.id for m in sample.spread(list(reversed(many)), 6)] == [m.id for m in chosen]
    assert (sample.enough(many, sample.SHARE + 3), sample.enough(many, sample.SHARE + 4)) == (True, False)
    keys = [f"m.py::f{n}" for n in range(60)]
    assert [len(part) for part in sample.parts(keys)] == [24, 24, 12]
    assert list(sample.parts(keys)) == list(sample.parts(keys[::-1]))


def test_a_function_is_graded_by_the_tests_that_call_it_most_directly() -> None:
    names = [f"t{n}" for n in range(sample.NEAREST + 10)]
    depth = {("f", name): 1 + at for at, name in enumerate(names)}
    assert set(sample.nearest({"f": names}, depth)["f"]) == set(names[: sample.NEAREST])
    assert sample.lowest(names, 100) == names
    assert len(sample.lowest(names, 7)) == 7


def test_only_files_as_they_were_come_with_bytecode() -> None:
    files = {"PKG-INFO": b"Name: x\n", "x/__init__.py": b"A = 1\n", "x/b.py": b"B = 1\n", "tests/test_x.py": b""}
    original = source.read(files)
    changed = {**original.code, "x/b.py": b"B = 2\n", "x/c.py": b"C = 1\n"}
    assert [path.split(".")[0] for path in sorted(set(grade.entries_of(original, changed)) - set(changed))] == [
        "x/__pycache__/__init__"
    ]


def test_pytest_is_not_compiled_again_in_every_sandbox(pool: Pool, tmp_path: Path) -> None:
    """Half the time of `run_tests` went into compiling pytest."""
    built = root.ready(lock_of(str(tiny.archive(tmp_path)), (), lambda _: None))
    with pool.take(run.spec_of(built, {})) as box:
        done = box.exec(["python3", "-c", "import _pytest.config as c, pluggy as p; print(c.__cached__, p.__cached__)"])
    config, pluggy = done.stdout.decode().split()
    for place in (config, pluggy):
        assert (built.site / place.removeprefix(f"{root.SITE}/")).is_file()
