"""Plays episodes with a program of the user's own: the agent asks the gateway for turns, and its exit ends the episode.

    play_out ─> drive ─> AgentTurns(episode) ─┬─ function: `await agent(task, client, box)` on this machine
                (the one driver)              └─ command: run in the sandbox, a relay carries its requests out
                                                            │
                                             Gateway ─ Session ─ branches ─> segments of one trajectory

The agent is part of the policy: what it breaks is its own doing. Its crash ends the episode, which is graded as always.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import warnings
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import httpx
from pydantic import ValidationError

from agentrl.envs.base import Environment
from agentrl.envs.episode import Episode
from agentrl.envs.play import Played, Stop, drive
from agentrl.envs.tool_output import well_formed
from agentrl.errors import AgentError, AuthoringError, Fault, InfraError, RecipeError, fault_of
from agentrl.interop.gateway import MODEL, Gateway
from agentrl.interop.policies import ChatPolicy, TokenPolicy
from agentrl.interop.relay import SOCKET, Relay
from agentrl.interop.session import Opening, Policy, Session
from agentrl.recipe import AgentSection, Recipe
from agentrl.rollout.chat import ChatPlayer
from agentrl.rollout.player import LocalPlayer
from agentrl.rollout.rollout import Budget, EnvRuntime, RolloutId, play_out
from agentrl.sandboxes.base import ENVIRONMENT, HOME, Sandbox, off_loop
from agentrl.types import Message, Task, ToolCall, Trajectory
from agentrl.verifiers.base import Context

P = TypeVar("P", LocalPlayer, ChatPlayer)
AgentFunction = Callable[[Task, "AgentClient", Sandbox | None], Awaitable[Any]]
GRACE_S = 5.0
"""Seconds within which a cancelled agent must end."""
PATH = ENVIRONMENT["PATH"]
FOLDER = f"{HOME}/agent"
"""Where `files` lie in the sandbox."""
MAX_FILES = 200
KEPT = 2000
"""Characters of an agent's output that are kept with the trajectory."""


@dataclass(frozen=True, slots=True)
class AgentClient:
    """What an agent on this machine is given to reach the policy. Any OpenAI client takes `base_url` and `api_key`."""

    base_url: str
    api_key: str
    tools: Sequence[dict[str, Any]] = ()
    """The schemas of the environment's tools, as a request takes them."""
    model: str = MODEL

    async def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> dict[str, Any]:
        """Ask for the next turn: messages in, the assistant's message out."""
        body = await self._post("chat/completions", {"model": self.model, "messages": list(messages), **options})
        message: dict[str, Any] = body["choices"][0]["message"]
        return message

    async def call(self, name: str, arguments: Any) -> str:
        """Run a tool of the environment and return what the policy is to see."""
        return str((await self._post("tools", {"name": name, "arguments": arguments}))["content"])

    async def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        headers = {"authorization": f"Bearer {self.api_key}"}
        async with httpx.AsyncClient(timeout=None, trust_env=False) as client:
            response = await client.post(f"{self.base_url}/{path}", json=body, headers=headers)
        if response.status_code != 200:
            raise EndpointError(response.status_code, response.json()["error"]["message"])
        return response.json()


class EndpointError(Exception):
    """The gateway refused a request."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status}: {text}")
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """An agent as a run uses it."""

    section: AgentSection
    function: AgentFunction | None = None


def program_of(environment: Environment, section: AgentSection | None) -> Program | None:
    """Return the agent that plays an environment: the recipe's, else the one that the environment names."""
    own = inspect.getattr_static(type(environment), "agent", None)
    own = own.__func__ if isinstance(own, staticmethod) else own
    if section is None and own is None:
        return None
    if section is None and isinstance(own, Mapping):
        try:
            section = AgentSection(**own)
        except ValidationError as error:
            wrong = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'it'}: {e['msg']}" for e in error.errors())
            raise AuthoringError(f"{type(environment).__name__}.agent: {wrong}") from error
    if section is None:
        return Program(section=AgentSection(function="(the environment's)"), function=_checked(own, "agent"))
    if section.function is None:
        if section.files is not None and not section.files.expanduser().exists():
            raise RecipeError(f"envs[].agent.files: {section.files}: no such file or folder")
        if section.venv is not None:
            shown_image(section.venv)
        return Program(section=section)
    return Program(section=section, function=_checked(load_function(section.function), section.function))


def load_function(name: str) -> Any:
    """Return a function from `file.py:name` or `module:name`."""
    place, _, attribute = name.rpartition(":")
    if not place:
        raise RecipeError(f"envs[].agent.function: {name!r} must be `file.py:name` or `module:name`")
    try:
        if place.endswith(".py"):
            path = Path(place).resolve()
            spec = importlib.util.spec_from_file_location(f"agentrl_agent_{path.stem}", path)
            if spec is None or spec.loader is None or not path.is_file():
                raise FileNotFoundError(f"{path}: no such file")
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(place)
        return getattr(module, attribute)
    except Exception as error:
        raise RecipeError(f"envs[].agent.function: {name!r} cannot be loaded: {error}") from error


def _checked(function: Any, name: str) -> AgentFunction:
    if not inspect.iscoroutinefunction(function):
        raise RecipeError(f"the agent {name!r} must be written as `async def agent(task, client, box)`")
    return function  # type: ignore[no-any-return]


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


def with_agents(recipe: Recipe, player: P, gateway: Gateway) -> AgentPlayer | P:
    """Return a player that has the recipe's agents play their environments."""
    sections = {section.name: section.agent for section in recipe.envs}
    programs = {name: program_of(runtime.make(), sections[name]) for name, runtime in player.runtimes.items()}
    agents = {name: program for name, program in programs.items() if program is not None}
    return AgentPlayer(inner=player, gateway=gateway, programs=agents) if agents else player


