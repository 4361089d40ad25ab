"""Any environment for TRL's GRPOTrainer: a class for `environment_factory`, a data set, and a reward function.

    from agentrl.interop import trl

    trainer = GRPOTrainer(
        ...,
        environment_factory=trl.factory("files", level=3),
        train_dataset=trl.dataset("files", level=3, count=256),
        reward_funcs=trl.reward,
    )

    TRL ── reset(row) ──> SteppedEpisode.start          one sandbox per rollout, closed before it is graded
        ── run(...)   ──> SteppedEpisode.act            every tool is a method with the tool's own signature
        ── reward     ──> SteppedEpisode.settle         the score; None (left out of baseline and loss) for trouble

TRL never hands an environment the final message, so the score comes from a reward function, which sees it. It has no
signal for the end of an episode either: after it, tools answer that it is over, and change nothing.
"""

from __future__ import annotations

import asyncio
import atexit
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakSet

from agentrl import envs, sandboxes
from agentrl.envs.gym_adapter import wait
from agentrl.envs.play import Played, Stage, message_of
from agentrl.envs.schema_tools import TYPES, SchemaTool
from agentrl.envs.stepped import SteppedEpisode
from agentrl.envs.tools import Tool, tools_of
from agentrl.errors import AuthoringError, UserError
from agentrl.sandboxes.pool import Pool
from agentrl.types import Split, Task, ToolCall

RESERVED = ("reset", "get_reward")
"""Names of methods that TRL calls itself."""
OVER = "error: the episode is over"
_instances: WeakSet[Exported] = WeakSet()
"""What TRL holds: it closes nothing itself, so that what is under way at the end is closed here."""


def factory(
    name: str,
    *,
    split: Split = "train",
    level: int | None = None,
    sandbox: str = "namespace",
    options: Mapping[str, Any] | None = None,
    max_turns: int | None = None,
    limit: int = 64,
) -> type[Any]:
    """Return a class for `environment_factory`.

    Args:
        name: the environment, or the path of its folder.
        split: the split of a row that names none.
        level: the level of a row that names none; by default the easiest.
        sandbox: the sandbox backend.
        options: keyword arguments of the environment.
        max_turns: the most tool calls of an episode; by default the environment's own limit of turns.
        limit: the most sandboxes at once.
    """
    chosen = dict(options or {})
    kind = envs.load(name, chosen)
    _trainable(name, kind, split)
    pool = Pool(sandboxes.load(sandbox)(), limit=limit)
    atexit.register(pool.close)
    first = kind.levels[0] if level is None else level
    tools = tools_of(kind)
    taken = [tool for tool in tools if tool in RESERVED or tool.startswith("_")]
    if taken:
        raise AuthoringError(f"{name}: TRL keeps the name {taken[0]!r} for itself; rename the tool")
    body: dict[str, Any] = {
        "__doc__": kind.__doc__,
        "__module__": __name__,
        "_make": staticmethod(partial(kind, **chosen)),
        "_stage": Stage(boxes=pool),
        "_default": {"split": split, "level": first, "index": 0, "seed": 0},
        "_turns": max_turns,
    }
    body |= {tool.name: _method(kind, tool) for tool in tools.values()}
    return type(kind.__name__, (Exported,), body)


