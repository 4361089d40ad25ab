"""Judged rewards of a recipe: what the judge reads of an episode, what asks it, and how it is measured beforehand.

rubric, reward_model   verifier ── Refined ── graded where the episode is played, like any verdict
pairwise               the verifier's score first; judges/tournament.py compares the members of a finished group
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentrl.envs.base import Environment
from agentrl.envs.play import Stage, message_of, play, spoken
from agentrl.errors import RecipeError
from agentrl.judges.calibration import (
    Agreement,
    Labelled,
    agreement_of,
    expert_and_wrong,
    labelled_episode,
    labelled_rows,
)
from agentrl.recipe import JudgeCalibration, ModelReward, PairwiseReward, Recipe, RewardsSection, RubricReward
from agentrl.rollout.request import EnvRuntime
from agentrl.types import Message, Round, Task, Verdict
from agentrl.verifiers.base import Context, Judge, Submission, Verifier
from agentrl.verifiers.compose import UNJUDGED, Refined
from agentrl.verifiers.judge import Criterion, JudgeVerifier, Rubric, Scalar, Versus, compare
from agentrl.verifiers.judge.prompt import Form

SEEN = 500
"""Characters of each observation that a judge is shown; the rest is left out, and said to be."""
Environments = Mapping[str, tuple[Callable[[], Environment], Stage]]
"""By name, what makes an instance, and the stage that its episodes are played on."""


def shown(messages: Sequence[Message], view: str) -> str:
    """Return what the judge reads of an episode: its last turn, or every turn with the beginning of what it brought.

    The lines of a transcript are indented, so that no turn can write what looks like an answer of the environment.
    """
    begun = next((place for place, message in enumerate(messages) if message.role == "assistant"), len(messages))
    turns = [message for message in messages[begun:] if message.role == "assistant"]
    if view == "answer":
        return spoken(turns[-1]) if turns else ""
    parts = []
    for message in messages[begun:]:
        text = spoken(message) if message.role == "assistant" else message.content
        if message.role != "assistant" and len(text) > SEEN:
            text = f"{text[:SEEN]} [{len(text) - SEEN} more characters]"
        lines = "".join(f"\n  {line}" for line in text.splitlines())
        parts.append(f"[{'policy' if message.role == 'assistant' else 'environment'}]{lines}")
    return "\n\n".join(parts)


def rubric_of(section: RubricReward) -> Rubric:
    """Return the rubric that a recipe names."""
    return Rubric(tuple(Criterion(c.name, c.question, c.weight) for c in section.criteria))


def judging_part(
    judged: RubricReward | ModelReward, rubric: Form | Callable[[bytes], Form] | None = None
) -> JudgeVerifier:
    """Return the verifier that asks the judge, alone; `rubric` replaces the one that the recipe names."""
    return _asking(judged, Scalar() if isinstance(judged, ModelReward) else rubric or rubric_of(judged))


def _asking(
    judged: RubricReward | PairwiseReward | ModelReward, form: Form | Callable[[bytes], Form], **options: Any
) -> JudgeVerifier:
    return JudgeVerifier(
        form,
        gold=(),
        measured_elsewhere=True,
        view=lambda submission: shown(submission.transcript, judged.view),
        max_characters=judged.max_characters,
        **options,
    )


def reward_of(rewards: RewardsSection, rubric: Form | Callable[[bytes], Form] | None = None) -> Any:
    """Return what puts the judge beside a verifier; None where no episode is judged by itself."""
    judged = rewards.judged
    if judged is None or isinstance(judged, PairwiseReward):
        return None
    part = judging_part(judged, rubric)
    last: list[Verifier] = []

    def reward(outcome: Verifier) -> Verifier:
        if not last or last[0] is not outcome:  # environments mostly share theirs
            last[:] = [outcome, Refined(outcome, part, weight=judged.weight, gate=judged.gate)]
        return last[1]

    return reward


def with_rewards(
    rewards: RewardsSection, runtimes: Mapping[str, EnvRuntime], rubric: Form | Callable[[bytes], Form] | None = None
) -> dict[str, EnvRuntime]:
    """Return environments whose training episodes are graded as the recipe's rewards say."""
    reward = reward_of(rewards, rubric)
    return {name: replace(runtime, reward=reward) if reward else runtime for name, runtime in runtimes.items()}


def reward_row(round_: Round) -> dict[str, float]:
    """Return what verifiers and judge gave to the episodes of a round; nothing where no reward is judged."""
    breakdowns = [
        trajectory.verdict.breakdown
        for group in (*round_.kept, *round_.dropped)
        for trajectory in group.trajectories
        if trajectory.verdict is not None and "verifier" in trajectory.verdict.breakdown
    ]
    if not breakdowns:
        return {}
    opinions = [breakdown["judge"] for breakdown in breakdowns if "judge" in breakdown]
    return {
        "reward/verifier": sum(breakdown["verifier"] for breakdown in breakdowns) / len(breakdowns),
        "reward/judge": sum(opinions) / len(opinions) if opinions else 0.0,
        "reward/judged": len(opinions),
        "reward/unjudged": sum(f"judge.{UNJUDGED}" in breakdown for breakdown in breakdowns),
    }


