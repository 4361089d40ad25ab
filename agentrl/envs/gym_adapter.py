"""Every environment as a `gymnasium.Env`, over the same episode and driver as training.

    gymnasium.make("agentrl/files-v0")        reset ─ text     step(action) ─ text, 0.0, False, False, info
                                                               ... the ending step: the verdict's score, True

One event loop in a thread of its own serves all of them, so they work from plain code, notebooks and other loops.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, SupportsFloat, TypeVar

import gymnasium
import numpy as np
from gymnasium import spaces

from agentrl import envs, sandboxes
from agentrl.envs.base import Environment
from agentrl.envs.episode import Episode
from agentrl.envs.play import Played, Stage, drive, message_of, spoken
from agentrl.envs.tools import Tool, tools_of
from agentrl.errors import AuthoringError, InfraError, VerifierError
from agentrl.sandboxes.pool import Pool
from agentrl.types import Message, Task, ToolCall

T = TypeVar("T")
GymAction = str | Mapping[str, Any]
"""A message, or a tool call as {"name": ..., "arguments": {...}}."""

_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789 .,-_/()+*=<>;:'\"\n"
"""What random actions are made of. Without & and |: in a shell those run things at once, in no certain order."""


class Text(spaces.Space[str]):
    """Any text up to a length; gymnasium's own Text space would want every character listed."""

    def __init__(self, max_length: int = 1 << 20, seed: int | None = None) -> None:
        super().__init__(shape=None, dtype=None, seed=seed)
        self.max_length = max_length

    def contains(self, x: Any) -> bool:
        return isinstance(x, str) and len(x) <= self.max_length

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        length = int(self.np_random.integers(0, 40))
        return "".join(_LETTERS[i] for i in self.np_random.integers(0, len(_LETTERS), length))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Text) and other.max_length == self.max_length

    def __repr__(self) -> str:
        return f"Text({self.max_length})"


class ActionSpace(spaces.Space[GymAction]):
    """A text message or a call of one of the tools."""

    def __init__(self, tools: Mapping[str, Tool], seed: int | None = None) -> None:
        super().__init__(shape=None, dtype=None, seed=seed)
        self.tools = dict(tools)
        self._schemas = {name: tool.schema()["function"]["parameters"] for name, tool in tools.items()}

    def contains(self, x: Any) -> bool:
        if isinstance(x, str):
            return True
        if not isinstance(x, Mapping) or set(x) != {"name", "arguments"} or x["name"] not in self.tools:
            return False
        try:
            self.tools[x["name"]].validate(x["arguments"])
        except (TypeError, ValueError):
            return False
        return True

    def sample(self, mask: Any = None, probability: Any = None) -> GymAction:
        """Mostly calls that fit their schemas; sometimes a message, which usually ends an episode."""
        rng = self.np_random
        if not self.tools or rng.random() < 0.2:
            return _junk(rng)
        name = list(self.tools)[int(rng.integers(len(self.tools)))]
        for _ in range(20):
            act = {"name": name, "arguments": _fitting(self._schemas[name], rng)}
            if self.contains(act):
                return act
        return _junk(rng)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ActionSpace) and other._schemas == self._schemas

    def __repr__(self) -> str:
        return f"Acts({', '.join(self.tools)})"


