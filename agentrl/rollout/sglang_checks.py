"""Whether the weights that were sent are those that a server holds: its own hashes, computed here again."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from agentrl.errors import EngineError
from agentrl.rollout.sglang_client import Client

VOCABULARY_BLOCK = 64
"""SGLang rounds a vocabulary up to a multiple of this."""
STACKED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Tensors that SGLang keeps in one piece."""
SPOT_CHECKS = 3
ROWS = 4
WORD, LONG = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF
TILE = 8192
SEED = 0x243F6A88


async def check(client: Client, tensors: Mapping[str, Tensor]) -> None:
    """Compare what a server holds with what was sent; raises EngineError with the first name that differs."""
    info = await client.get("/server_info")
    if int(info.get("tp_size") or 1) == 1 and await client.knows("/weights_checker"):
        ranks = (await client.call("/weights_checker", {"action": "checksum"})).get("ranks") or []
        if ranks:
            on_gpu = info.get("device") != "cpu"
            wrong, compared = await asyncio.to_thread(differing, tensors, ranks[0]["checksums"], on_gpu=on_gpu)
            if compared and not wrong:
                return
            if len(wrong) < compared:
                raise EngineError(f"after the update the server's {wrong[0]} differs from what was sent")
    # No hashes, or every one differs: it may hash in another way, so some values are looked at.
    for name in list(tensors)[:: max(1, len(tensors) // SPOT_CHECKS)]:
        answer = await client.call("/get_weights_by_name", {"name": name, "truncate_size": ROWS})
        held = answer.get("parameter", answer.get("message"))
        if not isinstance(held, list):
            raise EngineError(f"the server does not say what its {name} is, so the update cannot be checked")
        sent = tensors[name][: len(held)].float().cpu()
        if not torch.equal(torch.tensor(held).to(tensors[name].dtype).float(), sent):
            raise EngineError(f"after the update the server's {name} differs from what was sent")


def differing(tensors: Mapping[str, Tensor], checksums: Mapping[str, str], *, on_gpu: bool) -> tuple[list[str], int]:
    """Names whose hash differs from the server's, and how many could be compared."""
    wrong, compared = [], 0
    for name, expected in checksums.items():
        parts = [name]
        for stacked, pieces in STACKED.items():
            if stacked in name:
                parts = [name.replace(stacked, piece) for piece in pieces]
        if not all(part in tensors for part in parts):
            continue
        compared += 1
        whole = torch.cat([_as_served(part, tensors[part]).reshape(-1) for part in parts])
        if (gpu_hash(whole) if on_gpu else cpu_hash([whole])) != expected:
            wrong.append(name)
    return wrong, compared


def _as_served(name: str, tensor: Tensor) -> Tensor:
    """A tensor as the server lays it out: rows of a vocabulary are filled up with zeros to a whole block."""
    if not name.endswith(("embed_tokens.weight", "lm_head.weight")):
        return tensor
    return torch.nn.functional.pad(tensor, (0, 0, 0, -len(tensor) % VOCABULARY_BLOCK))


def cpu_hash(tensors: Sequence[Tensor], digits: int = 16) -> str:
    """SHA-256 over the bytes, as servers on the CPU hash their weights and all servers adapters."""
    hasher = hashlib.sha256()
    for tensor in tensors:
        hasher.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()[:digits]


@torch.no_grad()
def gpu_hash(tensor: Tensor) -> str:
    """The hash that servers take on a GPU, wherever the tensor lies.

    Each 32-bit word is mixed with its place in two ways, summed in tiles, and the tiles' sums are mixed and summed.
    """
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    words = torch.nn.functional.pad(raw, (0, -len(raw) % 4)).view(torch.int32)
    seeds = (SEED, (SEED * 0x9E3779B1 ^ 0xDEADBEEF) & WORD)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, len(words), 512 * TILE):  # int64 takes eight bytes a word: not all at once
        part = words[start : start + 512 * TILE].to(torch.int64) & WORD
        place = torch.arange(start, start + len(part), device=words.device)
        halves = []
        for factor, seed, turn in ((0x27D4EB2D, seeds[0], 15), (0x165667B1, seeds[1], 13)):
            key = (place * factor + seed & WORD) ^ (place << turn | place >> 32 - turn) & WORD
            mixed = torch.nn.functional.pad(_mix(part ^ key), (0, -len(part) % TILE))
            halves.append(_mix(mixed.view(-1, TILE).sum(1) & WORD ^ 4 * len(words) & WORD))
        total += (halves[0] << 32 | halves[1]).sum()
    value = int(total) & LONG
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value = (value ^ value >> shift) * factor & LONG
    return f"{value ^ value >> 31:016x}"


def _mix(words: Tensor) -> Tensor:
    """Murmur's last step, on 32 bits kept in 64."""
    words = (words ^ words >> 16) * 0x85EBCA6B & WORD
    words = (words ^ words >> 13) * 0xC2B2AE35 & WORD
    return words ^ words >> 16
