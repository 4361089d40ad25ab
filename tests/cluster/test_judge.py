"""Players ask the run's judge, which stays in the driver: one budget, one key, and no question in anything of Ray's."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from agentrl import loop as training
from agentrl import metrics
from agentrl import recipe as recipes
from agentrl.cluster.judge import Address, JudgeDesk, RemoteJudge, Waits, asking_for
from agentrl.errors import BudgetSpent, EngineError, Outage
from agentrl.learn import checkpoint
from agentrl.types import Message
from agentrl.verifiers.busy import loop_timeout
from tests.cluster.rollouts import RECIPE
from tests.judges.conftest import Endpoint

QUESTION = [Message(role="system", content="Examine."), Message(role="user", content="Is it ä planet?")]
ASKING = """
from agentrl import Environment, Task, Verdict, Verifier
from agentrl.types import Message


class Asks(Verifier):
    asks_judge = True

    async def verify(self, submission, context):
        wanted = submission.task.secret["marker"]
        said = " ".join(m.content for m in submission.transcript if m.role == "assistant")
        question = [Message(role="user", content=f"Is it {wanted}? {said}")]
        return Verdict(score=float(await context.judge.ask(question, seed=1, max_tokens=8) == "yes"), trust="judged")

    async def probe(self, context):
        pass


class Asking(Environment):
    levels = range(1, 2)
    verifier = Asks()

    def task(self, split, level, index):
        return Task(id=f"asking/{split}/{level}/{index}", split=split, level=level, prompt="Say anything.",
                    secret={"marker": f"judged-secret-{split}-{index}", "wrong_answer": "wrong"})

    def expert(self, task):
        return ["anything"]


EXPORT = Asking
"""


class FakeJudge:
    """Answers with what it was asked, or as told."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.delay_s, self.cancelled = 0.0, 0

    async def ask(self, messages: Sequence[Message], *, seed: int, max_tokens: int) -> str:
        try:
            await asyncio.sleep(self.delay_s)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        return f"{[(m.role, m.content) for m in messages]} {seed} {max_tokens}"


