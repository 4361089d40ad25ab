"""What only SGLang has: three ways for weights, servers too old to say versions, and a process that may die."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentrl.engines.base import Sampling, Weights
from agentrl.engines.sglang.buckets import BucketSender, split
from agentrl.engines.sglang.engine import SglangEngine
from agentrl.engines.sglang.routing import Router
from agentrl.engines.sglang.server import Server
from agentrl.engines.sglang.weight_check import Expected
from agentrl.errors import EngineError, UserError
from agentrl.learn.teacher import ServedTeacher
from agentrl.recipe import TeacherSection
from agentrl.types import Completion, Segment, TrainingSample

PROMPT = [5, 17, 99, 201, 7, 42]
TOLERANCE = 0.15 if os.environ.get("AGENTRL_DEVICE") == "cuda" else 1e-4
Forward = Callable[..., list[float]]

pytestmark = [pytest.mark.xdist_group("sglang"), pytest.mark.timeout(600)]  # a busy machine starts a server slowly


def close(one: Any, other: Any) -> bool:
    return len(one) == len(other) and all(abs(a - b) < TOLERANCE for a, b in zip(one, other, strict=True))


def scaled(model: Any, factor: float) -> dict[str, torch.Tensor]:
    return {name: p.detach() * factor for name, p in model.named_parameters()}


def test_a_server_scores_tokens_as_a_teacher(opened: Any, kept: Any, forward: Forward, model_folder: Path) -> None:
    """One prefill gives the logprobs of given tokens; those of the sampled ones are picked, and equal a plain forward
    pass. Two requests with the same prefix, the second from the cache, say the same."""
    sources = np.array([0, 0, 2, 2, 1, 2], dtype=np.uint8)
    sampled = sources == 2
    segment = Segment(np.array(PROMPT), np.where(sampled, -1.0, 0), np.where(sampled, 0, -1), sources)
    sample = TrainingSample(segment=segment, advantages=np.zeros(6, np.float32), weight=1.0, group=0, trajectory=0)

    async def main() -> list[Any]:
        async with opened("sglang"):
            url = (await kept.started("plain")).url
            served = ServedTeacher(TeacherSection(path=model_folder, urls=[url]), 310)
            try:
                await served.probe()
                return [*await served.score([sample, sample]), *await served.score([sample])]
            finally:
                await served.close()

    scores = asyncio.run(main())
    expected = np.array(forward(PROMPT[:2], tuple(PROMPT[2:])))[[0, 1, 3]]
    assert [close(score, expected) for score in scores] == [True, True, True]


def test_weights_by_tensor_process_group_and_file(
    opened: Any, model: Any, record_property: Callable[[str, Any], None]
) -> None:
    """Each update is compared with what the server says it holds, by a hash over every tensor."""

    async def main() -> None:
        async with opened("sglang") as engine:
            greedy = []
            for version, way in enumerate(["tensor", "distributed", "disk", "tensor", "distributed"], start=1):
                engine._sync._ways = [way]
                began = time.perf_counter()
                await engine.publish(Weights(version=version, tensors=scaled(model, 1.0 + version / 10)))
                record_property(f"{way}_s", round(time.perf_counter() - began, 3))
                assert engine._sync.used == way
                completion = await engine.generate(PROMPT, Sampling(max_tokens=4, temperature=0.0))
                assert completion.versions == (version,) * 4
                greedy.append(completion.logprobs)
            assert len(set(greedy)) == 5

    asyncio.run(main())


def test_weights_that_did_not_arrive_are_noticed(opened: Any, model: Any) -> None:
    async def main() -> None:
        async with opened("sglang") as engine:
            expected, server = Expected({}), engine._clients[0]
            await expected.prepare(server)
            await expected.add(scaled(model, 1.5))
            with pytest.raises(EngineError, match=r"model\.embed_tokens\.weight differs"):
                await expected.compare(server)

    asyncio.run(main())


def test_an_update_that_hangs_is_given_up(opened: Any, model: Any) -> None:
    async def main() -> None:
        async with opened("sglang") as engine:

            async def stuck(*_: Any) -> None:
                await asyncio.sleep(60)

            engine._sync._send = stuck
            engine._sync.timeout_s = 0.1
            with pytest.raises(EngineError, match=r"took longer than 0 s and was given up"):
                await engine.publish(Weights(version=1, tensors=scaled(model, 1.0)))
            assert engine.version == 0
            assert len((await engine.generate(PROMPT, Sampling(max_tokens=2, temperature=0.0))).token_ids) == 2

    asyncio.run(main())


def keep(told: list[tuple[int, ...]], tokens: Sequence[int]) -> None:
    told.append(tuple(tokens))


def test_a_server_too_old_to_say_versions(opened: Any, model: Any, forward: Forward) -> None:
    """Requests are aborted, keep their tokens and version, and send their prefix again under the new weights."""

    async def main() -> None:
        async with opened("sglang") as engine:
            engine._spans = False
            wait = 0.1
            while True:
                told: list[tuple[int, ...]] = []
                sampling = Sampling(max_tokens=400, on_tokens=partial(keep, told))
                task = asyncio.ensure_future(engine.generate(PROMPT, sampling))
                await asyncio.sleep(wait)
                await engine.publish(Weights(version=1, tensors=scaled(model, 1.1)))
                completion = await task
                if set(completion.versions) == {0, 1}:
                    break
                wait = wait / 2 if 1 not in completion.versions else wait * 2
                await engine.publish(Weights(version=0, tensors=scaled(model, 1.0)))
            old = completion.versions.count(0)
            assert completion.versions == (0,) * old + (1,) * (len(completion.versions) - old)
            assert close(completion.logprobs[:old], forward(PROMPT, completion.token_ids)[:old])
            # A stream goes on over the abort: what was told only grows.
            assert told == [completion.token_ids[: len(tokens)] for tokens in told] and len(told[-1]) > old

    asyncio.run(main())


@pytest.mark.skipif(not os.environ.get("AGENTRL_FULL"), reason="starts SGLang twice more; set AGENTRL_FULL")
def test_a_server_that_dies_is_diagnosed_and_started_again(
    kept: Any, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two, killed while requests run: its requests fail with the log's end, those of the other keep their tokens
    and end as if nothing had been, and afterwards both have the weights that were published last. The one that is
    started again has no tokenizer, as when a model comes from nowhere but the learner."""

    async def main() -> None:
        server, other = [await kept.started(name) for name in ("plain", "second")]
        said: list[str] = []
        engine = SglangEngine(servers=[server, other], vocabulary=310, max_context=4096, say=said.append)
        await engine.start()
        try:
            await engine.publish(Weights(version=3, tensors=scaled(model, 1.2)))
            greedy = Sampling(max_tokens=4, temperature=0.0)
            before = await engine.generate(PROMPT, greedy)
            launch, under_way = engine._launch, []

            async def watched() -> None:
                under_way.append([client.load for client in engine._clients])
                await launch()

            monkeypatch.setattr(engine, "_launch", watched)
            # Many, since any of them may come to its end before the server dies.
            many = [asyncio.ensure_future(engine.generate(PROMPT, Sampling(max_tokens=300))) for _ in range(16)]
            await asyncio.sleep(0.1)
            assert min(client.load for client in engine._clients) > 0  # some on each
            monkeypatch.setattr(server, "flags", (*server.flags, "--skip-tokenizer-init"))
            assert server._process is not None
            os.killpg(server._process.pid, signal.SIGKILL)
            ended = await asyncio.gather(*many, return_exceptions=True)
            broken = [str(one) for one in ended if isinstance(one, EngineError)]
            whole = [one for one in ended if isinstance(one, Completion)]
            assert broken and all("broke during /generate" in text and "its end:" in text for text in broken)
            assert len(broken) <= 8 and len(broken) + len(whole) == 16
            assert {version for one in whole for version in one.versions} == {3}
            assert all(len(one.token_ids) == 300 for one in whole)
            assert engine.statistics()["restarts"] == 1 and under_way == [[0, 0]]  # none whose connection would be cut
            assert [text.rsplit(" ", 1)[1] for text in said] == [str(server.log)]
            assert len(engine._clients) == 2
            for client in engine._clients:
                reply = await client.generate(PROMPT, greedy, "after")
                assert tuple(reply.token_ids) == before.token_ids
            assert (await engine.generate(PROMPT, greedy)).versions == (3,) * 4
        finally:
            engine.servers = []  # they go on for the tests that follow
            await engine.close()

    asyncio.run(main())


