"""From a run's files to a data set: what is kept, what is left out and why, and that a warm start takes every line."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentrl import data, envs, sandboxes
from agentrl import recipe as recipes
from agentrl.cli import main
from agentrl.codec import Note
from agentrl.data.command import bounds, step_range
from agentrl.errors import Fault, UserError
from agentrl.initial_policy import load_policy
from agentrl.rollout.examples import read
from agentrl.rollout.render import Renderer
from agentrl.rollout.request import Budget, EnvRuntime, RolloutId
from agentrl.rollout.rollout import rollout
from agentrl.rollout.scripted import ScriptedEngine
from agentrl.rollout.store import Store
from agentrl.runfolder import open_run
from agentrl.sandboxes.pool import Pool
from agentrl.types import Group, Outcome, Round, Task, ToolCall, Trajectory, Verdict

RECIPE: dict[str, Any] = {
    "run": {"name": "made", "seed": 3, "steps": 0, "threads": 1},
    "model": {"type": "scratch", "layers": 1, "width": 32, "heads": 2, "vocabulary": 300, "context": 320},
    "envs": [{"name": "files", "levels": [1]}],
    "rollout": {"group_size": 4, "max_turns": 2, "max_tokens": 64},
    "eval": None,
    "audit": None,
}
ELSEWHERE = ToolCall(name="run", arguments={"command": "echo x > elsewhere.txt"})


class Made:
    """A run's folder as training leaves it, without the training."""

    def __init__(self, folder: Path, renderer: Renderer) -> None:
        self.folder, self.renderer = folder, renderer
        self.trajectories: list[Trajectory] = []


def play(renderer: Renderer, runtime: EnvRuntime, task: Task, script: Sequence[Any], group: int, index: int) -> Any:
    engine = ScriptedEngine(renderer, script)
    identity = RolloutId(seed=3, group=group, index=index)
    return rollout(engine, renderer, runtime, task, rollout_id=identity, budget=Budget(context=320, tokens=200))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    """Two groups of four: two solve their task (the second says more), two do something else. Then an episode without a
    grade, one that its audit refutes, one of a held-out task, and one of an evaluation."""
    out = tmp_path_factory.mktemp("runs")
    recipe = recipes.build({**RECIPE, "run": {**RECIPE["run"], "out": str(out)}})
    backend = sandboxes.load("namespace")()
    backend = backend if backend.available().works else sandboxes.load("process")()
    pool = Pool(backend, limit=2)
    runtime = EnvRuntime(name="files", make=envs.load("files"), boxes=pool)
    policy = load_policy(recipe, {"files": runtime}, say=lambda text: None)
    with open_run(recipe, resume=False) as folder:
        policy.tokenizer.save_pretrained(folder.checkpoints / "step-000000" / "model")
        made = Made(folder.path, policy.renderer)

        async def fill() -> None:
            env = runtime.make()
            store = Store(folder.trajectories)
            groups = []
            for number in range(2):
                task = env.task("train", 1, number)
                best = list(env.expert(task))
                scripts: list[list[Any]] = [best, [*best[:-1], "It is done now."], [ELSEWHERE, "done"], ["done"]]
                played = [await play(policy.renderer, runtime, task, s, number, i) for i, s in enumerate(scripts)]
                groups.append(Group(task=task.public(), number=number, trajectories=tuple(played), env="files"))
            solved = groups[0].trajectories[0]
            broken = Outcome(ending="done", grade="infra_error", score=None, fault=Fault("sandbox", "infra", "lost"))
            secretly = env.task("heldout", 1, 0)
            heldout = await play(policy.renderer, runtime, secretly, env.expert(secretly), 2, 2)
            disguised = replace(heldout.task, split="train", id="files/train/1/99")
            others = [
                replace(solved, group=2, index=0, outcome=broken, verdict=None),
                replace(solved, group=2, index=1, audit=Verdict(score=0.0)),
                replace(heldout, task=disguised),
                replace(solved, group=2, index=3, messages=renamed(solved, "not what its tokens say")),
            ]
            for trajectory in [*(t for group in groups for t in group.trajectories), *others]:
                made.trajectories.append(trajectory)
                await store.add(trajectory, "files", Note())
            await store.add(replace(solved, group=1 << 40), "files", Note(kind="eval", stage="end", step=1))
            store.decided(1, Round(number=0, kept=(groups[0],)), [])
            store.decided(2, Round(number=1, kept=(groups[1],)), [])
            await store.close()

        asyncio.run(fill())
    yield made
    pool.close()


