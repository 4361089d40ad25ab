"""Repair: the references are right, the mutants are wrong, hidden tests tell them apart, and tasks do not repeat."""

import ast
import asyncio
import errno
import random
import re
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.envs.edits import edits, indented, nearest, substituted
from agentrl.envs.play import Action, Played, Stage, play
from agentrl.envs.repair import HIDDEN, Repair, reference, verify, wrong_line
from agentrl.envs.repair.mutate import Change, apply, changes
from agentrl.envs.repair.program import Program, call
from agentrl.envs.repair.programs import PROGRAMS
from agentrl.envs.repair.table import mutants
from agentrl.envs.repair.tasks import LEVELS, Choices, candidates, repository
from agentrl.redteam import mutate as redteam
from agentrl.sandboxes.base import ExecResult
from agentrl.types import SPLITS, Split, Task, ToolCall
from tests.pace import within

KINDS = {"algorithms", "text", "parsers", "structures", "dates", "money", "graphs"}
KNOWN: list[tuple[str, str, tuple[Any, ...], Any]] = [
    ("bisecting", "find", ([1, 2, 2, 9], 2), 1),
    ("intervals", "merge", ([[5, 8], [1, 3], [3, 4]],), [[1, 4], [5, 8]]),
    ("coins", "fewest", ([1, 3, 4], 6), 2),
    ("knapsack", "best_value", ([[3, 4], [2, 3], [2, 3]], 4), 6),
    ("rising", "longest_rising", ([3, 1, 2, 2, 5],), 3),
    ("bases", "to_base", (-255, 16), "-ff"),
    ("spiral", "spiral", ([[1, 2, 3], [4, 5, 6], [7, 8, 9]],), [1, 2, 3, 6, 9, 8, 7, 4, 5]),
    ("runs", "encode", ("aaabcc",), "3a1b2c"),
    ("wrap", "wrap", ("ab cd efg", 5), ["ab cd", "efg"]),
    ("caesar", "shift", ("Xyz, a!", 3), "Abc, d!"),
    ("slug", "slug", ("Hello, World!", 20), "hello-world"),
    ("cells", "cells", ('a,"b,c","d""e"',), ["a", "b,c", 'd"e']),
    ("calc", "value", ("2+3*(4-1)-5",), 6),
    ("durations", "seconds", ("1h30m",), 5400),
    ("roman", "to_roman", (1994,), "MCMXCIV"),
    ("brackets", "problem", ("(a[b)]",), 4),
    ("versions", "newest", (["1.9.0", "1.10.0-rc1", "1.10.0"],), "1.10.0"),
    ("weekday", "weekday", (2000, 1, 1), "Sat"),
    ("later", "add_months", ([2024, 1, 31], 1), [2024, 2, 29]),
    ("clock", "between", ("23:30", "00:15"), 45),
    ("bookings", "gaps", ([[3, 4], [6, 6]], [1, 9]), [[1, 2], [5, 5], [7, 9]]),
    ("workdays", "due", (4, 1, []), 7),
    ("split", "split", (100, [1, 1, 1]), [34, 33, 33]),
    ("tax", "tax", (1000, [[0, 10], [500, 20]]), 150),
    ("basket", "total", ([["a", 3, 500]], 0, 2000), 1495),
    ("rounding", "divide", (5, 2), 2),
    ("loan", "schedule", (1000, 10, 600), [[100, 600, 500], [50, 550, 0]]),
    ("hops", "path", ({"a": ["b"], "b": ["c"], "c": []}, "a", "c"), ["a", "b", "c"]),
    ("roads", "distances", ({"a": {"b": 9, "c": 2}, "b": {}, "c": {"b": 3}}, "a"), {"a": 0, "c": 2, "b": 5}),
    ("ordering", "order", ({"a": ["c"], "b": [], "c": []},), ["b", "c", "a"]),
    ("flood", "area", ([".#.", "...", "#.#"], 0, 0), 6),
    ("bosses", "depths", ({"a": "", "b": "a", "c": "a", "d": "c"},), [1, 2, 1]),
]


def played(where: Stage, task: Task, *actions: Action) -> Played:
    return asyncio.run(play(Repair(), task, actions, where))


