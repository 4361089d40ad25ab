"""Sends new weights to SGLang servers through shared tensors, a process group or files, and checks that they arrived.

    tensor       learner and server on one machine: only handles travel (CUDA IPC, or shared memory on the CPU)
    distributed  a process group that the learner and every server joined: one broadcast per tensor
    disk         a safetensors file that the server reads, in memory-backed /dev/shm where it fits

Every way has a time limit and ends in an error that says what to do, never in a silent hang.
"""

from __future__ import annotations

import asyncio
import base64
import concurrent.futures
import io
import json
import secrets
import shutil
import socket
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing

from agentrl.engines.base import Weights
from agentrl.engines.sglang.client import Client
from agentrl.engines.sglang.server import free_port
from agentrl.engines.sglang.weight_check import check, cpu_hash
from agentrl.errors import EngineError

SHARED_MEMORY = "/dev/shm"


class Sync:
    """Sends weights to servers, and remembers which way works."""

    def __init__(
        self, clients: Sequence[Client], *, way: str, local: bool, timeout_s: float = 300.0, address: str = "127.0.0.1"
    ) -> None:
        """`local`: the servers run on this machine. `way`: one of the three, or "auto". `address`: where servers of
        other machines reach this process."""
        self.clients = clients
        self.timeout_s = timeout_s
        self.used = ""
        """The way that the last weights were sent."""
        self.seconds: dict[str, float] = {}
        """How long sending and checking them took."""
        automatic = ["tensor" if local else "distributed", "disk"]
        self._ways = automatic if way == "auto" else [way]
        self._group: Any = None
        self._address = address
        self._name = f"agentrl-{secrets.token_hex(4)}"
        """The process group's name; a server remembers those of earlier runs."""

    async def send(self, weights: Weights) -> None:
        """Send `weights` to every server and check that they arrived."""
        if weights.tensors is None:
            raise EngineError("SGLang has a copy of the weights: publish needs their tensors")
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
                self._ways.remove(way)  # what failed once is not tried again at every step
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
        except (RuntimeError, OSError) as error:  # torch's own errors of a process group or of shared memory
            raise EngineError(f"sending weights ({what}) failed: {error}") from error

    async def _send(self, way: str, tensors: dict[str, torch.Tensor], version: int) -> None:
        if way == "disk":
            await self._disk(tensors, version)
            return
        # Newer servers want a session around an update, so that packed weights can be opened and closed.
        session = await self.clients[0].knows("/begin_weight_update")
        if session:
            await self._all("/begin_weight_update", {})
        try:
            await (self._tensors if way == "tensor" else self._broadcast)(tensors, version)
        finally:
            if session:
                await self._all("/end_weight_update", {})

    async def _all(self, path: str, body: Mapping[str, Any]) -> None:
        await asyncio.gather(*(client.call(path, body, self.timeout_s) for client in self.clients))

    async def _disk(self, tensors: dict[str, torch.Tensor], version: int) -> None:
        from safetensors.torch import save_file

        size = sum(t.nbytes for t in tensors.values())
        parent = SHARED_MEMORY if _free_bytes(SHARED_MEMORY) > 2 * size else None
        with tempfile.TemporaryDirectory(prefix="agentrl-weights-", dir=parent, ignore_cleanup_errors=True) as folder:
            body = {"model_path": folder, "weight_version": str(version), "flush_cache": True, "keep_pause": True}
            file = Path(folder) / "model.safetensors"
            await asyncio.to_thread(
                lambda: save_file({name: t.cpu().contiguous() for name, t in tensors.items()}, file)
            )
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
            self._group = await self._join(_backend(next(iter(tensors.values())), self.clients, self._address))
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

        await asyncio.gather(self._all("/update_weights_from_distributed", body), _in_thread(send))

    async def _join(self, backend: str) -> Any:
        sizes = [await client.ranks() for client in self.clients]
        port = free_port("")
        known = self._address != "127.0.0.1" or _on_this_host(self.clients, self._address)
        host = self._address if known else socket.getfqdn()
        world = 1 + sum(sizes)
        offsets = [1 + sum(sizes[:index]) for index in range(len(sizes))]
        common = {"master_address": host, "master_port": port, "world_size": world, "group_name": self._name}
        calls = [
            client.call("/init_weights_update_group", common | {"rank_offset": o, "backend": backend}, self.timeout_s)
            for client, o in zip(self.clients, offsets, strict=True)
        ]
        address = f"tcp://{host}:{port}"
        group = _in_thread(lambda: _process_group(self._name, backend, address, world, self.timeout_s))
        return (await asyncio.gather(group, *calls))[0]

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
        leave = _in_thread(lambda: torch.distributed.destroy_process_group(group))
        with suppress(TimeoutError):  # a peer that is gone must not hold us up
            await asyncio.wait_for(asyncio.gather(leave, *calls, return_exceptions=True), 15.0)


def _on_this_host(clients: Sequence[Client], address: str) -> bool:
    return all("//127.0.0.1" in client.url or f"//{address}:" in client.url for client in clients)


def _backend(tensor: torch.Tensor, clients: Sequence[Client], address: str) -> str:
    """Choose NCCL, or gloo through the host where learner and server share a GPU, which NCCL does not allow."""
    shared_gpu = _on_this_host(clients, address) and torch.cuda.device_count() == 1
    return "nccl" if tensor.is_cuda and not shared_gpu else "gloo"


def _in_thread(work: Callable[[], Any]) -> asyncio.Future[Any]:
    """Run `work` in a daemon thread, so that one stuck in a collective does not keep the process from exiting."""
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()  # from here on it cannot be cancelled, only ignored

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name="agentrl-weights").start()
    return asyncio.wrap_future(future)


def distinct(tensors: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors without second names of a tied one."""
    first: dict[tuple[int, tuple[int, ...]], str] = {}
    for name, tensor in tensors.items():
        first.setdefault((tensor.data_ptr(), tuple(tensor.shape)), name)
    return {name: tensors[name].detach() for name in first.values()}


def _shared(tensors: dict[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """Return CUDA tensors as they are, and CPU tensors as copies whose memory can be shared with the server."""
    size = sum(t.nbytes for t in tensors.values() if not t.is_cuda)
    if size and _free_bytes(SHARED_MEMORY) < 2 * size:
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
    """Return the body of `/load_lora_adapter_from_tensors`; the server compares the hashes itself."""
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


def _free_bytes(path: str) -> int:
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return 0


def _process_group(name: str, backend: str, address: str, world: int, timeout_s: float) -> Any:
    """Join as rank 0 a group beside the default one, built the way SGLang builds its side."""
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
