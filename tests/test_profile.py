"""What `env profile` makes of scores."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentrl import catalogue
from agentrl import recipe as recipes
from agentrl.profile import Level, _only, as_text, draw, level_of, run

LEVEL = Level(
    level=2, tasks=4, score=0.5, solved=11 / 24, informative=0.5, in_band=0.5,
    histogram=(1, 0, 0, 0, 0, 2, 0, 0, 0, 1),
)  # fmt: skip


def test_a_level_by_hand() -> None:
    scores = [[0.0, 0.0, 0.0], [1.0, 1.0], [1.0, 0.0], [0.0, 1.0, 0.5], [1.0], []]
    assert level_of(2, scores, (0.2, 0.8)) == LEVEL


def test_a_level_without_grades() -> None:
    found = level_of(1, [[], [1.0]], (0.2, 0.8))
    assert (found.tasks, found.score, found.informative, sum(found.histogram)) == (0, 0.0, 0.0, 0)


def test_the_table() -> None:
    assert as_text("files", [LEVEL]).splitlines()[2:] == [
        "level  tasks  score  informative  in band  0        1",
        "    2      4   0.50         0.50     0.50  ▄    █   ▄",
        "",
        "most signal: level 2, 50% of its groups carry some",
    ]


def test_no_signal_is_said() -> None:
    dead = level_of(1, [[0.0, 0.0]], (0.2, 0.8))
    assert as_text("files", [dead]).endswith("warm it up first, or choose other levels or a model")


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib, which the base install leaves out")
    draw("files", [LEVEL, LEVEL], tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_the_recipe_is_narrowed_to_the_environment() -> None:
    text = {"run": {"name": "x"}, "model": {"type": "scratch"}, "envs": [{"name": "a", "levels": [3]}, {"name": "b"}]}
    recipe = recipes.build(json.loads(json.dumps(text)))
    assert [(s.name, s.levels) for s in _only(recipe, "a").envs] == [("a", [3])]
    assert [(s.name, s.levels, s.sandbox) for s in _only(recipe, "c").envs] == [("c", None, "namespace")]


@pytest.mark.parametrize("name", [name for name in catalogue.members("envs")])
def test_any_environment_is_profiled_with_a_recipe_made_for_another(name: str, tmp_path: Path) -> None:
    """One tiny random policy, one task of each level: the file has a whole row for each of them."""
    recipe = recipes.build(
        {
            "run": {"name": "p", "out": str(tmp_path)},
            "model": {"type": "scratch", "layers": 1, "width": 32, "heads": 2, "vocabulary": 512, "context": 4096},
            "envs": [{"name": "files", "levels": [1]}],
            "rollout": {"engine": {"type": "transformers"}, "group_size": 2, "max_tokens": 8, "max_turns": 2},
        }
    )
    said: list[str] = []
    assert run(recipe, name, tasks=1, out=tmp_path / "deep" / "p.json", as_json=True, say=said.append) == 0
    found = json.loads((tmp_path / "deep" / "p.json").read_text())
    assert found == json.loads(said[0])
    wanted = [1] if name == "files" else list(catalogue.load("envs", name).levels)
    assert (found["env"], found["model"], found["samples"]) == (name, "scratch", 2)
    assert [(row["level"], row["tasks"], sum(row["histogram"]), row["ungraded"]) for row in found["levels"]] == [
        (level, 1, 1, 0) for level in wanted
    ]