def namespace(source: str) -> SimpleNamespace:
    space: dict[str, Any] = {"__name__": "candidate"}
    exec(compile(source, "candidate.py", "exec"), space)
    return SimpleNamespace(**space)


def hidden(program: Program, seed: int) -> list[Any]:
    return [*program.edges, *reference.drawn(program, random.Random(seed), HIDDEN)]


def test_there_are_fifty_programs_of_seven_kinds() -> None:
    assert len(PROGRAMS) == 50
    assert {program.kind for program in PROGRAMS.values()} == KINDS
    assert all(list(PROGRAMS.values()).count(program) == 1 for program in PROGRAMS.values())
    assert max(program.source.count("\n") for program in PROGRAMS.values()) <= 50
    assert all('"""' in program.source for program in PROGRAMS.values())


@pytest.mark.parametrize(("name", "function", "args", "expected"), KNOWN, ids=lambda value: str(value)[:20])
def test_references_give_what_is_known(name: str, function: str, args: tuple[Any, ...], expected: Any) -> None:
    assert reference.run(reference.names(name), call(function, *args)) == [reference.Result(expected)]


def test_programs_written_anew_agree_with_the_references() -> None:
    rewritten = {name: program.others for name, program in PROGRAMS.items() if program.others}
    assert len(rewritten) >= 8
    for name, others in rewritten.items():
        for other in others:
            for probe in hidden(PROGRAMS[name], 3):
                assert reference.run(namespace(other), probe) == reference.run(reference.names(name), probe), name


def test_probes_leave_their_arguments_alone() -> None:
    broken = namespace("def merge(intervals):\n    intervals.clear()\n    return []\n")
    probe = call("merge", [[1, 2]])
    assert reference.run(broken, probe) == [reference.Result([])]
    assert probe == call("merge", [[1, 2]])


def test_changes_of_every_kind() -> None:
    source = (
        "def f(a, b):\n    if not a:\n        return 0\n    b += 1\n    return max(a, b) if a < b and b else a - b\n"
    )
    found = {(change.kind, source[change.start : change.end], change.text) for change in changes(source)}
    assert {
        ("condition", "not a", "not (not a)"),
        ("condition", "not a", "a"),
        ("edge case", "    if not a:\n        return 0\n", ""),
        ("dropped statement", "    b += 1\n", ""),
        ("operator", "+", "-"),
        ("operator", "-", "+"),
        ("comparison", "<", "<="),
        ("comparison", "<", ">"),
        ("condition", "and", "or"),
        ("off by one", "1", "2"),
        ("off by one", "0", "1"),
        ("wrong function", "max", "min"),
        ("swapped arguments", "a, b", "b, a"),
    } <= found
    assert ("wrong variable", "a", "b") in found
    assert apply("a + b", [Change("operator", 2, 3, "-")]) == "a - b"


def test_a_sample_of_the_table_is_verified_again() -> None:
    every = [mutant for name in PROGRAMS for mutant in mutants()[name]]
    assert len(every) > 7_500 and all(mutant.mask for mutant in every)
    for mutant in random.Random(1).sample(every, 60):
        assert verify.mask(PROGRAMS[mutant.program], mutant.changes) == mutant.mask, mutant
    kinds = {change.kind for mutant in every for change in mutant.changes}
    assert len(kinds) >= 9


def test_endless_loops_are_no_mutants() -> None:
    program = PROGRAMS["workdays"]
    at = program.source.index("day += 1")
    assert verify.mask(program, [Change("endless", at, at + len("day += 1"), "pass")]) == 0


def test_hidden_tests_kill_at_least_95_in_100_of_other_mutants() -> None:
    killed = alive = 0
    for name in ("intervals", "settings", "ring"):
        probes, right = hidden(PROGRAMS[name], 5), reference.names(name)
        expected = [reference.run(right, probe) for probe in probes]
        for _, source in redteam.mutants(PROGRAMS[name].source):
            try:
                broken = namespace(source)
                dead = any(repr(verify._limited(broken, p)) != repr(e) for p, e in zip(probes, expected, strict=True))
            except (Exception, verify._TooLong):
                dead = True
            killed, alive = killed + dead, alive + (not dead and not _only_texts(name, source))
    assert killed > 90
    assert killed / (killed + alive) >= 0.95


