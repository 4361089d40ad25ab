"""`agentrl chat`: a person talks to a policy, whose tools work in a real sandbox.

    a line is read (this thread) ──> the policy's turns, on an event loop that runs meanwhile ──> the next line
                                       └─ a call ─> the environment's tool ─> what it gave ─┘
Reading happens outside the event loop, so that Ctrl-C ends a prompt at once, and ends a turn without ending the chat.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agentrl import initial_policy, seeds, serving
from agentrl import recipe as recipes
from agentrl.engines.base import Engine, Sampling
from agentrl.engines.build import make as make_engine
from agentrl.envs.episode import Episode
from agentrl.envs.play import spoken
from agentrl.envs.task_check import task_of
from agentrl.errors import AgentError, UserError
from agentrl.eval.targets import find
from agentrl.recipe import EnvSection, OpenaiEngine, Recipe, TransformersEngine
from agentrl.rollout.request import EnvRuntime
from agentrl.rollout.runtimes import runtimes as open_runtimes
from agentrl.types import Message, Split
from agentrl.verifiers.base import Context
from agentrl.verifiers.grade import grade

HELP = """\
a line is your message to the policy; in an environment an empty line sends the task
  /task   show the task          /grade  end the episode and grade it
  /new    begin again            /tools  list the policy's tools
  /help   this text              /quit   end (so do Ctrl-D and Ctrl-C)"""
MAX_CALLS = 32
"""Turns that a policy may take before the person is asked again."""
Say = Callable[[str], None]
Ask = Callable[[str], str]
"""Puts a prompt and returns a line; raises EOFError at the end of input."""


@dataclass(kw_only=True)
class Talk:
    """A conversation: the policy, its environment where it has one, and what was said."""

    policy: initial_policy.PolicyModel
    engine: Engine
    runtime: EnvRuntime | None = None
    split: Split = "heldout"
    level: int = 0
    index: int = 0
    """The task whose files lie in the sandbox."""
    system: str = ""
    """The system message where there is no environment."""
    temperature: float = 1.0
    max_tokens: int = 512
    seed: int = 0
    say: Say = print
    messages: list[Message] = field(default_factory=list)
    """The conversation without an environment; with one, the episode has it."""
    episode: Episode | None = None
    _key: bytes = field(default_factory=lambda: os.urandom(32), repr=False)
    """Verifiers' secrets come from it."""
    _turns: int = 0
    """Turns sampled so far: each has a seed of its own."""

    async def begin(self) -> None:
        """Begin a conversation; in an environment with a fresh sandbox, where the task's message is not sent yet."""
        await self.end()
        self.messages = [Message(role="system", content=self.system)] if self.system else []
        if self.runtime is None:
            return
        environment = self.runtime.make()
        task = task_of(environment, self.split, self.level, self.index)
        self.episode = Episode(
            environment, task, seed=seeds.derive(self.seed, "reset", task.id), boxes=self.runtime.boxes
        )
        await self.episode.start()
        self.messages = self.episode.transcript
        self.messages.pop()
        self.say(f"[task {task.id}] {printable(task.prompt)}")

    async def end(self) -> None:
        """Let go of the sandbox."""
        if self.episode is not None:
            episode, self.episode = self.episode, None
            await episode.close()

    async def send(self, text: str) -> None:
        """Say something to the policy, and show its turns until it waits for an answer."""
        self.messages.append(Message(role="user", content=text))
        for _ in range(MAX_CALLS):
            message = await self._turn()
            if message is None:
                return
            self.say(f"[policy] {printable(spoken(message)) or '(nothing)'}")
            if not message.tool_calls:
                self.messages.append(message)
                return
            if self.episode is None:
                self.messages.append(replace(message, tool_calls=()))
                self.say("[chat] it called a tool, but there is no environment; name one with --env")
                return
            try:
                step = await self.episode.act(message)
            except AgentError as error:
                self.say(f"[chat] the policy broke its sandbox: {error}")
                await self.begin()
                return
            for observation in step.observations:
                self.say(f"[{observation.name or observation.role}] {printable(observation.content)}")
            if step.done:
                await self.grade()
                return
        self.say(f"[chat] it made {MAX_CALLS} turns without an answer; write something, or /new")

    async def _turn(self) -> Message | None:
        """Sample one turn; None where there is no room for one, or it did not end within its tokens."""
        schemas = self.episode.schemas if self.episode else []
        prompt = self.policy.renderer.prompt(self.messages, schemas).token_ids
        room = min(self.max_tokens, self.policy.context - len(prompt))
        if room < 1:
            self.say(f"[chat] the conversation fills the model's {self.policy.context} tokens; /new begins again")
            return None
        self._turns += 1
        completion = await self.engine.generate(
            prompt,
            Sampling(
                max_tokens=room,
                temperature=self.temperature,
                seed=seeds.derive(self.seed, "chat", self._turns),
                stop_token_ids=self.policy.renderer.stop_token_ids,
            ),
        )
        message: Message = self.policy.renderer.parse(completion.token_ids, self.episode.tools if self.episode else ())
        if completion.finish == "stop":
            return message
        self.say(f"[policy] {printable(spoken(message))}")
        self.say(f"[chat] cut off after {len(completion.token_ids)} tokens; its calls are not carried out")
        self.messages.append(replace(message, tool_calls=()))
        return None

    async def grade(self) -> None:
        """Have the verifier grade what was done so far; the next task follows."""
        if self.episode is None or self.runtime is None:
            self.say("[chat] there is nothing to grade without an environment; name one with --env")
            return
        episode = self.episode
        last = next((m for m in reversed(episode.transcript) if m.role == "assistant"), None)
        episode.answer = episode.answer or (last.content if last else "")
        submission = await episode.finish("done")
        await self.end()
        secret = seeds.secret(self._key, episode.task.id, self.index)
        context = Context(secret=secret, boxes=self.runtime.boxes, deadline_s=60.0, judge=self.runtime.judge)
        outcome, verdict = await grade(episode.environment.verifier, submission, context)
        score = "not graded" if outcome.score is None else f"score {outcome.score:g}"
        why = list(verdict.evidence) if verdict else [outcome.fault.cause if outcome.fault else "no verdict"]
        self.say(f"[grade] {score}")
        for line in why[:5]:
            self.say(f"  {printable(line)}")
        self.index += 1
        await self.begin()


