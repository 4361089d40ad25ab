"""A program in a sandbox that answers one message with one message.

    host: open(box)  ── exec python3 program ─────────────────> program, which keeps its stdin and stdout to itself
    host: ask(m)     ── one line ──> stdin ──> program ──> stdout ── one line ──> the answer

Whatever a program does to the pipes, it can only answer wrongly, late or not at all.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from agentrl.errors import AgentError
from agentrl.sandboxes.base import Sandbox
from agentrl.sandboxes.stdio import StdioProcess
from agentrl.verifiers.values import Malformed, parse_json

FOLDER = ".grading"
MAX_MESSAGE = 400_000
NO_ANSWER = "no answer in time"
_PATIENCE = 5.0
"""Seconds that the pipes have beyond the time limit, so that the limit itself is what ends a wait."""


class Gone(Exception):
    """The program ended, hung, or answered with something that is not a message."""


class Channel:
    """The host's end of the conversation with `.grading/program.py` of a sandbox."""

    def __init__(self, box: Sandbox, program: StdioProcess) -> None:
        self._box, self._program = box, program

    @classmethod
    async def open(cls, box: Sandbox) -> Channel:
        """Start the program."""
        argv = ["python3", "-B", f"{FOLDER}/program.py"]
        try:
            return cls(box, await StdioProcess.start(box, argv, limit=MAX_MESSAGE + 1))
        except AgentError as error:
            raise Gone(f"the program could not be started ({type(error).__name__})") from None

    async def ask(self, message: dict[str, Any], timeout: float) -> dict[str, Any]:
        """Send a message and return the answer; raises `Gone` when there is none."""
        data = json.dumps(message).encode()
        if len(data) > MAX_MESSAGE:
            raise Gone("the message is too long")
        try:
            async with asyncio.timeout(timeout):
                await self._program.write(data, timeout=timeout + _PATIENCE)
                line = await self._program.read(timeout=timeout + _PATIENCE)
            reply = parse_json(line, max_bytes=MAX_MESSAGE)
        except TimeoutError:
            raise Gone(NO_ANSWER) from None
        except Malformed as error:
            raise Gone(f"the answer cannot be read ({type(error).__name__})") from None
        except AgentError:
            await self._look()
            raise Gone("the program ended") from None
        if type(reply) is not dict:
            raise Gone("the answer is not a message")
        return reply

    async def _look(self) -> None:
        """Run a command: a sandbox that ended for a cause outside it says so, which is no fault of the program's."""
        try:
            await self._box.aio.exec(["true"], timeout=10.0)
        except AgentError:
            return

    async def close(self) -> None:
        """End the program."""
        await self._program.close()
