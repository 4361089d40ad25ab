"""Files: every kind of chore can be done, nothing else is accepted, and tasks do not repeat."""

import asyncio
import re

import pytest

from agentrl.envs import load
from agentrl.envs.files import SINGLE, plan
from agentrl.envs.play import Action, Stage, play
from agentrl.types import SPLITS, Task, ToolCall
from tests.pace import within

Files = load("files")
TAGS = {
    1: "append copy delete move write",
    2: "append copy delete move write",
    3: "append copy delete fetch link move permit rename shelve sweep write",
    4: "column count keep order part replace strip",
    5: "best column count gather keep merge order part replace strip tally total",
    6: "best lock merge prune report survey tally total unpack",
}


def run(command: str) -> ToolCall:
    return ToolCall(name="run", arguments={"command": command})


def score(where: Stage, task: Task, *actions: Action) -> float | None:
    return asyncio.run(play(Files(), task, actions, where)).score


@pytest.mark.parametrize("level", Files.levels)
def test_the_expert_does_every_kind_of_chore(level: int, where: Stage) -> None:
    todo = set(TAGS[level].split())
    tags: set[str] = set()
    environment = Files()
    for index in range(60):
        task = environment.task("heldout", level, index)
        tags |= set(task.tags)
        if todo & set(task.tags):
            todo -= set(task.tags)
            assert score(where, task, *environment.expert(task)) == 1.0, task.prompt
            assert score(where, task, "done") == 0.0, task.prompt
    assert sorted(tags) == TAGS[level].split() and not todo


@pytest.mark.parametrize("level", Files.levels)
def test_ten_thousand_tasks_without_a_repeat(level: int) -> None:
    assert len({plan("train", level, index).content() for index in range(10_000)}) == 10_000


def test_level_one_is_a_closed_space_split_by_number() -> None:
    assert SINGLE == 3 * 256 * 255 + 2 * 64 * 256
    prompts = {split: {plan(split, 1, index).content() for index in range(3000)} for split in SPLITS}
    assert [len(found) for found in prompts.values()] == [3000, 3000, 3000]
    assert not prompts["train"] & prompts["heldout"] and not prompts["train"] & prompts["test"]


def test_low_levels_are_short() -> None:
    environment = Files()
    for level, prompt, command in ((1, 40, 30), (2, 75, 30)):
        for index in range(200):
            task = environment.task("train", level, index)
            assert len(task.prompt) <= prompt
            assert max(map(len, task.secret["commands"])) <= command


def test_side_effects_and_half_work_score_nothing(where: Stage) -> None:
    environment = Files()
    task = next(t for t in environment.tasks("train", 1) if t.tags == ("move",))
    (command,) = task.secret["commands"]
    a, b = command.split()[1:]
    assert score(where, task, run(command), "done") == 1.0
    assert score(where, task, run(command)) == 1.0, "an episode out of turns is still graded"
    assert score(where, task, run(f"cp {a} {b}"), "done") == 0.0
    assert score(where, task, run(f"{command}; touch extra"), "done") == 0.0
    assert score(where, task, run(f"{command}; chmod 777 *"), "done") == 0.0
    assert score(where, task, run(f"ln -s {a} {b}"), "done") == 0.0
    assert score(where, task, run(f"printf x > {b}; rm {a}"), "done") == 0.0


def test_newlines_that_nobody_asked_for_score_nothing(where: Stage) -> None:
    """The last newline of what the task writes may be missing; other newlines, and other files, count."""
    environment = Files()
    task = next(t for t in environment.tasks("train", 1) if t.tags == ("write",))
    (command,) = task.secret["commands"]
    _, word, _, path = command.split()
    alone = next(name for name in task.setup["files"] if name != path)
    assert score(where, task, run(f"echo {word} > {path}"), "done") == 1.0
    assert score(where, task, run(f"printf {word} > {path}"), "done") == 1.0
    assert score(where, task, run(f"echo {word} > {path}; echo >> {path}"), "done") == 0.0
    assert score(where, task, run(f"echo {word} > {path}; yes '' | head -n 100000 >> {path}"), "done") == 0.0
    assert score(where, task, run(f"{command}; echo >> {alone}"), "done") == 0.0
    assert score(where, task, run(f'{command}; printf %s "$(cat {alone})" > {alone}'), "done") == 0.0


def test_permissions_are_graded(where: Stage) -> None:
    environment = Files()
    task = next(t for t in environment.tasks("train", 3) if "permit" in t.tags)
    commands = task.secret["commands"]
    careless = [run(c) for c in commands if not c.startswith("chmod")]
    assert score(where, task, *map(run, commands), "done") == 1.0
    assert score(where, task, *careless, "done") == 0.0


def test_folders_are_left_as_they_are(where: Stage) -> None:
    environment = Files()
    task = next(t for t in environment.tasks("train", 6) if "lock" in t.tags)
    commands = task.secret["commands"]
    careless = [re.sub(r"find (\w+) -type f -exec chmod (\d+) .*", r"chmod -R \2 \1", c) for c in commands]
    assert careless != commands
    assert score(where, task, *map(run, commands), "done") == 1.0
    assert score(where, task, *map(run, careless), "done") == 0.0


def test_a_task_is_made_in_under_five_milliseconds() -> None:
    environment = Files()
    for level in Files.levels:
        with within(0.005 * 30 * len(SPLITS)):
            for split in SPLITS:
                for index in range(30):
                    environment.task(split, level, index)
