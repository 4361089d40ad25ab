"""How new weights reach SGLang servers: shared tensors, a process group, or files; checked afterwards.

    tensor       learner and server on one machine: only handles travel (CUDA IPC, or shared memory on the CPU)
    distributed  a process group that the learner and every server joined: one broadcast a tensor
    disk         a safetensors file that the server reads, in memory-backed /dev/shm where it fits

Every way has a time limit and ends in an error that says what to do, never in a silent hang.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import secrets
import shutil
import socket
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Literal

import torch
import torch.multiprocessing

from agentrl.engines.base import Weights
from agentrl.engines.sglang.client import Client
from agentrl.engines.sglang.weight_check import check, cpu_hash
from agentrl.errors import EngineError

Way = Literal["tensor", "distributed", "disk"]


class Sync:
    """Sends weights to servers, remembering which way works."""

    def __init__(self, clients: Sequence[Client], *, way: str, local: bool, timeout_s: float = 300.0) -> None:
        """`local`: the servers run on this machine. `way`: one of the three, or "auto"."""
        self.clients = clients
        self.timeout_s = timeout_s
        self.used: Way | None = None
        """The way the last weights went."""
        self.seconds: dict[str, float] = {}
        """What sending and checking them took."""
        self._ways: list[Way] = _ways(way, local)
        self._group: Any = None
        self._name = f"agentrl-{secrets.token_hex(4)}"
        """Of the process group; a server remembers those of earlier runs."""

    async def send(self, weights: Weights) -> None:
        """Bring `weights` to every server and check that they arrived."""
        if weights.folder is not None and weights.tensors is None:
            await self._limited("disk", self._from_folder(weights.folder, weights.version))
            return
        if weights.tensors is None:
            raise EngineError("SGLang has a copy of the weights: publish needs tensors or a folder")
        tensors = distinct(weights.tensors)
        failures: list[str] = []
        for way in list(self._ways):
            try:
                began = time.monotonic()
                await self._limited(way, self._send(way, tensors, weights.version))
                sent = time.monotonic()
                await self._limited("checksum", self._check(tensors))
            except EngineError as error:
                failures.append(f"{way}: {error}")
                self._ways.remove(way)  # what failed once is not tried before every step
                continue
            if failures:
                warnings.warn(f"weights go to SGLang by {way} from now on: {'; '.join(failures)}", stacklevel=2)
            self.used = way
            self.seconds = {"send_s": sent - began, "check_s": time.monotonic() - sent}
            return
        self._ways = self._ways or ["disk"]
        raise EngineError(f"policy version {weights.version} could not be sent to SGLang. " + "; ".join(failures))

    async def _limited(self, what: str, work: Any) -> None:
        try:
            await asyncio.wait_for(work, self.timeout_s)
        except TimeoutError as error:
            raise EngineError(
                f"sending weights ({what}) took longer than {self.timeout_s:.0f} s and was given up; "
                "look at the server's log, or set rollout.engine.sync to another way"
            ) from error
        except (RuntimeError, OSError) as error:  # torch's own, of a process group or of shared memory
            raise EngineError(f"sending weights ({what}) failed: {error}") from error

    async def _send(self, way: Way, tensors: dict[str, torch.Tensor], version: int) -> None:
        if way == "tensor":
            await self._session(self._tensors, tensors, version)
        elif way == "distributed":
            await self._session(self._broadcast, tensors, version)
        else:
            with _scratch(sum(t.nbytes for t in tensors.values())) as folder:
                await asyncio.to_thread(_save, tensors, folder)
                await self._from_folder(folder, version)

    async def _session(self, work: Any, tensors: dict[str, torch.Tensor], version: int) -> None:
        """Newer servers want a session around an update, so that packed weights can be opened and closed."""
        wanted = await self.clients[0].knows("/begin_weight_update")
        if wanted:
            await self._all("/begin_weight_update", {})
        try:
            await work(tensors, version)
        finally:
            if wanted:
                await self._all("/end_weight_update", {})

    async def _all(self, path: str, body: Mapping[str, Any]) -> None:
        await asyncio.gather(*(client.call(path, body, self.timeout_s) for client in self.clients))

    async def _from_folder(self, folder: Path, version: int) -> None:
        body = {"model_path": str(folder), "weight_version": str(version), "flush_cache": True, "keep_pause": True}
        await self._all("/update_weights_from_disk", body)

    async def _tensors(self, tensors: dict[str, torch.Tensor], version: int) -> None:
        async def to(client: Client) -> None:
            shared = _shared(tensors)
            payload = [_serialised(shared) for _ in range(await client.ranks())]
            body = {"serialized_named_tensors": payload, "flush_cache": True, "weight_version": str(version)}
            await client.call("/update_weights_from_tensor", body, self.timeout_s)

        await asyncio.gather(*map(to, self.clients))

    async def _broadcast(self, tensors: dict[str, torch.Tensor], version: int) -> None:
        if self._group is None:
            self._group = await self._join(_backend(next(iter(tensors.values())), self.clients))
        body = {
            "names": list(tensors),
            "dtypes": [str(t.dtype).removeprefix("torch.") for t in tensors.values()],
            "shapes": [list(t.shape) for t in tensors.values()],
            "group_name": self._name,
            "flush_cache": True,
            "weight_version": str(version),
        }

        def send() -> None:
            for tensor in tensors.values():
                torch.distributed.broadcast(tensor.detach().contiguous(), src=0, group=self._group)

        await asyncio.gather(self._all("/update_weights_from_distributed", body), _aside(send))

    async def _join(self, backend: str) -> Any:
        sizes = [await client.ranks() for client in self.clients]
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        host = "127.0.0.1" if all("//127.0.0.1" in client.url for client in self.clients) else socket.getfqdn()
        world = 1 + sum(sizes)
        offsets = [1 + sum(sizes[:index]) for index in range(len(sizes))]
        common = {"master_address": host, "master_port": port, "world_size": world, "group_name": self._name}
        asked = [
            client.call("/init_weights_update_group", common | {"rank_offset": o, "backend": backend}, self.timeout_s)
            for client, o in zip(self.clients, offsets, strict=True)
        ]
        address = f"tcp://{host}:{port}"
        group = _aside(lambda: _process_group(self._name, backend, address, world, self.timeout_s))
        return (await asyncio.gather(group, *asked))[0]

    async def _check(self, tensors: dict[str, torch.Tensor]) -> None:
        await asyncio.gather(*(check(client, tensors) for client in self.clients))

    async def close(self) -> None:
        """Leave the process group, and let the servers leave it."""
        group, self._group = self._group, None
        if group is None:
            return
        calls = [
            client.call("/destroy_weights_update_group", {"group_name": self._name}, 10.0) for client in self.clients
        ]
        leave = _aside(lambda: torch.distributed.destroy_process_group(group))
        with suppress(TimeoutError):  # a peer that is gone must not keep us
            await asyncio.wait_for(asyncio.gather(leave, *calls, return_exceptions=True), 15.0)


def _backend(tensor: torch.Tensor, clients: Sequence[Client]) -> str:
    """NCCL joins no two processes on one GPU; where learner and server share it, gloo goes through the host."""
    local = all("//127.0.0.1" in client.url for client in clients)
    return "nccl" if tensor.is_cuda and not (local and torch.cuda.device_count() == 1) else "gloo"


def _aside(work: Callable[[], Any]) -> asyncio.Future[Any]:
    """Run `work` in a thread that nobody waits for at exit: one stuck in a collective must not keep the process."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(value)

    def run() -> None:
        value, error = None, None
        try:
            value = work()
        except BaseException as caught:
            error = caught
        with suppress(RuntimeError):  # the loop may be over by now
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=run, daemon=True, name="agentrl-weights").start()
    return future


