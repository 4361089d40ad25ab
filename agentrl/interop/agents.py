"""Plays episodes with a program of the user's own: the agent asks the gateway for turns, and its exit ends the episode.

    play_out ─> drive ─> AgentTurns(episode) ─┬─ function: `await agent(task, client, box)` on this machine
                (the one driver)              └─ command: run in the sandbox, a relay carries its requests out
                                                            │
                                             Gateway ─ Session ─ branches ─> segments of one trajectory

The agent is part of the policy: what it breaks is its own doing. Its crash ends the episode, which is graded as always.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from agentrl.envs.episode import Episode, Step
from agentrl.envs.play import Played, Stop, drive
from agentrl.envs.tool_output import well_formed
from agentrl.errors import AgentError, AuthoringError, Fault, InfraError, UserError, fault_of
from agentrl.interop.gateway import Gateway
from agentrl.interop.policies import ChatPolicy, TokenPolicy
from agentrl.interop.programs import (
    FOLDER,
    AgentClient,
    AgentFunction,
    Files,
    Program,
    copy_files,
    fitted,
    program_of,
    variables,
)
from agentrl.interop.relay import Relay
from agentrl.interop.session import Opening, Policy, Session
from agentrl.recipe import Recipe
from agentrl.rollout.chat import ChatPlayer
from agentrl.rollout.player import LocalPlayer
from agentrl.rollout.request import Budget, RolloutId
from agentrl.rollout.rollout import play_out
from agentrl.sandboxes.base import ENVIRONMENT, off_loop
from agentrl.types import Message, Observation, Task, ToolCall, Trajectory
from agentrl.verifiers.base import Context

P = TypeVar("P", LocalPlayer, ChatPlayer)
GRACE_S = 5.0
"""Seconds within which a cancelled agent must end."""
PATH = ENVIRONMENT["PATH"]
TIME_OVER = "the time of the episode's tools is used up"
KEPT = 2000
"""Characters of an agent's output that are kept with the trajectory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentPlayer:
    """A player whose environments may be played by agents; the others go to the player within."""

    inner: LocalPlayer | ChatPlayer
    gateway: Gateway
    programs: Mapping[str, Program]
    """By environment."""
    warned: set[str] = field(default_factory=set)
    """Environments whose agent was reported to crash."""

    async def play(self, env: str, task: Task, rollout_id: RolloutId) -> Trajectory:
        """Play one task to its end and have it graded."""
        program = self.programs.get(env)
        if program is None:
            return await self.inner.play(env, task, rollout_id)
        await self.gateway.start()
        inner = self.inner

        def attempt(earlier: Sequence[Any]) -> AgentTurns:
            how = (task, rollout_id, inner.budget, inner.sampling, earlier)
            policy: Policy = (
                ChatPolicy(inner.endpoint, *how)
                if isinstance(inner, ChatPlayer)
                else TokenPolicy(inner.engine, inner.renderer, *how)
            )
            return AgentTurns(self.gateway, policy, program, inner.budget)

        runtime = fitted(inner.runtimes[env], program)
        trajectory = await play_out(attempt, runtime, task, rollout_id=rollout_id, budget=inner.budget)
        fault, asked = trajectory.outcome.fault, trajectory.ledger.get("agent", {}).get("requests")
        if fault is not None and asked == 0 and env not in self.warned:
            self.warned.add(env)
            warnings.warn(f"the agent of {env} ended before it asked anything: {fault.cause}", stacklevel=2)
        return trajectory

    def at(self, temperature: float) -> AgentPlayer:
        """Return the same player with another temperature."""
        return replace(self, inner=self.inner.at(temperature))


def with_agents(
    recipe: Recipe, player: P, gateway: Gateway, files: Mapping[str, Files] | None = None
) -> AgentPlayer | P:
    """Return a player that has the recipe's agents play their environments; `files` come from another machine."""
    sections = {section.name: section.agent for section in recipe.envs}
    programs = {
        name: program_of(runtime.make(), sections[name], (files or {}).get(name))
        for name, runtime in player.runtimes.items()
    }
    agents = {name: program for name, program in programs.items() if program is not None}
    if agents and recipe.rollout.think_tokens is not None:
        raise UserError(
            f"rollout.think_tokens: the agent of {min(agents)} writes its own requests, into which nothing is forced; "
            "remove the key, or the agent"
        )
    return AgentPlayer(inner=player, gateway=gateway, programs=agents) if agents else player


