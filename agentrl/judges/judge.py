"""The judge of a run: the model that verifiers ask, within a budget, and measured before any of its verdicts counts.

    verifier ── ask ──> Judge ── budget ── place ──> backend: OpenAI endpoint, SGLang server, frozen policy
                          │                             │ fails, with the engine's own retries spent
                          │                             └─> a fixed question, with nothing of the policy's in it
                          │                                    ├─ answered ──> EngineError: the submission, perhaps
                          │                                    └─ fails too ─> Outage: infrastructure, never a score
                          └─ nothing left ─> BudgetSpent: never a score; `on_spent` stops the run
The whole wait is off the verifier's clock: it has limits of its own, and no submission lengthens it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import tempfile
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from agentrl.engines.base import Sampling
from agentrl.engines.build import chat
from agentrl.engines.openai import Answer, OpenaiEngine
from agentrl.errors import BudgetSpent, EngineError, Outage, RecipeError, StorageError, UserError
from agentrl.judges.calibration import Agreement
from agentrl.recipe import JudgeSection, PolicyJudge, RewardModelJudge, RewardsSection, SglangJudge
from agentrl.recipe import OpenaiEngine as OpenaiSection
from agentrl.recipe.load import read, section
from agentrl.rollout.render import Renderer
from agentrl.rollout.tool_formats import split_thinking
from agentrl.types import Message
from agentrl.verifiers.busy import off_the_clock

CONTROL = (Message(role="user", content="Reply with the word yes."),)
"""What is asked after a failure, to tell an outage from a question that cannot be answered."""
CHARACTERS_PER_TOKEN = 4
"""How tokens are estimated where an endpoint does not count them."""


class Backend(Protocol):
    """What answers questions."""

    async def start(self) -> None: ...
    async def chat(
        self, messages: Sequence[Message], *, max_tokens: int, temperature: float = 1.0, seed: int | None = None
    ) -> Answer: ...
    async def close(self) -> None: ...


class Judge:
    """A judge as verifiers ask it (`agentrl.verifiers.base.Judge`): counted, bounded, and started when first needed."""

    def __init__(self, section: JudgeSection, make: Callable[[], Awaitable[Backend]], *, name: str) -> None:
        """`make` makes the backend, not yet started."""
        self.section, self.name = section, name
        self.on_spent: Callable[[str], None] = lambda text: None
        """Called once, with the reason, when a question is refused because the budget is spent."""
        self.calibration: list[Agreement] = []
        self.counts = {"calls": 0, "tokens": 0, "failures": 0}
        """Over the whole run."""
        self._make = make
        self._backend: Backend | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._slots = asyncio.Semaphore(section.concurrency)
        self._starting = asyncio.Lock()
        self._logged = dict(self.counts)
        self.refused = False
        """Whether a question was refused because the budget was spent."""

    @property
    def spent(self) -> str:
        """Say which part of the budget is spent; empty while there is some left."""
        budget = self.section.budget
        for key, limit in (("calls", budget.calls), ("tokens", budget.tokens)):
            if limit is not None and self.counts[key] >= limit:
                return (
                    f"the judge's budget is spent: {self.counts[key]} of {limit} {key}; nothing more can be scored, so "
                    f"raise judge.budget.{key}"
                )
        return ""

    async def ask(self, messages: Sequence[Message], *, seed: int, max_tokens: int) -> str:
        """Return the judge's greedy answer; raise what `grade` never turns into a score, or EngineError."""
        if reason := self.spent:
            if not self.refused:
                self.refused = True
                self.on_spent(reason)
            raise BudgetSpent(reason)
        self.counts["calls"] += 1  # before the first wait, so that no crowd of questions overdraws it
        with off_the_clock():
            backend = await self._started()
            async with self._slots:
                try:
                    return await self._answer(backend, messages, seed=seed, max_tokens=max_tokens)
                except EngineError as error:
                    self.counts["failures"] += 1
                    await self._check_outage(backend, error)
                    raise

    async def start(self) -> None:
        """Start the backend now, so that what is wrong with it shows before anything else starts."""
        await self._started()

    async def close(self) -> None:
        """Release the backend; a later question starts it again."""
        backend, self._backend = self._backend, None
        if backend is not None:
            await backend.close()

    def step_row(self) -> dict[str, int]:
        """Return what was asked since the last call, for the metrics of a step."""
        row = {f"judge/{key}": count - self._logged[key] for key, count in self.counts.items()}
        self._logged = dict(self.counts)
        return row

    def report(self) -> dict[str, Any]:
        """Return which judge this is, what it was asked, and how well it agreed, as plain data."""
        return {"judge": self.name, **self.counts, "calibration": [row.as_dict() for row in self.calibration]}

    def save(self, path: Path) -> None:
        """Write the report."""
        part = path.with_name(path.name + ".part")
        try:
            part.write_text(json.dumps(self.report(), indent=1) + "\n", encoding="utf-8")
            part.replace(path)
        except OSError as error:
            raise StorageError(f"{path}: {error.strerror}; free some space, then resume with --resume") from error

    def restore(self, path: Path) -> None:
        """Continue with what the earlier part of a run has spent."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            saved = json.loads(path.read_text(encoding="utf-8"))
            self.counts = {key: int(saved[key]) for key in self.counts}
        self._logged = dict(self.counts)

    async def _started(self) -> Backend:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # an event loop's locks and connections are its own
            self._loop, self._backend = loop, None
            self._slots, self._starting = asyncio.Semaphore(self.section.concurrency), asyncio.Lock()
        async with self._starting:
            if self._backend is None:
                backend = await self._make()
                try:
                    await backend.start()
                except BaseException:
                    await backend.close()
                    raise
                self._backend = backend
            return self._backend

    async def _answer(self, backend: Backend, messages: Sequence[Message], *, seed: int, max_tokens: int) -> str:
        answer = await backend.chat(messages, seed=seed, max_tokens=max_tokens, temperature=0.0)
        text = answer.message.content
        counted = answer.prompt_tokens + answer.completion_tokens
        characters = len(text) + sum(len(message.content) for message in messages)
        self.counts["tokens"] += counted or 1 + characters // CHARACTERS_PER_TOKEN
        return text

    async def _check_outage(self, backend: Backend, error: EngineError) -> None:
        """Raise Outage if the judge does not answer a question of our own either."""
        try:
            await self._answer(backend, CONTROL, seed=0, max_tokens=4)
        except EngineError:
            raise Outage(f"the judge does not answer: {error}") from error


def make(section: JudgeSection, *, policy: Callable[[], Any] | None = None, folder: Path | None = None) -> Judge:
    """Make the judge of a recipe's section.

    `policy` loads the initial policy (model, renderer and context) for `{type: policy}`; `folder` is where a server
    that is started keeps its log.
    """
    engine = section.engine
    if isinstance(engine, OpenaiSection):

        async def endpoint() -> Backend:
            return chat(engine, timeout_s=section.timeout_s)

        return Judge(section, endpoint, name=f"{engine.model} at {engine.url}")
    if isinstance(engine, SglangJudge):

        async def servers() -> Backend:
            return _Servers(section, engine, folder)

        where = f"at {', '.join(engine.urls)}" if engine.urls else f"with {engine.model}"
        return Judge(section, servers, name=f"sglang {where}")
    if isinstance(engine, RewardModelJudge):
        scoring = engine

        async def reward_model() -> Backend:
            from agentrl.learn.reward_model import RewardModel

            return await asyncio.to_thread(RewardModel, scoring)

        return Judge(section, reward_model, name=f"the reward model {engine.path}")
    if policy is None:
        raise RecipeError(
            "judge.engine.type policy: there is no policy here, only a training run has one; name an openai or sglang "
            "judge"
        )
    if not isinstance(engine, PolicyJudge):
        raise AssertionError(engine)
    load, size = policy, engine.max_batch

    async def frozen() -> Backend:
        return _FrozenPolicy(load(), size)

    return Judge(section, frozen, name="the policy as it was before the run, frozen")


def named(text: str, *, folder: Path | None = None) -> Judge:
    """Make the judge that `--judge` names: a YAML file with the section `judge`, or URL#MODEL of an endpoint."""
    if text.startswith(("http://", "https://")):
        url, _, model = text.partition("#")
        if not model:
            raise UserError(f"--judge {text}: say which model answers there, as URL#MODEL, e.g. {url}#NAME")
        return make(JudgeSection(engine=OpenaiSection(type="openai", url=url, model=model)))
    data = read(Path(text))
    if isinstance(data, dict) and "judge" in data:
        data = data["judge"]
    return make(section(JudgeSection, data, f"{text}: judge"), folder=folder)


