"""Every environment as a `gymnasium.Env`, over the same episode and driver as training.

    gymnasium.make("agentrl/files-v0")        reset ─ text     step(action) ─ text, 0.0, False, False, info
                                                               ... the ending step: the verdict's score, True

One event loop in a thread of its own serves all of them, so they work from plain code, notebooks and other loops.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, SupportsFloat, TypeVar

import gymnasium
import numpy as np
from gymnasium import spaces

from agentrl import envs, sandboxes
from agentrl.envs.play import Played, Stage, message_of, spoken
from agentrl.envs.stepped import SteppedEpisode
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
        self._options = dict(options or {})
        self._kind = envs.load(name, self._options)
        self._sandbox, self._split, self._level = sandbox, split, level
        self._turns = max_turns or self._kind.max_turns
        self.render_mode = render_mode
        self.action_space = ActionSpace(tools_of(self._kind))
        self.observation_space = Text()
        self._stage: Stage | None = None
        self._pool: Pool | None = None
        self._playing: SteppedEpisode | None = None
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
        task = self._kind(**self._options).task(wish["split"], level, index)
        self._turn = 0
        opening = wait(self._start(task, int(self.np_random.integers(1 << 62))))
        return self._text(opening[1:]), self._info()

    def step(self, action: GymAction) -> tuple[str, SupportsFloat, bool, bool, dict[str, Any]]:
        """One turn. Infrastructure trouble raises; it is never a reward."""
        if self._playing is None or self._playing.episode.over:
            raise gymnasium.error.ResetNeeded("call reset() before step(): no episode is under way")
        self._turn += 1
        return wait(self._step(_message(action)))

    async def _start(self, task: Task, seed: int) -> Sequence[Message]:
        await self._end()
        if self._stage is None:
            self._pool = Pool(sandboxes.load(self._sandbox)(), limit=4)
            self._stage = Stage(boxes=self._pool)
        make = partial(self._kind, **self._options)
        self._playing = SteppedEpisode(make, task, self._stage, seed=seed, turns=self._turns, repeat=False)
        return await self._playing.start()

    async def _step(self, message: Message) -> tuple[str, float, bool, bool, dict[str, Any]]:
        assert self._playing is not None
        observed = await self._playing.act(message)
        if not isinstance(observed, Played):
            return self._text(observed), 0.0, False, False, self._info()
        outcome, step = observed.outcome, self._playing.episode.step
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
            await self._playing.close()
            self._playing = None

    def render(self) -> str | None:
        """The conversation so far, as text."""
        if self.render_mode != "ansi" or self._playing is None:
            return None
        return "\n".join(f"[{m.role}] {spoken(m)}" for m in self._playing.episode.transcript)

    def close(self) -> None:
        """End the episode and let go of the boxes. Safe to call twice."""
        if self._playing is not None:
            wait(self._end())
        if self._pool is not None:
            self._pool.close()
            self._pool = self._stage = None

    def _info(self) -> dict[str, Any]:
        assert self._playing is not None
        task = self._playing.task
        return {
            "task": task.id,
            "level": task.level,
            "turn": self._turn,
            "system": self._kind.system,
            "tools": self._playing.episode.schemas,
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


def wait(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the adapters' own loop and wait for it."""
    global _loop
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="agentrl-gymnasium", daemon=True).start()
    return asyncio.run_coroutine_threadsafe(work, _loop).result()
