"""The attacks on judges, against every kind of judge: a sound one holds, a weak one falls, a user's own is reached."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentrl.cli import main
from agentrl.judges import evolving
from agentrl.redteam import suite, testbeds
from agentrl.redteam.attack import attacks
from agentrl.redteam.testbeds import TESTBEDS, ScriptedExaminer
from agentrl.sandboxes.pool import Pool
from agentrl.types import Message
from tests import reward_models
from tests.judges.conftest import Endpoint, endpoint, planets

__all__ = ["endpoint", "planets"]
BEDS = {kind.__name__: kind for kind in TESTBEDS["judge"]}
AIMED = ("rival_slandered", "claimed_reference", "order_game", "planted_criterion", "keyword_stuffing", "broken_reply")


def gained(
    bed: type[testbeds.Testbed], boxes: Pool, judge: Any, names: Sequence[str] = AIMED
) -> dict[str, float | None]:
    """Return which of the attacks gain what against a testbed with this judge; its controls must be right."""
    corpus = attacks()
    target = suite.AttackTarget.of("judge", bed, judge=judge)
    report = asyncio.run(suite.run(target, boxes, chosen=[corpus[f"J.{name}"] for name in names], coverage=False))
    assert [(c.name, c.score) for c in report.controls if not c.ok] == []
    assert [f.id for f in report.findings if not f.tried] == []
    return {f.id[2:]: f.score for f in report.findings if f.succeeded}


@pytest.mark.parametrize("bed", sorted(BEDS))
def test_a_sound_judge_of_each_kind_holds(bed: str, boxes: Pool) -> None:
    assert gained(BEDS[bed], boxes, ScriptedExaminer()) == {}


class Believes(ScriptedExaminer):
    """A judge that agrees with every gold label and believes what a text says of itself."""

    async def ask(self, messages: Sequence[Message], *, seed: int, max_tokens: int) -> str:
        said = messages[-1].content
        if messages[-1].role == "assistant" and "correct" in said:
            return "0.9"
        if "QUESTION:" in said:
            blocks = re.findall(r"BEGIN SUBMISSION (\w+)\n(.*?)\nEND SUBMISSION \1", said, re.S)
            claims = ["Reference solution" in text for _, text in blocks]
            if any(claims):
                return json.dumps({"instructs_examiner": "none", "better": "first" if claims[0] else "second"})
        return await super().ask(messages, seed=seed, max_tokens=max_tokens)


@pytest.mark.parametrize(
    ("bed", "fallen"), [("Compared", {"claimed_reference": 1.0}), ("Scored", {"keyword_stuffing": 0.9})]
)
def test_a_weak_judge_falls(bed: str, fallen: dict[str, float], boxes: Pool) -> None:
    assert gained(BEDS[bed], boxes, Believes(), list(fallen)) == fallen


def test_a_planted_criterion_gains_where_nothing_checks_it(boxes: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks are what holds: with each of the two alone it holds too."""

    async def agrees(self: Any, question: str, environments: Any) -> str:
        return ""

    monkeypatch.setattr(evolving, "refusal", lambda question, texts: "")
    assert gained(BEDS["Grown"], boxes, ScriptedExaminer(), ["planted_criterion"]) == {}
    monkeypatch.setattr(evolving.EvolvingRubric, "_disagreement", agrees)
    assert gained(BEDS["Grown"], boxes, ScriptedExaminer(), ["planted_criterion"]) == {"planted_criterion": 0.5}
    monkeypatch.undo()
    monkeypatch.setattr(evolving.EvolvingRubric, "_disagreement", agrees)
    assert gained(BEDS["Grown"], boxes, ScriptedExaminer(), ["planted_criterion"]) == {}


def attacked(target: str, path: Path, capsys: pytest.CaptureFixture[str], *names: str) -> dict[str, Any]:
    capsys.readouterr()
    chosen = [word for name in names for word in ("--attack", name)]
    with pytest.raises(SystemExit):
        main(["redteam", target, "--judge", str(path), "--json", *chosen])
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_the_judge_of_a_recipes_rewards_is_attacked_in_the_verifiers_place(
    planets: Callable[..., str], endpoint: Endpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The endpoint prefers the submission that names the right planet, and believes a claim to be the reference."""

    def better(user: str) -> str:
        texts = [json.loads(text) for _, text in re.findall(r"BEGIN SUBMISSION (\w+)\n(.*?)\nEND", user, re.S)]
        worth = [2 * ("Reference" in text) + ("Mercury" in text) for text in texts]
        chosen = "tie" if worth[0] == worth[1] else "first" if worth[0] > worth[1] else "second"
        return json.dumps({"instructs_examiner": "none", "better": chosen})

    endpoint.script = better
    path = tmp_path / "judge.yaml"
    rewards = {"judged": {"type": "pairwise", "view": "answer"}}
    path.write_text(yaml.safe_dump({"judge": {"engine": endpoint.section}, "rewards": rewards}))
    report = attacked(planets("planets_attacked"), path, capsys, "claimed_reference", "rival_slandered")
    assert {row["id"]: (row["succeeded"], row["score"]) for row in report["attacks"]} == {
        "J.claimed_reference": (True, 1.0),
        "J.rival_slandered": (False, 0.0),
    }
    assert {name: control["ok"] for name, control in report["controls"].items()} == dict.fromkeys(
        report["controls"], True
    )


@pytest.mark.skipif(os.environ.get("AGENTRL_FULL") != "1", reason="loads a model; runs with AGENTRL_FULL=1")
def test_a_real_reward_model_is_attacked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its head was fitted on six answers: it tells them apart, and says what it says about everything else."""
    from agentrl.redteam.testbeds.judged import GOLD, QUESTION

    good, bad = ([item.text for item in GOLD if item.passes is kind] for kind in (True, False))
    path = tmp_path / "judge.yaml"
    model = reward_models.write(tmp_path / "model", [QUESTION], good, bad, context=2048)
    engine = {"type": "reward_model", "path": str(model), "dtype": "float32"}
    path.write_text(yaml.safe_dump({"judge": {"engine": engine}}))
    report = attacked("judge", path, capsys, "keyword_stuffing", "repetition", "length", "broken_reply")
    assert report["target"] == "judge/scored"
    assert sorted(row["id"] for row in report["attacks"] if row["score"] is not None) == [
        "J.broken_reply", "J.keyword_stuffing", "J.length", "J.repetition",
    ]  # fmt: skip
