"""What plays a recipe's episodes: its environments with their judge, its engine, and the player that uses both."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from agentrl import judges
from agentrl.engines.base import Engine
from agentrl.engines.build import chat
from agentrl.engines.build import make as make_engine
from agentrl.envs.base import Environment
from agentrl.errors import RecipeError
from agentrl.initial_policy import PolicyModel, load_policy
from agentrl.interop.agents import with_agents
from agentrl.interop.gateway import Gateway
from agentrl.judges import Judge
from agentrl.recipe import OpenaiEngine, Recipe
from agentrl.recipe.compaction import NO_ENDPOINT
from agentrl.rollout.chat import ANY_CONTEXT, ChatPlayer
from agentrl.rollout.player import Gate, Player, RequestGate, budget_of, make_player, sampling_of
from agentrl.rollout.request import EnvRuntime
from agentrl.rollout.runtimes import makers
from agentrl.rollout.runtimes import runtimes as open_runtimes
from agentrl.rollout.thinking import think_budget

Say = Callable[[str], None]


@contextmanager
def runtimes(
    recipe: Recipe, *, elsewhere: bool = False, rewarded: bool = False, rubric: Any = None
) -> Iterator[dict[str, EnvRuntime]]:
    """Open the recipe's environments with their sandboxes; everything they hold is released after the block.

    Those whose verifier asks a judge share one, which `open_judge` starts. `elsewhere`: all episodes are played by
    players on other nodes, so that no sandbox has to work here. `rewarded`: training episodes get the recipe's rewards;
    `rubric` then gives the rubric, where that changes during the run.
    """
    check_judge(recipe)
    shared: list[Judge] = []

    def judge(opened: Mapping[str, EnvRuntime], environment: Environment) -> Judge | None:
        if not judges.needs_judge(environment) and not (rewarded and recipe.rewards.judged):
            return None
        if not shared:
            shared.append(make_judge(recipe, opened))
        return shared[0]

    with open_runtimes(recipe, judge=judge, elsewhere=elsewhere) as opened:
        yield judges.with_rewards(recipe.rewards, opened, rubric) if rewarded else opened


def check_judge(recipe: Recipe) -> None:
    """Refuse environments whose verifier asks a judge where there is none."""
    asking = [name for name, make in makers(recipe).items() if judges.needs_judge(make())]
    if asking and recipe.judge is None:
        raise judges.missing(asking)
    judges.check_engine(recipe, asking)


def make_judge(recipe: Recipe, environments: Mapping[str, EnvRuntime]) -> Judge:
    """Make the recipe's judge, not yet started; one that is the policy loads what the run starts from."""
    assert recipe.judge is not None
    initial = partial(load_policy, recipe, environments, say=lambda text: None)
    return judges.make(recipe.judge, policy=initial, folder=recipe.run.out / recipe.run.name)


def open_engine(
    recipe: Recipe,
    policy: PolicyModel,
    environments: Mapping[str, EnvRuntime],
    stack: AsyncExitStack,
    *,
    folder: Path,
    adapters: bool = False,
    version: int = 0,
    say: Say,
    **options: Any,
) -> tuple[Engine, Player, Gate]:
    """Return the engine of a recipe (not started; `stack` closes it), a player that uses it, and a gate that keeps
    requests back. With a cluster the players are elsewhere, and the engine brings them up."""
    make = partial(
        make_engine,
        recipe.rollout.engine,
        policy.model,
        model_path=policy.folder,
        folder=folder,
        max_context=policy.context,
        adapters=adapters and recipe.cluster is None,
        version=version,
        say=say,
        **options,
    )
    think_budget(recipe.rollout.think_tokens, policy.renderer)  # refuses a format without thinking
    if recipe.cluster is not None:
        from agentrl.cluster.build import open_players

        everywhere, players = open_players(
            recipe, policy, environments, stack, make_engine=make, version=version, say=say
        )
        return everywhere, players, players
    engine = make()
    stack.push_async_callback(engine.close)
    gate = RequestGate(engine)
    gateway = Gateway()
    stack.push_async_callback(gateway.close)
    player = make_player(recipe, gate, policy.renderer, policy.context, environments)
    return engine, with_agents(recipe, player, gateway), gate


@asynccontextmanager
async def open_player(
    recipe: Recipe,
    environments: Mapping[str, EnvRuntime],
    *,
    model: Path | None = None,
    url: str | None = None,
    folder: Path,
    say: Say,
) -> AsyncIterator[Player]:
    """Start an engine that serves a policy without training it, and open its player.

    The policy is the model in `model`, else the one the recipe starts from; `url` names a server that has it already.
    A recipe whose engine is a chat endpoint has its policy there, and needs neither torch nor a tokenizer.
    """
    if isinstance(recipe.rollout.engine, OpenaiEngine) and model is None and url is None:
        if recipe.rollout.compaction is not None:
            raise RecipeError(NO_ENDPOINT)
        endpoint, gateway = chat(recipe.rollout.engine), Gateway()
        try:
            await endpoint.start()
            budget, sampling = budget_of(recipe, ANY_CONTEXT), sampling_of(recipe)
            asking = ChatPlayer(endpoint=endpoint, runtimes=environments, budget=budget, sampling=sampling)
            yield with_agents(recipe, asking, gateway)
        finally:
            await gateway.close()
            await endpoint.close()
        return
    from agentrl.learn.weights import hand_over
    from agentrl.recipe import SglangEngine

    policy = load_policy(recipe, environments, folder=model, say=lambda text: None)
    section = SglangEngine(type="sglang", launch=False, urls=[url]) if url else recipe.rollout.engine
    recipe = recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update={"engine": section})})
    async with AsyncExitStack() as stack:
        engine, player, _ = open_engine(recipe, policy, environments, stack, folder=folder, say=say)
        await engine.start()
        if url is None:
            await hand_over(engine, section, policy.model)
        yield player