def dataset(
    name: str,
    *,
    split: Split = "train",
    level: int | None = None,
    count: int = 64,
    start: int = 0,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """Return a `datasets.Dataset` with a prompt per task, and the columns by which `reset` finds the task again."""
    from datasets import Dataset

    chosen = dict(options or {})
    kind = envs.load(name, chosen)
    _trainable(name, kind, split)
    environment = kind(**chosen)
    first = kind.levels[0] if level is None else level
    size = environment.size_of(split, first)
    indices = range(start, start + count if size is None else min(start + count, size))
    rows = [_row(environment.system, environment.task(split, first, index), index) for index in indices]
    return Dataset.from_list(rows)


def reward(completions: Sequence[Any], environments: Sequence[Any], **_: Any) -> list[float | None]:
    """Give the score of each episode, for `reward_funcs`; None where the infrastructure failed, not the policy."""
    finals = [_final(completion) for completion in completions]

    async def every() -> list[Any]:
        pairs = zip(environments, finals, strict=True)
        return await asyncio.gather(*(environment._score(final) for environment, final in pairs))

    return list(wait(every()))


class Exported:
    """One rollout at a time of an environment, as TRL drives it; `factory` adds the tools."""

    _make: Callable[[], Any]
    _stage: Stage
    _default: Mapping[str, Any]
    _turns: int | None

    def __init__(self) -> None:
        self._playing: SteppedEpisode | None = None
        self._trouble: Exception | None = None
        _instances.add(self)

    def reset(self, **row: Any) -> str | None:
        """Start the episode of a row; return what only the start knows, to follow the prompt."""
        place = {key: row.get(key, value) for key, value in self._default.items()}
        task = self._make().task(place["split"], int(place["level"]), int(place["index"]))
        return wait(self._start(task, int(place["seed"])))

    async def _start(self, task: Task, seed: int) -> str | None:
        if self._playing is not None:
            await self._playing.close()
        self._trouble = None
        for attempt in (1, 2):
            self._playing = SteppedEpisode(self._make, task, self._stage, seed=seed, turns=self._turns)
            try:
                opening = (await self._playing.start())[1].content
                return opening[len(task.prompt) :] or None
            except UserError:
                raise
            except Exception as error:  # the policy has done nothing yet
                if attempt == 2:
                    self._fail(error)
        return None

    def _call(self, tool: str, arguments: Mapping[str, Any]) -> str:
        if self._playing is None or self._trouble is not None or self._playing.played is not None:
            return OVER
        try:
            shown = wait(self._playing.act(message_of(ToolCall(name=tool, arguments=arguments))))
        except Exception as error:  # seen twice, and the system is at fault: `act` has looked
            self._fail(error)
            return f"error: {type(error).__name__}"
        return OVER if isinstance(shown, Played) else "\n".join(message.content for message in shown)

    def _fail(self, error: Exception) -> None:
        self._trouble = error
        print(f"agentrl: an episode gets no reward: {type(error).__name__}: {error}", file=sys.stderr, flush=True)

    async def _score(self, final: str | None) -> float | None:
        if self._playing is None:
            return None
        try:
            if self._trouble is not None:
                return None
            return (await self._playing.settle(final)).score
        except Exception as error:
            self._fail(error)
            return None
        finally:
            await self._playing.close()


@atexit.register
def close() -> None:
    """Give up every episode that is under way."""
    for exported in tuple(_instances):
        if exported._playing is not None:
            wait(exported._playing.close())


def _trainable(name: str, kind: type[envs.Environment], split: Split) -> None:
    if "train" not in kind.splits:
        raise UserError(f"{name} is for evaluation only: it has no training tasks, and training on it is refused")
    if split not in kind.splits:
        raise UserError(f"{name} has no tasks of the split {split!r}; there are: {', '.join(kind.splits)}")


def _row(system: str, task: Task, index: int) -> dict[str, Any]:
    prompt = [{"role": "system", "content": system}, {"role": "user", "content": task.prompt}]
    return {"prompt": prompt, "split": task.split, "level": task.level, "index": index}


def _final(completion: Any) -> str | None:
    """Return the final message; None where the rollout was cut off before there was one."""
    if isinstance(completion, str):
        return completion
    last = completion[-1] if completion else {"role": "assistant", "content": ""}
    if last["role"] != "assistant" or last.get("tool_calls"):
        return None
    content = last.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _method(kind: type[envs.Environment], tool: Tool) -> Callable[..., str]:
    """Return a plain function with the tool's signature and docstring: TRL reads both through transformers."""
    if isinstance(tool, SchemaTool):
        signature, doc = _written(tool)
    else:
        original = inspect.unwrap(getattr(kind, tool.name))
        signature, doc = inspect.signature(original, eval_str=True), inspect.getdoc(original) or ""

    def method(self: Exported, *args: Any, **arguments: Any) -> str:
        bound = signature.bind(self, *args, **arguments).arguments
        return self._call(tool.name, {name: value for name, value in bound.items() if name != "self"})

    method.__name__ = method.__qualname__ = tool.name
    method.__doc__ = doc
    hints = {name: parameter.annotation for name, parameter in signature.parameters.items() if name != "self"}
    method.__annotations__ = hints | {"return": str}
    method.__signature__ = signature.replace(return_annotation=str)  # type: ignore[attr-defined]
    return method


def _written(tool: SchemaTool) -> tuple[inspect.Signature, str]:
    """Write a signature and a docstring for a tool that has only a schema; what they cannot say, the docstring adds."""
    required = tool.parameters.get("required") or ()
    properties: Mapping[str, Any] = tool.parameters.get("properties", {})
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    lines = []
    for name, part in sorted(properties.items(), key=lambda item: item[0] not in required):
        if not name.isidentifier():
            raise AuthoringError(f"tool {tool.name!r}: TRL needs a Python name for each parameter, not {name!r}")
        hint = TYPES.get(part.get("type") if isinstance(part, dict) else None, str)  # type: ignore[arg-type]
        default = inspect.Parameter.empty if name in required else None
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(name, kind, annotation=hint, default=default))
        words = " ".join(str(part.get("description") or name).split()) if isinstance(part, dict) else name
        options = f" (one of {', '.join(map(str, part['enum']))})" if isinstance(part, dict) and "enum" in part else ""
        lines.append(f"    {name}: {words}{options}")
    description = " ".join(tool.description.split()) or tool.name
    doc = "\n".join([description, *(["", "Args:", *lines] if lines else [])])
    return inspect.Signature(parameters), doc
