"""A program in a real sandbox with its stdin and stdout kept open."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from agentrl import sandboxes
from agentrl.errors import AgentError
from agentrl.sandboxes.base import SandboxSpec
from agentrl.sandboxes.stdio import StdioProcess

ECHO = "import sys\nfor line in sys.stdin: print(line.strip()[::-1], flush=True)"


def run(work: Any) -> Any:
    """Run a coroutine function with a sandbox of its own."""

    async def main() -> Any:
        box = sandboxes.load("namespace")().create(SandboxSpec())
        try:
            coroutine: Coroutine[Any, Any, Any] = work(box)
            return await coroutine
        finally:
            box.close()

    return asyncio.run(main())


def test_lines_go_in_and_out_while_the_program_stays() -> None:
    """Two requests reach one and the same program; `close` ends it."""

    async def work(box: Any) -> list[bytes]:
        process = await StdioProcess.start(box, ["python3", "-c", ECHO])
        answers = []
        for line in (b"abc", b"defg"):
            await process.write(line)
            answers.append(await process.read())
        await process.close()
        return answers

    assert run(work) == [b"cba", b"gfed"]


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("import sys; sys.exit('no such thing')", "has ended: no such thing"),
        ("import time; time.sleep(60)", "wrote nothing for 0.5 s"),
        ("import sys\nwhile True: sys.stdout.write('x' * 65536)", "a line of more than 100000 bytes"),
        ("import sys; sys.stdout.write('half a line')", "has ended"),
    ],
)
def test_a_program_that_ends_hangs_or_floods_is_the_agents_doing(program: str, message: str) -> None:
    """Each is an AgentError with its cause, within the time and the memory that were allowed."""

    async def work(box: Any) -> None:
        process = await StdioProcess.start(box, ["python3", "-c", program], limit=100_000)
        try:
            with pytest.raises(AgentError, match=message):
                await process.read(timeout=0.5 if "sleep" in program else 20.0)
        finally:
            await process.close()

    run(work)
