"""Tests that an agent writes count if they notice faults by what the package does, and by nothing else."""

import asyncio
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl import sandboxes
from agentrl.envs.play import Stage, play
from agentrl.repos import build, compare, root, written_tests, written_tests_build
from agentrl.repos.mutate import Change
from agentrl.repos.written_tests import WritingRecipe
from agentrl.sandboxes.pool import Pool
from agentrl.types import ToolCall
from agentrl.verifiers.base import Context
from tests.repos import tiny

FULL = bool(os.environ.get("AGENTRL_FULL"))
CODE = '''"""Small sums."""
import inspect
from operator import attrgetter, methodcaller


def clamp(value, low, high):
    """Return the value, but never less than low nor more than high."""
    if value < low:
        return low
    if value > high:
        return high
    return value


def compose(*steps):
    """Return a function that calls these, the last one first."""

    def call(value):
        for step in reversed(steps):
            value = step(value)
        return value

    return call
'''
PROJECT = {"sums/__init__.py": CODE, "pyproject.toml": tiny.PYPROJECT.replace("tinysums", "sums")}
PROJECT |= {"tests/test_sums.py": "from sums import clamp\n\n\ndef test_clamp():\n    assert clamp(1, 2, 3) == 2\n"}
HONEST = """import sums


def test_inside():
    assert [sums.clamp(n, 2, 4) for n in range(7)] == [2, 2, 2, 3, 4, 4, 4]
"""
TRICKS = {
    "no file": "",
    "nothing": "def test_x():\n    pass\n",
    "no assertion": "import sums\n\ndef test_x():\n    sums.clamp(1, 2, 3)\n",
    "always fails": "import sums\n\ndef test_x():\n    assert sums.clamp(1, 2, 3) == 9\n",
    "chance": "import random, sums\n\ndef test_x():\n    sums.clamp(5, 2, 3)\n    assert random.random() < 0.3\n",
    "other calls by chance": (
        "import random, sums\n\ndef test_x():\n    assert sums.clamp(random.random(), 0.0, 1.0) < 0.3\n"
    ),
    "time": "import time, sums\n\ndef test_x():\n    assert time.time_ns() % 3\n",
    "source": (
        "import sums\n\ndef test_x():\n    text = sums.inspect.getsource(sums.clamp)\n"
        "    assert 'value < low' in text and 'value > high' in text\n"
    ),
    "bytecode": (
        "import sums\n\ndef test_x():\n    assert sums.attrgetter('__co' + 'de__.co_code')(sums.clamp)\n"
        "    assert sums.clamp(1, 2, 3) == 2\n"
    ),
    "names of the code, counted inside": (
        "import sums\n\ndef test_x():\n"
        "    count = sums.compose(sums.methodcaller('__len__'), sums.attrgetter('__code__.co_consts'))\n"
        "    assert count(sums.clamp) == 1\n"
    ),
    "file": "import sums\n\ndef test_x():\n    assert len(open(sums.__file__).read()) == 500\n",
    "path": "def test_x():\n    assert open('/box/sums/__init__.py').read()\n",
    "forged report": (
        "import os, json, sys\nfrom agentrl.verifiers.hidden_tests import inside_tests\n\ndef test_x():\n    pass\n"
    ),
    "forged request": (
        "import sys, sums\n\ndef test_x():\n    ask = type(sums).__getattr__.__globals__['ask']\n"
        "    text = ask('get', at={'module': 'sums'}, name='inspect')\n"
        "    ask('call', at={'m': 'inspect', 'n': 'getsource'}, args=[{'m': 'sums', 'n': 'clamp'}], kwargs={})\n"
    ),
    "an operator that no test has": (
        "import sums\n\ndef test_x():\n    ask = type(sums).__getattr__.__globals__['ask']\n"
        "    ask('attrgetter', at='x', args=[])\n"
    ),
}


def faults() -> list[tuple[object, ...]]:
    """Faults of clamp, as coordinates."""
    rows: list[tuple[object, ...]] = []
    for old, new in (("value < low", "value > low"), ("value > high", "value < high"), ("return low", "return 0")):
        start = CODE.index(old)
        rows.append(("sums/__init__.py", start, start + len(old), new, "operator", "clamp"))
    return rows


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Iterator[root.Root]:
    from agentrl.repos.lock import lock_of

    folder = tmp_path_factory.mktemp("sums")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENTRL_CACHE", str(folder / "cache"))
        yield root.ready(lock_of(str(tiny.archive(folder, PROJECT, "sums-1.0")), (), lambda text: None))


