"""The chat endpoint: against SGLang's own /v1, and against an endpoint that fails in known ways."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from agentrl.engines.openai import OpenaiEngine
from agentrl.engines.sglang.server import Server
from agentrl.errors import EngineError, UserError
from agentrl.recipe import JudgeSection
from agentrl.types import Message, ToolCall
from tests.engines.conftest import DEVICE, FLAGS

pytestmark = [pytest.mark.xdist_group("sglang"), pytest.mark.timeout(600)]  # a busy machine starts a server slowly
HELLO = [Message(role="system", content="be brief"), Message(role="user", content="hello")]


def test_a_judge_on_a_real_endpoint_repeats_itself(server: Server) -> None:
    async def main() -> None:
        if not server.alive:
            await server.start()
        engine = OpenaiEngine(f"{server.url}/v1", "default")
        await engine.start()
        try:
            first = await engine.ask(HELLO, seed=1, max_tokens=8)
            assert first == await engine.ask(HELLO, seed=1, max_tokens=8)
            answer = await engine.chat(HELLO, max_tokens=8, temperature=0.0)
            assert answer.message == Message(role="assistant", content=first)
            assert (answer.finish, answer.completion_tokens) == ("length", 8)
            pieces: list[tuple[int, str]] = []
            streamed = await engine.chat(
                HELLO, max_tokens=8, temperature=0.0, on_text=lambda start, text: pieces.append((start, text))
            )
            assert replace(streamed, seconds=0.0) == replace(answer, seconds=0.0)
            assert "".join(text for _, text in pieces) == first and len(pieces) > 1
            assert [start for start, _ in pieces] == [len(first[:start]) for start, _ in pieces]
            assert engine.statistics()["tokens"] == 32
        finally:
            await engine.close()

    asyncio.run(main())


def test_a_judge_of_a_recipe_on_a_real_server(server: Server) -> None:
    """Named by its URL, with and without /v1, and asked in turn."""
    from agentrl import judges

    async def main() -> list[str]:
        if not server.alive:
            await server.start()
        engine = {"type": "sglang", "urls": [server.url, f"{server.url}/v1/"]}
        judge = judges.make(JudgeSection.model_validate({"engine": engine}))
        async with judges.closing(judge):
            replies = [await judge.ask(HELLO, seed=1, max_tokens=8) for _ in range(2)]
        assert (judge.counts["calls"], judge.counts["failures"]) == (2, 0)
        assert judge.counts["tokens"] > 16
        return replies

    first, second = asyncio.run(main())
    assert first == second != ""


@pytest.mark.skipif(not os.environ.get("AGENTRL_FULL"), reason="starts one more SGLang server; set AGENTRL_FULL")
def test_a_judge_of_a_recipe_starts_a_server_of_its_own(model_folder: Path, tmp_path: Path) -> None:
    """Named by its model's folder: the server answers, its log lies in the run folder, and it ends with the judge."""
    from agentrl import judges

    def servers() -> set[bytes]:
        find = ["pgrep", "-f", f"launch_server.*{model_folder}"]
        return set(subprocess.run(find, capture_output=True, check=False).stdout.split())

    others = servers()  # those that tests share

    async def main() -> str:
        engine = {"type": "sglang", "model": model_folder, "device": DEVICE, "flags": list(FLAGS[DEVICE])}
        judge = judges.make(JudgeSection.model_validate({"engine": engine}), folder=tmp_path)
        async with judges.closing(judge):
            await judge.start()
            assert len(servers() - others) == 1
            return await judge.ask(HELLO, seed=1, max_tokens=8)

    assert asyncio.run(main()) != ""
    assert [path.name for path in (tmp_path / "engine").iterdir()] == ["judge.log"]
    assert servers() == others