def named_rewards(text: str) -> RewardsSection | None:
    """Return the section `rewards` of the YAML file that `--judge` names, if it has one with a judged reward."""
    if not text or text.startswith(("http://", "https://")):
        return None
    data = read(Path(text))
    if not isinstance(data, dict) or "judge" not in data or "rewards" not in data:
        return None
    rewards = section(RewardsSection, data["rewards"], f"{text}: rewards")
    return rewards if rewards.judged is not None else None


class _Servers:
    """SGLang's chat endpoint: one server that is started here, or running ones that are asked in turn."""

    def __init__(self, section: JudgeSection, engine: SglangJudge, folder: Path | None) -> None:
        self._section, self._engine, self._folder = section, engine, folder
        self._server: Any = None
        self._endpoints: list[OpenaiEngine] = []
        self._turn = itertools.count()

    async def start(self) -> None:
        urls = self._engine.urls or [await self._launch(self._engine.model)]
        for url in urls:
            base = url.rstrip("/").removesuffix("/v1")
            endpoint = OpenaiSection(type="openai", url=f"{base}/v1", model="default", retries=self._engine.retries)
            self._endpoints.append(chat(endpoint, timeout_s=self._section.timeout_s))
            await self._endpoints[-1].start()

    async def _launch(self, model: Path | None) -> str:
        from agentrl.engines.sglang import install
        from agentrl.engines.sglang.server import Server

        engine = self._engine
        assert model is not None
        if not (model / "config.json").is_file():
            raise RecipeError(f"judge.engine.model: {model} is no transformers folder: there is no config.json in it")
        self._server = Server(
            model,
            python=engine.python or install.python(engine.device == "cpu"),
            device=engine.device,
            log=(self._folder or Path(tempfile.mkdtemp(prefix="agentrl-"))) / "engine" / "judge.log",
            flags=tuple(engine.flags),
            memory_fraction=engine.memory_fraction,
            timeout_s=engine.start_timeout_s,
        )
        await self._server.start()
        return str(self._server.url)

    async def chat(self, messages: Sequence[Message], **options: Any) -> Answer:
        return await self._endpoints[next(self._turn) % len(self._endpoints)].chat(messages, **options)

    async def close(self) -> None:
        for endpoint in self._endpoints:
            await endpoint.close()
        self._endpoints.clear()
        if self._server is not None:
            await self._server.stop()


