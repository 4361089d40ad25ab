"""How new weights reach SGLang servers: shared tensors, a process group, or files; checked afterwards.

    tensor       learner and server on one machine: only handles travel (CUDA IPC, or shared memory on the CPU)
    distributed  a process group that the learner and every server joined: one broadcast a tensor
    disk         a safetensors file that the server reads, in memory-backed /dev/shm where it fits

Every way has a time limit and ends in an error that says what to do, never in a silent hang.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Literal

import torch
import torch.multiprocessing

from agentrl.errors import EngineError
from agentrl.rollout.engine import Weights
from agentrl.rollout.sglang_client import Client

Way = Literal["tensor", "distributed", "disk"]
VOCABULARY_BLOCK = 64
"""SGLang rounds a vocabulary up to a multiple of this."""
STACKED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Tensors that SGLang keeps in one piece."""
SPOT_CHECKS = 3


class Sync:
    """Sends weights to servers, remembering which way works."""

    def __init__(self, clients: Sequence[Client], *, way: str, local: bool, timeout_s: float = 300.0) -> None:
        """`local`: the servers run on this machine. `way`: one of the three, or "auto"."""
        self.clients = clients
        self.timeout_s = timeout_s
        self.used: Way | None = None
        """The way the last weights went."""
        self._ways: list[Way] = _ways(way, local)
        self._group: Any = None

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
                await self._limited(way, self._send(way, tensors, weights.version))
                await self._limited("checksum", self._check(tensors))
            except EngineError as error:
                failures.append(f"{way}: {error}")
                self._ways.remove(way)  # what failed once is not tried before every step
                continue
            self.used = way
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
        for client in self.clients:
            ranks = int((await client.get("/server_info")).get("tp_size") or 1)
            shared = _shared(tensors)
            payload = [_serialised(shared) for _ in range(ranks)]
            body = {"serialized_named_tensors": payload, "flush_cache": True, "weight_version": str(version)}
            await client.call("/update_weights_from_tensor", body, self.timeout_s)

    async def _broadcast(self, tensors: dict[str, torch.Tensor], version: int) -> None:
        if self._group is None:
            self._group = await self._join(next(iter(tensors.values())).is_cuda)
        body = {
            "names": list(tensors),
            "dtypes": [str(t.dtype).removeprefix("torch.") for t in tensors.values()],
            "shapes": [list(t.shape) for t in tensors.values()],
            "group_name": GROUP,
            "flush_cache": True,
            "weight_version": str(version),
        }

        def send() -> None:
            for tensor in tensors.values():
                torch.distributed.broadcast(tensor.detach().contiguous(), src=0, group=self._group)

        await asyncio.gather(self._all("/update_weights_from_distributed", body), asyncio.to_thread(send))

    async def _join(self, cuda: bool) -> Any:
        sizes = [int((await client.get("/server_info")).get("tp_size") or 1) for client in self.clients]
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        host = "127.0.0.1" if all("//127.0.0.1" in client.url for client in self.clients) else socket.getfqdn()
        backend, world = "nccl" if cuda else "gloo", 1 + sum(sizes)
        offsets = [1 + sum(sizes[:index]) for index in range(len(sizes))]
        common = {"master_address": host, "master_port": port, "world_size": world, "group_name": GROUP}
        asked = [
            client.call("/init_weights_update_group", common | {"rank_offset": o, "backend": backend}, self.timeout_s)
            for client, o in zip(self.clients, offsets, strict=True)
        ]
        group = asyncio.to_thread(_process_group, backend, f"tcp://{host}:{port}", world, self.timeout_s)
        return (await asyncio.gather(group, *asked))[0]

    async def _check(self, tensors: dict[str, torch.Tensor]) -> None:
        """Compare what the servers hold with what was sent: hashes of everything on the CPU, samples on a GPU."""
        for client in self.clients:
            checksums = await _checksums(client)
            if checksums is not None:
                compared = await asyncio.to_thread(_differing, tensors, checksums)
                if compared:
                    raise EngineError(f"after the update the server's {compared[0]} differs from what was sent")
                continue
            for name in list(tensors)[:: max(1, len(tensors) // SPOT_CHECKS)]:
                answer = await client.call("/get_weights_by_name", {"name": name, "truncate_size": 4})
                held = answer.get("parameter", answer.get("message"))
                if not isinstance(held, list):
                    continue
                sent = tensors[name][: len(held)].float().cpu()
                if not torch.equal(torch.tensor(held).to(tensors[name].dtype).float(), sent):
                    raise EngineError(f"after the update the server's {name} differs from what was sent")

    def close(self) -> None:
        """Leave the process group."""
        if self._group is not None:
            torch.distributed.destroy_process_group(self._group)
            self._group = None


GROUP = "agentrl_weights"


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


def _serialised(tensors: list[tuple[str, torch.Tensor]]) -> str:
    sharing: Any = torch.multiprocessing
    strategy = sharing.get_sharing_strategy()
    sharing.set_sharing_strategy("file_system")  # file descriptors reach only our own children
    try:
        buffer = io.BytesIO()
        ForkingPickler(buffer).dump(tensors)
    finally:
        sharing.set_sharing_strategy(strategy)
    return base64.b64encode(buffer.getvalue()).decode()


def adapter_body(name: str, weights: Weights) -> dict[str, Any]:
    """What `/load_lora_adapter_from_tensors` wants to know."""
    assert weights.adapter is not None and weights.tensors is not None
    config = json.loads(json.dumps(dict(weights.adapter), default=lambda value: sorted(value)))
    payload = [_serialised(_shared(distinct(weights.tensors)))]
    return {"lora_name": name, "config_dict": config, "serialized_named_tensors": payload}


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


def _process_group(backend: str, address: str, world: int, timeout_s: float) -> Any:
    """Rank 0 of a group beside the default one, put together the way SGLang puts its side together."""
    from torch.distributed import distributed_c10d

    private: Any = distributed_c10d
    limit = timedelta(seconds=timeout_s)
    store, rank, size = next(private.rendezvous(address, 0, world, timeout=limit))
    store.set_timeout(limit)
    group, _ = private._new_process_group_helper(
        size, rank, [], private.Backend(backend), private.PrefixStore(GROUP, store), group_name=GROUP, timeout=limit
    )
    private._world.pg_group_ranks[group] = {index: index for index in range(size)}
    return group


async def _checksums(client: Client) -> dict[str, str] | None:
    """The server's own hashes, where they can be computed here too: one rank, on the CPU."""
    info = await client.get("/server_info")
    if info.get("device") != "cpu" or int(info.get("tp_size") or 1) != 1:
        return None
    if not await client.knows("/weights_checker"):
        return None
    ranks = (await client.call("/weights_checker", {"action": "checksum"})).get("ranks") or []
    return dict(ranks[0]["checksums"]) if ranks else None


def _differing(tensors: dict[str, torch.Tensor], checksums: Mapping[str, str]) -> list[str]:
    """Names whose hash differs from the server's; names that the server stacks are stacked here too."""
    wrong = []
    for name, expected in checksums.items():
        parts = [name]
        for stacked, pieces in STACKED.items():
            if stacked in name:
                parts = [name.replace(stacked, piece) for piece in pieces]
        if not all(part in tensors for part in parts):
            continue
        hasher = hashlib.sha256()
        for part in parts:
            hasher.update(_as_served(part, tensors[part]).contiguous().reshape(-1).view(torch.uint8).numpy().data)
        if hasher.hexdigest()[:16] != expected:
            wrong.append(name)
    return wrong


def _as_served(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as the server lays it out: rows of a vocabulary are filled up with zeros to a whole block."""
    tensor = tensor.cpu()
    if not name.endswith(("embed_tokens.weight", "lm_head.weight")):
        return tensor
    return torch.nn.functional.pad(tensor, (0, 0, 0, -len(tensor) % VOCABULARY_BLOCK))