@contextmanager
def endpoint(answers: list[tuple[int, Any, dict[str, str]]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """An endpoint that gives the answers in turn, the last one for ever; also what it was sent."""
    seen: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(200, {"data": []}, {})

        def do_POST(self) -> None:
            seen.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.reply(*(answers.pop(0) if len(answers) > 1 else answers[0]))

        def reply(self, status: int, content: Any, headers: dict[str, str]) -> None:
            body = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=made.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{made.server_port}/v1", seen
    finally:
        made.shutdown()
        made.server_close()


def answered(content: str, **more: Any) -> dict[str, Any]:
    return {"choices": [{"message": {"content": content, **more}, "finish_reason": "stop"}]}


def chat(url: str, **options: Any) -> Any:
    async def main() -> Any:
        engine = OpenaiEngine(url, "m", backoff_s=0.01, **options)
        await engine.start()
        try:
            return await engine.chat(HELLO, max_tokens=4), dict(engine.statistics())
        finally:
            await engine.close()

    return asyncio.run(main())


def test_trouble_that_passes_is_tried_again() -> None:
    busy = (429, {"error": "slow down"}, {"Retry-After": "0.2"})
    broken: tuple[int, dict[str, Any], dict[str, str]] = (503, {"error": "starting"}, {})
    began = time.monotonic()
    with endpoint([busy, broken, (200, answered("yes"), {})]) as (url, seen):
        answer, statistics = chat(url)
    assert answer.message.content == "yes"
    assert (len(seen), statistics["retries"]) == (3, 2)
    assert time.monotonic() - began >= 0.2


def test_trouble_that_stays_is_told() -> None:
    with endpoint([(500, {"error": "no memory"}, {})]) as (url, seen):
        with pytest.raises(EngineError, match=r"no answer after 3 tries; the last said 500: .*no memory"):
            chat(url, retries=2)
        assert len(seen) == 3


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"<html>Bad gateway</html>", "cannot be read .*: <html>Bad gateway</html>"),
        (b"", "cannot be read"),
        (b"\xff\xfe", "cannot be read"),
        (b"[" * 100_000, "cannot be read .*RecursionError"),
        (b"[]", "cannot be read"),
        ({"choices": []}, "cannot be read"),
        ({"choices": [{"message": "yes"}]}, "cannot be read"),
        (b'{"choices": "' + b"x" * (9 << 20) + b'"}', "cannot be read .*a reply of more than 8388608 bytes"),
    ],
)
def test_a_reply_that_is_no_answer_is_tried_again_and_told(content: Any, said: str) -> None:
    with endpoint([(200, content, {}), (200, answered("yes"), {})]) as (url, seen):
        answer, statistics = chat(url)
    assert (answer.message.content, len(seen), statistics["retries"]) == ("yes", 2, 1)
    with endpoint([(200, content, {})]) as (url, seen):
        with pytest.raises(EngineError, match=f"(?s)no answer after 2 tries; the last said .*{said}"):
            chat(url, retries=1)
        assert len(seen) == 2


@pytest.mark.parametrize("tokens", ["many", None, -3, float("inf"), True])
def test_an_endpoint_that_counts_nonsense_is_counted_by_what_it_said(tokens: Any) -> None:
    """The answer is kept; a ceiling on tokens holds all the same."""
    content = json.dumps({"choices": [{"message": {"content": "yes"}}], "usage": {"completion_tokens": tokens}})
    with endpoint([(200, content.encode(), {})]) as (url, seen):
        answer, _ = chat(url)
    assert (answer.message.content, len(seen)) == ("yes", 1)
    assert answer.completion_tokens == 1 + len(content) // 4


def test_content_that_is_no_text_is_an_empty_message() -> None:
    """What the model said is the model's own, whatever its type: it is never asked again until it suits."""
    with endpoint([(200, {"choices": [{"message": {"content": ["yes"]}}]}, {})]) as (url, seen):
        answer, _ = chat(url)
    assert (answer.message.content, len(seen)) == ("", 1)


