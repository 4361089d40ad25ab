"""Plays a script on one task and has it graded as in training: `agentrl.envs.play` drives the episode."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from agentrl.envs import play as episodes
from agentrl.envs.base import Environment
from agentrl.envs.play import Abandoned, Action, Played, Policy, Stage, Stop, scripted
from agentrl.errors import Fault, UserError, fault_of
from agentrl.types import Ending, Grade, Outcome, Task

__all__ = ["Action", "Again", "Arena", "NotApplicable", "Played", "Script", "Stop", "Variants", "play"]

MAX_ACTIONS = 64
"""Turns that a script gets, whatever the environment's own budget."""
Script = Iterable[Action | Stop]
"""The actions of an episode: a list, or a generator that is sent what each of its actions brought."""


@dataclass(frozen=True, slots=True)
class Again(Stop):
    """Yielded in place of an action: the episode ends ungraded, and the next one of the same task begins."""

    ending: Ending | None = None


class Variants(list[Script]):
    """Several scripts that try one idea in different ways; the attack succeeds when any of them does."""


class NotApplicable(Exception):
    """The target offers nothing that this attack could work on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arena:
    """Where scripts are played: an environment, one of its tasks, and the sandboxes and secret for grading."""

    make: Callable[[], Environment]
    task: Task
    stage: Stage
    seed: int = 0
    limit_s: float = 240.0
    """Wall seconds for an episode with its grading; one that takes longer counts as hung."""


async def play(arena: Arena, script: Script) -> Played:
    """Play a script to its end and grade it. Whatever breaks gives an outcome without a score."""
    began = time.monotonic()
    ending: Ending = "done"
    grade: Grade = "infra_error"
    try:
        return await asyncio.wait_for(_play(arena, scripted(script)), arena.limit_s)
    except TimeoutError:
        ending, grade = "timeout", "verifier_error"
        fault = Fault("redteam", "verifier", f"the episode and its grading took longer than {arena.limit_s:.0f} s")
    except (NotApplicable, UserError):
        raise
    except Exception as error:  # training would retry this, so the agent got away without its 0
        fault = fault_of(error, "episode")
    outcome = Outcome(ending=ending, grade=grade, score=None, fault=fault)
    return Played(task=arena.task, messages=(), outcome=outcome, seconds={"episode": time.monotonic() - began})


async def _play(arena: Arena, policy: Policy) -> Played:
    """Play one episode after another until the script no longer asks for the next."""
    while True:
        try:
            return await episodes.play(
                arena.make(), arena.task, policy, arena.stage, seed=arena.seed, max_turns=MAX_ACTIONS
            )
        except Abandoned:
            continue