def _ways(way: str, local: bool) -> list[Way]:
    if way == "tensor":
        return ["tensor"]
    if way == "distributed":
        return ["distributed"]
    if way == "disk":
        return ["disk"]
    return ["tensor", "disk"] if local else ["distributed", "disk"]


def distinct(tensors: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Without second names of a tied tensor."""
    seen: set[tuple[int, tuple[int, ...]]] = set()
    kept: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        key = (tensor.data_ptr(), tuple(tensor.shape))
        if key not in seen:
            seen.add(key)
            kept[name] = tensor.detach()
    return kept


def _shared(tensors: dict[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """CUDA tensors as they are; CPU tensors as copies in shared memory, which end with the last process using them."""
    size = sum(t.nbytes for t in tensors.values() if not t.is_cuda)
    if size and _room("/dev/shm") < 2 * size:
        raise EngineError(f"/dev/shm has no room for {size >> 20} MiB of weights; give the machine more shared memory")
    return [(name, t if t.is_cuda else t.clone()) for name, t in tensors.items()]


def _serialised(tensors: list[tuple[str, torch.Tensor]] | dict[str, torch.Tensor]) -> str:
    sharing: Any = torch.multiprocessing
    strategy = sharing.get_sharing_strategy()
    sharing.set_sharing_strategy("file_system")  # file descriptors reach only our own children
    try:
        buffer = io.BytesIO()
        ForkingPickler(buffer).dump(tensors)
    finally:
        sharing.set_sharing_strategy(strategy)
    return base64.b64encode(buffer.getvalue()).decode()


async def adapter_body(client: Client, name: str, weights: Weights) -> dict[str, Any]:
    """What `/load_lora_adapter_from_tensors` wants to know; the server compares the hashes itself."""
    assert weights.adapter is not None and weights.tensors is not None
    tensors = distinct(weights.tensors)
    ranks = await client.ranks()
    shared = dict(_shared(tensors))
    return {
        "lora_name": name,
        "config_dict": json.loads(json.dumps(dict(weights.adapter), default=sorted)),
        "serialized_named_tensors": [_serialised(shared) for _ in range(ranks)],
        "expected_checksums": {key: cpu_hash([tensor], 64) for key, tensor in tensors.items()},
    }


def _save(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    from safetensors.torch import save_file

    save_file({name: t.cpu().contiguous() for name, t in tensors.items()}, folder / "model.safetensors")


@contextmanager
def _scratch(size: int) -> Iterator[Path]:
    parent = "/dev/shm" if _room("/dev/shm") > 2 * size else None
    folder = Path(tempfile.mkdtemp(prefix="agentrl-weights-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _room(path: str) -> int:
    try:
        stat = os.statvfs(path)
    except OSError:
        return 0
    return stat.f_bavail * stat.f_frsize


def _process_group(name: str, backend: str, address: str, world: int, timeout_s: float) -> Any:
    """Rank 0 of a group beside the default one, put together the way SGLang puts its side together."""
    from torch.distributed import distributed_c10d

    private: Any = distributed_c10d
    limit = timedelta(seconds=timeout_s)
    store, rank, size = next(private.rendezvous(address, 0, world, timeout=limit))
    store.set_timeout(limit)
    group, _ = private._new_process_group_helper(
        size, rank, [], private.Backend(backend), private.PrefixStore(name, store), group_name=name, timeout=limit
    )
    private._world.pg_group_ranks[group] = {index: index for index in range(size)}
    return group
