"""The programs that play episodes in place of the built-in loop: found, checked, and fitted into their sandboxes."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
from pydantic import ValidationError

from agentrl.envs.base import Environment
from agentrl.errors import AuthoringError, RecipeError
from agentrl.interop.gateway import MODEL
from agentrl.interop.relay import SOCKET
from agentrl.recipe import AgentSection, Recipe
from agentrl.rollout.request import EnvRuntime
from agentrl.sandboxes.base import HOME, Sandbox
from agentrl.types import Task

AgentFunction = Callable[[Task, "AgentClient", Sandbox | None], Awaitable[Any]]
FOLDER = f"{HOME}/agent"
"""Where `files` lie in the sandbox."""
MAX_FILES = 200
Files = Mapping[str, tuple[bytes, int]]
"""Files by name: content and mode."""
OWN = "(the environment's)"
"""Stands for the function of an environment."""


@dataclass(frozen=True, slots=True)
class AgentClient:
    """What an agent on this machine is given to reach the policy. Any OpenAI client takes `base_url` and `api_key`."""

    base_url: str
    api_key: str
    tools: Sequence[dict[str, Any]] = ()
    """The schemas of the environment's tools, as a request takes them."""
    messages: Sequence[dict[str, Any]] = ()
    """The messages with which the environment begins: its system message and the task, as a request takes them."""
    model: str = MODEL

    async def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> dict[str, Any]:
        """Ask for the next turn: messages in, the assistant's message out."""
        body = await self._post("chat/completions", {"model": self.model, "messages": list(messages), **options})
        message: dict[str, Any] = body["choices"][0]["message"]
        return message

    async def call(self, name: str, arguments: Any) -> str:
        """Run a tool of the environment and return what the policy is to see."""
        return str((await self._post("tools", {"name": name, "arguments": arguments}))["content"])

    async def step(self, message: Mapping[str, Any]) -> tuple[list[dict[str, Any]], bool]:
        """Carry out the policy's message as the built-in loop would: what to tell it next, and whether it is over."""
        reply = await self._post("step", {"message": message})
        return reply["messages"], reply["done"]

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
    files: Files = field(default_factory=dict)
    """What is copied into the sandbox: read once, so that every episode of a run has the same."""


def program_of(environment: Environment, section: AgentSection | None, files: Files | None = None) -> Program | None:
    """Return the agent that plays an environment: the recipe's, else the one that the environment names.

    `files` are the program's, where they come from another machine.
    """
    own, section = _named(environment, section)
    if section is None:
        return None
    if section.function is None:
        if section.venv is not None:
            shown_image(section.venv)
        return Program(section=section, files=read_files(section) if files is None else files)
    function = own if section.function == OWN else load_function(section.function)
    return Program(section=section, function=_checked(function, section.function))


def files_of(recipe: Recipe, environments: Mapping[str, EnvRuntime]) -> dict[str, Files]:
    """Return the files of every agent of a recipe, for players on other machines."""
    sections = {s.name: _named(environments[s.name].make(), s.agent)[1] for s in recipe.envs}
    return {name: read_files(section) for name, section in sections.items() if section is not None}


def settled(recipe: Recipe) -> Recipe:
    """Return a recipe whose agents are named by absolute paths, for processes that run in another folder."""
    sections = [section.model_copy(update={"agent": _settled(section.agent)}) for section in recipe.envs]
    return recipe.model_copy(update={"envs": sections})


def _settled(agent: AgentSection | None) -> AgentSection | None:
    if agent is None:
        return None
    place, _, name = (agent.function or "").rpartition(":")
    function = f"{Path(place).absolute()}:{name}" if place.endswith(".py") else agent.function
    venv = None if agent.venv is None else agent.venv.expanduser().absolute()
    return agent.model_copy(update={"function": function, "venv": venv})


def _named(environment: Environment, section: AgentSection | None) -> tuple[Any, AgentSection | None]:
    """Return the environment's own agent, and the section that counts."""
    own = inspect.getattr_static(type(environment), "agent", None)
    own = own.__func__ if isinstance(own, staticmethod) else own
    if section is not None or own is None:
        return own, section
    if isinstance(own, Mapping):
        try:
            return own, AgentSection(**own)
        except ValidationError as error:
            wrong = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'it'}: {e['msg']}" for e in error.errors())
            raise AuthoringError(f"{type(environment).__name__}.agent: {wrong}") from error
    return own, AgentSection(function=OWN)


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


def read_files(section: AgentSection) -> Files:
    """Read the file or folder of an agent; none where the section names none."""
    if section.files is None:
        return {}
    source = section.files.expanduser()
    if not source.exists():
        raise RecipeError(f"envs[].agent.files: {section.files}: no such file or folder")
    paths = sorted(p for p in source.rglob("*") if p.is_file()) if source.is_dir() else [source]
    if len(paths) > MAX_FILES:
        raise RecipeError(
            f"envs[].agent.files: {source} has {len(paths)} files, which are copied for every episode; at most "
            f"{MAX_FILES} are allowed. Install the agent in an image and name it in `image`"
        )
    names = [path.relative_to(source).as_posix() if source.is_dir() else path.name for path in paths]
    modes = [0o755 if path.stat().st_mode & 0o100 else 0o644 for path in paths]
    return {name: (path.read_bytes(), mode) for name, path, mode in zip(names, paths, modes, strict=True)}


def copy_files(files: Files, box: Sandbox) -> None:
    """Copy an agent's files into the sandbox, outside the workspace that is graded."""
    for name, (content, mode) in files.items():
        box.write(f"{FOLDER}/{name}", content, mode=mode)