def _only_texts(name: str, source: str) -> bool:
    """Whether only a docstring or the text of an error differs: nobody could tell."""

    def bare(text: str) -> str:
        tree = ast.parse(text)
        for node in ast.walk(tree):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                node.exc.args = []
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                node.value.value = ""
        return ast.dump(tree)

    return bare(PROGRAMS[name].source) == bare(source)


def test_edits_turn_every_mutant_back() -> None:
    for name in PROGRAMS:
        for mutant in random.Random(2).sample(mutants()[name], 5):
            text = mutant.source
            for old, new in edits(text, PROGRAMS[name].source):
                assert text.count(old) == 1
                text = text.replace(old, new)
            assert text == PROGRAMS[name].source


@pytest.mark.parametrize("level", Repair.levels)
def test_the_expert_and_others_solve_it_and_nothing_less_does(level: int, where: Stage) -> None:
    environment = Repair()
    task = environment.task("heldout", level, 3)
    expert = environment.expert(task)
    whole = played(where, task, *expert)
    assert whole.score == 1.0
    assert whole.messages[-2].content.endswith(" 0 failed</out>")
    assert played(where, task, "done").score == 0.0
    assert [played(where, task, *actions).score for actions in environment.alternatives(task)] == [1.0, 1.0]
    edited = [action for action in expert if isinstance(action, ToolCall) and action.name == "edit"]
    if len(edited) > 1:
        assert played(where, task, *edited[:-1], "done").score == 0.0


@pytest.mark.parametrize(("level", "fails"), [(1, True), (4, True), (6, False)])
def test_public_tests_tell_as_much_as_the_level_says(level: int, fails: bool, where: Stage) -> None:
    task = Repair().task("train", level, 5)
    output = played(where, task, ToolCall(name="run_tests")).messages[-1].content
    assert (" 0 failed" not in output) == fails
    assert (", got == " in output or "Error:" in output) == fails


def test_mending_the_tests_or_breaking_a_sound_module_scores_nothing(where: Stage) -> None:
    environment = Repair()
    task = environment.task("train", 1, 0)
    path = next(path for path in task.setup["files"] if path.startswith("test_"))
    wipe = {"path": path, "old": task.setup["files"][path], "new": "def test_1():\n    pass\n"}
    cheat = played(where, task, ToolCall(name="edit", arguments=wipe), ToolCall(name="run_tests"), "done")
    assert (cheat.score, cheat.messages[-2].content) == (0.0, "<out>1 passed, 0 failed</out>")
    task = environment.task("train", 5, 0)
    sound = next(
        p for p in task.setup["files"] if p.startswith("lib/") and p not in task.secret["fixed"] and "__" not in p
    )
    spoil = {"path": sound, "old": task.setup["files"][sound], "new": "def nothing():\n    pass\n"}
    assert (
        played(where, task, *environment.expert(task)[:-1], ToolCall(name="edit", arguments=spoil), "done").score == 0.0
    )


def test_tools_say_what_is_wrong(where: Stage) -> None:
    task = Repair().task("train", 1, 0)
    (path,) = task.secret["fixed"]
    whole = task.setup["files"][path]
    calls = [
        ToolCall(name="edit", arguments={"path": path, "old": "no such text", "new": ""}),
        ToolCall(name="edit", arguments={"path": path, "old": "", "new": "x"}),
        ToolCall(name="edit", arguments={"path": path, "old": whole, "new": whole}),
        ToolCall(name="view", arguments={"path": "../etc/passwd"}),
        ToolCall(name="view", arguments={"path": "lib/none.py"}),
        ToolCall(name="edit", arguments={"path": path, "old": whole, "new": "def ("}),
        ToolCall(name="run_tests"),
    ]
    seen = [m.content for m in played(where, task, *calls).messages if m.role == "tool"]
    copy = "read the file and copy the lines to change from it"
    assert seen[0] == f"<out>error: the old text is not in {path}; {copy}</out>"
    assert seen[1] == seen[0]
    same = "the old text and the new one are the same; write the new one as it should be"
    assert seen[2] == f"<out>error: {same}</out>"
    assert seen[3] == "<out>error: give a path of the repository, such as lib/name.py</out>"
    assert seen[4].startswith("<out>error:") and seen[5] == "<out>edited; now run the tests</out>"
    assert "cannot be imported: SyntaxError" in seen[6] and seen[6].endswith("0 passed, 1 failed</out>")


