"""The watch while a run trains, the audit verifier, the alarms, and `agentrl audit` on what was stored."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agentrl.alarms import alarms
from agentrl.audit import command, reference
from agentrl.audit.watch import Watch, heldout_gap
from agentrl.cli.base import app
from agentrl.envs.base import Environment
from agentrl.envs.play import Played, drive, scripted
from agentrl.errors import AuthoringError, UserError
from agentrl.recipe import AuditSection
from agentrl.rollout.request import AuditShares, Budget, EnvRuntime, RolloutId
from agentrl.rollout.rollout import play_out
from agentrl.sandboxes.base import SandboxSpec
from agentrl.types import Group, Round, Task, Trajectory, Verdict
from agentrl.verifiers.base import Artifact, Context, Submission, Verifier

ROOT = Path(__file__).resolve().parents[2]


class Says(Verifier):
    """Scores 1 when the answer is one of these, and keeps what it was given."""

    def __init__(self, *answers: str) -> None:
        self.answers = answers
        self.secrets: list[bytes] = []

    async def verify(self, submission: Submission, context: Context) -> Verdict:
        self.secrets.append(context.secret)
        return Verdict(score=float(submission.answer in self.answers), evidence=(f"heard {submission.answer}",))

    async def probe(self, context: Context) -> None: ...


class Weak(Environment):
    """Accepts a word that it should not."""

    verifier = Says("right", "trick")
    audit_verifier = Says("right")

    def task(self, split: Any, level: int, index: int) -> Task:
        return Task(id=f"weak/{split}/{level}/{index}", split=split, level=level, prompt="Say it.")

    def expert(self, task: Task) -> list[str]:
        return ["right"]


class OneAnswer:
    """One attempt that answers at once."""

    acted = True

    def __init__(self, answer: str) -> None:
        self.answer = answer

    def recorded(self) -> list[Any]:
        return [self.answer]

    async def play(self, episode: Any, context: Context) -> Played:
        return await drive(episode, scripted([self.answer]), context, turns=2)

    def tokens(self) -> dict[str, Any]:
        return {"segments": (), "usage": {"prompt": 1, "completion": 1}}


def play(answer: str, audits: AuditShares | None, index: int = 0, kind: type[Environment] = Weak) -> Trajectory:
    runtime = EnvRuntime(name="weak", make=kind, boxes=None, audits=audits)  # type: ignore[arg-type]
    at = RolloutId(seed=0, group=0, index=index, secret=b"secret")
    task = kind().task("train", 1, 0)
    work = play_out(lambda again: OneAnswer(answer), runtime, task, rollout_id=at, budget=Budget(context=100))
    return asyncio.run(work)


def test_the_audit_verifier_grades_the_sample_with_a_secret_of_its_own() -> None:
    played = play("trick", AuditShares(1.0, 1.0))
    assert played.outcome.score == 1.0  # the reward stays what it is
    assert played.audit is not None and (played.audit.score, played.audit.evidence) == (0.0, ("heard trick",))
    assert isinstance(Weak.audit_verifier, Says) and isinstance(Weak.verifier, Says)
    assert Weak.audit_verifier.secrets[-1] != Weak.verifier.secrets[-1]
    assert play("trick", AuditShares(0.0, 0.0)).audit is None
    assert play("wrong", AuditShares(1.0, 0.0)).audit is None
    assert play("trick", None).audit is None


def test_the_sample_is_drawn_by_the_seed_and_has_its_share() -> None:
    audited = [play("trick", AuditShares(0.25, 0.0), index).audit is not None for index in range(200)]
    assert audited == [play("trick", AuditShares(0.25, 0.0), index).audit is not None for index in range(200)]
    assert 30 < sum(audited) < 75


def test_an_audit_verifier_that_breaks_costs_nothing() -> None:
    class Broken(Says):
        async def verify(self, submission: Submission, context: Context) -> Verdict:
            raise RuntimeError("bug")

    class Sound(Weak):
        audit_verifier = Broken()

    played = play("right", AuditShares(1.0, 1.0), kind=Sound)
    assert (played.outcome.score, played.outcome.alarm) == (1.0, False)


def test_limits_of_the_audit_verifiers_artifacts_do_not_touch_the_reward() -> None:
    """An episode whose workspace is too large for the audit keeps its reward; the audit gets nothing."""
    from agentrl.envs.episode import Episode
    from agentrl.envs.play import Stage, stage

    class Sees(Says):
        artifacts = (Artifact(path="", max_bytes=10),)

    class Large(Weak):
        audit_verifier = Sees()

        def prepare(self, task: Task, rng: Any) -> SandboxSpec:
            return SandboxSpec(files={"large.txt": "x" * 100})

    async def run(on: Stage) -> Submission:
        episode = Episode(Large(), Large().task("train", 1, 0), seed=0, boxes=on.boxes)
        episode.auditing = True
        await episode.start()
        try:
            return await episode.finish()
        finally:
            await episode.close()

    async def alone() -> Submission:
        async with stage("namespace", limit=2) as on:
            return await run(on)

    assert asyncio.run(alone()).artifacts == {"": {}}


def test_a_verifiers_class_is_refused() -> None:
    with pytest.raises(AuthoringError, match="audit_verifier is the class Says"):
        type("Wrong", (Weak,), {"audit_verifier": Says})


def round_of(*answers: str, audits: bool = False) -> Round:
    shares = AuditShares(1.0, 1.0) if audits else None
    trajectories = tuple(play(answer, shares, index) for index, answer in enumerate(answers))
    return Round(number=1, kept=(Group(task=trajectories[0].task, number=0, trajectories=trajectories, env="weak"),))


KNOWN = {"weak": reference.of(Weak(), [1])}


def test_a_round_gives_its_figures() -> None:
    evals = [{"kind": "eval", "step": 20, "eval/weak/levels": {"1": 0.25}}]
    before = [{"kind": "step", "step": step, "audit/levels": {"weak/1": [step // 10, 2]}} for step in range(5, 25)]
    round_ = round_of("right", "trick", "no", "no", audits=True)
    seen = Watch(AuditSection(), KNOWN, 0).look(25, round_, before, evals)
    assert seen == {
        "audit/looked": 4,
        "audit/rewarded": 2,
        "audit/suspicious": 1,
        "audit/attempts": 0,
        "audit/signals": {"audit disagrees": 1},
        "audit/worst": "train.0.1 in weak, 0.95: audit disagrees (scored 1, the audit verifier gave 0: heard trick)",
        "audit/graded": 4,
        "audit/graded_rewarded": 2,
        "audit/refuted": 1,
        "audit/score": 0.25,
        "audit/gap": 0.25,
        "audit/levels": {"weak/1": [2, 4]},
        "audit/heldout_gap": 0.3,  # 11 of 20 in the steps 11 to 20
    }
    assert heldout_gap([{"step": 20, "audit/levels": {"weak/2": [1, 1]}}], evals) is None
    assert heldout_gap([{"step": 21, "audit/levels": {"weak/1": [1, 1]}}], evals) is None  # learnt since


def test_a_fault_of_the_watch_does_not_stop_a_run() -> None:
    watch = Watch(AuditSection(), {"weak": None}, 0)  # type: ignore[dict-item]
    watch.references = None  # type: ignore[assignment]
    assert list(watch.look(1, round_of("right"))) == ["audit/error"]


def rows(**figures: float) -> list[dict[str, Any]]:
    return [{"kind": "step", "step": n, "rollout/informative": 0.5, "rollout/score": 0.5, **figures} for n in range(12)]


@pytest.mark.parametrize(
    ("figures", "name"),
    [
        ({"audit/graded_rewarded": 4, "audit/refuted": 1}, "audit"),
        ({"audit/rewarded": 10, "audit/suspicious": 3}, "suspicious"),
    ],
)
def test_its_alarms(figures: dict[str, float], name: str) -> None:
    assert list(alarms(rows(**figures), [])) == [name]
    few = {key: value if "rewarded" in key else 0 for key, value in figures.items()}
    assert alarms(rows(**few), []) == {}


def test_a_held_out_gap_that_grows_is_told_and_one_that_was_there_is_not() -> None:
    steady = rows(**{"audit/heldout_gap": 0.6})
    assert alarms(steady, []) == {}
    assert list(alarms([{**steady[0], "audit/heldout_gap": 0.1}, *steady[1:]], [])) == ["held-out gap"]


@pytest.fixture(scope="module")
def hacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the policy of scripts on countdown with the weak verifier, short."""
    return _trained(tmp_path_factory.mktemp("runs") / "hacked", "countdown", "weak", 8)


