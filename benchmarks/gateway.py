"""What the gateway for black-box agents costs: CPU time of its process per turn, at 64 sessions, as turns add up.

python benchmarks/gateway.py [--json]

The agents are in a process of their own and the engine answers at once, so that all CPU time of this process is the
gateway's: HTTP, JSON, placing the request on its branch, tokenising what is new, checking it, parsing the turn.
`streaming` has agents that ask for streams of the same turns: the engine tells 8 tokens every 20 ms, as SGLang does.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from agentrl.engines.base import Sampling
from agentrl.interop.gateway import Gateway
from agentrl.interop.policies import TokenPolicy
from agentrl.interop.session import Session
from agentrl.rollout.render import Renderer
from agentrl.rollout.request import Budget, RolloutId
from agentrl.rollout.sampling import SamplingParams
from agentrl.types import Completion, Message, Task, ToolCall
from benchmarks._parts import report

SESSIONS, TURNS, REPEATS = 64, 24, 3
RESULT = "total 12\n-rw-r--r-- 1 agent agent 512 Jan  1 00:00 notes.txt\ndrwxr-xr-x 2 agent agent 4096 old\n" * 3
FUNCTION = {
    "name": "run",
    "description": "Run a shell command.",
    "parameters": {"type": "object", "properties": {"command": {"type": "string", "description": "what to run"}}},
}


class Instant:
    """An engine that always says the same: at once, or in pieces where it is asked to tell of its tokens."""

    def __init__(self, tokens: tuple[int, ...]) -> None:
        self.done = Completion(
            token_ids=tokens, logprobs=(-0.5,) * len(tokens), versions=(0,) * len(tokens), finish="stop"
        )

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str = "") -> Completion:
        """Say it."""
        if sampling.on_tokens is not None:
            for end in range(8, len(self.done.token_ids), 8):
                sampling.on_tokens(self.done.token_ids[:end])
                await asyncio.sleep(0.02)
        return self.done


def renderer() -> Renderer:
    """Return a renderer over a byte-level tokenizer that knows the texts of this benchmark."""
    from agentrl.learn.model import scratch_tokenizer

    return Renderer(scratch_tokenizer([RESULT, json.dumps(FUNCTION), "Run a command, look at the result."] * 20, 1024))


async def measure(stream: bool, words: str = "") -> list[dict[str, float]]:
    """Return CPU milliseconds per turn for each turn of the episodes; `words` are said before the call."""
    made = renderer()
    call = ToolCall(name="run", arguments={"command": "ls -l notes old | sort | head -n 20"})
    engine = Instant(made.write(Message(role="assistant", content=words, tool_calls=(call,))))
    gateway, budget = Gateway(), Budget(context=1 << 20, tokens=1 << 20, turns=TURNS + 1)
    await gateway.start()
    rows: list[list[float]] = []
    tokens = 0
    try:
        for repeat in range(REPEATS):
            sessions = []
            for index in range(SESSIONS):
                task = Task(id=f"t{index}", split="train", level=1, prompt="p")
                place = RolloutId(seed=0, group=repeat, index=index)
                policy = TokenPolicy(engine, made, task, place, budget, SamplingParams())
                sessions.append(gateway.open(Session(policy, turns=TURNS + 1, tokens=1 << 20, turn_tokens=400)))
            rows.append(await _rounds(gateway, [session.key for session in sessions], stream))
            policy = sessions[0].policy  # type: ignore[assignment]
            assert len(policy.branches.branches) == 1
            tokens = len(policy.branches.branches[0].log)
            for session in sessions:
                gateway.end(session)
    finally:
        await gateway.close()
    best = [min(row[turn] for row in rows) for turn in range(TURNS)]
    shown = [turn for turn in (1, 2, 4, 8, 12, 16, 24) if turn <= TURNS]
    return [
        {"turn": turn, "cpu_ms": round(best[turn - 1], 3), "tokens": round(tokens * turn / TURNS)} for turn in shown
    ]


async def _rounds(gateway: Gateway, keys: list[str], stream: bool) -> list[float]:
    """Have every session take one turn after another, all sessions at once; return this process's time for each."""
    command = [sys.executable, __file__, "--agents", "stream" if stream else "whole", str(gateway.port), *keys]
    agents = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert agents.stdin is not None and agents.stdout is not None
    spent = []
    try:
        for _ in range(TURNS):
            began = time.process_time()
            agents.stdin.write("go\n")
            agents.stdin.flush()
            answer = await asyncio.to_thread(agents.stdout.readline)
            assert answer == "done\n", answer
            spent.append((time.process_time() - began) / SESSIONS * 1000)
    finally:
        agents.stdin.close()
        agents.wait(10)
    return spent


def rebuilt(lines: bytes) -> dict[str, Any]:
    """Return the message that the chunks of a stream add up to."""
    message: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": []}
    for line in lines.splitlines():
        if line.startswith(b"data: {"):
            delta = json.loads(line[6:])["choices"][0]["delta"]
            message["content"] += delta.get("content") or ""
            message["tool_calls"] += delta.get("tool_calls", [])
    return message


def agents(stream: bool, port: int, keys: list[str]) -> None:
    """Be the agents: one turn each for every line that comes in."""

    def turn(state: dict[str, Any]) -> None:
        tools = [{"type": "function", "function": FUNCTION}]
        body = json.dumps({"model": "policy", "messages": state["talk"], "tools": tools, "stream": stream})
        headers = {"authorization": f"Bearer {state['key']}", "content-type": "application/json"}
        state["connection"].request("POST", "/v1/chat/completions", body, headers)
        response = state["connection"].getresponse()
        data = response.read()
        assert response.status == 200, data
        said = rebuilt(data) if stream else json.loads(data)["choices"][0]["message"]
        answer = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": RESULT}
        state["talk"] += [said, answer]

    opening = [{"role": "system", "content": "Use the tools."}, {"role": "user", "content": "Tidy the folder up."}]
    states = [
        {"key": key, "talk": list(opening), "connection": http.client.HTTPConnection("127.0.0.1", port)} for key in keys
    ]
    with ThreadPoolExecutor(len(keys)) as pool:
        for _ in sys.stdin:
            list(pool.map(turn, states))
            print("done", flush=True)


def per_turn() -> list[dict[str, float]]:
    """CPU milliseconds of the gateway's process per turn, for the first turn and later ones."""
    return asyncio.run(measure(False))


WORDS = "I look at the notes and the old folder first, then I sort what is there and tell you what I would remove."


def streaming() -> list[dict[str, float]]:
    """The same with a sentence before each call, sent whole and as a stream, and their ratio."""
    whole, stream = asyncio.run(measure(False, WORDS)), asyncio.run(measure(True, WORDS))
    return [
        {
            "turn": w["turn"],
            "cpu_ms": w["cpu_ms"],
            "stream_ms": s["cpu_ms"],
            "ratio": round(s["cpu_ms"] / w["cpu_ms"], 2),
        }
        for w, s in zip(whole, stream, strict=True)
    ]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--agents"]:
        agents(sys.argv[2] == "stream", int(sys.argv[3]), sys.argv[4:])
    else:
        sys.exit(report(__doc__, {"per_turn": per_turn, "streaming": streaming}))
