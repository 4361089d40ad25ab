"""A package becomes an environment: what is kept and why not, tasks that verify, the same bits, and no cheating."""

import asyncio
import io
import json
import os
import random
import re
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from agentrl import sandboxes
from agentrl.catalogue import cache_folder
from agentrl.envs.coding import named_like
from agentrl.envs.play import Stage, play
from agentrl.errors import UserError
from agentrl.interop.harbor_export import harbor
from agentrl.repos import build, root, source, suite
from agentrl.repos.environment import RepositoryEnvironment, repository, without
from agentrl.sandboxes.pool import Pool
from agentrl.types import SPLITS, ToolCall
from tests.repos import tiny

PRINTING = """import os
for number in range(3, 40):
    try:
        os.write(number, b'{"op": "done", "passed": []}\\n')
    except OSError:
        pass
"""
OPTIONS = build.Options(per_function=2, max_tasks=9)


@pytest.fixture(scope="module")
def images() -> Path:
    """Where the docker backend keeps its base image, before the tests have a cache of their own."""
    return cache_folder() / "images"


@pytest.fixture(scope="module")
def cache(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache of its own: what others built must not help."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENTRL_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="module")
def tinysums(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the environment, built once."""
    folder = tmp_path_factory.mktemp("project")
    build.build(str(tiny.archive(folder)), folder / "envs" / "tinysums", OPTIONS, lambda text: None)
    return folder / "envs" / "tinysums"


@pytest.fixture(scope="module")
def where() -> Iterator[Stage]:
    with Pool(sandboxes.load("namespace")(), limit=8) as pool:
        yield Stage(boxes=pool, key=b"k" * 32)


def test_tests_are_kept_or_left_out_with_a_reason(tinysums: Path) -> None:
    known = suite.read(tinysums)
    reasons = {name.rpartition("::")[2]: why.split(":")[0] for name, why in known.left_out.items()}
    assert reasons == {
        "test_needs_the_first": "depends on the order of the tests",
        "test_network": "needs the network",
        "test_writes_outside": "does not pass here (setup, call failed, teardown)",
        "test_skipped": "does not pass here (setup skipped, teardown)",
    }
    assert {split for split in SPLITS if known.of(split, 1)} == set(SPLITS)


def test_a_test_that_imports_everything_gets_the_names_of_the_pinned_package(tinysums: Path) -> None:
    known = suite.read(tinysums)
    assert known.names == {"tinysums": ["WORDS", "clamp", "ends", "mean", "pairs", "shout", "total", "whisper"]}
    assert "tests/test_star.py::test_by_star" in known.grading


def test_no_function_is_in_two_splits(tinysums: Path) -> None:
    splits: dict[str, set[str]] = {}
    for recipe in suite.read(tinysums).recipes:
        for change in recipe.changes:
            splits.setdefault(change.function, set()).add(recipe.split)
    assert {name: len(of) for name, of in splits.items() if len(of) > 1} == {}


def test_the_folder_holds_no_code_of_the_package(tinysums: Path) -> None:
    texts = "".join(path.read_text() for path in tinysums.iterdir() if path.is_file())
    assert [line for line in tiny.CODE.splitlines() if len(line) > 20 and line.strip() in texts] == []


def test_the_same_input_gives_the_same_bits(tinysums: Path, tmp_path: Path) -> None:
    """A second build takes every finished stage from the cache, and writes the same files."""
    said: list[str] = []
    archive = tinysums.parent.parent / "tinysums-1.0.tar.gz"
    build.build(str(archive), tmp_path / "tinysums", OPTIONS, said.append)
    for name in ("lock.json", "tests.json", "calls.json", "tasks.json", "__init__.py", "README.md"):
        assert (tmp_path / "tinysums" / name).read_bytes() == (tinysums / name).read_bytes(), name
    assert [text for text in said if text.startswith("running")] == []


def test_the_expert_scores_one_nothing_zero_and_cheats_zero(tinysums: Path, where: Stage) -> None:
    """Whatever is written beside the package, or into the process that serves the tests, gains nothing."""
    kind = repository(tinysums)
    kind.name = "tinysums"
    task = kind().task("train", 1, 0)
    assert {path for path in (change.file for change in kind().recipes[task.setup["recipe"]].changes)} == {
        "tinysums/__init__.py"
    }
    hook = "import os, sys; os._exit(0)"
    report = "import pytest, _pytest.runner; _pytest.runner.runtestprotocol = lambda *a, **k: []"
    everything_equal = (
        "import tinysums\nclass Yes:\n    __eq__ = lambda self, other: True\n"
        "    __iter__ = lambda self: iter([Yes()])\n"
        "for name in ('clamp', 'total', 'mean', 'pairs', 'shout'):\n"
        "    setattr(tinysums, name, lambda *a, **k: Yes())\n"
    )
    cheats = {
        "conftest": {"conftest.py": "def pytest_runtest_makereport(item, call): ...\n", "tests/conftest.py": report},
        "configuration": {"pytest.ini": "[pytest]\naddopts = --collect-only\n", "sitecustomize.py": hook},
        "tests": {"tests/test_sums.py": "def test_nothing(): pass\n", "easy.pth": hook},
        "exit": {"tinysums/extra.py": hook},
        "shadow": {"pytest.py": report, "json.py": hook, "tinysums/pytest.py": report},
        "equal": {"tinysums/extra.py": everything_equal},
        "print": {"tinysums/extra.py": PRINTING},
    }  # fmt: skip

    async def score(files: dict[str, str]) -> float | None:
        calls: list[ToolCall | str] = []
        for path, text in files.items():
            command = f"mkdir -p $(dirname {path}); cat > {path} <<'END'\n{text}\nEND"
            calls.append(ToolCall(name="run", arguments={"command": command}))
        if any(path.startswith("tinysums/") for path in files):
            calls.append(
                ToolCall(name="run", arguments={"command": "echo 'from . import extra' >> tinysums/__init__.py"})
            )
        return (await play(kind(), task, [*calls, "done"], where)).score

    async def scores() -> dict[str, float | None]:
        environment = kind()
        expert = await play(environment, task, environment.expert(task), where)
        others = await asyncio.gather(*(score(files) for files in ({}, *cheats.values())))
        return {"expert": expert.score, **dict(zip(("nothing", *cheats), others, strict=True))}

    assert asyncio.run(scores()) == {"expert": 1.0, "nothing": 0.0, **dict.fromkeys(cheats, 0.0)}


@pytest.mark.skipif(not os.environ.get("AGENTRL_FULL"), reason="nine gradings in containers; AGENTRL_FULL=1")
@pytest.mark.timeout(1800)
def test_verdicts_in_containers_are_those_of_namespaces(
    tinysums: Path, cache: Path, where: Stage, images: Path
) -> None:
    """The expert scores 1, nothing and a cheat 0, in every split, from the same workspace to the same workspace. (What
    a command says of the machine may differ: some of these tests want the network, or to write outside.)"""
    docker = pytest.importorskip("docker", reason="the Docker SDK is missing: pip install 'agentrl[docker]'")
    from agentrl.sandboxes.docker import daemon

    if images.is_dir():
        (cache / "images").symlink_to(images)  # else the base image is made again, which takes minutes
    kind = repository(tinysums)
    kind.name = "tinysums"
    tasks = [kind().task(split, 1, 0) for split in SPLITS]
    hook = ToolCall(name="run", arguments={"command": "echo 'import os; os._exit(0)' > tinysums/extra.py"})

    async def played(boxes: Pool) -> list[tuple[float | None, object, object]]:
        stage = Stage(boxes=boxes, key=b"k" * 32, grading_s=600.0)
        nothing: list[ToolCall | str] = ["done"]
        scripts = [(task, script) for task in tasks for script in (kind().expert(task), nothing, [hook, *nothing])]
        every = [await play(kind(), task, script, stage, digests=True) for task, script in scripts]
        return [(one.score, one.messages[:2], one.digests) for one in every]

    with ExitStack() as stack:
        try:
            stack.enter_context(daemon.running())
        except UserError as error:
            pytest.skip(str(error))
        with Pool(sandboxes.load("docker")(), limit=4) as boxes:
            inside = asyncio.run(played(boxes))
        with closing(docker.from_env()) as client:
            left = client.api.containers(all=True, filters={"label": "agentrl.owner"})
    assert [score for score, *_ in inside] == [1.0, 0.0, 0.0] * len(tasks)
    assert isinstance(where.boxes, Pool)
    assert inside == asyncio.run(played(where.boxes))
    assert left == []


@pytest.mark.skipif(
    not os.environ.get("AGENTRL_FULL") or os.geteuid() != 0 or not Path("/usr/bin/python3").exists(),
    reason="AGENTRL_FULL=1, as root, with a Python that every user can run: submitted code gets users of its own",
)
def test_a_task_as_a_harbor_folder_grades_without_agentrl(tinysums: Path, tmp_path: Path) -> None:
    """The expert's script scores 1, an untouched workspace 0, and so does a fix with a wrong byte elsewhere, with the
    folder's own sources and a bare Python; the agent's part holds no hidden test."""
    (folder,) = harbor(str(tinysums), tmp_path / "tasks", {}, count=1)
    about = json.loads((folder / "tests/task.json").read_text())
    app, out = tmp_path / "app", tmp_path / "out"
    for place in (app, out):
        place.mkdir()
    with tarfile.open(folder / "environment/workspace.tar") as tar:
        text = b"".join(tar.extractfile(m).read() for m in tar if m.isreg() and "tests/" in m.name)  # type: ignore[union-attr]
        tar.extractall(app, filter="data")
    hidden = {name.rpartition("::")[2].split("[")[0] for name in about["ids"]}
    assert [name for name in hidden if f"def {name}(".encode() not in text]
    (folder / "tests/task.json").write_text(json.dumps({**about, "workdir": str(app)}))
    scores = []
    solve = (folder / "solution/solve.sh").read_text().replace("cd /app", f"cd {app}")
    for script in ("true", solve, "sed -i 's/text.lower/text.title/' tinysums/__init__.py"):
        subprocess.run(["bash", "-c", script], cwd=app, check=True)
        command = ["/usr/bin/python3", "-I", "-S", "-B", str(folder / "tests/grade.py"), str(out)]
        done = subprocess.run(
            command, cwd="/", env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        scores.append(json.loads((out / "reward.json").read_text())["reward"])
    assert scores == [0.0, 1.0, 0.0]


def test_hidden_tests_are_not_in_the_workspace(tinysums: Path) -> None:
    environment: RepositoryEnvironment = repository(tinysums)()
    environment.__class__.name = "tinysums"
    for index in range(environment.size_of("train", 1)):
        task = environment.task("train", 1, index)
        recipe = environment.recipes[task.setup["recipe"]]
        text = environment.prepare(task, random.Random(0)).files["tests/test_sums.py"]
        assert isinstance(text, bytes)
        names = [name.rpartition("::")[2] for name in recipe.hidden]
        assert names and [name for name in names if f"def {name}(".encode() in text] == []
        assert set(recipe.fails) & {name for name in recipe.fails if name.split("[")[0] in recipe.hidden}


def test_a_class_whose_tests_are_all_hidden_stays_valid() -> None:
    text = b"class TestA:\n    @mark\n    def test_a(self):\n        pass\n\n\ndef test_b():\n    pass\n"
    assert without(text, {"TestA::test_a"}) == b"class TestA:\n    pass\n\n\ndef test_b():\n    pass\n"


def test_a_right_fix_with_one_wrong_byte_elsewhere_scores_nothing(tinysums: Path, where: Stage) -> None:
    """The fault is put right and one byte of code that no test calls is not; a scratch file beside the fix is free."""
    kind = repository(tinysums)
    kind.name = "tinysums"
    task = kind().task("train", 1, 0)
    fix = list(kind().expert(task))[:-2]
    scripts = {
        "right": "true",
        "with a scratch file": "echo 'print(1)' > tinysums/scratch.py; echo '# ' >> tinysums/__init__.py",
        "a byte of a function": "sed -i 's/text.lower/text.title/' tinysums/__init__.py",
        "a byte of a table": 'sed -i \'s/"two": 2/"two": 7/\' tinysums/__init__.py',
    }

    async def scores() -> dict[str, float | None]:
        out = {}
        for name, script in scripts.items():
            calls = [*fix, ToolCall(name="run", arguments={"command": script}), "done"]
            out[name] = (await play(kind(), task, calls, where)).score
        return out

    assert asyncio.run(scores()) == {
        "right": 1.0, "with a scratch file": 1.0, "a byte of a function": 0.0, "a byte of a table": 0.0,
    }  # fmt: skip


def test_a_verdict_ends_where_the_fault_is_seen(tinysums: Path, where: Stage) -> None:
    """An untouched package runs no test, one whose fault is still there only those that the fault breaks."""
    kind = repository(tinysums)
    kind.name = "tinysums"
    task = kind().task("train", 1, 0)
    broken = len(kind().recipes[task.setup["recipe"]].fails)
    comment = ToolCall(name="run", arguments={"command": "echo '# Fixed.' >> tinysums/__init__.py"})

    async def evidence(*actions: ToolCall | str) -> str:
        verdict = (await play(kind(), task, actions, where)).verdict
        assert verdict is not None
        return verdict.evidence[0]

    async def all_of_them() -> list[str]:
        return [await evidence("done"), await evidence(comment, "done"), await evidence(*kind().expert(task))]

    untouched, unfixed, fixed = asyncio.run(all_of_them())
    assert untouched == "the package is as it was"
    assert unfixed == f"0 of {broken} tests that the fault breaks passed"
    assert fixed == f"{broken} of {broken} hidden tests passed"  # no other test calls the function


def test_tools_say_what_to_do_next(tinysums: Path, where: Stage) -> None:
    """Lines by number, a folder that is not there, an old text that is nearly right, and an end before any change."""
    kind = repository(tinysums)
    kind.name = "tinysums"
    task = kind().task("train", 1, 0)
    actions: list[ToolCall | str] = [
        ToolCall(name="view", arguments={"path": "tinysums/__init__.py", "first": 1, "last": 1}),
        ToolCall(name="search", arguments={"text": "def mean(", "path": "*"}),
        ToolCall(name="search", arguments={"text": "def mean_of_one("}),
        ToolCall(name="edit", arguments={"path": "tinysums/__init__.py", "old": "def maen(numbers):", "new": "x"}),
        "done",
        "done",
    ]
    played = asyncio.run(play(kind(), task, actions, where))
    answers = [message.content for message in played.messages[2:] if message.role != "assistant"]
    assert answers[0].startswith('<out>    1 """Small sums."""\n(') and answers[0].endswith(" more lines)</out>")
    assert answers[1] == "<out>error: there is no '*'; leave path empty to look in all files</out>"
    assert re.fullmatch(r"<out>not found; functions of a similar name:\ntinysums.*def mean.*</out>", answers[2])
    assert answers[3].endswith("where the nearest lines are:\ndef mean(numbers):</out>")
    assert answers[4].startswith("Nothing was changed yet") and len(answers) == 5


def test_a_search_that_finds_nothing_names_functions_that_are_meant() -> None:
    """Reports speak of what a test does: test_mean_of_one is about mean()."""
    lines = [
        "a.py:3:def mean(numbers):",
        "a.py:9:    def meaning(self):",
        "b.py:1:async def one_mean():",
        "b.py:7:x = 1",
    ]
    assert named_like("def mean_of_one(", lines) == ["b.py:1:async def one_mean():", "a.py:3:def mean(numbers):"]
    assert named_like("def test_(", lines) == named_like("42", lines) == []


def test_tests_that_never_end_are_ended_by_their_processor_time(
    tinysums: Path, where: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wall time depends on what else is at work: sixteen episodes at once saw other results than one."""
    monkeypatch.setattr("agentrl.repos.environment.RUN_SECONDS", 1)
    kind = repository(tinysums)
    kind.name = "tinysums"
    spoilt = ToolCall(name="run", arguments={"command": "echo 'while True: pass' >> tinysums/__init__.py"})
    tests = ToolCall(name="run_tests", arguments={})
    played = asyncio.run(play(kind(), kind().task("train", 1, 0), [spoilt, tests, "done"], where))
    (said,) = [message.content for message in played.messages if message.name == "run_tests"]
    assert said.endswith("[ended by a signal: CPU time limit exceeded]</out>")


def test_an_end_with_failing_tests_is_sent_back_once(tinysums: Path, where: Stage) -> None:
    kind = repository(tinysums)
    kind.name = "tinysums"
    task = kind().task("train", 1, 0)
    spoilt = ToolCall(name="run", arguments={"command": "echo 'raise ValueError' >> tinysums/__init__.py"})
    tests = ToolCall(name="run_tests", arguments={})
    played = asyncio.run(play(kind(), task, [tests, spoilt, tests, "done", "done"], where))
    answers = [message.content for message in played.messages[2:] if message.role == "user"]
    assert len(answers) == 1 and answers[0].startswith("The tests that you ran last fail.")
    played = asyncio.run(play(kind(), task, [spoilt, "done"], where))  # it ran none: nothing was said about them
    assert [message for message in played.messages[2:] if message.role == "user"] == []


def test_the_expert_edits_only_what_it_has_seen(tinysums: Path, where: Stage) -> None:
    """A demonstration that edits unseen lines would teach to guess."""
    kind = repository(tinysums)
    kind.name = "tinysums"
    for level in kind.levels:
        task = kind().task("train", level, 0)
        played = asyncio.run(play(kind(), task, kind().expert(task), where))
        shown = [message.content for message in played.messages if message.name == "view"]
        seen = [line[6:].strip() for text in shown for line in text.splitlines()]
        edited = [call for message in played.messages for call in message.tool_calls if call.name == "edit"]
        assert edited and played.score == 1.0
        assert re.search(r"\d+ passed, \d+ deselected</out>$", played.messages[-2].content)  # none that fails anyhow
        for call in edited:
            assert {line.strip() for line in call.arguments["old"].splitlines()} <= set(seen)


def test_recorded_calls_judge_what_the_tests_do_not(tinysums: Path, where: Stage) -> None:
    """The tests of a function look at half of what it returns; a fix that gets the other half wrong scores 0."""
    known = suite.read(tinysums)
    key = "tinysums/__init__.py::ends"
    assert known.figures["functions_by_calls"] == 1 and known.calls[key].calls
    recipe = next(recipe for recipe in known.recipes if recipe.family == key)
    kind = repository(tinysums)
    kind.name = "tinysums"
    index = known.of(recipe.split, recipe.level).index(recipe)
    task = kind().task(recipe.split, recipe.level, index)
    bodies = {
        "right": "ordered = sorted(numbers)\\n    return [ordered[0], ordered[-1]]",
        "half right": "return [min(numbers), min(numbers)]",
    }

    async def score(body: str) -> float | None:
        script = f"sed -i '/Return the least/{{n; s/.*/    {body}/}}' tinysums/__init__.py"
        call = ToolCall(name="run", arguments={"command": script})
        return (await play(kind(), task, [call, "done"], where)).score

    async def scores() -> dict[str, float | None]:
        return {name: await score(body) for name, body in bodies.items()}

    assert asyncio.run(scores()) == {"right": 1.0, "half right": 0.0}


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"PKG-INFO": "Name: x\n", "x/__init__.py": ""}, "has no tests"),
        ({"PKG-INFO": "Name: x\n", "x/__init__.py": "", "x/fast.c": "", "tests/test_x.py": ""}, "compiled parts"),
        ({"x/__init__.py": "", "tests/test_x.py": ""}, "says no name"),
        ({"PKG-INFO": "Name: x\n", "tests/test_x.py": ""}, "no Python package"),
    ],
)
def test_input_that_cannot_be_used_is_refused_with_the_reason(
    files: dict[str, str], said: str, tmp_path: Path, cache: Path
) -> None:
    path = tiny.archive(tmp_path, files, "x-1.0")
    with pytest.raises(UserError, match=said):
        build.build(str(path), tmp_path / "x", OPTIONS, lambda text: None)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x-1.0.tar.gz"]


def test_a_bomb_and_a_path_outside_are_refused(tmp_path: Path) -> None:
    for name, size, said in (("x/big", source.MAX_BYTES + 1, "bomb"), ("../../etc/passwd", 1, "outside")):
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w:gz") as out:
            entry = tarfile.TarInfo(name)
            entry.size = size
            out.addfile(entry, io.BytesIO(bytes(size)))
        with pytest.raises(UserError, match=said):
            source.unpack(buffer.getvalue(), "x.tar.gz")


def test_an_archive_of_another_hash_is_refused(tinysums: Path, cache: Path) -> None:
    lock = suite.read(tinysums).lock
    kept = cache / "repos" / "archives" / lock.sha256
    data = kept.read_bytes()
    kept.write_bytes(data + b" ")
    try:
        with pytest.raises(UserError, match="its hash differs"):
            root.archive_bytes(lock)
    finally:
        kept.write_bytes(data)
    assert json.loads((tinysums / "lock.json").read_text())["sha256"] == lock.sha256