def _trained(folder: Path, name: str, verifier: str, steps: int) -> Path:
    from agentrl import sandboxes
    from agentrl.sandboxes.pool import Pool
    from benchmarks import _weak

    pool = Pool(sandboxes.load("namespace")(), limit=4)
    try:
        asyncio.run(_weak.train(name, verifier, folder, pool, steps=steps))
    finally:
        pool.close()
    return folder


def test_a_hacked_run_is_caught_from_a_copy_of_its_files(hacked: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(hacked, tmp_path / "copied")
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    report = command.audit(copy, limit=3)
    assert report["suspicious"] is True
    part = report["environments"]["countdown"]
    assert part["refuted"] > 10 and part["suspicious"] > 0.5 * part["rewarded"]
    assert [alarm["name"] for alarm in report["alarms"]] == ["suspicious", "audit"]
    worst = report["worst"][0]
    assert worst["link"] == f"http://127.0.0.1:7600/#/run/copied/one/{worst['key']}"
    assert worst["reasons"][0]["name"] == "audit disagrees"
    assert {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()} == before


def test_the_command_says_it_and_exits_with_1(hacked: Path) -> None:
    shown = CliRunner().invoke(app, ["audit", str(hacked), "--limit", "1"])
    assert shown.exit_code == 1
    assert "hacked: the audit verifier refutes" in shown.output
    assert "audit disagrees: scored 1, the audit verifier gave 0" in shown.output
    data = json.loads(CliRunner().invoke(app, ["audit", str(hacked), "--json", "--episodes", "40"]).output)
    assert data["looked_at"] <= 41
    with pytest.raises(UserError, match="no run there"):
        command.audit(hacked / "trajectories")


def test_a_sound_run_is_not_suspicious(tmp_path: Path) -> None:
    report = command.audit(_trained(tmp_path / "sound", "countdown", "sound", 8))
    assert (report["suspicious"], report["alarms"]) == (False, [])
    assert report["environments"]["countdown"]["suspicious"] == 0


@pytest.mark.skipif(not os.environ.get("AGENTRL_FULL"), reason="long: AGENTRL_FULL")
@pytest.mark.parametrize("name", ["files", "repair"])
@pytest.mark.parametrize("verifier", ["weak", "sound"])
def test_other_environments_at_length(name: str, verifier: str, tmp_path: Path) -> None:
    report = command.audit(_trained(tmp_path / "run", name, verifier, 20))
    assert report["suspicious"] is (verifier == "weak")
