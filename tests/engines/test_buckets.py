"""Weights in buckets: what lies together, and what happens when a server ends in the middle of an update."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from agentrl.engines.base import Delivery, Receipt, Sampling, Weights
from agentrl.engines.sglang import weight_check
from agentrl.engines.sglang.buckets import BucketSender, split
from agentrl.engines.sglang.engine import SglangEngine
from agentrl.engines.sglang.weight_check import hashes
from agentrl.errors import EngineError
from tests.engines.fake_server import FakeServer

Open = Callable[..., FakeServer]
NAMES = ["embed_tokens.weight", "layers.0.a.weight", "layers.0.b.weight", "layers.1.a.weight", "norm.weight"]
PROMPT, TURN = [5, 6], Sampling(max_tokens=1)


def weights(value: float) -> dict[str, torch.Tensor]:
    return {name: torch.full((64, 4), value + number / 10) for number, name in enumerate(NAMES)}


@pytest.fixture
def fake() -> Iterator[Open]:
    with ExitStack() as stack:

        def start(**options: Any) -> FakeServer:
            server = FakeServer(weights(0.0), **options)
            stack.callback(server.close)
            return server

        yield start


def holds(server: FakeServer, value: float) -> bool:
    return all(torch.equal(server.tensors[name], tensor) for name, tensor in weights(value).items())


def order(*servers: FakeServer, version: int = 1) -> Delivery:
    urls = tuple(server.url for server in servers)
    return Delivery(urls=urls, way="tensor", version=version, address="127.0.0.1", timeout_s=30.0, bucket_bytes=1024)


class Source:
    """A learner's weights, of which every bucket is counted."""

    def __init__(self, value: float) -> None:
        self.value, self.taken = value, 0
        self.sender = BucketSender(stable=True)

    def buckets(self) -> Iterator[dict[str, torch.Tensor]]:
        for bucket in split(weights(self.value), 1024):
            self.taken += 1
            yield bucket

    def deliver(self, order: Delivery) -> Receipt:
        return self.sender.send(order, self.buckets(), 4)


def test_a_layer_stays_together_and_a_tied_tensor_is_sent_once() -> None:
    tensors = weights(1.0)
    tensors["lm_head.weight"] = tensors["embed_tokens.weight"]
    assert [list(bucket) for bucket in split(tensors, 1024)] == [NAMES[:1], NAMES[1:3], NAMES[3:4], NAMES[4:]]
    assert [list(bucket) for bucket in split(tensors, 3072)] == [NAMES[:3], NAMES[3:]]


def test_the_version_comes_with_the_last_bucket_and_every_tensor_is_hashed(fake: Open) -> None:
    server, source = fake(), Source(1.0)
    server.running = False
    receipt = source.deliver(order(server, version=3))
    assert (receipt.error, receipt.buckets, receipt.nbytes, receipt.largest) == ("", 4, 5 * 1024, 2048)
    assert (holds(server, 1.0), server.version, source.taken) == (True, "3", 4)