def test_level_1_shows_what_reading_and_testing_would(where: Stage) -> None:
    for index in (0, 7):
        task = Repair().task("train", 1, index)
        (path,) = task.secret["fixed"]
        calls = [ToolCall(name="view", arguments={"path": path}), ToolCall(name="run_tests")]
        opening, viewed, tested = [
            m.content for m in played(where, task, *calls).messages if m.role in ("user", "tool")
        ]
        text, said = (content.removeprefix("<out>").removesuffix("</out>") for content in (viewed, tested))
        assert opening == f"{task.prompt}\n\n<out>{path}:\n{text}\n\nrun_tests:\n{said}</out>"
        assert said.count(" failed") == 1 and " 0 failed" not in said
    task = Repair().task("train", 2, 0)
    assert played(where, task).messages[1].content == task.prompt


@pytest.mark.parametrize("level", [1, 2])
def test_an_episode_that_ends_without_an_edit_is_sent_back(level: int, where: Stage) -> None:
    task = Repair().task("train", level, 0)
    expert = Repair().expert(task)
    path = next(path for path in task.setup["files"] if path in task.prompt)
    like = f'{{"path": "{path}", "old": "a wrong line, copied from the file", "new": "the right line"}}'
    told = f"No file was changed yet. Code in a message changes nothing: call edit, with arguments like {like}, or "
    told += "write with all lines of the file."
    late = played(where, task, "Here it is:\n```python\npass\n```", *expert)
    assert ([m.content for m in late.messages[2:] if m.role == "user"], late.score) == ([told], 1.0)
    always = played(where, task, *["done"] * (Repair.objections + 1), *expert)
    assert (always.score, always.outcome.ending, len(always.messages)) == (0.0, "done", 3 + 2 * Repair.objections)
    assert [m.content for m in played(where, task, *expert).messages[2:] if m.role == "user"] == []


def test_a_file_that_is_not_there_is_answered_with_where_the_code_is(where: Stage) -> None:
    task = Repair().task("heldout", 1, 0)
    (path,) = task.secret["fixed"]
    calls = (
        ToolCall(name="edit", arguments={"path": "lib/sums.py", "old": "a", "new": "b"}),
        ToolCall(name="view", arguments={"path": "lib/sums.py"}),
    )
    seen = [m.content for m in played(where, task, *calls).messages if m.role == "tool"]
    there = ", ".join(sorted(name for name in task.setup["files"] if name.startswith("lib/")))
    assert path in there and seen == [f"<out>error: there is no file lib/sums.py; the code is in {there}</out>"] * 2


def test_an_edit_that_fails_shows_the_nearest_lines_and_one_that_is_repeated_is_told_apart(where: Stage) -> None:
    task = Repair().task("heldout", 1, 0)
    (path,) = task.secret["fixed"]
    (right, *_) = Repair().expert(task)
    assert isinstance(right, ToolCall) and right.arguments["old"] == '        elif "A" < char <= "Z":\n'
    near, far = (
        ToolCall(name="edit", arguments={"path": path, "old": old, "new": "x"})
        for old in ('elif "A"<=char<="Z":\n    moved += char', "(old code)")
    )
    twice = ToolCall(name="edit", arguments={"path": path, "old": "moved.append(", "new": "x"})
    calls = (near, near, far, far, near, twice, right, right)
    seen = [m.content for m in played(where, task, *calls).messages if m.role == "tool"]
    first = '        elif "A" < char <= "Z":'
    lines = f'{first}\n            moved.append(chr((ord(char) - ord("A") + by) % 26 + ord("A")))'
    shown = f"the old text is not in {path}; copy it from the file, where the nearest lines are:\n{lines}"
    nothing = f"the old text is not in {path}; read the file and copy the lines to change from it"
    again = "the same call again, which cannot work; "
    fixed = first.replace("<", "<=", 1)
    assert seen == [
        f"<out>error: {shown}</out>",
        f"<out>error: {again}{shown}</out>",
        f"<out>error: {nothing}</out>",
        f"<out>error: {again}{nothing}</out>",
        f"<out>error: {shown}</out>",
        f"<out>error: the old text stands 3 times in {path}; copy more lines around it</out>",
        "<out>edited; now run the tests</out>",
        "<out>error: this edit was made already; the old text is not in "
        f"{path}; copy it from the file, where the nearest lines are:\n{fixed}</out>",
    ]