class _FrozenPolicy:
    """The initial policy, loaded once more, in an embedded engine that nothing publishes to."""

    def __init__(self, policy: Any, max_batch: int) -> None:
        from agentrl.engines.transformers.engine import TransformersEngine

        self._renderer: Renderer = policy.renderer
        self._rendering = threading.Lock()
        self._engine = TransformersEngine(
            policy.model,
            max_batch=max_batch,
            max_context=policy.context,
            deterministic=next(policy.model.parameters()).device.type == "cpu",
        )

    async def start(self) -> None:
        await self._engine.start()

    async def chat(
        self, messages: Sequence[Message], *, max_tokens: int, temperature: float = 1.0, seed: int | None = None
    ) -> Answer:
        prompt = await asyncio.to_thread(self._render, tuple(messages))
        stops = self._renderer.stop_token_ids
        sampling = Sampling(max_tokens=max_tokens, temperature=temperature, seed=seed, stop_token_ids=stops)
        completion = await self._engine.generate(prompt, sampling, request_id="judge")
        if not completion.token_ids:
            raise EngineError(f"the question's {len(prompt)} tokens fill the judge's context of {self._engine.context}")
        tokens = [token for token in completion.token_ids if token not in stops]
        return Answer(
            message=Message(role="assistant", content=split_thinking(self._renderer.decode(tokens))[1]),
            finish=completion.finish,
            prompt_tokens=len(prompt),
            completion_tokens=len(completion.token_ids),
        )

    def _render(self, messages: tuple[Message, ...]) -> tuple[int, ...]:
        with self._rendering:
            return tuple(self._renderer.prompt(messages).token_ids)

    async def close(self) -> None:
        await self._engine.close()
