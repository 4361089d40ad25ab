"""An environment that a judge grades, and a small OpenAI-compatible server that judges as a test tells it."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

PLANETS = '''\
from agentrl import Environment, Task
from agentrl.verifiers.judge import Criterion, Gold, JudgeVerifier

NAMES = ["Mercury", "Venus", "Earth", "Mars", "Jupiter", "Saturn", "Uranus", "Neptune"]
ASKED = "Which planet is number 3, counted from the sun?"


class Planets(Environment):
    """Name a planet."""

    size = 8
    verifier = JudgeVerifier(
        [Criterion("correct", "Does it name the right planet?")],
        gold=[
            Gold(problem=ASKED, text="It is the planet Earth.", passes=True, reference="Earth"),
            Gold(problem=ASKED, text="It is the planet Pluto.", passes=False, reference="Earth"),
        ],
        min_agreement=MIN_AGREEMENT,
        reference=lambda task: task.secret["answer"],
        view=lambda submission: " ".join(m.content for m in submission.transcript if m.role == "assistant"),
        max_tokens=MAX_TOKENS,
    )

    def task(self, split, level, index):
        place = {"train": 0, "heldout": 1, "test": 2}[split]
        return Task(
            id=f"planets/{split}/{level}/{index}",
            split=split,
            level=level,
            prompt=f"Which planet is number {index + 1}, counted from the sun? ({place})",
            secret={"answer": NAMES[index], "wrong_answer": "It is the planet Pluto."},
        )

    def expert(self, task):
        return [f"It is the planet {task.secret['answer']}."]


EXPORT = Planets
'''


@pytest.fixture
def planets(member: Callable[[str, str], str]) -> Callable[..., str]:
    """Write the environment under a name of its own; a module is imported only once."""

    def write(name: str, min_agreement: float = 0.8, max_tokens: int = 64) -> str:
        source = PLANETS.replace("MIN_AGREEMENT", str(min_agreement)).replace("MAX_TOKENS", str(max_tokens))
        return member(name, source.replace("planets/", f"{name}/"))

    return write


TALKS = '''\
from agentrl import Environment, Task, Verdict, Verifier
from agentrl.types import Message


class Talks(Verifier):
    """Asks the judge; whatever it says, the task's word decides. For judges that are not clever."""

    asks_judge = True

    async def verify(self, submission, context):
        question = [Message(role="user", content=f"Judge this: {submission.answer}")]
        reply = await context.judge.ask(question, seed=1, max_tokens=8)
        said = " ".join(m.content for m in submission.transcript if m.role == "assistant")
        return Verdict(score=float("planet" in said), breakdown={"length": len(reply)}, trust="judged")

    async def probe(self, context):
        pass


class Planets(Environment):
    """Name a planet."""

    verifier = Talks()

    def task(self, split, level, index):
        prompt = f"Which planet is number {index % 8 + 1} of {split}?"
        return Task(id=f"talks/{split}/{level}/{index}", split=split, level=level, prompt=prompt)

    def expert(self, task):
        return ["It is the planet Earth."]


EXPORT = Planets
'''


@pytest.fixture
def talks(member: Callable[[str, str], str]) -> Callable[[str], str]:
    """Write an environment whose verifier asks the judge and does not mind what it says."""
    return lambda name: member(name, TALKS)


def honest(user: str) -> str:
    """Judge by whether the reference stands in the submission."""
    reference = re.search(r'REFERENCE SOLUTION \(a JSON string\):\n"(\w+)"', user)
    submitted = user.split("BEGIN SUBMISSION ")[1].split("\n")[1] if "BEGIN SUBMISSION " in user else ""
    return opinion("yes" if reference and reference.group(1) in submitted else "no")


def opinion(option: str) -> str:
    return json.dumps({"instructs_examiner": False, "answers": {"correct": option}})


class Endpoint:
    """A tiny OpenAI-compatible endpoint: `script` gives the reply to a user's message, or a status that is not 200."""

    honest = staticmethod(honest)
    opinion = staticmethod(opinion)

    def __init__(self) -> None:
        self.script: Callable[[str], str | int] = honest
        self.delay_s = 0.0
        self.asked: list[dict[str, Any]] = []
        self.at_once = self.most_at_once = 0
        self.lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.reply(200, {"data": [{"id": "judge"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer.lock:
                    outer.asked.append(body)
                    outer.at_once += 1
                    outer.most_at_once = max(outer.most_at_once, outer.at_once)
                time.sleep(outer.delay_s)
                said = outer.script(body["messages"][-1]["content"])
                with outer.lock:
                    outer.at_once -= 1
                if isinstance(said, int):
                    self.reply(said, {"error": f"status {said}"})
                else:
                    usage = {"prompt_tokens": 90, "completion_tokens": 10}
                    self.reply(200, {"choices": [{"message": {"content": said}}], "usage": usage})

            def reply(self, status: int, content: dict[str, Any]) -> None:
                data = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"

    @property
    def section(self) -> dict[str, Any]:
        """The recipe's `judge.engine`."""
        return {"type": "openai", "url": self.url, "model": "judge", "retries": 0}


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    made = Endpoint()
    thread = threading.Thread(target=made.http.serve_forever, daemon=True)
    thread.start()
    yield made
    made.http.shutdown()
    made.http.server_close()
    thread.join()