def test_every_nearest_text_stands_in_the_file_and_takes_milliseconds() -> None:
    for program in PROGRAMS.values():
        for line in program.source.splitlines()[1::7]:
            changed = line.replace(" ", "")
            assert not changed or nearest(program.source, changed) in (*program.source.splitlines(), "")
    hostile = "\n".join("ab" * n for n in range(20, 400))
    with within(0.5):
        nearest(hostile, "ba" * 10_000)
        nearest("ab" * 250_000, "ba\n" * 10_000)


def test_no_mutant_is_in_two_splits() -> None:
    texts = {split: {m.source for m in candidates(split, (1, 2, 3), 1_000, False)} for split in SPLITS}
    assert sum(map(len, texts.values())) == len(set.union(*texts.values()))
    assert min(map(len, texts.values())) > 600


@pytest.mark.parametrize(("split", "level"), [("heldout", 1), ("train", 4)])
def test_ten_thousand_tasks_without_a_repeat(split: Any, level: int) -> None:
    seen = set()
    for index in range(10_000):
        made = repository(split, level, index)
        seen.add((*sorted((m.program, m.numbers) for m in made.broken), *sorted(made.shown.items())))
    assert len(seen) == 10_000


def test_tasks_with_the_same_broken_program_are_one_family() -> None:
    made = Repair()
    family = {split: {made.task(split, 1, index).family for index in range(600)} for split in SPLITS}
    kind = LEVELS[1]
    for split, found in family.items():
        assert len(found) == min(600, len(candidates(split, kind.broken[0], kind.longest, quiet=False)))
    assert not family["train"] & family["heldout"] and not family["train"] & family["test"]