def renamed(trajectory: Trajectory, text: str) -> tuple[Any, ...]:
    """Its messages with another ending."""
    return (*trajectory.messages[:-1], replace(trajectory.messages[-1], content=text))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_best_of_a_run_with_its_very_tokens(run: Made, tmp_path: Path) -> None:
    """Solved, graded, not refuted, not held out, exact; a warm start reads the tokens and masks of the run."""
    report = data.make([run.folder], tmp_path / "best.jsonl")
    assert (report["lines"], report["tasks"], report["read"]) == (4, 2, 12)
    assert report["left_out"] == {"ungraded": 1, "score": 4, "suspicious": 1, "held-out task": 1, "inexact": 1}
    made = lines(tmp_path / "best.jsonl")
    assert [(line["group"], line["score"], line["step"], line["level"]) for line in made] == [
        (0, 1.0, 1, 1), (0, 1.0, 1, 1), (1, 1.0, 2, 1), (1, 1.0, 2, 1)]  # fmt: skip
    examples = read(tmp_path / "best.jsonl", run.renderer, context=320).examples
    solved = [t for t in run.trajectories[:8] if t.outcome.score == 1.0]
    for example, trajectory in zip(examples, solved, strict=True):
        assert [s.token_ids.tolist() for s in example.segments] == [s.token_ids.tolist() for s in trajectory.segments]
        assert [s.loss_mask.tolist() for s in example.segments] == [s.loss_mask.tolist() for s in trajectory.segments]


def test_pairs_are_the_best_against_the_worst_of_a_group(run: Made, tmp_path: Path) -> None:
    report = data.make([run.folder], tmp_path / "pairs.jsonl", paired=True)
    made = lines(tmp_path / "pairs.jsonl")
    assert [(line["group"], line["chosen_score"], line["rejected_score"]) for line in made] == [
        (0, 1.0, 0.0), (0, 1.0, 0.0), (1, 1.0, 0.0), (1, 1.0, 0.0)]  # fmt: skip
    assert made[0]["rejected"] == [{"role": "assistant", "content": "done"}]  # the last of equals is the worst
    assert report["left_out"]["unpaired"] == 2
    examples = read(tmp_path / "pairs.jsonl", run.renderer, context=320)
    assert (examples.kind, [e.good for e in examples.examples]) == ("pairs", [True, False] * 4)
    one = data.make([run.folder], tmp_path / "one.jsonl", paired=True, per_task=1)
    assert (one["lines"], one["tasks"]) == (2, 2)


def test_other_choices(run: Made, tmp_path: Path) -> None:
    def kept(name: str, **options: Any) -> list[tuple[int, float]]:
        data.make([run.folder], tmp_path / name, **options)
        return [(line["group"], line["score"]) for line in lines(tmp_path / name)]

    assert kept("a.jsonl", selection=data.Selection(score=(0.0, 0.5), steps=(1, 1))) == [(0, 0.0), (0, 0.0)]
    assert kept("b.jsonl", per_task=1) == [(0, 1.0), (1, 1.0)]
    assert kept("c.jsonl", selection=data.Selection(score=(1.0, 1.0), suspicious=True), near=1.0)[-1] == (1, 1.0)
    with pytest.raises(UserError, match="nothing is left of 12 trajectories: .* of other levels"):
        data.make([run.folder], tmp_path / "d.jsonl", selection=data.Selection(levels=frozenset({7})))
    with pytest.raises(UserError, match="is there already"):
        data.make([run.folder], tmp_path / "a.jsonl")
    with pytest.raises(UserError, match="no run there"):
        data.make([tmp_path], tmp_path / "e.jsonl")
    assert not (tmp_path / "d.jsonl").exists() and not list(tmp_path.glob("*.part"))


def test_given_files_are_kept_apart(run: Made, tmp_path: Path) -> None:
    """A task whose prompt stands in a file, alone or inside a longer text, is left out."""
    prompt = run.trajectories[0].task.prompt
    (tmp_path / "bench.jsonl").write_text(json.dumps({"question": prompt.upper()}) + "\n")
    report = data.make([run.folder], tmp_path / "best.jsonl", against=[tmp_path / "bench.jsonl"])
    assert (report["lines"], report["left_out"]["given file"]) == (2, 3)
    (tmp_path / "odd.jsonl").write_text('{"answer": 3}\n')
    with pytest.raises(UserError, match="line 1: no text to compare with"):
        data.make([run.folder], tmp_path / "other.jsonl", against=[tmp_path / "odd.jsonl"])


