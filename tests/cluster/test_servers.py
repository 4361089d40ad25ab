"""SGLang servers on a cluster: which server a group goes to, what one needs, and one that is killed and replaced."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Coroutine
from contextlib import AsyncExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest.mock import AsyncMock

import pytest

from agentrl import initial_policy, serving
from agentrl.cluster import server_actor
from agentrl.cluster.connect import OWN_ADDRESS
from agentrl.cluster.engine import PlayersEngine
from agentrl.cluster.own_node import OwnNode
from agentrl.cluster.players import RayPlayers
from agentrl.cluster.remote import Remote
from agentrl.cluster.server_actor import fingerprint, node_address, resources
from agentrl.engines.base import Sampling, Weights
from agentrl.engines.sglang import engine as engines
from agentrl.engines.sglang import install
from agentrl.engines.sglang.client import ConnectionBroken, Reply
from agentrl.engines.sglang.engine import SglangEngine
from agentrl.engines.sglang.routing import of_group
from agentrl.engines.sglang.server import Server
from agentrl.errors import EngineError, InfraError
from agentrl.recipe import SglangEngine as Section
from agentrl.rollout.request import RolloutId
from agentrl.rollout.runtimes import runtimes
from agentrl.types import Task
from agentrl.verifiers.busy import loop_timeout
from tests.cluster.rollouts import Loop, small_recipe

T = TypeVar("T")
FULL = bool(os.environ.get("AGENTRL_FULL"))
SERVERS = [f"http://10.0.0.{number}:30000" for number in range(1, 9)]
GROUPS = [str(group) for group in range(4000)]


def sleeps_end_at_once(monkeypatch: pytest.MonkeyPatch, slept: list[float]) -> None:
    """Make sleeps of this loop end at once and keep their lengths; other loops, like the players', sleep as before."""
    loop, sleep = asyncio.get_running_loop(), asyncio.sleep

    async def asleep(seconds: float) -> None:
        if asyncio.get_running_loop() is loop:
            slept.append(seconds)
            seconds = 0
        await sleep(seconds)

    monkeypatch.setattr(asyncio, "sleep", asleep)


def test_groups_spread_over_servers_and_a_lost_one_moves_only_its_own() -> None:
    before = {group: SERVERS[of_group(group, SERVERS)] for group in GROUPS}
    counts = Counter(before.values())
    assert set(counts) == set(SERVERS)
    assert all(abs(count - 500) < 5 * 500**0.5 for count in counts.values())
    left = SERVERS[:3] + SERVERS[4:]
    after = {group: left[of_group(group, left)] for group in GROUPS}
    moved = {group for group in GROUPS if before[group] != after[group]}
    assert moved == {group for group in GROUPS if before[group] == SERVERS[3]}
    assert max(Counter(after[group] for group in moved).values()) < len(moved) / 4  # spread over all that are left
    turned = SERVERS[::-1]
    assert {group: turned[of_group(group, turned)] for group in GROUPS} == before  # whatever the order


@pytest.mark.parametrize(
    ("section", "needs"),
    [
        ({"device": "cpu"}, {"CPU": 0.01}),
        ({}, {"GPU": 1.0}),
        ({"flags": ["--tp", "4"]}, {"GPU": 4.0}),
        ({"flags": ["--tensor-parallel-size=2", "--pp-size", "2", "--dtype", "bfloat16"]}, {"GPU": 4.0}),
    ],
)
def test_a_server_asks_for_its_gpus(section: dict[str, Any], needs: dict[str, float]) -> None:
    assert resources(Section(type="sglang", **section)) == needs