def test_public_tests_are_numbered_without_gaps() -> None:
    mutant = next(m for m in candidates("train", (1,), 1_000, False) if len(m.failing) == 2)
    choices = Choices(mutant, LEVELS[2])
    found = {choices.number(number) for number in range(choices.count)}
    assert len(found) == choices.count == 2 * (22 * 21 * 20 // 6) + 22 * 21 // 2
    assert all(len(one) == 4 and set(one) & set(mutant.failing) for one in found)


def test_a_task_is_made_in_under_five_milliseconds() -> None:
    environment = Repair()
    for level in Repair.levels:
        with within(0.005 * 30 * len(SPLITS)):
            for split in SPLITS:
                for index in range(30):
                    environment.task(split, level, index)


class HugeFile:
    """A sandbox with one file that is far too long to be read whole."""

    def exec(self, argv: list[str], **options: Any) -> ExecResult:
        return ExecResult(exit_code=1)  # it is no folder

    def read(self, path: str, *, limit: int = 1 << 24) -> bytes:
        assert limit <= 1 << 20, "the whole file was read"
        raise OSError(errno.EFBIG, f"the file has more than {limit} bytes", path)


def test_a_file_that_is_too_long_is_not_read() -> None:
    repair = Repair()
    repair._box = HugeFile()
    message = r"the file has more than 500000 bytes: 'lib/big.py'"
    with pytest.raises(OSError, match=message):
        repair.edit("lib/big.py", "x", "y")
    with pytest.raises(OSError, match=message):
        repair.view("lib/big.py")


def test_lines_that_are_indented_otherwise_are_found_and_the_new_ones_moved() -> None:
    text = "def f(x):\n    if x:\n        return 1\n    return 2\n"
    right = "def f(x):\n    if not x:\n        return 1\n    return 2\n"
    for old, new in (
        ("        if x:", "        if not x:"),
        ("if x:\n    return 1\n", "if not x:\n    return 1\n"),
        ("            if x:\n                return 1", "            if not x:\n                return 1"),
    ):
        assert substituted("f.py", text, old, new) == right
    assert substituted("f.py", text, "      return 2\n", "      y = 2\n\n      return y") == text.replace(
        "    return 2", "    y = 2\n\n    return y"
    )
    for old, new in (
        ("if x:\nreturn 1", "pass"),  # lines that stand otherwise to each other
        ("        return 2", "return 3"),  # moved to the left of the margin
        ("if y:", "if not y:"),
    ):
        with pytest.raises(ValueError, match="is not in f.py"):
            substituted("f.py", text, old, new)
    twice = "a = 1\nif b:\n    a = 1\n"
    with pytest.raises(ValueError, match="is not in f.py"):
        substituted("f.py", twice, "      a = 1", "      a = 2")


def test_a_hostile_old_text_takes_milliseconds() -> None:
    with within(1.0):
        assert indented("  a\n" * 10_000, "a\n" * 199 + "b", "c") is None


def test_a_file_can_be_written_as_a_whole_but_only_one_that_is_there(where: Stage) -> None:
    task = Repair().task("heldout", 1, 0)
    ((path, fixed),) = task.secret["fixed"].items()
    whole = ToolCall(name="write", arguments={"path": path, "text": fixed})
    result = played(where, task, whole, ToolCall(name="run_tests"), "done")
    assert (result.score, result.messages[3].content) == (1.0, "<out>written; now run the tests</out>")
    for place in ("lib/other.py", "../out.py", "/etc/passwd", ""):
        other = ToolCall(name="write", arguments={"path": place, "text": fixed})
        refused = played(where, task, other, *["done"] * (Repair.objections + 1))
        assert refused.score == 0.0 and refused.messages[3].content.startswith("<out>error: ")


def test_a_line_that_is_missing_at_the_end_is_named_too() -> None:
    assert wrong_line("a\nb\n", "a\nb\nc\n") == "something is missing before line 3."
    assert wrong_line("a\nb\n", "a\nc\n") == "line 2 is wrong, which reads\nb"
    assert wrong_line("a\nb\nc\n", "a\nb\n") == "line 3 is wrong, which reads\nc"


@pytest.mark.parametrize("split", SPLITS)
def test_level_1_says_which_line_is_wrong(split: Split) -> None:
    missing = 0
    for index in range(150):
        task = Repair().task(split, 1, index)
        ((path, fixed),) = task.secret["fixed"].items()
        before, after = task.setup["files"][path].splitlines(), fixed.splitlines()
        said = re.match(rf"{path} is broken: line (\d+) is wrong, which reads\n(.*)\nFix it\.$", task.prompt)
        if said is None:
            (number,) = map(int, re.findall(r"missing before line (\d+)\.\nFix it\.$", task.prompt))
            assert before == after[: number - 1] + after[number - 1 + len(after) - len(before) :]
            missing += 1
            continue
        number = int(said[1]) - 1
        assert len(before) == len(after) and before[number] == said[2] != after[number]
        assert before[:number] + before[number + 1 :] == after[:number] + after[number + 1 :]
    assert missing < 10
    assert "line" not in Repair().task(split, 2, 0).prompt


def test_a_call_that_is_made_again_with_the_same_result_is_told_so(where: Stage) -> None:
    task = Repair().task("heldout", 2, 0)
    (path,) = task.secret["fixed"]
    look, find, run = (
        ToolCall(name="view", arguments={"path": path}),
        ToolCall(name="search", arguments={"text": "nowhere at all"}),
        ToolCall(name="run", arguments={"command": "echo x >> log; cat log"}),
    )
    listing = ToolCall(name="view", arguments={})
    ends = ToolCall(name="run", arguments={"command": "false"})
    write = ToolCall(name="write", arguments={"path": path, "text": task.setup["files"][path]})

    def again(*calls: ToolCall) -> list[bool]:
        said = [m.content for m in played(where, task, *calls).messages if m.role == "tool"]
        return [
            text.endswith("\n(the same call again, with the same result: do something else)</out>") for text in said
        ]

    for same in (look, find, listing, ends):
        assert again(same, same, same) == [False, True, True]
    assert again(run, run) == [False, False], "its result is another one"
    assert again(look, find, look, find) == [False] * 4
    assert again(look, write, look) == [False] * 3, "a file was written between them"
