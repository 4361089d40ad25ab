"""Which environments ask a judge, and what is said where a recipe does not fit them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from agentrl.envs.base import Environment
from agentrl.envs.play import Stage
from agentrl.errors import RecipeError, UserError
from agentrl.judges.calibration import calibrate
from agentrl.judges.judge import Judge, named
from agentrl.judges.rewards import measure
from agentrl.recipe import Recipe, RewardModelJudge
from agentrl.rollout.request import EnvRuntime
from agentrl.verifiers.base import Verifier, judged_parts

WHAT_TO_WRITE = """\
  judge:
    engine: {type: openai, url: http://localhost:8000/v1, model: NAME}
or another engine: {type: sglang, urls: [http://localhost:30001]}, or {type: policy}; docs/verifiers.md says more"""


UNUSED = "judge: no verifier of this recipe's environments asks a judge, so none is started; remove the section"


class Target(Protocol):
    """What the red team attacks."""

    @property
    def name(self) -> str: ...
    @property
    def make(self) -> Callable[[], Environment]: ...
    @property
    def judge(self) -> Any: ...


def needs_judge(environment: Environment | type[Environment]) -> bool:
    """Tell whether an environment itself, its verifier, or its audit verifier asks a judge."""
    if environment.asks_judge:
        return True
    verifiers = (getattr(environment, name, None) for name in ("verifier", "audit_verifier"))
    return any(isinstance(verifier, Verifier) and bool(judged_parts(verifier)) for verifier in verifiers)


def check_engine(recipe: Recipe, asking: Sequence[str]) -> None:
    """Refuse a reward model where an environment asks questions: it answers none."""
    if asking and recipe.judge is not None and isinstance(recipe.judge.engine, RewardModelJudge):
        raise RecipeError(
            f"judge.engine: {', '.join(sorted(asking))} asks its judge questions, and a reward model gives numbers "
            "alone; name an openai, sglang or policy judge"
        )


def missing(names: Iterable[str]) -> RecipeError:
    """Return the refusal of a recipe that has environments with a judge, and no judge."""
    return RecipeError(
        f"the verifier of {', '.join(sorted(names))} asks a judge, and the recipe names none; add\n{WHAT_TO_WRITE}"
    )


def for_command(text: str, name: str, kind: type[Environment], options: Mapping[str, Any]) -> Judge | None:
    """Make the judge that `--judge` names, if the environment asks one; refuse one that is missing, or that nobody
    asks. The caller closes it."""
    environment: Environment | type[Environment] = kind
    with suppress(Exception):  # the author's constructor; what is wrong with it is for the checks to say
        environment = kind(**options)
    if needs_judge(environment):
        if not text:
            raise UserError(
                f"the verifier of {name} asks a judge; name one with --judge: URL#MODEL of an OpenAI-compatible "
                f"endpoint, or a YAML file with\n{WHAT_TO_WRITE}"
            )
        return named(text)
    if text:
        raise UserError(f"--judge: the verifier of {name} asks no judge; leave the option out")
    return None


@asynccontextmanager
async def asked_by(targets: Sequence[Target]) -> AsyncIterator[tuple[str, ...]]:
    """Measure the judge of what is attacked, if it asks one; close it after the block. Yields what to say about it."""
    asking = [target for target in targets if needs_judge(target.make())]
    judge = next((target.judge for target in targets if isinstance(target.judge, Judge)), None)
    if judge is None:
        scripted = "judge: the scripted examiner, which knows its own testbed alone; --judge names a real one"
        yield (scripted,) if asking else ()
        return
    try:
        if not asking:
            raise UserError(f"--judge: the verifier of {targets[0].name} asks no judge; leave the option out")
        await judge.start()
        yield (f"judge: {judge.name}",)
    finally:
        await judge.close()


@asynccontextmanager
async def closing(judge: Judge | None) -> AsyncIterator[None]:
    """Close the judge, if there is one, after the block."""
    try:
        yield
    finally:
        if judge is not None:
            await judge.close()


async def measured(judge: Judge, name: str, make: Callable[[], Environment], where: Stage) -> list[str]:
    """Measure a judge as a run would, and say how well it agreed, one line per source of labels."""
    await judge.start()
    judge.calibration = await calibrate(judge, judge.section.calibration, {name: (make, where)})
    return [f"judge ({judge.name}) in {agreement}" for agreement in judge.calibration]


def judge_of(runtimes: Mapping[str, EnvRuntime]) -> Judge | None:
    """Return the judge that environments share, if any of them asks one."""
    return next((runtime.judge for runtime in runtimes.values() if isinstance(runtime.judge, Judge)), None)


def stages_of(
    recipe: Recipe, environments: Mapping[str, EnvRuntime], judge: Judge
) -> dict[str, tuple[Callable[[], Environment], Stage]]:
    """Return what makes each environment, and where its labelled episodes are played."""
    grading_s = recipe.rollout.verify_seconds
    return {
        name: (runtime.make, Stage(boxes=runtime.boxes, judge=judge, grading_s=grading_s))
        for name, runtime in environments.items()
    }


@asynccontextmanager
async def open_judge(
    recipe: Recipe,
    environments: Mapping[str, EnvRuntime],
    *,
    path: Path | None = None,
    rewarded: bool = False,
    say: Callable[[str], None],
) -> AsyncIterator[Judge | None]:
    """Start the judge that the environments share, and measure it; RecipeError if it is not good enough.

    `path` keeps what the run has spent, and how well the judge agreed. `rewarded`: it is measured for the recipe's
    rewards as well.
    """
    judge = judge_of(environments)
    if judge is None:
        if recipe.judge is not None and recipe.rewards.judged is None:
            say(f"warning: {UNUSED}")
        yield None
        return
    if path is not None:
        judge.restore(path)
        if judge.spent:
            raise RecipeError(judge.spent)
    try:
        await judge.start()
        stages = stages_of(recipe, environments, judge)
        judge.calibration = await calibrate(judge, judge.section.calibration, stages)
        if rewarded:
            judge.calibration += await measure(judge, recipe, stages)
        for agreement in judge.calibration:
            say(f"judge ({judge.name}) in {agreement}")
        judge.step_row()  # what measuring took belongs to no step
        yield judge
    finally:
        await judge.close()
        if path is not None:
            judge.save(path)