@pytest.mark.skipif(not os.environ.get("AGENTRL_FULL"), reason="starts SGLang twice more; set AGENTRL_FULL")
@pytest.mark.parametrize("way", ["tensor", "distributed"])
def test_a_server_killed_between_two_buckets_is_left_out(kept: Any, model: Any, way: str) -> None:
    """The other one gets everything from the beginning, within seconds, and samples from it. In a process group it
    hangs in a broadcast that never ends: then the update fails in time, and nothing is sampled."""

    async def main() -> None:
        healthy, killed = [await kept.started(name) for name in ("plain", "second")]
        said: list[str] = []
        engine = SglangEngine(
            urls=[healthy.url, killed.url], sync=way, vocabulary=310, max_context=4096, update_timeout_s=60.0,
            say=said.append,
        )  # fmt: skip
        sender, taken = BucketSender(stable=True), list[int]()

        def buckets() -> Iterator[dict[str, torch.Tensor]]:
            for number, bucket in enumerate(split(scaled(model, 1.3), 1)):
                if number == 2 and killed.alive:
                    os.killpg(killed._process.pid, signal.SIGKILL)
                taken.append(number)
                yield bucket

        await engine.start()
        try:
            count = len(split(scaled(model, 1.3), 1))
            began = time.monotonic()
            new = Weights(version=4, deliver=lambda order: sender.send(order, buckets(), count))
            if way == "distributed":
                with pytest.raises(EngineError, match="broke during /update_weights_from_distributed"):
                    await engine.publish(new)
                assert (time.monotonic() - began < 60.0, taken) == (True, [*range(count)])
                with pytest.raises(EngineError, match="nothing is sampled from half of it"):
                    await engine.generate(PROMPT, Sampling(max_tokens=4))
                os.killpg(healthy._process.pid, signal.SIGKILL)  # it would hang for those who come after
                return
            await engine.publish(new)
            assert time.monotonic() - began < 60.0
            assert taken == [*range(count), *range(count)]
            assert (engine.addresses, len(said)) == ([healthy.url], 1)
            greedy = await engine.generate(PROMPT, Sampling(max_tokens=4, temperature=0.0))
            assert greedy.versions == (4,) * 4
        finally:
            await engine.close()
            sender.close()

    asyncio.run(main())


