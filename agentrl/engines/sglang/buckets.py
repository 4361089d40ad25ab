"""Sends whole tensors to SGLang servers bucket by bucket, from the process that has them, and checks that they arrived.

    tensor       learner and server on one machine: only handles travel (CUDA IPC, or shared memory on the CPU)
    distributed  a process group that this process and every server joined: one broadcast per tensor
    disk         safetensors files that the server reads, one per bucket

    bucket ── sent to every server ── hashed here ── freed          after the last one: every server's own hashes

At most one bucket is held beside the one that is being gathered, and none beside tensors that stay as they are. Every
way has a time limit. A server carries the new version's name only once it has the last bucket.
"""

from __future__ import annotations

import asyncio
import base64
import concurrent.futures
import io
import secrets
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
from torch import Tensor

from agentrl.engines.base import Delivery, Receipt
from agentrl.engines.sglang.client import Client, ConnectionBroken
from agentrl.engines.sglang.server import free_port
from agentrl.engines.sglang.weight_check import Expected, Layout
from agentrl.errors import EngineError

SHARED_MEMORY = "/dev/shm"
ALIGNMENT = 64
GRACE_S = 5.0
"""How long the other servers may take to answer once one is lost."""

Bucket = Mapping[str, Tensor]


class ServersLost(EngineError):
    """Servers ended while something was sent to them."""

    def __init__(self, reason: str, urls: Sequence[str]) -> None:
        super().__init__(reason)
        self.urls = tuple(urls)


def split(tensors: Bucket, limit: int) -> list[dict[str, Tensor]]:
    """Divide tensors into buckets of at most so many bytes, where a layer is not larger by itself. Its tensors stay
    together, because servers stack some of them."""
    buckets: list[dict[str, Tensor]] = [{}]
    layers: dict[str, dict[str, Tensor]] = {}
    for name, tensor in distinct(tensors).items():
        layers.setdefault(_layer(name), {})[name] = tensor
    for layer in layers.values():
        if buckets[-1] and nbytes(buckets[-1]) + nbytes(layer) > limit:
            buckets.append({})
        buckets[-1] |= layer
    return buckets


def nbytes(tensors: Bucket) -> int:
    """Return the bytes of tensors together."""
    return sum(tensor.nbytes for tensor in tensors.values())


def _layer(name: str) -> str:
    """Return the part of a name up to the layer's number; the name itself outside of layers."""
    parts = name.split(".")
    place = next((index for index, part in enumerate(parts) if part.isdigit()), None)
    return name if place is None else ".".join(parts[: place + 1])


@dataclass
class _Group:
    """A process group with servers."""

    name: str
    urls: tuple[str, ...]
    group: Any = field(repr=False)


class BucketSender:
    """Sends buckets to servers. It lives where the tensors are, and keeps a process group from one time to the next."""

    def __init__(self, *, stable: bool) -> None:
        """`stable`: tensors stay where they are after they were yielded, so that CUDA handles of them can be sent."""
        self._stable = stable
        self._group: _Group | None = None
        self.layouts: dict[str, Layout] = {}
        """How servers keep their weights, by address: what was learnt at earlier updates."""

    def send(self, order: Delivery, buckets: Iterable[Bucket], count: int) -> Receipt:
        """Send `count` buckets; what went wrong is in the receipt.

        Every bucket is taken in any case: ranks that gather them together must go on together.
        """
        iterator = iter(buckets)
        began = time.monotonic()
        lost: tuple[str, ...] = ()
        try:
            return asyncio.run(_Sending(self, order, count, self._stable).run(iterator, began))
        except ServersLost as error:
            lost, reason = error.urls, str(error)
        except (EngineError, RuntimeError, OSError) as error:  # also torch's own, of a group or of shared memory
            reason = str(error) or type(error).__name__
        finally:
            for _ in iterator:
                pass
        self.leave()
        self.layouts.clear()  # what is started in a lost server's place may keep its weights in another way
        return Receipt(error=reason, lost=lost, seconds={"send_s": time.monotonic() - began})

    async def group(self, order: Delivery, clients: Sequence[Client], tensor: Tensor) -> _Group:
        """Return the process group with these servers; another one where it was with others."""
        if self._group is not None and self._group.urls == order.urls:
            return self._group
        self.leave()
        name = f"agentrl-{secrets.token_hex(4)}"  # a server remembers the names of earlier groups
        backend = _backend(tensor, clients, order.address)
        self._group = _Group(name, order.urls, await _join(name, backend, order, clients))
        return self._group

    def leave(self) -> None:
        """Leave the process group; peers that wait in it for us are let go."""
        group, self._group = self._group, None
        if group is None:
            return
        done = threading.Event()

        def end() -> None:
            with suppress(Exception):  # cuts the connections, so that a peer that waits for a broadcast ends it
                torch.distributed.distributed_c10d._abort_process_group(group.group)
            with suppress(Exception):
                torch.distributed.destroy_process_group(group.group)
            done.set()

        threading.Thread(target=end, daemon=True, name="agentrl-weights-leave").start()
        done.wait(GRACE_S)  # a peer that is gone must not hold us up

    def close(self, timeout_s: float = 10.0) -> None:
        """Leave the process group, and let the servers leave it."""
        group = self._group
        self.leave()
        if group is None:
            return

        async def tell() -> None:
            clients = [Client(url) for url in group.urls]
            body = {"group_name": group.name}
            await asyncio.gather(
                *(c.call("/destroy_weights_update_group", body, timeout_s) for c in clients), return_exceptions=True
            )
            await asyncio.gather(*(c.close() for c in clients))

        asyncio.run(tell())


