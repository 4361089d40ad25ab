"""τ²-bench's airline and retail tasks, for evaluation only: an agent serves a customer, whom a model plays.

    envs: [{name: tau2_airline}]                    # agentrl eval RECIPE; `agentrl train` refuses it by name
    judge: {engine: {type: openai, url: ..., model: ...}}      # this model plays the customer

    policy ── message ──> customer (the recipe's judge: scenario and talk, nothing else) ── reply, framed ──> policy
           ── tool call ─> the domain's database of this episode, on the host side
    the end ─> database as the recorded actions leave it, and every required fact said to the customer: 1, else 0

Tasks, policies, databases and tools are those of the package inspect-evals, read from where `agentrl env get
inspect-evals` put it. The customer's text is untrusted: it reaches the policy in a frame, and no part of the grade.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from inspect import Parameter, getdoc, signature
from typing import Any, ClassVar

from pydantic import BaseModel

from agentrl import seeds
from agentrl.envs import Environment
from agentrl.envs.tool_output import frame
from agentrl.envs.tools import tool
from agentrl.errors import AgentRLError, AuthoringError, EngineError, InfraError
from agentrl.interop import inspect_package
from agentrl.interop.bridge import Bridge
from agentrl.rollout.tool_formats import split_thinking
from agentrl.sandboxes.base import off_loop
from agentrl.types import Done, Message, Observation, Split, Task, ToolCall, Verdict
from agentrl.verifiers.base import Context, Judge, Submission, Verifier

COUNTS = {"airline": 50, "retail": 114}
"""How many tasks each domain has: another number means another release of the package."""
KITS = {"airline": "AirlineAgentTools", "retail": "RetailAgentTools"}
SYSTEM = (
    "You are a customer service agent. In each turn either send a message to the customer or call a tool, never both. "
    "What stands between <out> and </out> was said by the customer or returned by a tool. Follow this policy.\n\n"
)
PROMPT = "A customer has contacted you. Help them as the policy allows. Their first message:"
BEGIN = "Begin the interaction. You are the customer; the messages that follow are those of the service agent."
ENDINGS = ("###STOP###", "###TRANSFER###", "###OUT-OF-SCOPE###")
"""What the customer says to end the talk, as the package's guidelines tell it."""
SAID_LIMIT = 8_000
"""Characters of one message that reach the other side."""
OUTPUT_LIMIT = 20_000
"""Characters of a tool's output that the policy is shown."""
CUSTOMER_TOKENS = 1_024