def chat(
    target: str,
    *,
    env: str | None = None,
    level: int | None = None,
    index: int = 0,
    sandbox: str | None = None,
    system: str = "",
    temperature: float | None = None,
    max_tokens: int | None = None,
    seed: int = 0,
    say: Say = print,
    ask: Ask | None = None,
) -> int:
    """Open the policy and let a person talk to it until the input ends; return an exit code.

    `target` is a run, a checkpoint, a transformers folder, a hub id or a recipe. `env` names the environment whose
    tools it has; by default that of the run, and `none` gives it none.
    """
    recipe, model = _policy(target)
    section = _environment(recipe, env, sandbox)
    with ExitStack() as held, asyncio.Runner() as runner:
        runtime = None
        if section is not None:
            opened = held.enter_context(open_runtimes(recipe.model_copy(update={"envs": [section]})))
            runtime = opened[section.name]
            levels = runtime.make().levels
            level = (section.levels or list(levels))[0] if level is None else level
            if level not in levels:
                raise UserError(f"{section.name} has the levels {levels[0]} to {levels[-1]}, not {level}")
        # An untrained model from scratch makes its tokenizer from the tasks.
        untrained = recipe.model.type == "scratch" and model is None
        environments = held.enter_context(serving.runtimes(recipe)) if untrained else {}
        policy = initial_policy.load_policy(recipe, environments, folder=model, say=lambda text: None)
        stack = AsyncExitStack()
        engine = make_engine(TransformersEngine(), policy.model, max_context=policy.context)
        stack.push_async_callback(engine.close)
        talk = Talk(
            policy=policy,
            engine=engine,
            runtime=runtime,
            level=level or 0,
            index=index,
            system=system,
            temperature=recipe.rollout.temperature if temperature is None else temperature,
            max_tokens=max_tokens or recipe.rollout.max_tokens,
            seed=seed,
            say=say,
        )
        stack.push_async_callback(talk.end)
        try:
            runner.run(engine.start())
            where = f"{section.name}, {section.sandbox} sandboxes" if section else "no tools"
            say(f"{target}: {where}; /help says what you can do")
            runner.run(talk.begin())
            _lines(talk, runner, ask or _prompt)
        finally:
            runner.run(stack.aclose())
    return 0