class _Sending:
    """One delivery."""

    def __init__(self, sender: BucketSender, order: Delivery, count: int, stable: bool) -> None:
        self.sender, self.order, self.count, self.stable = sender, order, count, stable
        self.clients: list[Client] = []
        self.staging: Tensor | None = None

    async def run(self, buckets: Iterator[Bucket], began: float) -> Receipt:
        """Send every bucket, then compare hashes."""
        folder: Path | None = None
        sizes: list[int] = []
        checked = 0.0
        self.clients = [Client(url) for url in self.order.urls]
        try:
            expected = Expected(self.sender.layouts)
            await self._each(expected.prepare)
            session = self.order.way != "disk" and await self.clients[0].knows("/begin_weight_update")
            if self.order.way == "disk":
                folder = Path(tempfile.mkdtemp(prefix="agentrl-weights-"))
            if session:
                await self._each(lambda client: client.call("/begin_weight_update", {}, self.order.timeout_s))
            try:
                for number, bucket in enumerate(buckets, 1):
                    tensors = distinct(bucket)
                    sizes.append(nbytes(tensors))
                    await self._limited(self._bucket(tensors, number, folder))
                    moment = time.monotonic()
                    await expected.add(tensors)
                    checked += time.monotonic() - moment
                if folder is not None:
                    await self._limited(self._read(folder))
            finally:
                if session:
                    with suppress(EngineError):
                        await self._each(lambda client: client.call("/end_weight_update", {}, self.order.timeout_s))
            if len(sizes) != self.count:
                raise EngineError(f"{len(sizes)} buckets of weights came in place of {self.count}")
            sent = time.monotonic()
            await self._limited(self._each(expected.compare))
            checked += time.monotonic() - sent
            seconds = {"send_s": time.monotonic() - began - checked, "check_s": checked}
            return Receipt(seconds=seconds, buckets=len(sizes), nbytes=sum(sizes), largest=max(sizes, default=0))
        finally:
            self.staging = None
            await asyncio.gather(*(client.close() for client in self.clients))
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)

    async def _limited(self, work: Awaitable[None]) -> None:
        try:
            await asyncio.wait_for(work, self.order.timeout_s)
        except TimeoutError as error:
            raise EngineError(
                f"sending weights ({self.order.way}) took longer than {self.order.timeout_s:.0f} s and was given up; "
                "look at the server's log, or set rollout.engine.sync to another way"
            ) from error

    async def _each(
        self, call: Callable[[Client], Coroutine[Any, Any, Any]], beside: Awaitable[Any] | None = None
    ) -> None:
        """Do something with every server at once, and `beside` in the meantime. Where one is lost, the others get a
        moment, and the error names the lost ones."""
        calls = {asyncio.ensure_future(call(client)): client.url for client in self.clients}
        tasks = {*calls, *([asyncio.ensure_future(beside)] if beside is not None else [])}
        done, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if waiting:
            more, waiting = await asyncio.wait(waiting, timeout=GRACE_S)
            done |= more
        for task in waiting:
            task.cancel()
        errors = [(task, task.exception()) for task in done if not task.cancelled() and task.exception() is not None]
        lost = [(calls[task], error) for task, error in errors if task in calls and isinstance(error, ConnectionBroken)]
        if lost:
            raise ServersLost(str(lost[0][1]), sorted(url for url, _ in lost))
        for _, error in errors:
            assert error is not None
            raise error

    async def _bucket(self, tensors: dict[str, Tensor], number: int, folder: Path | None) -> None:
        last = number == self.count
        body: dict[str, Any] = {"flush_cache": last}
        if last:
            body["weight_version"] = str(self.order.version)
        if folder is not None:
            from safetensors.torch import save_file

            whole = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
            file = folder / f"model-{number:05d}.safetensors"
            await asyncio.to_thread(save_file, whole, file)
        elif self.order.way == "tensor":
            shared = self._shared(tensors)
            await self._each(lambda client: self._handles(client, shared, body))
        else:
            await self._broadcast(tensors, body)

    async def _read(self, folder: Path) -> None:
        """Have the servers read the files."""
        version = str(self.order.version)
        body = {"model_path": str(folder), "weight_version": version, "flush_cache": True, "keep_pause": True}
        await self._each(lambda client: client.call("/update_weights_from_disk", body, self.order.timeout_s))

    async def _handles(self, client: Client, shared: list[tuple[str, Tensor]], body: Mapping[str, Any]) -> None:
        payload = [serialised(shared) for _ in range(await client.ranks())]
        handles = {"serialized_named_tensors": payload}
        await client.call("/update_weights_from_tensor", {**body, **handles}, self.order.timeout_s)

    def _shared(self, tensors: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
        """Return tensors whose memory another process can open: CUDA tensors that stay, or copies in one block."""
        first = next(iter(tensors.values()))
        if self.stable and first.is_cuda:
            return list(tensors.items())
        size = sum(_room(tensor) for tensor in tensors.values())
        if not first.is_cuda and _free_bytes(SHARED_MEMORY) < 2 * size:
            raise EngineError(
                f"/dev/shm has no room for {size >> 20} MiB of weights; give the machine more shared memory"
            )
        if self.staging is None or len(self.staging) < size:
            self.staging = torch.empty(size, dtype=torch.uint8, device=first.device)
        result, start = [], 0
        for name, tensor in tensors.items():
            block = self.staging[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            result.append((name, block.copy_(tensor)))
            start += _room(tensor)
        if first.is_cuda:
            torch.cuda.synchronize(first.device)
        return result

    async def _broadcast(self, tensors: dict[str, Tensor], body: Mapping[str, Any]) -> None:
        joined = await self.sender.group(self.order, self.clients, next(iter(tensors.values())))
        request = {
            "names": list(tensors),
            "dtypes": [str(t.dtype).removeprefix("torch.") for t in tensors.values()],
            "shapes": [list(t.shape) for t in tensors.values()],
            "group_name": joined.name,
            **body,
        }

        def send() -> None:
            for tensor in tensors.values():
                torch.distributed.broadcast(tensor.detach().contiguous(), src=0, group=joined.group)

        timeout_s = self.order.timeout_s
        await self._each(
            lambda client: client.call("/update_weights_from_distributed", request, timeout_s), _in_thread(send)
        )


async def _join(name: str, backend: str, order: Delivery, clients: Sequence[Client]) -> Any:
    sizes = [await client.ranks() for client in clients]
    port = free_port("")
    known = order.address != "127.0.0.1" or _on_this_host(clients, order.address)
    host = order.address if known else socket.getfqdn()
    world = 1 + sum(sizes)
    offsets = [1 + sum(sizes[:index]) for index in range(len(sizes))]
    common = {"master_address": host, "master_port": port, "world_size": world, "group_name": name}
    calls = [
        client.call("/init_weights_update_group", common | {"rank_offset": o, "backend": backend}, order.timeout_s)
        for client, o in zip(clients, offsets, strict=True)
    ]
    address = f"tcp://{host}:{port}"
    group = _in_thread(lambda: _process_group(name, backend, address, world, order.timeout_s))
    return (await asyncio.gather(group, *calls))[0]


def _on_this_host(clients: Sequence[Client], address: str) -> bool:
    return all("//127.0.0.1" in client.url or f"//{address}:" in client.url for client in clients)


def _backend(tensor: Tensor, clients: Sequence[Client], address: str) -> str:
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


def distinct(tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors without second names of a tied one."""
    first: dict[tuple[int, tuple[int, ...]], str] = {}
    for name, tensor in tensors.items():
        first.setdefault((tensor.data_ptr(), tuple(tensor.shape)), name)
    return {name: tensors[name].detach() for name in first.values()}


def _room(tensor: Tensor) -> int:
    """Return the bytes that a tensor takes in a block."""
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT


def serialised(tensors: list[tuple[str, Tensor]] | dict[str, Tensor]) -> str:
    """Return handles of tensors, for a process that shares their memory."""
    sharing: Any = torch.multiprocessing
    strategy = sharing.get_sharing_strategy()
    sharing.set_sharing_strategy("file_system")  # file descriptors reach only our own children
    try:
        buffer = io.BytesIO()
        ForkingPickler(buffer).dump(tensors)
    finally:
        sharing.set_sharing_strategy(strategy)
    return base64.b64encode(buffer.getvalue()).decode()


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
