"""Gym: worlds of gymnasium as tasks; scores by a declared rule, experts that plan, floors that hold."""

import asyncio
import random
import re
import statistics
from typing import Any

import gymnasium
import pytest

from agentrl.envs import load
from agentrl.envs.gym.games import FrozenLake, Rule, Start
from agentrl.envs.gym.lakes import LEVELS, crossed_by_chance, distances, lake
from agentrl.envs.play import Played, Stage, play
from agentrl.errors import AuthoringError
from agentrl.types import SPLITS, Split, ToolCall

Gym = load("gym")
EXPERT = object()
SMALL = {"desc": ["SFF", "HHF", "GFF"], "is_slippery": False}


def moves(*names: str) -> list[ToolCall]:
    return [ToolCall(name="act", arguments={"action": name}) for name in names]


def played(where: Stage, script: Any, place: tuple[Split, int, int] = ("train", 1, 0), /, **options: Any) -> Played:
    """An episode of the task at a place, by a script or by the expert."""
    environment = Gym(**options)
    task = environment.task(*place)
    return asyncio.run(play(environment, task, environment.expert(task) if script is EXPERT else script, where))


def test_distances_and_chances_of_a_lake_worked_by_hand() -> None:
    cells = "SFHG"  # two by two: S F over H G
    assert distances(cells) == {0: 0, 1: 1, 3: 2}
    # left or up (1/2) stays, down (1/4) drowns, right (1/4) goes on; from there down (1/4) arrives
    assert crossed_by_chance(cells, 1) == 0.0
    assert crossed_by_chance(cells, 2) == 1 / 16
    assert crossed_by_chance(cells, 3) == 1 / 16 + 1 / 2 * 1 / 16 + 1 / 4 * 1 / 2 * 1 / 4


@pytest.mark.parametrize("level", LEVELS)
def test_lakes_can_be_crossed_and_seldom_by_chance(level: int) -> None:
    kind = LEVELS[level]
    homes: dict[tuple[str, ...], str] = {}
    for split in SPLITS:
        for index in range(60):
            made = lake(split, level, index)
            cells = "".join(made.rows)
            moves_needed = distances(cells)[cells.index("G")]
            assert kind.distance[0] <= moves_needed <= kind.distance[1]
            assert (len(made.rows), made.steps) == (kind.side, 2 * moves_needed)
            assert crossed_by_chance(cells, made.steps) <= {1: 0.3, 2: 0.1}.get(level, 0.03)
            assert homes.setdefault(made.rows, split) == split
    assert len(homes) == 180


@pytest.mark.parametrize("id", ["FrozenLake-v1", "Taxi-v4", "CliffWalking-v1"])
def test_the_expert_wins_by_the_shortest_way(id: str, where: Stage) -> None:
    for level in (1, 3, 6):
        for split in SPLITS:
            found = played(where, EXPERT, (split, level, 0), id=id)
            steps = Gym(id=id).task(split, level, 0).setup["start"]["steps"]
            turns = sum(message.role == "assistant" for message in found.messages)
            assert (found.score, 2 * turns) == (1.0, steps)


def test_what_is_seen_and_said(where: Stage) -> None:
    found = played(where, moves("left", "fly", "up"), kwargs=SMALL)
    assert found.messages[1].content.startswith("Play the game. Moves: left, down, right, up; at most 40 in all.\n")
    task = Gym().task("train", 1, 0)
    *lines, where_told, beside = task.prompt.splitlines()[1:]
    side = [line.split(" ") for line in lines]
    assert [len(row) for row in side] == [5] * 5
    (row, column), goal = (
        next((y, x) for y, line in enumerate(side, 1) for x, cell in enumerate(line, 1) if cell == letter)
        for letter in "AG"
    )
    assert where_told.startswith(f"A in row {row}, column {column}; G in row {goal[0]}, column {goal[1]}, ")
    walled = [["edge"] * 7, *(["edge", *line, "edge"] for line in side), ["edge"] * 7]
    left, down, right, up = (walled[row + y][column + x] for x, y in ((-1, 0), (0, 1), (1, 0), (0, -1)))
    assert beside == f"from A: left {left}, down {down}, right {right}, up {up}"
    assert [m.content for m in found.messages if m.role == "tool"][1] == (
        "<out>error: there is no move 'fly'; write one of: left, down, right, up</out>"
    )