def _lines(talk: Talk, runner: asyncio.Runner, ask: Ask) -> None:
    """Read lines and carry them out until the input ends."""
    commands = {"/new": talk.begin, "/grade": talk.grade}
    while True:
        try:
            line = ask("> ").strip()
        except (EOFError, KeyboardInterrupt):
            return
        if line in ("/quit", "/q", "/exit"):
            return
        try:
            if line in ("/help", "/?"):
                talk.say(HELP)
            elif line == "/task":
                talk.say(printable(talk.episode.task.prompt) if talk.episode else "there is no task without --env")
            elif line == "/tools":
                talk.say(", ".join(talk.episode.tools) if talk.episode else "none: name an environment with --env")
            elif line in commands:
                runner.run(commands[line]())
            elif line.startswith("/"):
                talk.say(f"there is no command {line.split()[0]}\n{HELP}")
            elif line or talk.episode is not None:
                runner.run(talk.send(line or (talk.episode.task.prompt if talk.episode else "")))
        except KeyboardInterrupt:
            talk.say("[chat] interrupted; write something else, or /quit")


def _prompt(text: str) -> str:
    """Read a line from the person, or from a pipe, where no prompt is put."""
    if not sys.stdin.isatty():
        return input()
    with suppress(ImportError):
        import readline  # noqa: F401 (arrow keys and history)
    return input(text)


def _policy(target: str) -> tuple[Recipe, Path | None]:
    """Return the recipe and the model's folder of what the user named."""
    alone = Path(target) / "config.json"
    if alone.is_file() and not (Path(target).parent / "COMPLETE").is_file():
        return _recipe_of(Path(target)), Path(target)
    found = find(target, recipe=_recipe_of(Path("none")))
    if found.url is not None or found.stored is not None or isinstance(found.recipe.rollout.engine, OpenaiEngine):
        raise UserError(f"{target}: chat loads the weights itself; name a run, a checkpoint or a transformers folder")
    if found.recipe.model.type == "pretrained" and found.recipe.model.path == Path("none") and found.model:
        return _recipe_of(found.model), found.model
    return found.recipe, found.model


def _recipe_of(folder: Path) -> Recipe:
    """Return the recipe of a model that came without one."""
    import torch

    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    data: dict[str, Any] = {"run": {"name": "chat"}, "model": {"path": str(folder), "dtype": dtype}}
    return recipes.build({**data, "envs": [{"name": "none"}]})


def _environment(recipe: Recipe, env: str | None, sandbox: str | None) -> EnvSection | None:
    """Return which environment the policy's tools come from: the named one, or the first of its recipe."""
    if env == "none" or (env is None and recipe.envs[0].name == "none"):
        return None
    named = EnvSection(name=env) if env else recipe.envs[0]
    own: Sequence[EnvSection] = [s for s in recipe.envs if s.name == named.name and named.path in (None, s.path)]
    section = own[0] if own else named
    return section.model_copy(update={"sandbox": sandbox}) if sandbox else section


def printable(text: str) -> str:
    """Return text that a terminal shows and does not obey: what a policy or a tool wrote may hold control codes."""
    return "".join(c if c in "\n\t" or c.isprintable() else f"\\x{ord(c):02x}" for c in text)