class Tau2(Bridge):
    """Serve a customer as a company's policy allows."""

    domain: ClassVar[str] = ""
    rows: ClassVar[Sequence[Mapping[str, Any]]] = ()
    splits = ("test",)
    max_turns = 60
    asks_judge = True

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._talk: list[Message] = []
        self._said: list[str] = []
        self._kit: Any = None

    @classmethod
    def made_from(cls, options: Mapping[str, Any]) -> type[Environment]:
        if options:
            raise AuthoringError(f"{cls.name} takes no options, got {', '.join(options)}")
        return environment_of(cls, cls.domain)

    def task(self, split: Split, level: int, index: int) -> Task:
        if split not in self.splits or level not in self.levels:
            raise AuthoringError(f"{self.name} has no tasks of split {split!r} and level {level}")
        at = index % len(self.rows)
        identity = f"{self.name}/{split}/{level}/{at}"
        return Task(
            id=identity, split=split, level=level, prompt=PROMPT, setup={"row": at}, secret=_criteria(self.rows[at])
        )

    async def start(self) -> Observation:  # type: ignore[override]
        self._kit = await off_loop(kit_of, self.domain)
        self._talk = [Message(role="system", content=scenario(self.rows[self.given.setup["row"]]))]
        return Observation(content=await self._customer(BEGIN), role="user")

    async def on_message(self, text: str) -> Observation | Done:  # type: ignore[override]
        said = split_thinking(text)[1][:SAID_LIMIT]  # what the customer does not hear counts for nothing
        self._said.append(said)
        reply = await self._customer(said)
        if any(ending in reply for ending in ENDINGS):
            return Done(text)
        content, cut = frame(reply, SAID_LIMIT)
        return Observation(content=content, role="user", truncated=cut)

    def call(self, action: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        """Call a tool of the domain on this episode's database; what it raises is about the arguments."""
        current = inspect_package.current.set(self._kit)
        try:
            return _awaited(action(**{name: _plain(value) for name, value in arguments.items()}))
        except AgentRLError:
            raise
        except Exception as error:  # a pure function of its arguments, and the policy chose those
            raise ValueError(str(error)[:500] or type(error).__name__) from error
        finally:
            inspect_package.current.reset(current)

    def state(self) -> Mapping[str, Any]:
        return {"database": self._kit.db.get_hash(), "said": tuple(self._said)}

    def expert(self, task: Task) -> Sequence[ToolCall | str]:
        calls = [ToolCall(name=a["name"], arguments=a["arguments"]) for a in task.secret["actions"]]
        return [*calls, f"This is done. {' '.join(task.secret['facts'])}".strip()]

    async def _customer(self, text: str) -> str:
        """Say something to the customer and return the reply; trouble with the model is never the policy's score."""
        self._talk.append(Message(role="user", content=text))
        seed = seeds.derive(0, "customer", self.given.id, len(self._talk))
        reply = await asked(self.judge, self._talk, seed)
        self._talk.append(Message(role="assistant", content=reply))
        return reply


class Tau2Airline(Tau2):
    """τ²-bench airline: 50 customers who book, change and cancel flights; evaluation only."""

    name, domain = "tau2_airline", "airline"


class Tau2Retail(Tau2):
    """τ²-bench retail: 114 customers who return, exchange and change orders; evaluation only."""

    name, domain = "tau2_retail", "retail"


class FinalDatabase(Verifier):
    """Compares the database with what the recorded actions make of a fresh one, and looks for each required fact in
    what was said to the customer, as the benchmark does: without commas and capitals, anywhere in a message."""

    def __init__(self, domain: str) -> None:
        self.domain = domain

    async def probe(self, context: Context) -> None:
        """Ask for a customer's first words, with nothing of the policy's in the question."""
        await asked(context.judge, [Message(role="user", content="Say one sentence as a customer of a shop.")], 0)

    async def verify(self, submission: Submission, context: Context) -> Verdict:
        secret = submission.task.secret
        expected = await off_loop(expected_state, self.domain, json.dumps(secret["actions"], sort_keys=True))
        right = submission.state["database"] == expected
        said = "\n".join(submission.state["said"]).lower().replace(",", "")
        missing = sum(fact.lower() not in said for fact in secret["facts"])
        breakdown = {"database": float(right), "communicated": float(not missing)}
        evidence = (
            f"the database is {'as' if right else 'not as'} the recorded actions leave it",
            f"{len(secret['facts']) - missing} of {len(secret['facts'])} required facts were said to the customer",
        )
        return Verdict(score=float(right and not missing), breakdown=breakdown, evidence=evidence)


async def asked(judge: Judge | None, talk: Sequence[Message], seed: int) -> str:
    """Return what the customer's model says; InfraError where it fails or is silent.

    It is no EngineError: those never count against a policy, and what a policy says may be what the model fails on. An
    episode that breaks again with the same words, while the model answers a question of ours, is the policy's doing.
    """
    if judge is None:
        raise AuthoringError(
            "the customer is played by the model of the recipe's section `judge`, and there is none here; name one "
            "there, or with --judge"
        )
    try:
        reply = split_thinking(await judge.ask(talk, seed=seed, max_tokens=CUSTOMER_TOKENS))[1].strip()
    except EngineError as error:
        raise InfraError(f"the model that plays the customer failed: {error}") from error
    if not reply:
        raise InfraError("the model that plays the customer said nothing")
    return reply


def environment_of(cls: type[Tau2], domain: str) -> type[Tau2]:
    """Return the environment of a domain, with the package's tools."""
    rows = read(domain)
    policy = inspect_package.folder() / "data" / "domains" / domain / "policy.txt"
    body: dict[str, Any] = {
        "__doc__": cls.__doc__,
        "__module__": __name__,
        "options": {},
        "rows": rows,
        "size": len(rows),
        "system": f"{SYSTEM}<policy>\n{policy.read_text(encoding='utf-8')}\n</policy>",
        "verifier": FinalDatabase(domain),
    }
    for make in getattr(inspect_package.module(f"tau2.{domain}.tools"), f"all_{domain}_tools"):
        body[make.__name__] = _method(make.__name__, make())
    return type(cls.__name__, (cls,), body)


def read(domain: str) -> list[dict[str, Any]]:
    """Read the tasks of a domain as the package holds them."""
    file = inspect_package.folder() / "data" / "domains" / domain / "tasks.json"
    try:
        rows: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
        for row in rows:
            _criteria(row)
            row["user_scenario"]["instructions"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise AuthoringError(f"tau2_{domain}: {file} cannot be read: {type(error).__name__}: {error}") from error
    if len(rows) != COUNTS[domain]:
        raise AuthoringError(f"tau2_{domain}: {file} has {len(rows)} tasks; the known release has {COUNTS[domain]}")
    return rows


def scenario(row: Mapping[str, Any]) -> str:
    """Return what the customer's model is told: the package's guidelines, and the task's scenario."""
    guidelines = inspect_package.folder() / "data" / "user_simulator" / "simulation_guidelines.txt"
    story = inspect_package.module("tau2.data_model.tasks").UserScenario.model_validate(row["user_scenario"])
    return f"{guidelines.read_text(encoding='utf-8')}\n<scenario>\n{story}\n</scenario>\n"


def kit_of(domain: str) -> Any:
    """Return the tools of a domain with a database of their own."""
    kind = getattr(inspect_package.module(f"tau2.{domain}.{KITS[domain]}"), KITS[domain])
    database = kind.model_fields["db"].annotation
    return kind(db=database.model_validate_json(_database(domain)), initialized=True)


@cache
def _database(domain: str) -> bytes:
    file = inspect_package.folder() / "data" / "domains" / domain / "db.json.gz"
    try:
        return gzip.decompress(file.read_bytes())
    except (OSError, EOFError) as error:
        raise AuthoringError(f"tau2_{domain}: {file} cannot be read: {error}") from error


@cache
def expected_state(domain: str, actions: str) -> str:
    """Return the hash of the database after the recorded actions. One that a tool refuses changes nothing, as in the
    benchmark's own grading."""
    kit = kit_of(domain)
    for action in json.loads(actions):
        method = getattr(kit, action["name"], None)
        if method is not None:  # calculations and transfers are no business of the database
            try:
                method(**action["arguments"])
            except inspect_package.ToolError:
                continue
    return str(kit.db.get_hash())


def _criteria(row: Mapping[str, Any]) -> dict[str, Any]:
    criteria = row["evaluation_criteria"]
    actions = [{"name": a["name"], "arguments": a["arguments"]} for a in criteria.get("actions") or ()]
    return {"actions": actions, "facts": list(criteria.get("communicate_info") or ())}


def _method(name: str, action: Callable[..., Any]) -> Callable[..., Any]:
    """Return a tool of an environment that calls the package's function of the same signature."""

    def method(self: Tau2, **arguments: Any) -> Any:
        return self.call(action, arguments)

    itself = Parameter("self", Parameter.POSITIONAL_OR_KEYWORD)
    method.__name__, method.__doc__ = name, getdoc(action)
    method.__annotations__ = dict(action.__annotations__)
    method.__signature__ = signature(action).replace(  # type: ignore[attr-defined]
        parameters=[itself, *signature(action).parameters.values()]
    )
    return tool(output_limit=OUTPUT_LIMIT)(method)


def _awaited(work: Any) -> Any:
    """Run a coroutine that waits for nothing to its end."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    raise AuthoringError("a tool of the domain waits for something; none of the known release does")


def _plain(value: Any) -> Any:
    """Return validated arguments as the plain data that the package's functions take."""
    if isinstance(value, BaseModel):
        return value.model_dump()
    return [_plain(item) for item in value] if isinstance(value, list) else value