def test_chat_and_parquet_say_the_same(run: Made, tmp_path: Path) -> None:
    """Chat lines hold messages and tools alone; parquet and packed files read back as JSON lines do."""
    for name, form in (("a.jsonl", "chat"), ("b.parquet", "chat"), ("c.parquet", "tokens"), ("d.jsonl.gz", "tokens")):
        data.make([run.folder], tmp_path / name, form=form)  # type: ignore[arg-type]
    first = lines(tmp_path / "a.jsonl")[0]
    assert "segments" not in first and first["tools"][0]["function"]["name"] == "run"
    assert [message["role"] for message in first["messages"]] == ["system", "user", "assistant", "tool", "assistant"]
    sets = [read(path, run.renderer, context=320).examples for path in sorted(tmp_path.iterdir())]
    chat, chat_parquet, tokens, packed = ([example.segments for example in examples] for examples in sets)
    assert chat == chat_parquet and tokens == packed
    assert chat[:4] == tokens and len(chat) == 5  # the one whose tokens say something else is exact as text


def test_the_command(run: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "best.jsonl"
    with pytest.raises(SystemExit) as end:
        main(["data", str(run.folder), "--out", str(target), "--score", "1", "--steps", "2-2", "--levels", "1"])
    assert end.value.code == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{target}: 2 trajectories of 1 tasks, as tokens\nread 12 training episodes; left out:\n")
    assert [line["step"] for line in lines(target)] == [2, 2]
    with pytest.raises(SystemExit) as end:
        main(["data", str(run.folder), "--out", str(target), "--score", "2"])
    assert end.value.code == 2


def test_bounds_and_steps() -> None:
    assert (bounds("0.5", (1, 1)), bounds("0.5-0.9", (1, 1)), bounds(None, (1, 1))) == ((0.5, 1.0), (0.5, 0.9), (1, 1))
    assert (step_range("3"), step_range("3-9"), step_range(None)) == ((3, 3), (3, 9), None)
    for text in ("x", "2", "0.9-0.1", "-1"):
        with pytest.raises(UserError):
            bounds(text, (0.0, 1.0))
    for text in ("x", "9-3", "-1", ""):
        with pytest.raises(UserError):
            step_range(text)


def train(tmp_path: Path, name: str, *arguments: str, **warm: Any) -> tuple[int, Path]:
    path = tmp_path / f"{name}.yaml"
    recipe = {**RECIPE, "run": {**RECIPE["run"], "name": name, "out": str(tmp_path)}}
    path.write_text(yaml.safe_dump({**recipe, "warm_start": {"lr": 0.003, "batch": 2, "epochs": 2, **warm}}))
    with pytest.raises(SystemExit) as end:
        main(["train", str(path), *arguments])
    return int(end.value.code or 0), tmp_path / name


@pytest.mark.parametrize("loss", ["sft", "dpo"])
def test_a_run_trains_on_what_another_did(run: Made, tmp_path: Path, loss: str) -> None:
    """Run, data, warm start, checkpoint; then RL would follow. A resume does not train on the file again."""
    file = tmp_path / "set.jsonl"
    data.make([run.folder], file, paired=loss != "sft")
    code, folder = train(tmp_path, loss, data=str(file), loss=loss)
    assert code == 0
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (row,) = [row for row in rows if row["kind"] == "warm_start"]
    assert row["warm_start/examples"] == (4 if loss == "sft" else 8)
    assert ("warm_start/accuracy" in row) == (loss != "sft")
    file.unlink()  # a resume has no need of it
    assert train(tmp_path, loss, "--resume", data=str(file), loss=loss)[0] == 0


def test_a_bad_file_is_refused_before_anything_starts(
    run: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "set.jsonl"
    data.make([run.folder], file)
    line = lines(file)[0]
    line["segments"][0]["mask"] = [1] * len(line["segments"][0]["mask"])
    file.write_text(file.read_text() + json.dumps(line) + "\n")
    code, folder = train(tmp_path, "bad", data=str(file))
    assert code == 2
    assert "line 5: " in capsys.readouterr().err
    assert not list((folder / "checkpoints").iterdir())