def fitted(runtime: EnvRuntime, program: Program) -> EnvRuntime:
    """Return the environment with the sandbox that the agent asks for."""
    section = program.section
    if section.image is None and section.memory_mb is None and section.venv is None:
        return runtime
    image = section.image if section.venv is None else shown_image(section.venv)

    def make() -> Environment:
        environment = runtime.make()
        prepare = environment.prepare

        def prepared(*arguments: Any) -> Any:
            spec = prepare(*arguments)
            if spec is None:
                return None
            limits = replace(spec.limits, memory_mb=section.memory_mb or spec.limits.memory_mb)
            if section.venv is not None and spec.image not in ("host", "python"):
                raise RecipeError(
                    f"envs[].agent.venv: the environment's sandbox has the image {spec.image!r}, which a virtual "
                    "environment of this machine does not fit; install the agent in that image instead"
                )
            return replace(spec, image=image or spec.image, limits=limits)

        environment.prepare = prepared  # type: ignore[method-assign,assignment]
        return environment

    return replace(runtime, make=make)


def shown_image(venv: Path) -> str:
    """Return the image that shows a virtual environment, with the Python that it is made of."""
    folder = venv.expanduser().resolve()
    python = folder / "bin" / "python"
    if not python.exists():
        raise RecipeError(f"envs[].agent.venv: {folder} is no virtual environment; make one with `python -m venv`")
    base = python.resolve().parents[1]
    return ":".join(["host", str(folder), *([] if str(base) in ("/", "/usr") else [str(base)])])


def variables(port: int, key: str, prompt: str) -> dict[str, str]:
    """Return the environment variables that tell an agent in a sandbox where the policy is, in the usual names."""
    url = f"http://127.0.0.1:{port}"
    return {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_BASE": f"{url}/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": key,
        "AGENTRL_MODEL": MODEL,
        "AGENTRL_SOCKET": SOCKET,
        **({"AGENTRL_PROMPT": prompt} if len(prompt.encode()) < 100_000 else {}),
    }


def copy_files(given: Path, box: Sandbox) -> None:
    """Copy a file or folder of the user's into the sandbox, outside the workspace that is graded."""
    source = given.expanduser()
    files = sorted(p for p in source.rglob("*") if p.is_file()) if source.is_dir() else [source]
    if len(files) > MAX_FILES:
        raise RecipeError(
            f"envs[].agent.files: {source} has {len(files)} files, which are copied for every episode; at most "
            f"{MAX_FILES} are allowed. Install the agent in an image and name it in `image`"
        )
    for path in files:
        name = path.relative_to(source).as_posix() if source.is_dir() else path.name
        box.write(f"{FOLDER}/{name}", path.read_bytes(), mode=0o755 if path.stat().st_mode & 0o100 else 0o644)


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
        session.tools, session.run_tool = self._opening[1], self._runner(episode)
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
        if self.crash is not None:
            return Stop(session.ending or "agent_error")
        episode.answer = well_formed(self.answer or "")
        return Stop(session.ending or "done")

    async def _run(self, episode: Episode, session: Session) -> None:
        """Run the program."""
        if self.program.function is None:
            await self._command(episode, session)
        else:
            await self._function(self.program.function, episode, session)

    async def _function(self, function: AgentFunction, episode: Episode, session: Session) -> None:
        """Run the function; what it raises is its crash, unless the sandbox or the system says otherwise."""
        url = f"{self.gateway.url}/s/{session.id}/v1"
        client = AgentClient(url, session.key, tuple(session.tools))
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
            if section.files is not None:
                await off_loop(copy_files, section.files, box)
            path = {"PATH": f"{section.venv.expanduser().resolve()}/bin:{PATH}"} if section.venv is not None else {}
            result = await box.aio.exec(
                [word.replace("{files}", FOLDER).replace("{prompt}", prompt) for word in section.command or ()],
                stdin=prompt.encode(),
                env={**variables(relay.port, session.key, prompt), **path, **section.env},
                timeout=self.budget.wall_seconds + GRACE_S,
            )
        finally:
            await relay.close()
        self.output = well_formed(result.text[-KEPT:])
        if not result.ok:
            how = "ran out of time" if result.timed_out else f"ended with exit code {result.exit_code}"
            self.crash = Fault("agent", "agent", f"the agent {how}: {' '.join(self.output.split())[-200:]}")
        elif section.answer == "stdout":
            self.answer = result.stdout.decode("utf-8", "replace").strip()
        else:
            self.answer = self._last_message()

    def _last_message(self) -> str:
        talk = self.policy.conversation(None)
        return talk[-1].content if talk else ""

    def _runner(self, episode: Episode) -> Callable[[str, Any], Awaitable[tuple[str, bool]]]:
        """Return what runs the environment's tools, one call after the other, as the built-in loop would."""

        async def run(name: str, arguments: Any) -> tuple[str, bool]:
            async with self._tool_lock:
                if episode.over:
                    return "error: the episode is over", True
                if episode.seconds["tools"] >= self.budget.tool_seconds:
                    return "error: the time of the episode's tools is used up", True
                call = ToolCall(name=name, arguments=arguments if isinstance(arguments, Mapping) else {})
                if not isinstance(arguments, Mapping):
                    call = replace(call, error="the arguments must be a JSON object")
                step = await episode.timed(
                    "tools", episode.act(Message(role="assistant", content="", tool_calls=(call,)))
                )
                content = "\n".join(observation.content for observation in step.observations)
                return content or "done", any(observation.error for observation in step.observations)

        return run
