"""Checks that a server holds the weights that were sent: its own hashes are computed here again and compared."""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.engines.sglang.client import Client
from agentrl.errors import EngineError

VOCABULARY_BLOCK = 64
"""SGLang pads a vocabulary to a multiple of this."""
STACKED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Tensors that SGLang keeps stacked in one."""
SPOT_CHECKS = 3
ROWS = 4
WORD, LONG = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF
TILE = 8192
TILES = 4096
"""Tiles that are mixed at once: a few copies of them are held."""
SEED = 0x243F6A88
HASHED_BYTES = 1 << 28
"""Bytes of weights that are copied and hashed together."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How a server keeps its weights."""

    names: frozenset[str] | None
    """Its names of its tensors; None where it gives no hashes."""
    on_gpu: bool

    @classmethod
    async def of(cls, client: Client) -> Layout:
        """Ask the server; it hashes all of its weights to answer."""
        sums = await _sums(client)
        names = None if sums is None else frozenset(sums)
        return cls(names=names, on_gpu=(await client.info()).get("device") != "cpu")


async def _sums(client: Client) -> Mapping[str, str] | None:
    """Return the server's hash of each tensor by its name; None where it gives none."""
    if await client.ranks() != 1 or not await client.knows("/weights_checker"):
        return None
    ranks = (await client.call("/weights_checker", {"action": "checksum"})).get("ranks") or []
    sums: Mapping[str, str] | None = ranks[0]["checksums"] if ranks else None
    return sums


class Expected:
    """What servers must hold after an update, collected bucket by bucket; hashed once for all that keep it alike."""

    def __init__(self, layouts: dict[str, Layout]) -> None:
        """`layouts` holds what is known of servers by their address; what is asked here is added to it."""
        self._layouts = layouts
        self._hashes: dict[Layout, dict[str, str]] = {}
        self._samples: dict[str, Tensor] = {}

    async def prepare(self, client: Client) -> None:
        """Find out how the server keeps its weights, where that is not known from an earlier update."""
        if client.url not in self._layouts:
            self._layouts[client.url] = await Layout.of(client)
        self._hashes[self._layouts[client.url]] = {}

    async def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Hash the tensors of a bucket as the servers will, and remember some values."""
        for layout, found in self._hashes.items():
            if layout.names is not None:
                found |= await asyncio.to_thread(hashes, tensors, layout.names, on_gpu=layout.on_gpu)
        for name in list(tensors)[:: max(1, len(tensors) // SPOT_CHECKS)]:
            self._samples[name] = tensors[name][:ROWS].detach().to("cpu", copy=True)

    async def compare(self, client: Client) -> None:
        """Compare what the server holds with what was sent; raise EngineError with the first name that differs."""
        layout = self._layouts[client.url]
        expected = self._hashes[layout]
        sums = await _sums(client) if expected else None
        if sums is not None and frozenset(sums) != layout.names:
            del self._layouts[client.url]  # another server is in the place of the one that was asked
        elif sums is not None:
            wrong = [name for name, value in expected.items() if sums[name] != value]
            if not wrong:
                return
            if len(wrong) < len(expected):
                raise EngineError(f"after the update the server's {wrong[0]} differs from what was sent")
        # No hashes, none made for it, or every one differs: it may hash in another way, so compare some values.
        for name, sent in list(self._samples.items())[:: max(1, len(self._samples) // SPOT_CHECKS)]:
            answer = await client.call("/get_weights_by_name", {"name": name, "truncate_size": ROWS})
            held = answer.get("parameter", answer.get("message"))
            if not isinstance(held, list):
                raise EngineError(f"the server does not say what its {name} is, so the update cannot be checked")
            if not torch.equal(torch.tensor(held).to(sent.dtype).float(), sent[: len(held)].float()):
                raise EngineError(f"after the update the server's {name} differs from what was sent")


def hashes(tensors: Mapping[str, Tensor], names: Iterable[str], *, on_gpu: bool) -> dict[str, str]:
    """Return the hashes that a server must have for those of its tensors, by its names, that are made of these."""
    pieces: dict[str, list[Tensor]] = {}
    for name in names:
        parts = [name]
        for stacked, members in STACKED.items():
            if stacked in name:
                parts = [name.replace(stacked, member) for member in members]
        if all(part in tensors for part in parts):
            pieces[name] = [_as_served(part, tensors[part]).detach().reshape(-1) for part in parts]
    return gpu_hashes(pieces) if on_gpu else {name: cpu_hash(parts) for name, parts in pieces.items()}


def _as_served(name: str, tensor: Tensor) -> Tensor:
    """Return a tensor as the server holds it: a vocabulary's rows are padded with zeros to a whole block."""
    if not name.endswith(("embed_tokens.weight", "lm_head.weight")):
        return tensor
    return torch.nn.functional.pad(tensor, (0, 0, 0, -len(tensor) % VOCABULARY_BLOCK))


