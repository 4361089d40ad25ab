"""Opens the environments of a recipe with their sandboxes: where the run is, and in every player elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from agentrl import envs, sandboxes
from agentrl.envs.base import Environment
from agentrl.envs.tools import tools_of
from agentrl.errors import AuthoringError, RecipeError
from agentrl.recipe import EnvSection, Recipe, SubagentCompaction
from agentrl.rollout.compaction import DELEGATE
from agentrl.rollout.request import AuditShares, EnvRuntime
from agentrl.sandboxes.pool import Pool
from agentrl.verifiers.version import version_of

JudgeOf = Callable[[Mapping[str, EnvRuntime], Environment], Any]
"""Returns the judge of an environment, if its verifier asks one."""


@contextmanager
def runtimes(
    recipe: Recipe, *, judge: JudgeOf = lambda opened, environment: None, elsewhere: bool = False
) -> Iterator[dict[str, EnvRuntime]]:
    """Open the recipe's environments with their sandboxes; everything they hold is released after the block.

    `elsewhere`: all episodes are played by players on other nodes, so that no sandbox has to work here.
    """
    made_by = makers(recipe)
    with ExitStack() as stack:
        pools: dict[str, Pool] = {}
        opened: dict[str, EnvRuntime] = {}
        audits = AuditShares(recipe.audit.top, recipe.audit.rest) if recipe.audit else None
        for section in recipe.envs:
            if section.sandbox not in pools:
                pools[section.sandbox] = _pool(section, recipe, elsewhere)
                stack.callback(pools[section.sandbox].close)
            make = made_by[section.name]
            opened[section.name] = EnvRuntime(
                name=section.name,
                make=make,
                boxes=pools[section.sandbox],
                judge=judge(opened, make()),
                audits=audits,
                states=recipe.algorithm.credited == "state",
            )
        yield opened


def _pool(section: EnvSection, recipe: Recipe, elsewhere: bool) -> Pool:
    backend = sandboxes.load(section.sandbox)()
    if not backend.safe and not section.unsafe:
        raise RecipeError(
            f"envs: the sandbox {section.sandbox!r} of {section.name} isolates nothing; choose `namespace` or "
            "`docker`, or say `unsafe: true` if what the policy does to this machine is no matter"
        )
    if not backend.safe and recipe.algorithm.credited == "branch":
        raise RecipeError(
            f"envs: the sandbox {section.sandbox!r} of {section.name} does not tell what runs in it, so that no "
            "episode can be forked (algorithm.credit: branch); choose `namespace` or `docker`"
        )
    state = None if elsewhere else backend.available()
    if state is not None and not state.works:
        fix = f"; {state.fix}" if state.fix else ""
        raise RecipeError(
            f"envs: the sandbox {section.sandbox!r} of {section.name} does not work here: "
            f"{', '.join(state.missing)}{fix}"
        )
    return Pool(backend, limit=recipe.sandboxes.boxes)


def makers(recipe: Recipe) -> dict[str, Callable[[], Environment]]:
    """Return what makes each environment; refuse options and levels that it does not take."""
    return {section.name: _maker(section, recipe) for section in recipe.envs}


def _maker(section: EnvSection, recipe: Recipe) -> Callable[[], Environment]:
    eval_levels = recipe.eval.levels if recipe.eval else None
    warm = recipe.warm_start.levels if recipe.warm_start else None
    try:
        kind = envs.load(section.source, section.options)
        environment = kind(**section.options)
    except (TypeError, AuthoringError) as error:
        raise RecipeError(f"envs: {section.name} does not take these options: {error}") from error
    _check_compaction(section.name, environment, recipe)
    for key, levels in {"envs[].levels": section.levels, "eval.levels": eval_levels, "warm_start.levels": warm}.items():
        unknown = [level for level in levels or () if level not in environment.levels]
        if unknown:
            first, last = environment.levels[0], environment.levels[-1]
            raise RecipeError(f"{key}: {section.name} has the levels {first} to {last}, not {unknown[0]}")
    return lambda: kind(**section.options)


def _check_compaction(name: str, environment: Environment, recipe: Recipe) -> None:
    """Refuse compaction where an environment names its agent itself, or has a tool of the name that sub-agents need."""
    section = recipe.rollout.compaction
    if section is not None and getattr(environment, "agent", None) is not None:
        raise RecipeError(f"rollout.compaction: the agent of {name} keeps its own context; leave one of them out")
    if isinstance(section, SubagentCompaction) and DELEGATE.name in tools_of(environment):
        raise RecipeError(f"rollout.compaction: {name} has a tool named {DELEGATE.name} already; use summary or drop")


def source_versions(environments: Mapping[str, EnvRuntime]) -> dict[str, str]:
    """Return a hash of each environment's and its verifier's source and settings."""
    instances = {name: runtime.make() for name, runtime in environments.items()}
    own = {f"environment {name}": version_of(environment) for name, environment in instances.items()}
    return own | {f"verifier of {name}": environment.verifier.version for name, environment in instances.items()}
