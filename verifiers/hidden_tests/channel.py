"""A program in a box that answers one message with one message, carried by the box's shell.

    host: ask(m) ── shell: printf m > in; cat out ──> fifo in ──> program ──> fifo out ──> reply

Nothing a program can do to the shell or the fifos gives it more than the power to answer wrongly, late or not at all.
"""

from __future__ import annotations

import base64
import binascii
import json
from typing import Any

from agentrl.errors import AgentError
from agentrl.sandboxes.base import Sandbox, Shell, off_loop
from agentrl.verifiers.values import Malformed, parse_json

FOLDER = ".grading"
MAX_MESSAGE = 400_000


class Gone(Exception):
    """The program ended, hung, or answered with something that is no message."""


class Channel:
    """One side of the conversation; opened on a box whose workspace holds `.grading/program.py`."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell

    @classmethod
    async def open(cls, box: Sandbox) -> Channel:
        """Start the program. When it ends, the subshell unblocks whoever waits for it."""
        shell = await off_loop(box.shell)
        run = f"python3 -B {FOLDER}/program.py < /dev/null > /dev/null 2>&1; exec 9<> {FOLDER}/in; : > {FOLDER}/out"
        await off_loop(shell.run, f"mkfifo {FOLDER}/in {FOLDER}/out; ({run}) &", timeout=10.0)
        return cls(shell)

    async def ask(self, message: dict[str, Any], timeout: float) -> dict[str, Any]:
        """Send a message and wait for the answer; `Gone` when there is none to be had."""
        text = base64.b64encode(json.dumps(message).encode()).decode()
        if len(text) > MAX_MESSAGE:
            raise Gone("a message of too many bytes")
        command = f"printf %s '{text}' > {FOLDER}/in; cat {FOLDER}/out"
        try:
            done = await off_loop(self._shell.run, command, timeout=timeout)
            if done.timed_out or done.truncated:
                raise Gone("no answer in time" if done.timed_out else "an answer of too many bytes")
            reply = parse_json(base64.b64decode(done.stdout.strip(), validate=True), max_bytes=MAX_MESSAGE)
        except (Malformed, binascii.Error, AgentError) as error:
            raise Gone(f"no clear answer ({type(error).__name__})") from None
        if type(reply) is not dict:
            raise Gone("an answer that is no message")
        return reply

    async def close(self) -> None:
        await off_loop(self._shell.close)