def test_taxi_and_cliff_are_drawn_as_text() -> None:
    taxi = Gym(id="Taxi-v4").task("train", 1, 0).prompt.splitlines()
    assert [len(line) for line in taxi[1:6]] == [11] * 5
    assert re.match(r"taxi A in row [1-5], column [1-5], passenger at [RGYB], destination [RGYB]$", taxi[6])
    cliff = Gym(id="CliffWalking-v1").task("train", 1, 0).prompt.splitlines()
    assert [len(line.split(" ")) for line in cliff[1:5]] == [12] * 4
    assert sorted({cell for line in cliff[1:5] for cell in line.split(" ")}) in (list(".ACG"), list(".ACGS"))
    assert re.match(r"A in row \d, column \d+; G in row 4, column 12$", cliff[5])


def test_a_fall_an_end_of_the_budget_and_an_early_word_score_0(where: Stage) -> None:
    fallen = played(where, moves("down"), kwargs=SMALL)
    spent = played(where, moves(*["left"] * 9), kwargs=SMALL, steps=8)
    early = played(where, ["I won. Reward 1.0"], kwargs=SMALL)
    won = played(where, moves("right", "right", "down", "down", "left", "left"), kwargs=SMALL)
    assert [p.verdict.evidence[0] for p in (fallen, spent, early, won) if p.verdict] == [
        "1 steps, rewards 0 in all, 0 at last",
        "8 steps, rewards 0 in all, 0 at last",
        "0 steps, rewards 0 in all, 0 at last",
        "6 steps, rewards 1 in all, 1 at last",
    ]
    assert [p.score for p in (fallen, spent, early, won)] == [0.0, 0.0, 0.0, 1.0]


def test_how_far_the_goal_is_by_the_names_of_moves() -> None:
    rows = ["FFG", "FFF", "FHF"]
    told = [
        FrozenLake().show(Start(seed=0, steps=4, kwargs={"desc": rows}), at, None).split("\n")[3:] for at in (0, 3, 8)
    ]
    assert told == [
        ["A in row 1, column 1; G in row 1, column 3, 2 right from A", "from A: left edge, down F, right F, up edge"],
        [
            "A in row 2, column 1; G in row 1, column 3, 1 up and 2 right from A",
            "from A: left edge, down F, right F, up F",
        ],
        ["A in row 3, column 3; G in row 1, column 3, 2 up from A", "from A: left H, down edge, right edge, up F"],
    ]


def test_lakes_of_level_1_have_the_goal_one_or_two_moves_away() -> None:
    assert {lake("train", 1, index).steps for index in range(60)} == {2, 4}


def test_words_are_sent_back_once_while_the_game_lasts(where: Stage) -> None:
    kept_on = played(where, ["right", *moves("right", "right", "down", "down", "left", "left")], kwargs=SMALL)
    assert kept_on.messages[3].content == "The game is not over, and words make no move. Call act with a move."
    assert kept_on.score == 1.0
    gone = played(where, ["right", "down", *moves("right")], kwargs=SMALL)
    assert (gone.score, gone.messages[-1].content) == (0.0, "down")


@pytest.mark.parametrize(("level", "most"), [(1, 0.22), (2, 0.07)])
def test_random_moves_for_the_whole_budget_arrive_seldom(level: int, most: float, where: Stage) -> None:
    scores = []
    for index in range(120):
        script = moves(*random.Random(index).choices(("left", "down", "right", "up"), k=40))
        scores.append(played(where, script, ("train", level, index)).score)
    assert statistics.fmean(score or 0.0 for score in scores) <= most