def test_only_tests_that_notice_what_the_package_does_count(sums: root.Root) -> None:
    """Chance, time, the source, bytecode, files and forged messages gain nothing; the reason is said."""
    recipe = WritingRecipe("x", "train", 1, "sums/__init__.py::clamp", "tests/test_added.py", (), (), (), "", ())

    some = ("chance", "source")
    tricks = TRICKS if FULL else {name: TRICKS[name] for name in some}

    async def results() -> dict[str, bool]:
        with Pool(sandboxes.load("namespace")(), limit=8) as pool:
            told = {}
            for name, text in {"honest": HONEST, **tricks}.items():
                context = Context(secret=name.encode(), boxes=pool)
                wrong, noticed = await written_tests.judged(sums, recipe, text.encode(), faults(), context)
                told[name] = not wrong and all(noticed)
            return told

    assert asyncio.run(results()) == {"honest": True, **dict.fromkeys(tricks, False)}


def test_requests_may_use_the_package_and_not_look_into_it() -> None:
    """Plain types and exceptions are handed over; names that no reply gave, other modules and code are not."""
    at = {"m": "sums", "n": "clamp"}
    call = {"op": "call", "at": at, "args": [1, {"builtin": "TypeError"}, {"builtin": "int"}], "kwargs": {}}
    issued = {("sums", "clamp")}
    assert compare.refusal(call, ["sums"], issued) == ""
    told = {
        "not given": compare.refusal(call, ["sums"], set()),
        "eval": compare.refusal({**call, "args": [{"builtin": "eval"}]}, ["sums"], issued),
        "code": compare.refusal({"op": "get", "at": at, "name": "__code__"}, ["sums"], issued),
        "frame": compare.refusal({"op": "get", "at": {"o": 1}, "name": "gi_frame"}, ["sums"], issued),
        "dotted": compare.refusal({"op": "get", "at": at, "name": "a.b"}, ["sums"], issued),
        "module": compare.refusal({"op": "get", "at": {"module": "inspect"}, "name": "x"}, ["sums"], issued),
        "import": compare.refusal({"op": "import", "name": "inspect"}, ["sums"], issued),
        "operator": compare.refusal({"op": "attrgetter", "at": "x"}, ["sums"], issued),
        "text": compare.refusal({**call, "args": ["__import__('os')"]}, ["sums"], issued),
        "nested": compare.refusal({**call, "kwargs": {"x": [{"module": "os"}]}}, ["sums"], issued),
    }
    assert [name for name, why in told.items() if not why] == []


def test_a_rewritten_package_does_the_same_and_looks_different() -> None:
    one, two = (compare.rewritten({"m.py": CODE.encode()}, random.Random(seed))["m.py"] for seed in (1, 2))
    spaces: list[dict[str, object]] = [{}, {}, {}]
    for text, space in zip((CODE.encode(), one, two), spaces, strict=True):
        exec(compile(text, "m", "exec"), space)
    clamps = [space["clamp"] for space in spaces]
    assert [[f(n, 2, 4) for n in range(7)] for f in clamps] == [[2, 2, 2, 3, 4, 4, 4]] * 3  # type: ignore[operator]
    for field in ("co_code", "co_consts", "co_names", "co_varnames", "co_firstlineno"):
        assert len({str(getattr(f.__code__, field)) for f in clamps}) > 1, field  # type: ignore[attr-defined]


@pytest.mark.skipif(not FULL, reason="builds an environment: AGENTRL_FULL=1")
def test_a_package_gives_tasks_to_write_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The workspace lacks every test of the function, the package's own tests score 1, and an empty file 0."""
    monkeypatch.setenv("AGENTRL_CACHE", str(tmp_path / "cache"))
    options = build.Options(per_function=5, max_tasks=3)
    out = tmp_path / "tiny_tests"
    known = written_tests_build.build(str(tiny.archive(tmp_path)), out, options, lambda text: None)
    kind = written_tests.environment(out)
    kind.name = "tiny_tests"
    assert [recipe.split for recipe in known.recipes] == ["train", "heldout", "test"]
    task = kind().task("train", 1, 0)
    recipe = kind.recipes[task.setup["recipe"]]
    files = kind().prepare(task, random.Random(0)).files
    tests = files["tests/test_sums.py"]
    assert isinstance(tests, bytes)
    assert [name for name in recipe.absent if f"def {name.rpartition('::')[2]}(".encode() in tests] == []
    assert all(Change(*fault).function == recipe.function.partition("::")[2] for fault in recipe.hidden)
    assert [path for path in files if path.startswith("faults/")] == [
        f"faults/{n + 1}.diff" for n in range(len(recipe.given))
    ]

    async def scores() -> list[float | None]:
        with Pool(sandboxes.load("namespace")(), limit=8) as pool:
            where = Stage(boxes=pool, key=b"k" * 32)
            empty = ToolCall(name="run", arguments={"command": f"echo 'def test_x(): pass' > {recipe.path}"})
            link = ToolCall(name="run", arguments={"command": f"ln -s test_sums.py {recipe.path}"})
            plays: list[list[ToolCall | str]] = [kind().expert(task), ["done"], [empty, "done"], [link, "done"]]
            return [(await play(kind(), task, actions, where)).score for actions in plays]

    assert asyncio.run(scores()) == [1.0, 0.0, 0.0, 0.0]
