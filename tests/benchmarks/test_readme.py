"""The pages that profiles are written into."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import UserError
from benchmarks.readme import filled, main, section

PROFILE: dict[str, Any] = {
    "env": "mine",
    "model": "smollm2",
    "engine": "sglang",
    "split": "train",
    "samples": 8,
    "band": [0.2, 0.8],
    "budget": {"max_turns": None, "max_tokens": 512, "temperature": 1.0},
    "levels": [
        {
            "level": 1, "tasks": 4, "score": 0.5, "solved": 0.4375, "informative": 0.75, "in_band": 0.5,
            "histogram": [1, 0, 0, 0, 0, 2, 0, 0, 0, 1], "ungraded": 3,
        }
    ],
    "date": "2026-01-02",
}  # fmt: skip

TABLE = """\
| level | tasks | mean score | solved | informative | mean in [0.2, 0.8] | tasks by mean score |
|---|---|---|---|---|---|---|
| 1 | 4 | 0.500 | 0.438 | 0.75 | 0.50 | `▄····█···▄` |
"""


def test_a_section() -> None:
    text = section([PROFILE])
    assert " ".join(text.split()).startswith(
        "## Learnability **smollm2** (sglang, 2026-01-02): 4 tasks of each level of the train split, 8 rollouts a "
        "task, at most the environment's own number of turns and 512 sampled tokens, temperature 1. | level | tasks |"
    )
    assert f"\n\n{TABLE}\n" in text
    assert "3 rollouts could not be graded" in text and text.count("agentrl env profile mine") == 1
    assert max(map(len, text.splitlines())) <= 120
    assert section([PROFILE, {**PROFILE, "model": "other"}]).count(TABLE) == 2


def test_only_that_section_changes_and_again_changes_nothing() -> None:
    page = "# mine\n\ntext\n\n## Learnability\n\nold\n\n## After\n\nmore\n"
    text = "## Learnability\n\nnew\n"
    new = filled(page, text)
    assert new == "# mine\n\ntext\n\n## Learnability\n\nnew\n\n## After\n\nmore\n"
    assert filled(new, text) == new
    assert filled("# mine\n\n## Learnability\n\nold\n", text) == "# mine\n\n" + text
    assert filled("# mine\n", text) == "# mine\n\n" + text


def test_files_in_pages_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTRL_PATH", str(tmp_path))
    folder = tmp_path / "envs" / "mine"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("EXPORT = None\n")
    (folder / "README.md").write_text("# mine\n\n## Learnability\n\nnothing yet\n")
    (tmp_path / "p.json").write_text(json.dumps(PROFILE))
    assert main([str(tmp_path / "p.json")]) == 0
    assert (folder / "README.md").read_text() == "# mine\n\n" + section([PROFILE])


def test_what_is_no_profile_is_named(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text("[]")
    with pytest.raises(UserError, match=r"p.json is no profile that `agentrl env profile --out` wrote"):
        main([str(tmp_path / "p.json")])
    (tmp_path / "p.json").write_text(json.dumps({**PROFILE, "env": "no_such_environment"}))
    with pytest.raises(UserError, match="no README of an environment 'no_such_environment'"):
        main([str(tmp_path / "p.json")])