def test_a_reply_that_trickles_in_is_late() -> None:
    """Each byte comes in time, the answer never does."""

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        post = (await reader.read(4)) == b"POST"
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n" if post else b"HTTP/1.1 200 OK\r\n\r\n")
        with suppress(ConnectionError):
            while post:
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(0.05)
        writer.close()

    async def main() -> None:
        async with await asyncio.start_server(drip, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
            engine = OpenaiEngine(url, "m", retries=0, timeout_s=0.5)
            await engine.start()
            with pytest.raises(EngineError, match=r"no whole reply within 0.5 s"):
                await engine.chat(HELLO, max_tokens=4)
            await engine.close()

    asyncio.run(asyncio.wait_for(main(), 20))


def test_our_own_mistake_is_not_tried_again() -> None:
    with endpoint([(400, {"error": "unknown model"}, {})]) as (url, seen):
        with pytest.raises(EngineError, match="after 1 tries; the last said 400: .*unknown model"):
            chat(url)
        assert len(seen) == 1


def test_an_address_without_v1_is_told_so() -> None:
    with endpoint([(404, {"detail": "Not Found"}, {})]) as (url, _):
        base = url.removesuffix("/v1")
        with pytest.raises(EngineError, match=f"Not Found.*mostly ends with /v1: {base}/v1$"):
            chat(base)
        with pytest.raises(EngineError, match=f"mostly ends with /v1: {url}$"):
            chat(f"{url}/chat/completions")
        for other in (url, f"{base}/v1beta/openai", f"{base}/api/paas/v4"):  # the model is what is not there
            with pytest.raises(EngineError, match='Not Found"}$'):
                chat(other)


def test_the_rate_limit_spaces_requests() -> None:
    async def main(url: str) -> float:
        engine = OpenaiEngine(url, "m", requests_per_minute=600)
        await engine.start()
        began = time.monotonic()
        await asyncio.gather(*(engine.ask(HELLO, seed=i, max_tokens=1) for i in range(6)))
        await engine.close()
        return time.monotonic() - began

    with endpoint([(200, answered("ok"), {})]) as (url, _):
        assert asyncio.run(main(url)) >= 0.5


def test_tool_calls_travel_both_ways_and_bad_ones_carry_their_error() -> None:
    calls = [
        {"id": "a", "function": {"name": "look", "arguments": '{"path": "/"}'}},
        {"id": "b", "function": {"name": "look", "arguments": '{"path'}},
        {"id": "c", "function": {"name": "look", "arguments": "[1]"}},
    ]
    with endpoint([(200, answered("", tool_calls=calls), {})]) as (url, _):
        answer, _ = chat(url)
    good, cut, wrong = answer.message.tool_calls
    assert good == ToolCall(name="look", arguments={"path": "/"}, id="a")
    assert cut.error is not None and cut.error.startswith("the arguments are not JSON")
    assert wrong.error == "the arguments must be a JSON object"


def test_a_wrong_address_is_told_at_the_start() -> None:
    with pytest.raises(EngineError, match="check the URL"):
        chat("http://127.0.0.1:9/v1")


def test_no_training_on_an_endpoint_without_tokens() -> None:
    from agentrl import recipe
    from agentrl.engines import build

    section = recipe.OpenaiEngine(type="openai", url="http://127.0.0.1:9/v1", model="m")
    with pytest.raises(UserError, match="evaluation and judges, not training"):
        build.make(section, None)


def test_a_real_servers_chat_endpoint_is_evaluated(server: Server, tmp_path: Path) -> None:
    """SGLang's /v1 plays whole episodes of a real environment: graded, counted by the server, without token ids."""
    from agentrl import recipe as recipes
    from agentrl.eval import command as eval_command

    if not server.alive:
        asyncio.run(server.start())
    recipe = recipes.build(
        {
            "run": {"name": "r", "out": str(tmp_path)},
            "model": {"type": "scratch"},
            "envs": [{"name": "countdown", "levels": [1]}],
            "rollout": {"max_tokens": 12, "max_turns": 2},
            "eval": {"tasks": 2},
        }
    )
    target = eval_command.find(f"default@{server.url}/v1", recipe=recipe)
    report = eval_command.run(target, None, ks=[1, 2], say=lambda text: None)
    figures = report["policies"][0]["environments"]["countdown"]
    assert (figures["tries"], figures["ungraded"], figures["token_ids"]) == (4, 0, False)
    assert 4 <= figures["completion_tokens"] <= 48 and figures["prompt_tokens"] > 100