class AgentTurns:
    """One attempt of an agent at an episode."""

    def __init__(self, gateway: Gateway, policy: Policy, program: Program, budget: Budget) -> None:
        self.gateway, self.policy, self.program, self.budget = gateway, policy, program, budget
        self.session: Session | None = None
        self.crash: Fault | None = None
        self.answer: str | None = None
        self.output = ""
        self._opening: Opening = ((), [])
        self._tool_lock = asyncio.Lock()

    @property
    def acted(self) -> bool:
        """Return whether the agent has asked anything: from then on nothing that breaks may remove the episode."""
        return self.session is not None and self.session.counts["requests"] > 0

    def recorded(self) -> list[Any]:
        """Return the answers so far, for another attempt; never empty, since the attempt itself counts."""
        return [(b"", None), *self.policy.calls]

    def tokens(self) -> dict[str, Any]:
        """Return the fields of the trajectory that tell its tokens."""
        return self.policy.tokens(self.program.section, self.answer, self._opening)

    async def play(self, episode: Episode, context: Context) -> Played:
        """Play the episode within the budget."""
        played = await drive(episode, self, context, turns=1, wall_seconds=self.budget.wall_seconds)
        outcome = played.outcome
        if self.crash is not None and outcome.fault is None:
            outcome = replace(outcome, fault=self.crash)
        messages = self.policy.conversation(self.answer) or played.messages
        return replace(played, messages=messages, outcome=outcome, ledger={**played.ledger, "agent": self.ledger()})

    def ledger(self) -> dict[str, Any]:
        """Return what the agent asked of the gateway, and which of its conversations are trained on."""
        assert self.session is not None
        report = self.policy.report(self.program.section, self.answer)
        overridden = sorted(self.session.overridden)
        return {**self.session.counts, **report, "overridden": overridden, "output": self.output}

    async def __call__(self, episode: Episode) -> Stop:
        """Run the agent to its end; return how the episode ended."""
        self._opening = (tuple(episode.transcript), episode.schemas)
        budget = self.budget
        session = self.session = Session(
            self.policy,
            turns=budget.turns or episode.environment.max_turns,
            tokens=budget.tokens,
            turn_tokens=budget.turn_tokens,
        )
        session.opening = [{"role": m.role, "content": m.content} for m in self._opening[0]]
        session.tools, session.run_tool = self._opening[1], self._runner(episode)
        session.run_step = partial(self._step, episode)
        self.gateway.open(session)
        try:
            episode.stage = "policy"
            running = asyncio.ensure_future(self._run(episode, session))
            try:
                over = asyncio.ensure_future(session.over.wait())
                ends: set[asyncio.Future[Any]] = {running, session.trouble, over}
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                over.cancel()
                if session.trouble.done():
                    session.trouble.result()  # the system failed, not the agent
                if running.done():
                    running.result()
            finally:
                running.cancel()
                await asyncio.wait({running}, timeout=GRACE_S)
        finally:
            self.gateway.end(session)
            episode.seconds["engine"] += session.seconds
        cut_off = session.cut_off(self.answer)  # ends the episode, as in the loop
        if self.crash is not None:
            return Stop(session.ending or ("max_tokens" if cut_off else "agent_error"))
        if not episode.over:  # else a terminal tool, or the environment's reply to a message, has set it
            episode.answer = well_formed(self.answer or "")
        return Stop(session.ending or ("max_tokens" if cut_off else "done"))

    async def _run(self, episode: Episode, session: Session) -> None:
        """Run the program."""
        if self.program.function is None:
            await self._command(episode, session)
        else:
            await self._function(self.program.function, episode, session)

    async def _function(self, function: AgentFunction, episode: Episode, session: Session) -> None:
        """Run the function; what it raises is its crash, unless the sandbox or the system says otherwise."""
        url = f"{self.gateway.url}/s/{session.id}/v1"
        client = AgentClient(url, session.key, tuple(session.tools), tuple(session.opening))
        box: Any = episode.environment._box
        try:
            result = await function(episode.task.public(), client, box)
        except (AgentError, InfraError):
            raise
        except (Exception, SystemExit) as error:
            if isinstance(error, SystemExit) and error.code in (None, 0):
                result = None
            else:
                self.crash = fault_of(error, "agent", "agent")
                self.output = well_formed(self.crash.trace[-KEPT:])
                return
        self.answer = result if isinstance(result, str) else self._last_message()

    async def _command(self, episode: Episode, session: Session) -> None:
        """Run the command in the sandbox, with a relay as its only way out; its exit code tells how it went."""
        section, box = self.program.section, episode.environment._box
        if box is None:
            raise AuthoringError(
                f"{type(episode.environment).__name__} has no sandbox, in which the agent's command could run; "
                "use a `function`, or return a SandboxSpec from prepare()"
            )
        prompt = episode.transcript[1].content
        relay = Relay(box, self.gateway, session)
        try:
            await relay.start()
            await off_loop(copy_files, self.program.files, box)
            path = {"PATH": f"{section.venv.expanduser().resolve()}/bin:{PATH}"} if section.venv is not None else {}
            result = await box.aio.exec(
                [word.replace("{files}", FOLDER).replace("{prompt}", prompt) for word in section.command or ()],
                stdin=prompt.encode(),
                env={**variables(relay.port, session.key, prompt), **path, **section.env},
                timeout=self.budget.wall_seconds + GRACE_S,
            )
        finally:
            await relay.close()
        self.output = well_formed(result.text.replace(session.key, "OPENAI_API_KEY")[-KEPT:])
        if not result.ok:
            how = "ran out of time" if result.timed_out else f"ended with exit code {result.exit_code}"
            self.crash = Fault("agent", "agent", f"the agent {how}: {' '.join(self.output.split())[-200:]}")
        elif section.answer == "stdout":
            self.answer = result.stdout.decode("utf-8", "replace").strip()
        else:
            self.answer = self._last_message()

    async def _step(self, episode: Episode, said: Message) -> tuple[Sequence[Observation], bool]:
        """Carry out a turn of the policy, as the built-in loop would."""
        assert self.session is not None
        step = await self._act(episode, said)
        if step is None and not episode.over:
            self.session.spent("timeout", TIME_OVER)
        return (step.observations, step.done) if step is not None else ((), True)

    async def _act(self, episode: Episode, message: Message) -> Step | None:
        """Carry a message out, one after the other; None when the episode, or the time of its tools, is over.

        A client that hangs up while it waits is forgotten. What has begun runs to its end, and the next one waits.
        """
        assert self.session is not None
        session, lock = self.session, self._tool_lock
        await lock.acquire()
        if episode.over or episode.seconds["tools"] >= self.budget.tool_seconds:
            lock.release()
            return None

        def ended(task: asyncio.Task[Step]) -> None:
            lock.release()
            session.running.discard(task)
            error = None if task.cancelled() else task.exception()
            if error is not None and not session.trouble.done():
                session.trouble.set_exception(error)

        acting = asyncio.ensure_future(episode.timed("tools", episode.act(message)))
        session.running.add(acting)
        acting.add_done_callback(ended)
        return await asyncio.shield(acting)

    def _last_message(self) -> str:
        """Return what the policy said last; a turn that was cut off is no answer, as in the loop."""
        if self.session is not None and self.session.cut_off(None):
            return ""
        talk = self.policy.conversation(None)
        return talk[-1].content if talk else ""

    def _runner(self, episode: Episode) -> Callable[[str, Any], Awaitable[tuple[str, bool]]]:
        """Return what runs the environment's tools, one call after the other, as the built-in loop would."""

        async def run(name: str, arguments: Any) -> tuple[str, bool]:
            call = ToolCall(name=name, arguments=arguments if isinstance(arguments, Mapping) else {})
            if not isinstance(arguments, Mapping):
                call = replace(call, error="the arguments must be a JSON object")
            step = await self._act(episode, Message(role="assistant", content="", tool_calls=(call,)))
            if step is None:
                return f"error: {'the episode is over' if episode.over else TIME_OVER}", True
            content = "\n".join(observation.content for observation in step.observations)
            return content or "done", any(observation.error for observation in step.observations)

        return run