def cpu_hash(tensors: Sequence[Tensor], digits: int = 16) -> str:
    """Return SHA-256 over the bytes: servers on the CPU hash weights so, and all servers adapters."""
    hasher = hashlib.sha256()
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous()
        # Not through numpy: memory that it has seen can never be freed before its tensor, as FSDP does.
        hasher.update((ctypes.c_char * flat.nbytes).from_address(flat.data_ptr()))
    return hasher.hexdigest()[:digits]


def gpu_hashes(pieces: Mapping[str, Sequence[Tensor]]) -> dict[str, str]:
    """Return the hash of each tensor, given in pieces; those of one size are hashed together, in fewer kernels."""
    alike: dict[tuple[int, torch.dtype], list[str]] = {}
    for name, parts in pieces.items():
        alike.setdefault((sum(p.nbytes for p in parts), parts[0].dtype), []).append(name)
    hashes: dict[str, str] = {}
    for (size, _), names in alike.items():
        count = max(1, HASHED_BYTES // size)
        for start in range(0, len(names), count):
            some = names[start : start + count]
            hashes |= zip(some, gpu_hash(torch.stack([torch.cat(list(pieces[name])) for name in some])), strict=True)
    return {name: hashes[name] for name in pieces}


@torch.no_grad()
def gpu_hash(rows: Tensor) -> list[str]:
    """Return the hash of each row as servers on a GPU compute it, on whichever device the tensor is.

    Each 32-bit word is mixed with its position in two ways, summed in tiles, and the tiles' sums are mixed and summed.
    Words are signed 32-bit numbers here, because 64 bits would take twice as long to move: they wrap as unsigned ones
    do, and sums count modulo 2**32.
    """
    raw = rows.detach().contiguous().view(torch.uint8)
    words = torch.nn.functional.pad(raw, (0, -raw.shape[1] % 4)).view(torch.int32)
    length = words.shape[1]
    seeds = (SEED, SEED * 0x9E3779B1 ^ 0xDEADBEEF)
    total = torch.zeros(len(words), dtype=torch.int64, device=words.device)
    width = max(1, TILES // len(words)) * TILE
    for start in range(0, length, width):
        part = words[:, start : start + width]
        place = torch.arange(part.shape[1], dtype=torch.int32, device=words.device) + _signed(start)
        halves = []
        for factor, seed, turn in ((0x27D4EB2D, seeds[0], 15), (0x165667B1, seeds[1], 13)):
            key = place * factor + _signed(seed) ^ (place << turn | _shifted(place, 32 - turn))
            mixed = torch.nn.functional.pad(_mix_words(part ^ key), (0, -part.shape[1] % TILE))
            halves.append(_mix(mixed.view(len(words), -1, TILE).sum(2) & WORD ^ 4 * length & WORD))
        total += (halves[0] << 32 | halves[1]).sum(1)
    return [_last_mix(int(value) & LONG) for value in total.tolist()]


def _mix_words(words: Tensor) -> Tensor:
    """Apply Murmur's last step in place, on 32 bits kept in 32, sign and all."""
    words ^= _shifted(words, 16)
    words *= _signed(0x85EBCA6B)
    words ^= _shifted(words, 13)
    words *= _signed(0xC2B2AE35)
    words ^= _shifted(words, 16)
    return words


def _shifted(words: Tensor, bits: int) -> Tensor:
    """Shift right without copying the sign."""
    return words >> bits & (1 << 32 - bits) - 1


def _signed(number: int) -> int:
    """Return the signed 32-bit number with the same lowest bits."""
    return (number + (1 << 31) & WORD) - (1 << 31)


def _last_mix(value: int) -> str:
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value = (value ^ value >> shift) * factor & LONG
    return f"{value ^ value >> 31:016x}"


def _mix(words: Tensor) -> Tensor:
    """Apply Murmur's last step, on 32 bits kept in 64."""
    words = (words ^ words >> 16) * 0x85EBCA6B & WORD
    words = (words ^ words >> 13) * 0xC2B2AE35 & WORD
    return words ^ words >> 16