def test_a_model_folder_is_known_by_its_files(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    first = fingerprint(tmp_path)
    (tmp_path / "a").write_text("22")
    assert first != fingerprint(tmp_path)


class Fake:
    """A server's client whose server may be gone."""

    def __init__(self, url: str) -> None:
        self.url, self.load, self.gone, self.asked = url, 0, False, list[str]()

    async def generate(self, token_ids: Any, sampling: Sampling, request_id: str, *, adapter: Any = None) -> Reply:
        if self.gone:
            raise ConnectionBroken(f"{self.url} is gone")
        self.asked.append(request_id)
        return Reply([7], [-1.0], "stop", [("3", 0, 1)], 0)

    async def info(self) -> dict[str, Any]:
        return {}

    async def close(self) -> None: ...


async def in_time(work: Coroutine[Any, Any, T]) -> T:
    """Do some work of an episode that has a tenth of a second."""
    async with loop_timeout(0.1):
        return await work


def test_a_request_of_a_lost_server_goes_to_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request waits until the driver names the servers that are left; with none left it waits for the next, and
    its episode's time does not run."""
    clients: dict[str, Fake] = {}
    monkeypatch.setattr(engines, "Client", lambda url, **_: clients.setdefault(url, Fake(url)))

    async def main() -> None:
        engine = SglangEngine(urls=SERVERS[:3], by_group=True)
        await engine.start()
        await engine.use(SERVERS[:3])
        for client in clients.values():
            client.asked.clear()
        for turn in range(3):
            await engine.generate([1, 2], Sampling(max_tokens=4), request_id=f"5-0-{turn}-0")
        first = SERVERS[of_group("5", SERVERS[:3])]
        assert {url: len(client.asked) for url, client in clients.items() if client.asked} == {first: 3}
        clients[first].gone = True
        waiting = asyncio.create_task(engine.generate([1, 2], Sampling(max_tokens=4), request_id="5-0-3-0"))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        left = [url for url in SERVERS[:3] if url != first]
        await engine.use(left)
        assert (await waiting).versions == (3,)
        second = left[of_group("5", left)]
        assert len(clients[second].asked) == 1
        await engine.use([])
        waiting = asyncio.create_task(in_time(engine.generate([1, 2], Sampling(max_tokens=4), request_id="5-0-4-0")))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        await engine.use([SERVERS[5]])
        assert (await waiting).token_ids == (7,)
        await engine.close()

    asyncio.run(main())


def test_a_recipe_with_a_cluster_places_its_servers_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Servers are not started beside the driver, and players hear of every change, those that start later too."""
    from agentrl.cluster import connect
    from agentrl.cluster.servers import RayServers

    monkeypatch.setattr(connect, "connected", lambda *_, **__: nullcontext())
    engine_section = {"type": "sglang", "device": "cpu", "servers": 3, "memory_fraction": 0.3, "flags": ["--tp", "1"]}
    recipe = small_recipe(
        envs=[{"name": "files", "levels": [1]}],
        rollout={"group_size": 2, "engine": engine_section},
        cluster={"players": 2},
    )
    told: list[tuple[str, ...]] = []

    async def main() -> None:
        async with AsyncExitStack() as stack:
            environments = stack.enter_context(runtimes(recipe, elsewhere=True))
            policy = initial_policy.load_policy(recipe, environments, say=lambda text: None)
            engine, players, _ = serving.open_engine(
                recipe, policy, environments, stack, folder=tmp_path, say=lambda text: None
            )
            assert isinstance(engine, PlayersEngine) and isinstance(players, RayPlayers)
            servers = engine._servers
            assert isinstance(servers, RayServers)
            assert (servers._section.servers, servers._plan.memory_fraction) == (3, 0.3)
            assert servers._plan.flags[:2] == ("--tp", "1") and (Path(servers._plan.model) / "config.json").is_file()

            async def use(urls: tuple[str, ...]) -> None:
                told.append(urls)

            player = Remote(0, SimpleNamespace(use_servers=SimpleNamespace(remote=use)))
            players.ready.append(player)
            assert servers.changed is not None
            await servers.changed(("http://a", "http://b"))
            assert (told, player.urls, players._urls) == ([("http://a", "http://b")], *[("http://a", "http://b")] * 2)
            players.ready.clear()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("address", "nodes", "gpus", "flags", "needs", "memory", "way"),
    [
        (OWN_ADDRESS, 1, 1, [], 0.5, 0.2, "auto"),
        (OWN_ADDRESS, 1, 1, ["--tp", "2"], 2.0, 0.4, "auto"),
        (OWN_ADDRESS, 1, 2, [], 1.0, 0.4, "distributed"),
        (OWN_ADDRESS, 3, 1, [], 1.0, 0.4, "distributed"),
        ("10.0.0.1", 1, 1, [], 1.0, 0.4, "distributed"),
    ],
)
def test_servers_share_the_only_gpu_of_the_only_machine(
    monkeypatch: pytest.MonkeyPatch,
    address: str,
    nodes: int,
    gpus: int,
    flags: list[str],
    needs: float,
    memory: float,
    way: str,
) -> None:
    """To a cluster that was joined a node may come. Where all share one GPU, weights go through its memory."""
    from agentrl.cluster import servers as module

    monkeypatch.setattr(module, "node_address", lambda: address)
    monkeypatch.setattr("ray.nodes", lambda: [{}] * nodes)
    monkeypatch.setattr("ray.cluster_resources", lambda: {"GPU": float(gpus)})
    section = Section(type="sglang", servers=2, flags=flags, memory_fraction=0.4)
    template = Server(Path("model"), python=Path("python"), device="cuda", log=Path("log"), memory_fraction=0.2)
    servers = module.RayServers(template, section)
    assert servers._needs == {"GPU": needs}
    assert servers._plan.memory_fraction == memory
    assert isinstance(servers._in_turn, asyncio.Lock) == (needs == 0.5)
    assert servers._client(["http://127.0.0.1:1"])._way == way


def test_players_never_give_two_requests_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server refuses a name that it has: players start at once, and a lost rollout may still run where it was."""
    client = Fake(SERVERS[0])
    monkeypatch.setattr(engines, "Client", lambda url, **_: client)

    async def main() -> None:
        for _ in range(2):
            player = SglangEngine(urls=SERVERS[:1], by_group=True)
            await player.start()
            await player.generate([1, 2], Sampling(max_tokens=4), request_id="5-0-0-0")
            await player.close()

    asyncio.run(main())
    assert len(client.asked) == len(set(client.asked)) == 4
    assert [name.rsplit("-", 2)[0] for name in client.asked] == ["agentrl-probe", "5-0-0-0"] * 2


@pytest.mark.parametrize("by_group", [True, False])
def test_requests_of_busy_players_leave_together(monkeypatch: pytest.MonkeyPatch, by_group: bool) -> None:
    """Of a process that has many under way, when the clock shows a multiple of the beat, so that all processes' do."""
    client, now, slept = Fake(SERVERS[0]), 1000.01, list[float]()
    monkeypatch.setattr(engines, "Client", lambda url, **_: client)
    answer, sleep = client.generate, asyncio.sleep

    async def main() -> None:
        player, answering = SglangEngine(urls=SERVERS[:1], by_group=True), asyncio.Event()
        await player.start()
        player._by_group = by_group

        async def late(*arguments: Any, **named: Any) -> Reply:
            await answering.wait()
            return await answer(*arguments, **named)

        monkeypatch.setattr(client, "generate", late)
        sleeps_end_at_once(monkeypatch, slept)
        monkeypatch.setattr("time.time", lambda: now)
        names = [f"{group}-0-0-0" for group in range(engines.BUSY + 3)]
        asked = (player.generate([1, 2], Sampling(max_tokens=4), request_id=name) for name in names)
        under_way = asyncio.gather(*asked)
        await sleep(0.05)
        answering.set()
        assert [each.token_ids for each in await under_way] == [(7,)] * len(names)
        await player.close()

    asyncio.run(main())
    assert len(slept) == (3 if by_group else 0)
    assert all(0 < seconds <= engines.BEAT_S for seconds in slept)
    assert all(round((now + seconds) / engines.BEAT_S, 6).is_integer() for seconds in slept)


def test_no_rollout_is_to_blame_while_there_is_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time stands still until a server is there again; when none will come, the run ends and says why."""
    killed: list[Any] = []
    monkeypatch.setattr("ray.kill", killed.append)
    monkeypatch.setattr("ray.cancel", lambda ref: None)
    monkeypatch.setattr("agentrl.cluster.dispatch.END_S", 0.1)
    said: list[str] = []
    task = Task(id="files/train/1/0", split="train", level=1, prompt="Do it.")

    async def main() -> None:
        players = RayPlayers(small_recipe(cluster={"players": 2}), sources={}, retries_s=0.2, say=said.append)
        never = SimpleNamespace(remote=lambda *_: asyncio.get_running_loop().create_future())
        use = SimpleNamespace(remote=lambda urls: asyncio.sleep(0))
        actors = [SimpleNamespace(play=never, use_servers=use) for _ in range(2)]
        players.ready.extend(Remote(slot, actor) for slot, actor in enumerate(actors))
        await players.use_servers(("http://a",))
        await players.use_servers(())
        rollout_id = RolloutId(seed=0, group=0, index=0, secret=b"", task_index=0)
        rollout = asyncio.create_task(players.play("files", task, rollout_id))
        await asyncio.sleep(0.8)
        assert players.counts["rollouts_lost"] == 0 and not rollout.done()
        players._lose(players.ready[0], "its node died")  # its replacement has not begun when nothing is left to do
        players.give_up("no SGLang server is left, and none of them could be started again")
        with pytest.raises(InfraError, match="no player is left: .*no SGLang server is left"):
            await asyncio.wait_for(rollout, 5.0)
        assert players.ready == [] and killed == actors

    asyncio.run(main())


@pytest.mark.parametrize("alive", [False, True])
def test_players_end_the_run_where_ray_is_gone_from_its_machine(alive: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another player is asked for and would never come: only where this machine's raylet lives it is waited for."""
    never = SimpleNamespace(remote=lambda *_: asyncio.get_running_loop().create_future())
    killed, left = list[str](), list[str]()
    monkeypatch.setattr("ray.kill", lambda actor: killed.append(actor.name))
    node = OwnNode(look_s=0.1, is_dead=lambda: not alive, leave=left.append)
    task = Task(id="files/train/1/0", split="train", level=1, prompt="Do it.")

    async def main() -> None:
        recipe = small_recipe(cluster={"players": 1})
        players = RayPlayers(recipe, sources={}, own_node=node, say=lambda text: None)
        second = SimpleNamespace(start=never, name="second")
        monkeypatch.setattr(players, "_kind", SimpleNamespace(remote=lambda kit: second))
        players.ready.append(Remote(0, SimpleNamespace(name="first")))
        players.heed_own_node()
        players._lose(players.ready[0], "its node died")
        rollout_id = RolloutId(seed=0, group=0, index=0, secret=b"", task_index=0)
        rollout = asyncio.create_task(players.play("files", task, rollout_id))
        if alive:
            await asyncio.wait([rollout], timeout=0.5)
            assert not rollout.done()
            rollout.cancel()
        else:
            with pytest.raises(InfraError, match="no player is left: Ray's raylet on the machine of `agentrl train`"):
                await asyncio.wait_for(rollout, 5.0)
        await players.close()

    with node.watched():
        asyncio.run(main())
    assert killed == (["first", "second"] if alive else ["first"])  # a raylet that stands still would be waited for
    assert (left, node.told) == ([], set())


def test_servers_that_cannot_be_started_again_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each keeper gives up after some failures; the last of them says that none will come."""
    from agentrl.cluster import servers as module

    ended: list[str] = []

    async def main() -> None:
        sleeps_end_at_once(monkeypatch, [])
        holder = SimpleNamespace(_say=ended.append, _up={}, gave_up=lambda why: ended.append(f"ended: {why}"))
        holder._bring_up = AsyncMock(side_effect=EngineError("no room"))
        came = asyncio.get_running_loop().create_future()
        came.set_result(None)
        keep = module.RayServers._keep
        holder._keepers = [asyncio.create_task(keep(holder, slot, came)) for slot in range(2)]  # type: ignore[arg-type]
        await asyncio.gather(*holder._keepers)

    asyncio.run(main())
    assert [line for line in ended if line.startswith("ended: ")] == ended[-1:]
    assert ended[-1] == "ended: no SGLang server is left, and none of them could be started again"


def test_a_server_that_stands_still_is_lost(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its process lives and its port takes connections; whatever it answers shows that it works."""
    clock = 0.0
    monkeypatch.setattr(server_actor, "time", SimpleNamespace(monotonic=lambda: clock))
    plan = server_actor.Plan(
        model=str(tmp_path), mark="", python="", device="cpu", flags=(), memory_fraction=0.1, timeout_s=1.0
    )
    talks = True

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if talks:
            writer.write(b"HTTP/1.1 405 Method Not Allowed\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        else:
            await asyncio.sleep(60.0)
        writer.close()

    async def main() -> list[str]:
        nonlocal clock, talks
        listening = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        actor: Any = server_actor.ServerActor(plan)
        actor._server = SimpleNamespace(alive=True, url=url, stop=AsyncMock())
        states = [await actor.state(), await actor.state()]
        talks = False
        monkeypatch.setattr(server_actor, "ASK_S", 0.1)
        clock = server_actor.SILENT_S
        states.append(await actor.state())
        clock += 1.0
        states.append(await actor.state())
        await actor.stop()
        listening.close()
        return states

    assert asyncio.run(main()) == ["", "", "", "its process runs and did not answer for 60 s"]


def test_a_lost_server_is_told_to_remove_its_files_before_it_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that does not answer is not waited for longer than a moment, and loses its place all the same."""
    from agentrl.cluster import servers as module

    events: list[str] = []

    async def stop() -> None:
        events.append("stop")

    async def never() -> None:
        await asyncio.sleep(60.0)

    monkeypatch.setattr("ray.kill", lambda actor: events.append("kill"))
    monkeypatch.setattr(module, "remove_placement_group", lambda group: events.append(f"free {group}"))
    monkeypatch.setattr(module, "CLEAR_S", 0.1)

    async def main() -> None:
        holder = SimpleNamespace(_all=set(), _clearing=set())
        holder._clear = lambda held: module.RayServers._clear(holder, held)  # type: ignore[arg-type]
        for name, work in {"well": stop, "gone": never}.items():
            held = module.Held(0, name, SimpleNamespace(stop=SimpleNamespace(remote=work)))
            module.RayServers._discard(holder, held)  # type: ignore[arg-type]
            await asyncio.gather(*holder._clearing)

    asyncio.run(main())
    assert events == ["stop", "kill", "free well", "kill", "free gone"]


@pytest.mark.skipif(not FULL, reason="starts SGLang twice; set AGENTRL_FULL")
@pytest.mark.timeout(900)
def test_a_server_that_is_killed_is_replaced_with_the_current_weights(nodes: Any, loop: Loop, tmp_path: Path) -> None:
    """A real server on the cluster. It serves the weights of the last publication before anybody is told of it."""
    if not install.python(cpu=True).exists():
        pytest.skip("SGLang for the CPU is not installed")
    import torch
    import transformers

    from agentrl.cluster import connect
    from agentrl.cluster.servers import RayServers

    hub: Any = transformers  # its classes are not annotated
    torch.manual_seed(0)
    config = hub.LlamaConfig(
        vocab_size=310, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, bos_token_id=None, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    model = hub.LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "model")
    flags = ("--dtype", "float32", "--max-total-tokens", "4096", "--skip-tokenizer-init")
    section = Section(type="sglang", device="cpu", servers=1, memory_fraction=0.2, start_timeout_s=400.0)
    template = Server(
        tmp_path / "model",
        python=install.python(True),
        device="cpu",
        log=tmp_path / "log",
        flags=flags,
        timeout_s=400.0,
    )
    said: list[str] = []
    told: list[tuple[str, ...]] = []

    async def changed(urls: tuple[str, ...]) -> None:
        told.append(urls)

    async def main() -> None:
        servers = RayServers(template, section, say=said.append)
        servers.changed = changed
        player = None
        try:
            await servers.start()
            first = servers.addresses[0]
            assert told == [(first,)] and f"//{node_address()}:" in first
            player = SglangEngine(urls=[first], by_group=True)
            await player.start()
            await player.use([first])
            doubled = {name: tensor.detach() * 1.5 for name, tensor in model.named_parameters()}
            await servers.publish(Weights(version=4, tensors=doubled))
            greedy = Sampling(max_tokens=3, temperature=0.0)
            before = await player.generate([5, 17, 99], greedy, request_id="0-0-0-0")
            assert before.versions == (4, 4, 4)
            held = servers._up[0]
            folder = Path(await held.actor.__ray_call__.remote(lambda far: far._folder.name))
            assert folder.is_dir()
            os.killpg(await held.actor.process.remote(), signal.SIGKILL)
            waiting = asyncio.create_task(player.generate([5, 17, 99], greedy, request_id="0-0-1-0"))
            async with asyncio.timeout(400):
                while len(told) < 3:
                    await asyncio.sleep(0.1)
                    if len(told) == 2 and player.urls:
                        await player.use(told[-1])  # as players are told: none is left
            assert told[1] == () and told[2] != (first,)
            await player.use(told[2])
            after = await waiting
            assert (after.token_ids, after.versions) == (before.token_ids, (4, 4, 4))
            assert after.logprobs == pytest.approx(before.logprobs, abs=1e-4)
            await servers.pause()
            held_back = asyncio.create_task(player.generate([5, 17, 99], greedy, request_id="0-0-2-0"))
            await asyncio.sleep(2.0)
            assert not held_back.done()
            await servers.resume()
            assert (await held_back).token_ids == before.token_ids
            assert servers.statistics()["servers_lost"] == 1
            assert not folder.exists()  # what the lost one had on its node is removed
        finally:
            if player is not None:
                await player.close()
            await servers.close()

    with connect.connected(small_recipe(cluster={"players": 1}).cluster):  # type: ignore[arg-type]
        loop.run(main(), 850.0)
    assert any(line.startswith("lost SGLang server 0") and "SIGKILL" in line for line in said), said