def test_a_server_that_holds_something_else_afterwards_is_noticed(fake: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    server = fake()
    server.running = False
    take = server._do__update_weights_from_tensor

    async def damaged(body: Any) -> Any:
        result = await take(body)
        if body.get("weight_version"):
            server.tensors["layers.0.b.weight"][3, 3] += 1e-6
        return result

    monkeypatch.setattr(server, "_do__update_weights_from_tensor", damaged)
    receipt = Source(1.0).deliver(order(server))
    assert receipt.error == "after the update the server's layers.0.b.weight differs from what was sent"


def test_two_servers_alike_cost_one_hash_and_are_asked_for_their_names_once(
    fake: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers hash all of their weights to name them, and sample nothing meanwhile."""
    servers, source, hashed = [fake(), fake()], Source(1.0), list[str]()

    def counted(tensors: Any, *rest: Any, **named: Any) -> dict[str, str]:
        hashed.extend(tensors)
        return hashes(tensors, *rest, **named)

    monkeypatch.setattr(weight_check, "hashes", counted)
    for version, value in enumerate([1.0, 2.0, 3.0], 1):
        source.value = value
        for server in servers:
            server.running = False
        assert source.deliver(order(*servers, version=version)).error == ""
    assert [holds(server, 3.0) for server in servers] == [True, True]
    assert (hashed, [server.calls.count("/weights_checker") for server in servers]) == (NAMES * 3, [4, 4])


def test_a_server_in_the_place_of_another_is_compared_by_values(fake: Open) -> None:
    """It has a tensor more than the one that was asked: hashes that were made for that one say nothing about it."""
    server, source = fake(), Source(1.0)
    server.running = False
    assert source.deliver(order(server)).error == ""
    server.tensors["layers.0.scale"] = torch.ones(4)
    assert (source.deliver(order(server, version=2)).error, "/get_weights_by_name" in server.calls) == ("", True)
    server.calls.clear()
    assert source.deliver(order(server, version=3)).error == ""
    assert (server.calls.count("/weights_checker"), "/get_weights_by_name" in server.calls) == (2, False)
    server.named = False
    server.tensors["layers.1.scale"] = torch.ones(4)
    wrong = source.deliver(order(server, version=4)).error
    assert wrong == "the server does not say what its embed_tokens.weight is, so the update cannot be checked"


def test_a_server_that_ends_in_the_middle_is_left_out_and_the_others_start_again(fake: Open) -> None:
    """All buckets are taken each time: other ranks gather them too. No server samples in between."""
    healthy, dying = fake(), fake(dies_at=2)
    source, said = Source(1.0), list[str]()

    async def main() -> None:
        engine = SglangEngine(urls=[healthy.url, dying.url], sync="tensor", say=said.append)
        await engine.start()
        await engine.generate(PROMPT, TURN)
        await engine.publish(Weights(version=1, deliver=source.deliver))
        completion = await engine.generate(PROMPT, TURN)
        assert (completion.versions, engine.version, engine.addresses) == ((1,), 1, [healthy.url])
        await engine.close()

    asyncio.run(main())
    assert (source.taken, holds(healthy, 1.0)) == (8, True)
    assert len(said) == 1 and said[0].startswith(f"going on without {dying.url}, which ended while it got new weights")
    for state in (*healthy.sampled, *dying.sampled):
        assert len({round(float(tensor[0, 0]) - NAMES.index(name) / 10, 3) for name, tensor in state.items()}) == 1


def test_nothing_is_sampled_from_half_of_the_weights(fake: Open) -> None:
    """The only server ends: the update fails, and so does every turn until another one succeeds."""
    dying = fake(dies_at=2)

    async def main() -> None:
        engine = SglangEngine(urls=[dying.url], sync="tensor")
        await engine.start()
        with pytest.raises(EngineError, match="broke during /update_weights_from_tensor"):
            await engine.publish(Weights(version=1, deliver=Source(1.0).deliver))
        assert engine.version == 0
        with pytest.raises(EngineError, match="nothing is sampled from half of it"):
            await engine.generate(PROMPT, TURN)
        await engine.close()

    asyncio.run(main())


def test_a_refused_bucket_leaves_the_server_standing_still_until_an_update_succeeds(fake: Open) -> None:
    server = fake()
    sent = Source(1.0)

    def fails(order: Delivery) -> Receipt:
        sent.sender.send(order, list(sent.buckets())[:2], 4)
        return Receipt(error="no memory")

    async def main() -> None:
        engine = SglangEngine(urls=[server.url], sync="tensor")
        await engine.start()
        with pytest.raises(EngineError, match="could not be sent to SGLang. tensor: no memory"):
            await engine.publish(Weights(version=1, deliver=fails))
        assert (server.running, server.version) == (False, "0")
        await engine.pause()
        await engine.resume()
        assert not server.running
        with pytest.raises(EngineError, match="nothing is sampled from half of it"):
            await engine.generate(PROMPT, TURN)
        engine._sync._ways = ["tensor"]  # type: ignore[union-attr]
        await engine.publish(Weights(version=2, deliver=Source(2.0).deliver))
        assert (await engine.generate(PROMPT, TURN)).versions == (2,)
        await engine.close()

    asyncio.run(main())
    assert server.running and holds(server, 2.0)


def test_weights_that_the_learner_has_no_more_are_not_sent(fake: Open) -> None:
    """A server that comes late waits for the next version, and holds the old one until then."""
    server = fake()

    async def main() -> None:
        engine = SglangEngine(urls=[server.url], sync="tensor")
        await engine.start()
        with pytest.raises(EngineError, match="gone"):
            await engine.publish(Weights(version=1, deliver=lambda order: Receipt(stale=True, error="gone")))
        assert (await engine.generate(PROMPT, TURN)).versions == (0,)
        await engine.close()

    asyncio.run(main())
