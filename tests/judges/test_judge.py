"""The judge that a recipe names: within its budget, never a score from its own trouble, and nobody's deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl import judges
from agentrl import recipe as recipes
from agentrl.errors import BudgetSpent, RecipeError, UserError
from agentrl.types import Message, Outcome, Task
from agentrl.verifiers.base import Context, Submission, judged_parts
from agentrl.verifiers.busy import LoopWatch
from agentrl.verifiers.compose import all_of, gated, process, shaped
from agentrl.verifiers.grade import grade
from agentrl.verifiers.judge import Criterion, Gold, JudgeVerifier

RUBRIC = [Criterion("correct", "Is it right?")]
GOLD = [
    Gold(problem="?", text="It is the planet Earth.", passes=True, reference="Earth"),
    Gold(problem="?", text="It is the planet Pluto.", passes=False, reference="Earth"),
]
QUESTION = [Message(role="user", content='BEGIN SUBMISSION 1\n"x"')]
Asked = Callable[..., judges.Judge]


@pytest.fixture
def judge(endpoint: Any) -> Asked:
    def make(**options: Any) -> judges.Judge:
        return judges.make(recipes.JudgeSection.model_validate({"engine": endpoint.section, **options}))

    return make


class NoBoxes:
    def box(self, spec: object) -> Any:
        raise AssertionError("a judge needs no sandbox")


async def outcomes(judge: judges.Judge, *texts: str, deadline_s: float = 60.0) -> list[Outcome]:
    """Grade several submissions at once."""
    verifier = JudgeVerifier(RUBRIC, gold=GOLD, reference=lambda task: "Earth")
    context = Context(secret=b"secret", boxes=NoBoxes(), judge=judge, deadline_s=deadline_s)
    task = Task(id="t/1", split="train", level=1, prompt="Which planet?")
    graded = (grade(verifier, Submission(task=task, answer=text), context) for text in texts)
    return [outcome for outcome, _ in await asyncio.gather(*graded)]


def closed(judge: judges.Judge, main: Callable[[], Any]) -> Any:
    async def run() -> Any:
        try:
            return await main()
        finally:
            await judge.close()

    return asyncio.run(run())


def test_a_spent_budget_is_no_ones_zero(judge: Asked) -> None:
    """Four questions measure the judge, two grade the first submission; the next one finds nothing left."""
    limited = judge(budget={"calls": 6})
    reasons: list[str] = []
    limited.on_spent = reasons.append

    async def main() -> list[Outcome]:
        first = await outcomes(limited, "It is the planet Earth.")
        return first + await outcomes(limited, "It is the planet Earth!", "It is Earth, I think.")

    first, *others = closed(limited, main)
    assert (first.grade, first.score) == ("graded", 1.0)
    assert [(o.grade, o.score, o.alarm) for o in others] == [("verifier_error", None, False)] * 2
    text = "the judge's budget is spent: 6 of 6 calls; nothing more can be scored, so raise judge.budget.calls"
    assert reasons == [text] and limited.refused
    assert others[0].fault is not None and others[0].fault.cause == f"BudgetSpent: {text}"
    assert limited.counts == {"calls": 6, "tokens": 600, "failures": 0}


def test_tokens_are_counted_by_the_endpoint(judge: Asked) -> None:
    limited = judge(budget={"tokens": 150})

    async def main() -> None:
        await limited.ask(QUESTION, seed=0, max_tokens=5)
        await limited.ask(QUESTION, seed=0, max_tokens=5)
        with pytest.raises(BudgetSpent, match=r"200 of 150 tokens; .* raise judge.budget.tokens"):
            await limited.ask(QUESTION, seed=0, max_tokens=5)

    closed(limited, main)


def test_an_outage_is_infrastructure_and_a_question_that_breaks_the_judge_is_a_zero(
    judge: Asked, endpoint: Any
) -> None:
    asked = judge()

    async def main() -> tuple[list[Outcome], list[Outcome], list[Outcome]]:
        await outcomes(asked, "It is the planet Earth.")
        endpoint.script = lambda user: 400 if "poison" in user else endpoint.honest(user)
        poison = await outcomes(asked, "It is the planet Earth, poison.", "It is the planet Earth.")
        endpoint.script = lambda user: 503
        outage = await outcomes(asked, "It is the planet Earth.")
        endpoint.script = endpoint.honest
        return poison, outage, await outcomes(asked, "It is the planet Earth.")

    poison, outage, after = closed(asked, main)
    assert [(o.grade, o.score, o.alarm) for o in poison] == [("graded", 0.0, True), ("graded", 1.0, False)]
    assert [(o.grade, o.score) for o in outage] == [("infra_error", None)]
    assert outage[0].fault is not None and outage[0].fault.cause.startswith("Outage: the judge does not answer")
    assert [(o.grade, o.score) for o in after] == [("graded", 1.0)]


def test_a_passing_outage_never_becomes_a_zero(judge: Asked, endpoint: Any) -> None:
    """The judge is well again by the time that a probe would ask it."""
    asked, down = judge(), [503, 503]

    async def main() -> list[Outcome]:
        await outcomes(asked, "It is the planet Earth.")
        endpoint.script = lambda user: down.pop() if down else endpoint.honest(user)
        return await outcomes(asked, "It is the planet Earth.")

    assert [(o.grade, o.score) for o in closed(asked, main)] == [("infra_error", None)]


def test_waiting_for_the_judge_is_off_the_deadline(judge: Asked, endpoint: Any) -> None:
    """Eight submissions queue for one place, far longer than the deadline that each has."""
    slow = judge(concurrency=1)

    async def main() -> list[Outcome]:
        await outcomes(slow, "It is the planet Earth.")
        endpoint.delay_s = 0.1
        return await outcomes(slow, *["It is the planet Earth."] * 8, deadline_s=0.3)

    assert [(o.grade, o.score) for o in closed(slow, main)] == [("graded", 1.0)] * 8
    assert endpoint.most_at_once == 1


def test_a_slow_judge_holds_no_event_loop(judge: Asked, endpoint: Any) -> None:
    async def main() -> float:
        await slow.start()
        watch = LoopWatch()
        watch.start(0.05)
        await asyncio.gather(*(slow.ask(QUESTION, seed=n, max_tokens=5) for n in range(4)))
        watch.stop()
        return watch.stalled_s

    slow, endpoint.delay_s = judge(), 0.5
    assert closed(slow, main) < 0.25


def test_one_judge_serves_one_event_loop_after_another(judge: Asked) -> None:
    asked = judge()
    replies = [asyncio.run(asked.ask(QUESTION, seed=0, max_tokens=5)) for _ in range(2)]
    assert replies[0] == replies[1]


def test_verifiers_that_ask_are_found_wherever_they_are_held() -> None:
    from agentrl.verifiers.answer import Answer

    plain, judged = Answer(lambda task: "a"), JudgeVerifier(RUBRIC, gold=GOLD)
    held = shaped(gated(plain, all_of(a=plain, b=process(judged, lambda submission: []))))
    assert judged_parts(held) == [judged]
    assert judged_parts(all_of(a=plain)) == []


def test_what_judge_names(tmp_path: Path, endpoint: Any) -> None:
    assert judges.named(f"{endpoint.url}#some/model").name == f"some/model at {endpoint.url}"
    path = tmp_path / "judge.yaml"
    path.write_text("judge: {engine: {type: sglang, urls: [http://127.0.0.1:30001]}, budget: {calls: 5}}\n")
    assert judges.named(str(path)).section.budget.calls == 5
    path.write_text("engine: {type: sglang, urls: [http://127.0.0.1:30001], modle: x}\n")
    with pytest.raises(RecipeError, match=r"judge.yaml: judge: 1 mistake.*\n.*engine.modle: unknown key; did you mean"):
        judges.named(str(path))
    path.write_text("engine: {type: policy}\n")
    with pytest.raises(RecipeError, match="there is no policy here, only a training run has one"):
        judges.named(str(path))
    with pytest.raises(UserError, match=r"as URL#MODEL, e.g. http://127.0.0.1:1/v1#NAME"):
        judges.named("http://127.0.0.1:1/v1")


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ({"type": "sglang"}, "name either `model`, the folder that a server is started with, or `urls`"),
        ({"type": "sglang", "model": "x", "urls": ["http://a"]}, "name either `model`"),
        ({"type": "opnai", "url": "u", "model": "m"}, "did you mean 'openai'?"),
        ({"url": "u", "model": "m"}, "judge.engine.type: missing"),
        ({"type": "policy", "url": "u"}, "judge.engine.url: unknown key"),
    ],
)
def test_a_judge_that_makes_no_sense_is_refused(engine: dict[str, Any], said: str) -> None:
    base = {"run": {"name": "x"}, "model": {"type": "scratch"}, "envs": [{"name": "files"}]}
    with pytest.raises(RecipeError) as refused:
        recipes.build({**base, "judge": {"engine": engine}})
    assert said in str(refused.value)