def test_rules() -> None:
    ended = {"return": -3.0, "last": 20.0, "terminated": True, "over": True}
    cut = {"return": -3.0, "last": 20.0, "terminated": False, "over": True}
    open_ = {"return": 5.0, "last": 1.0, "terminated": False, "over": False}
    goal, sums = Rule("goal", reward=20.0), Rule("return", low=-5.0, high=5.0)
    assert [goal.score(state) for state in (ended, cut, open_)] == [1.0, 0.0, 0.0]
    assert [sums.score(state) for state in (ended, cut, open_)] == [0.2, 0.2, 0.0]
    assert [sums.score({**cut, "return": value}) for value in (-90.0, 90.0, float("nan"), float("inf"))] == [
        0.0, 1.0, 0.0, 0.0,
    ]  # fmt: skip


def test_any_other_world_with_its_own_rule(where: Stage) -> None:
    blackjack: dict[str, Any] = {
        "id": "Blackjack-v1",
        "score": {"type": "goal", "reward": 1.0},
        "actions": ["stick", "hit"],
    }
    winnable = []
    for index in range(8):
        try:
            winnable.append(played(where, EXPERT, ("train", 1, index), **blackjack).score)
        except AuthoringError as error:  # with this seed every play loses, and the expert says so
            assert "cannot be won" in str(error)
    assert winnable and set(winnable) == {1.0}
    pole: dict[str, Any] = {"id": "CartPole-v1", "score": {"type": "return", "low": 0, "high": 10}, "steps": 10}
    assert played(where, moves(*"01" * 5), **pole).score == 1.0
    assert played(where, moves(*"01"), **pole).score == 0.0
    slippery: dict[str, Any] = {"kwargs": {"is_slippery": True}}
    task = Gym(**slippery).task("train", 1, 0)
    assert task.setup["start"]["kwargs"]["desc"] and played(where, EXPERT, **slippery).score == 1.0


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"id": "CartPole-v1"}, "CartPole-v1 needs a rule for its score"),
        ({"id": "Pendulum-v1", "score": {"type": "goal"}}, "only Discrete ones become a tool"),
        ({"id": "NoSuch-v1", "score": {"type": "goal"}}, "gymnasium cannot make 'NoSuch-v1'"),
        ({"id": "CartPole-v1", "score": {"type": "best"}}, "score must be"),
        ({"id": "CartPole-v1", "score": {"kind": "goal"}}, "score must be"),
        ({"id": "CartPole-v1", "score": {"type": "goal"}, "actions": ["a"]}, "has 2 actions"),
        ({"kwargs": {"no_such": 1}, "score": {"type": "goal"}}, "gymnasium cannot make 'FrozenLake-v1'"),
    ],
)
def test_options_that_do_not_work_are_told(options: dict[str, Any], why: str) -> None:
    with pytest.raises(AuthoringError, match=why):
        Gym(**options)


def test_closed_spaces_begin_again_within_their_split() -> None:
    taxi = Gym(id="Taxi-v4")
    starts = {split: {taxi.task(split, 2, i).setup["start"]["state"] for i in range(60)} for split in SPLITS}
    assert [len(found) for found in starts.values()] == [40, 5, 5]
    assert len(set.union(*starts.values())) == 50


def test_gymnasium_itself_agrees_with_the_score(where: Stage) -> None:
    environment = Gym()
    task = environment.task("test", 4, 7)
    world = gymnasium.make("FrozenLake-v1", desc=task.setup["start"]["kwargs"]["desc"], is_slippery=False)
    world.reset(seed=0)
    names = [call.arguments["action"] for call in environment.expert(task) if isinstance(call, ToolCall)]
    paid = [world.step(("left", "down", "right", "up").index(name))[1] for name in names]
    assert paid == [0.0] * (len(paid) - 1) + [1.0]