def asked(work: Callable[[FakeJudge, RemoteJudge, Address, Waits], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Do something with a desk that is open and a player's side of it."""
    monkeypatch.setenv("RAY_AUTH_TOKEN", "a" * 64)

    async def main() -> None:
        judge, waits = FakeJudge(), Waits()
        desk = JudgeDesk(judge, waits)
        address = await desk.start("127.0.0.1")
        try:
            await work(judge, RemoteJudge(address), address, waits)
        finally:
            await desk.close()

    asyncio.run(main())


def test_a_player_gets_the_answer_and_the_errors_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(judge: FakeJudge, remote: RemoteJudge, address: Address, waits: Waits) -> None:
        answer = await remote.ask(QUESTION, seed=4, max_tokens=9)
        assert answer == "[('system', 'Examine.'), ('user', 'Is it ä planet?')] 4 9"
        long = [Message(role="user", content="x" * 1_000_000)]
        assert len(await remote.ask(long, seed=4, max_tokens=9)) > 1_000_000
        for error in (BudgetSpent("nothing is left"), Outage("it is gone"), EngineError("it broke")):
            judge.error = error
            with pytest.raises(type(error)) as seen:
                await remote.ask(QUESTION, seed=1, max_tokens=2)
            assert (type(seen.value), str(seen.value)) == (type(error), str(error))
        judge.error = ZeroDivisionError("a bug")
        with pytest.raises(RuntimeError, match="a bug"):
            await remote.ask(QUESTION, seed=1, max_tokens=2)

    asked(work, monkeypatch)


def test_who_has_no_token_is_not_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(judge: FakeJudge, remote: RemoteJudge, address: Address, waits: Waits) -> None:
        reader, writer = await asyncio.open_connection(address.host, address.port)
        body = json.dumps({"rollout": [0, 0], "messages": [], "seed": 1, "max_tokens": 2}).encode()
        writer.write(b"0" * 64 + b"\n" + body + b"\n")
        assert await reader.read() == b""
        writer.close()
        other = RemoteJudge(Address(address.host, address.port, "another run"))
        with pytest.raises(Outage, match="gave no answer"):
            await other.ask(QUESTION, seed=1, max_tokens=2)

    asked(work, monkeypatch)


def test_waiting_for_the_judge_is_nobodys_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the verifier's clock nor the rollout's deadline runs meanwhile; a question nobody waits for ends."""

    async def work(judge: FakeJudge, remote: RemoteJudge, address: Address, waits: Waits) -> None:
        judge.delay_s = 0.6
        asking_for.set((3, 1))
        began, other = waits.clock((3, 1)), waits.clock((3, 2))
        async with loop_timeout(0.3):
            await remote.ask(QUESTION, seed=1, max_tokens=2)
        assert waits.clock((3, 1)) - began < 0.3 and waits.clock((3, 2)) - other >= 0.6
        judge.delay_s = 60.0
        with suppress(TimeoutError):
            await asyncio.wait_for(remote.ask(QUESTION, seed=1, max_tokens=2), 0.3)
        async with asyncio.timeout(5.0):
            while not judge.cancelled:
                await asyncio.sleep(0.01)

    asked(work, monkeypatch)


@pytest.mark.skipif(not os.environ.get("AGENTRL_FULL"), reason="two training runs; set AGENTRL_FULL")
@pytest.mark.timeout(600)
def test_a_judged_run_on_the_cluster_gives_the_weights_of_one_process(
    nodes: Any, member: Callable[[str, str], str], wire: list[bytes], tmp_path: Path
) -> None:
    """The same questions, the same spending, and no task's secret in anything that crosses Ray."""
    endpoint = Endpoint()
    known = {"anything": "yes", "wrong": "no"}  # what the judge is measured by
    endpoint.script = lambda user: known.get(user.split("? ")[-1]) or ("yes" if len(user) % 2 else "no")
    threading.Thread(target=endpoint.http.serve_forever, daemon=True).start()
    data = {
        **RECIPE,
        "envs": [{"name": member("asking", ASKING)}],
        "group_filter": {"dynamic_sampling": False},
        "algorithm": {"entropy_bonus": 0.01},
        "learner": {"lr": 0.003, "groups_per_step": 4},
        "judge": {"engine": endpoint.section},
    }
    questions: dict[str, list[str]] = {}
    try:
        for name, cluster in {"here": None, "there": {"players": 2, "cpus": 0.2}}.items():
            endpoint.asked.clear()
            run = {**RECIPE["run"], "name": name, "out": str(tmp_path), "deterministic": True}
            assert training.train(recipes.Recipe.model_validate({**data, "run": run, "cluster": cluster})) == 0
            questions[name] = sorted(body["messages"][-1]["content"] for body in endpoint.asked)
        calls = {
            name: [row["judge/calls"] for row in metrics.read(tmp_path / name / "metrics.jsonl", "step")]
            for name in questions
        }
        total = {name: json.loads((tmp_path / name / "judge.json").read_text())["calls"] for name in questions}
        budget = total["here"] - sum(calls["here"]) + 5
        spent = recipes.Recipe.model_validate(
            {
                **data,
                "run": {**RECIPE["run"], "name": "spent", "out": str(tmp_path)},
                "judge": {**data["judge"], "budget": {"calls": budget}},
                "cluster": {"players": 2, "cpus": 0.2},
            }
        )
        assert training.train(spent) == 3
    finally:
        endpoint.http.shutdown()
        endpoint.http.server_close()
    assert questions["here"] == questions["there"] and len(questions["here"]) >= 16
    weights = []
    for name in ("here", "there"):
        saved = checkpoint.latest(tmp_path / name / "checkpoints")
        assert saved is not None and saved.step == 2
        weights.append(load_file(saved.model / "model.safetensors"))
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    assert calls["here"] == calls["there"] and total["here"] == total["there"]
    assert json.loads((tmp_path / "spent" / "judge.json").read_text())["calls"] == budget
    assert len(wire) > 16 and not [data for data in wire if b"judged-secret" in data]