def test_a_server_dies_with_us(tmp_path: Path) -> None:
    """The guard ends the server's whole process group when agentrl is killed without a chance to clean up, and removes
    its temporary files."""
    fake = tmp_path / "python"
    told = tmp_path / "pid"
    fake.write_text(
        f"#!/bin/sh\ntouch $TMPDIR/socket\necho $$ $TMPDIR > {told}.new\nmv {told}.new {told}\nexec sleep 300\n"
    )
    fake.chmod(0o755)
    code = (
        "import asyncio, os, pathlib, signal, time\n"
        "from agentrl.engines.sglang.server import Server\n"
        f"server = Server(pathlib.Path('x'), python=pathlib.Path({str(fake)!r}), device='cpu', "
        f"log=pathlib.Path({str(tmp_path / 'log')!r}))\n"
        "async def main():\n"
        "    task = asyncio.ensure_future(server.start())\n"
        f"    while not os.path.exists({str(tmp_path / 'pid')!r}): await asyncio.sleep(0.05)\n"
        "    await asyncio.sleep(0.5)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    )

    async def main() -> None:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
        assert await process.wait() == -signal.SIGKILL
        pid, temporary = told.read_text().split()
        for _ in range(100):
            if not Path(f"/proc/{pid}").exists() and not Path(temporary).exists():
                return
            await asyncio.sleep(0.1)
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
        raise AssertionError(f"the server outlived agentrl, or its files in {temporary} did")

    asyncio.run(main())


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    fake = tmp_path / "python"
    fake.write_text(f"#!/bin/sh\necho $TMPDIR > {tmp_path / 'told'}\necho cannot find the GPU\nexit 3\n")
    fake.chmod(0o755)
    server = Server(tmp_path, python=fake, device="cpu", log=tmp_path / "log")
    with pytest.raises(EngineError) as caught:
        asyncio.run(server.start())
    log = tmp_path / "log"
    assert not Path((tmp_path / "told").read_text().strip()).exists()
    assert str(caught.value) == (
        f"SGLang stopped while starting.\nit ended with exit code 3; log {log}, its end:\ncannot find the GPU"
    )


def test_a_missing_interpreter_names_the_command_that_makes_one(tmp_path: Path) -> None:
    server = Server(tmp_path, python=tmp_path / "none", device="cpu", log=tmp_path / "log")
    with pytest.raises(UserError, match="agentrl engine install sglang --cpu"):
        asyncio.run(server.start())


def test_routing_prefers_the_server_that_knows_the_prefix() -> None:
    router = Router(3)
    system = list(range(128))
    first = [*system, *range(1000, 1128)]
    second = [*system, *range(2000, 2128)]
    assert router.choose(first, [0, 0, 0]) == 0
    assert router.choose(second, [5, 0, 0]) == 1  # one shared system prompt does not draw everything to one server
    assert router.choose([*first, 7, 8, 9], [1, 1, 0]) == 0
    assert router.choose([*second, 7, 8, 9], [1, 1, 0]) == 1
    assert router.choose(first, [9, 0, 0]) != 0  # a server that is much busier is avoided
    router.forget()
    assert router.choose(second, [0, 0, 0]) == 0
