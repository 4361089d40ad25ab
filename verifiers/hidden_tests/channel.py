"""A program in a sandbox that answers one message with one message.

    host: open(box)  ── exec python3 program ─────────────────────────────> program
    host: ask(m)     ── exec sh: cat > in; cat out ──> fifo in ──> program ──> fifo out ──> reply
    `ask` waits for the reply's exec, or for the program's exec, after which there will be no reply

Whatever a program does to the fifos, it can only answer wrongly, late or not at all.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from agentrl.errors import AgentError
from agentrl.sandboxes.base import ExecResult, Sandbox
from agentrl.verifiers.values import Malformed, parse_json

FOLDER = ".grading"
MAX_MESSAGE = 400_000
LIFETIME = 600.0
NO_ANSWER = "no answer in time"


class Gone(Exception):
    """The program ended, hung, or answered with something that is not a message."""


class Channel:
    """The host's end of the conversation with `.grading/program.py` of a sandbox."""

    def __init__(self, box: Sandbox, program: asyncio.Task[ExecResult]) -> None:
        self._box, self._program = box, program

    @classmethod
    async def open(cls, box: Sandbox) -> Channel:
        """Start the program."""
        await box.aio.exec(["mkfifo", f"{FOLDER}/in", f"{FOLDER}/out"], timeout=10.0)
        argv = ["python3", "-B", f"{FOLDER}/program.py"]
        return cls(box, asyncio.ensure_future(box.aio.exec(argv, timeout=LIFETIME)))

    async def ask(self, message: dict[str, Any], timeout: float) -> dict[str, Any]:
        """Send a message and return the answer; raises `Gone` when there is none."""
        data = json.dumps(message).encode()
        if len(data) > MAX_MESSAGE:
            raise Gone("the message is too long")
        relay = ["sh", "-c", f"cat > {FOLDER}/in; cat {FOLDER}/out"]
        request = asyncio.ensure_future(self._box.aio.exec(relay, stdin=data, timeout=timeout))
        await asyncio.wait((request, self._program), return_when=asyncio.FIRST_COMPLETED)
        if not request.done():
            request.add_done_callback(_forget)
            raise Gone("the program ended")
        try:
            done = request.result()
            if done.timed_out or done.truncated:
                raise Gone(NO_ANSWER if done.timed_out else "the answer is too long")
            reply = parse_json(done.stdout, max_bytes=MAX_MESSAGE)
        except (Malformed, AgentError) as error:
            raise Gone(f"the answer cannot be read ({type(error).__name__})") from None
        if type(reply) is not dict:
            raise Gone("the answer is not a message")
        return reply

    async def close(self) -> None:
        """Stop waiting for the program, which ends with its sandbox."""
        self._program.add_done_callback(_forget)
        self._program.cancel()


def _forget(task: asyncio.Task[ExecResult]) -> None:
    """Retrieve the exception of an abandoned task, so that asyncio does not report it."""
    if not task.cancelled():
        task.exception()