def judged_alone(rewards: RewardsSection, make: Callable[[], Environment]) -> Callable[[], Environment]:
    """Return what makes an environment that the judge of these rewards grades alone, so that it can be attacked.

    Comparisons are made with the expert's work, with which a tie is full marks.
    """
    judged = rewards.judged
    if judged is None:
        return make
    if not isinstance(judged, PairwiseReward):
        return graded_by(make, judging_part(judged))

    def best(task: Task) -> str:
        turns = [message_of(action) for action in make().expert(task)]
        return shown(turns, judged.view)

    form = Versus(question=judged.question, tie=1.0)
    return graded_by(make, _asking(judged, form, reference=best))


# Measuring ---------------------------------------------------------------------------------------------------------


def graded_by(make: Callable[[], Environment], verifier: Verifier) -> Callable[[], Environment]:
    """Return what makes the same environment with another verifier."""

    def made() -> Environment:
        environment = make()
        environment.verifier = verifier  # type: ignore[misc]
        return environment

    return made


def labelled_by_source(section: JudgeCalibration, environments: Environments) -> dict[str, dict[str, list[Labelled]]]:
    """Return the labelled episodes of each environment by their source; RecipeError where there are none."""
    rows = labelled_rows(section.file, list(environments)) if section.file is not None else {}
    result = {}
    for name, (make, _) in environments.items():
        sources = {
            "file": [labelled_episode(make(), row) for row in rows.get(name, [])],
            "expert": expert_and_wrong(make(), section.tasks),
        }
        result[name] = {source: labelled for source, labelled in sources.items() if labelled}
        if not result[name]:
            raise RecipeError(
                f"rewards.judged: there is nothing to measure the judge on for {name}: no expert() was played; name a "
                "file in judge.calibration.file, or raise judge.calibration.tasks"
            )
    return result


async def measure(judge: Judge, recipe: Recipe, environments: Environments) -> list[Agreement]:
    """Measure the judge of a recipe's rewards on whole episodes, the verifier aside; RecipeError below the bound."""
    judged = recipe.rewards.judged
    if judged is None or recipe.judge is None:
        return []
    section, measured = recipe.judge.calibration, []
    for name, sources in labelled_by_source(section, environments).items():
        make, stage = environments[name]
        for source, labelled in sources.items():
            if isinstance(judged, PairwiseReward):
                agreement = await _preferred(name, source, make, stage, labelled, section.min_agreement, judged)
            else:
                own = graded_by(make, judging_part(judged))
                agreement = await agreement_of(name, source, own, stage, labelled, section.min_agreement)
            measured.append(replace(agreement, source=f"{judged.type}, {source}"))
    return measured


class _Shows(Verifier):
    """Grades nothing: only what the judge would read is wanted."""

    async def verify(self, submission: Submission, context: Context) -> Verdict:
        return Verdict(score=0.0)

    async def probe(self, context: Context) -> None:
        """Need nothing."""


async def _preferred(
    name: str,
    source: str,
    make: Callable[[], Environment],
    stage: Stage,
    labelled: Sequence[Labelled],
    required: float,
    judged: PairwiseReward,
) -> Agreement:
    """Measure how often the judge prefers the right one of two episodes of the same task, in both orders."""
    texts: dict[str, tuple[str, dict[bool, list[str]]]] = {}
    for item in labelled:
        played = await play(graded_by(make, _Shows())(), item.task, item.actions, stage)
        _, kinds = texts.setdefault(item.task.id, (item.task.prompt, {True: [], False: []}))
        kinds[item.passes].append(shown(played.messages, judged.view))
    good, bad = [], []
    for prompt, kinds in texts.values():
        for pair in zip(kinds[True], kinds[False], strict=False):
            assert stage.judge is not None
            result = await compare(stage.judge, judged.question, prompt, pair, secret=b"calibration")
            if not result.readable:
                raise RecipeError(f"judge: it gives no readable comparison for {name}")
            good.append(result.points[0] > 0.5)
            bad.append(result.points[1] < 0.5)
    if not good:
        raise RecipeError(f"judge.calibration: {name} has no task with a right and a wrong answer ({source})")
    agreement = Agreement(
        env=name,
        source=source,
        sensitivity=sum(good) / len(good),
        specificity=sum(bad) / len(bad),
        count=2 * len(good),
        required=required,
    )
    if agreement.balanced < required:
        raise RecipeError(f"judge: refused: {agreement}; use a better judge or a clearer question")
    return agreement