class GymEnv(gymnasium.Env[str, GymAction]):
    """One agentrl environment behind gymnasium's five-tuple. Reward is 0 until the ending step, then the score."""

    metadata: dict[str, Any] = {"render_modes": ["ansi"], "render_fps": 1}

    def __init__(
        self,
        name: str,
        *,
        sandbox: str = "namespace",
        split: str = "train",
        level: int | None = None,
        max_turns: int | None = None,
        render_mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._kind = envs.load(name)
        self._options = dict(options or {})
        self._sandbox, self._split, self._level = sandbox, split, level
        self._turns = max_turns or self._kind.max_turns
        self.render_mode = render_mode
        self.action_space = ActionSpace(tools_of(self._kind))
        self.observation_space = Text()
        self._stage: Stage | None = None
        self._pool: Pool | None = None
        self._episode: Episode | None = None
        self._actions: asyncio.Queue[Message]
        self._observations: asyncio.Queue[Sequence[Message]]
        self._playing: asyncio.Task[Played] | None = None
        self._turn = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start an episode. `options` may name `split`, `level` and `index`; what it leaves open, the seed decides."""
        super().reset(seed=seed)
        wish = {"split": self._split, "level": self._level, "index": None, **(options or {})}
        unknown = set(wish) - {"split", "level", "index"}
        if unknown:
            raise AuthoringError(f"reset takes the options split, level and index, not {', '.join(sorted(unknown))}")
        level, index = wish["level"], wish["index"]
        if level is None:
            level = int(self.np_random.choice(list(self._kind.levels)))
        if index is None:
            index = int(self.np_random.integers(self._kind.size or 1 << 31))
        environment = self._kind(**self._options)
        task = environment.task(wish["split"], level, index)
        self._turn = 0
        opening = _wait(self._start(environment, task, int(self.np_random.integers(1 << 62))))
        return self._text(opening[1:]), self._info()

    def step(self, action: GymAction) -> tuple[str, SupportsFloat, bool, bool, dict[str, Any]]:
        """One turn. Infrastructure trouble raises; it is never a reward."""
        if self._episode is None or self._episode.over:
            raise gymnasium.error.ResetNeeded("call reset() before step(): no episode is under way")
        self._turn += 1
        return _wait(self._step(_message(action)))

    async def _start(self, environment: Environment, task: Task, seed: int) -> Sequence[Message]:
        await self._end()
        if self._stage is None:
            self._pool = Pool(sandboxes.load(self._sandbox)(), limit=4)
            self._stage = Stage(boxes=self._pool)
        self._episode = Episode(environment, task, seed=seed, boxes=self._stage.boxes)
        self._actions, self._observations = asyncio.Queue(), asyncio.Queue()
        play = drive(self._episode, self._next_action, self._stage.context(task.id), turns=self._turns)
        self._playing = asyncio.create_task(play)
        opening = await self._next_observation()
        assert not isinstance(opening, Played)
        return opening

    async def _next_action(self, episode: Episode) -> Message:
        """The policy of the episode: show what came of the last action, then wait for the caller's next one."""
        observed = [o.message() for o in episode.step.observations] if episode.step else episode.transcript
        self._observations.put_nowait(observed)
        return await self._actions.get()

    async def _next_observation(self) -> Sequence[Message] | Played:
        """Wait until the episode shows something, or is over."""
        assert self._playing is not None
        shown = asyncio.ensure_future(self._observations.get())
        await asyncio.wait({shown, self._playing}, return_when=asyncio.FIRST_COMPLETED)
        if shown.done():
            return shown.result()
        shown.cancel()
        return self._playing.result()

    async def _step(self, message: Message) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._actions.put_nowait(message)
        observed = await self._next_observation()
        if not isinstance(observed, Played):
            return self._text(observed), 0.0, False, False, self._info()
        assert self._episode is not None
        outcome, step = observed.outcome, self._episode.step
        if outcome.score is None:
            cause = outcome.fault.cause if outcome.fault else "no cause given"
            raise (InfraError if outcome.grade == "infra_error" else VerifierError)(cause)
        text = self._text([o.message() for o in step.observations]) if step and outcome.ending != "agent_error" else ""
        info = {**self._info(), "ending": outcome.ending, "evidence": list(observed.evidence)}
        info["ledger"] = dict(observed.ledger)
        return text, float(outcome.score), outcome.ending != "max_turns", outcome.ending == "max_turns", info

    async def _end(self) -> None:
        """Give up the episode that is under way, if any, and wait until its sandbox is closed."""
        if self._playing is not None:
            self._playing.cancel()
            await asyncio.gather(self._playing, return_exceptions=True)
            self._playing = None

    def render(self) -> str | None:
        """The conversation so far, as text."""
        if self.render_mode != "ansi" or self._episode is None:
            return None
        return "\n".join(f"[{m.role}] {spoken(m)}" for m in self._episode.transcript)

    def close(self) -> None:
        """End the episode and let go of the boxes. Safe to call twice."""
        if self._playing is not None:
            _wait(self._end())
        self._episode = None
        if self._pool is not None:
            self._pool.close()
            self._pool = self._stage = None

    def _info(self) -> dict[str, Any]:
        assert self._episode is not None
        task = self._episode.task
        return {
            "task": task.id,
            "level": task.level,
            "turn": self._turn,
            "system": self._kind.system,
            "tools": self._episode.schemas,
        }

    def _text(self, messages: Sequence[Message]) -> str:
        text = "\n".join(m.content for m in messages)
        return text[: Text().max_length]


def _message(action: GymAction) -> Message:
    if isinstance(action, str):
        return message_of(action)
    if not isinstance(action, Mapping) or "name" not in action:
        raise AuthoringError(f'an action is a text or {{"name": ..., "arguments": {{...}}}}, got {action!r}')
    return message_of(ToolCall(name=str(action["name"]), arguments=action.get("arguments", {})))


def _junk(rng: np.random.Generator) -> str:
    return "".join(_LETTERS[i] for i in rng.integers(0, len(_LETTERS), int(rng.integers(1, 20))))


def _fitting(schema: Mapping[str, Any], rng: np.random.Generator) -> Any:
    """A random value of a JSON schema, good enough to exercise a tool."""
    if "enum" in schema:
        return schema["enum"][int(rng.integers(len(schema["enum"])))]
    if "const" in schema:
        return schema["const"]
    if "anyOf" in schema:
        return _fitting(schema["anyOf"][int(rng.integers(len(schema["anyOf"])))], rng)
    kind = schema.get("type")
    if kind == "object":
        required = schema.get("required", ())
        fields = schema.get("properties", {}).items()
        return {name: _fitting(part, rng) for name, part in fields if name in required or rng.random() < 0.5}
    if kind == "array":
        return [_fitting(schema.get("items", {}), rng) for _ in range(int(rng.integers(0, 3)))]
    if kind in ("integer", "number"):
        low = int(schema.get("minimum", schema.get("exclusiveMinimum", -10)))
        high = int(schema.get("maximum", schema.get("exclusiveMaximum", low + 100)))
        return int(rng.integers(low, high + 1))
    if kind == "boolean":
        return bool(rng.integers(2))
    return None if kind == "null" else _junk(rng)


_loop: asyncio.AbstractEventLoop | None = None
_lock = threading.Lock()


def _wait(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the adapters' own loop and wait for it."""
    global _loop
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="agentrl-gymnasium", daemon=True).start()
    return asyncio.run_coroutine_threadsafe(work, _loop).result()
