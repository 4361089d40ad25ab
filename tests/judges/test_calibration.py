"""A judge is measured before it counts: on gold labels, on a file, on the environment's expert and wrong answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl import envs, judges
from agentrl import recipe as recipes
from agentrl.envs.play import stage
from agentrl.errors import RecipeError


def measure(name: str, endpoint: Any, **calibration: Any) -> list[dict[str, Any]]:
    """Measure the endpoint on an environment and return the figures."""
    section = recipes.JudgeSection.model_validate({"engine": endpoint.section, "calibration": calibration})
    judge, kind = judges.make(section), envs.load(name)

    async def main() -> list[dict[str, Any]]:
        async with judges.closing(judge), stage("namespace", judge=judge) as where:
            return [row.as_dict() for row in await judges.calibrate(judge, section.calibration, {name: (kind, where)})]

    return asyncio.run(main())


def figures(name: str, source: str, count: int, required: float = 0.8) -> dict[str, Any]:
    shares = {"sensitivity": 1.0, "specificity": 1.0, "balanced": 1.0}
    return {"env": name, "source": source, "count": count, "required": required, **shares}


def test_every_source_of_labels_is_measured(planets: Callable[..., str], endpoint: Any, tmp_path: Path) -> None:
    name, path = planets("planets_sources"), tmp_path / "labels.jsonl"
    rows = [
        {"level": 1, "index": 3, "answer": "It is Mars, of course.", "passes": True},
        {"env": name, "split": "test", "level": 1, "index": 3, "answer": "It is Venus, of course.", "passes": False},
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    expected = [figures(name, "gold", 2), figures(name, "file", 2, 0.9), figures(name, "expert", 6, 0.9)]
    assert measure(name, endpoint, file=str(path), tasks=3, min_agreement=0.9) == expected


def test_a_judge_that_passes_everything_is_refused_by_each_source(
    planets: Callable[..., str], endpoint: Any, tmp_path: Path
) -> None:
    strict, lax = planets("planets_strict"), planets("planets_lax", min_agreement=0.0)
    endpoint.script = lambda user: endpoint.opinion("yes")
    with pytest.raises(
        RecipeError, match=r"refused for planets_strict: .* at 0.50 \(balanced\), below the required 0.80"
    ):
        measure(strict, endpoint)
    with pytest.raises(RecipeError, match=r"refused: planets_lax: balanced agreement 0.50 with 8 labels \(expert\)"):
        measure(lax, endpoint)
    path = tmp_path / "labels.jsonl"
    labels = [{"level": 1, "index": 0, "answer": f"It is planet {n}.", "passes": n < 3} for n in range(4)]
    path.write_text("\n".join(map(json.dumps, labels)))
    with pytest.raises(RecipeError, match=r"0.50 with 4 labels \(file\): passes 100% of the good, fails 0% of the bad"):
        measure(lax, endpoint, file=str(path))
    assert measure(lax, endpoint, tasks=0) == [{**figures(lax, "gold", 2, 0.0), "specificity": 0.0, "balanced": 0.5}]


def test_labels_of_one_kind_measure_nothing(planets: Callable[..., str], endpoint: Any, tmp_path: Path) -> None:
    path = tmp_path / "labels.jsonl"
    path.write_text(json.dumps({"level": 1, "index": 2, "answer": "It is Earth.", "passes": True}))
    with pytest.raises(RecipeError, match="labels of one kind only"):
        measure(planets("planets_one_kind"), endpoint, file=str(path))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"level": 1, "index": 0, "answer": "x"}', "line 2: 'passes' is missing; a line looks like"),
        (
            '{"level": 1, "index": 0, "answer": "x", "passes": "yes"}',
            "line 2: 'passes' is unknown or of the wrong type",
        ),
        ('{"level": true, "index": 0, "answer": "x", "passes": true}', "line 2: 'level' is unknown or of the wrong"),
        ('{"level": 1, "index": 0, "answer": "x", "passes": true, "note": 1}', "line 2: 'note' is unknown"),
        ('{"level": 1, "index": 0, "answer": "x", "passes": true, "split": "all"}', "line 2: `split` must be one of"),
        ('{"level": 1, "index": 0, "answer": "x", "passes": true, "env": "z"}', "line 2: `env` must be one of"),
        ('{"level": 7, "index": 0, "answer": "x", "passes": true}', "has no task 0 of level 7"),
        ("[1]", "line 2: must be an object"),
        ("{", "line 2: not strict JSON"),
    ],
)
def test_a_wrong_line_is_named(
    line: str, said: str, planets: Callable[..., str], endpoint: Any, tmp_path: Path
) -> None:
    path = tmp_path / "labels.jsonl"
    path.write_text('{"level": 1, "index": 2, "answer": "It is Earth.", "passes": true}\n' + line + "\n")
    with pytest.raises(RecipeError) as refused:
        measure(planets(f"planets_line_{abs(hash(line))}"), endpoint, file=str(path))
    assert said in str(refused.value)


def test_a_judge_that_nothing_measures_is_refused(member: Callable[[str, str], str], endpoint: Any) -> None:
    """A verifier of the author's own that asks the judge and brings no labels, in an environment without an expert."""
    source = '''\
from agentrl import Environment, Task, Verdict, Verifier
from agentrl.types import Message


class Asks(Verifier):
    asks_judge = True

    async def verify(self, submission, context):
        question = [Message(role="user", content=submission.answer)]
        return Verdict(score=float(await context.judge.ask(question, seed=0, max_tokens=4) == "1"), trust="judged")


class Own(Environment):
    """Say something."""

    verifier = Asks()

    def task(self, split, level, index):
        return Task(id=f"own/{split}/{level}/{index}", split=split, level=level, prompt=f"Say {index}.")


EXPORT = Own
'''
    with pytest.raises(RecipeError, match="there is nothing to measure it on for own_judged"):
        measure(member("own_judged", source), endpoint)
