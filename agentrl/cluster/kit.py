"""What travels to a player so that it can play: the recipe, the tokenizer, and a way to sample. No key and no task.

A player holds the embedded engine with a copy of the policy, or asks SGLang servers itself. Either way it needs nothing
of the run's folder, so that nodes share no disk.
"""

from __future__ import annotations

import hashlib
import io
import os
import platform
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from agentrl import __version__, catalogue
from agentrl.cluster.judge import Address
from agentrl.engines.base import Engine, Weights
from agentrl.engines.build import make as make_engine
from agentrl.interop.programs import Files, settled
from agentrl.recipe import Recipe, SglangEngine

PACKAGES = ("torch", "transformers", "numpy", "ray")
EXACT = ("python", "torch", "transformers", "processor", "threads")
"""Facts of a node on which the last bits of its logprobs depend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kit:
    """Everything that a player is built from."""

    recipe: Mapping[str, Any]
    """As plain data."""
    files: Mapping[str, bytes]
    """The tokenizer's files; with the embedded engine also the model's."""
    context: int
    """The longest sequence that the model takes."""
    threads: int
    """CPU threads of torch."""
    version: int
    """The policy's version that the model in `files` is."""
    urls: tuple[str, ...] = ()
    """SGLang servers; empty: the player holds the embedded engine."""
    boxes: int = 2
    """Sandboxes that one player may have at once, per backend."""
    judge: Address | None = None
    """Where to ask the run's judge, where a verifier does."""
    agents: Mapping[str, Files] = field(default_factory=dict)
    """Files of the agents that play environments, by environment."""


def pack(
    recipe: Recipe, policy: Any, *, version: int, urls: tuple[str, ...], agents: Mapping[str, Files] | None = None
) -> Kit:
    """Pack what players need of a policy: an `initial_policy.PolicyModel`."""
    import torch

    from agentrl.engines.transformers.decoding import twin
    from agentrl.learn.model import save_model

    assert recipe.cluster is not None
    with tempfile.TemporaryDirectory(prefix="agentrl-kit-") as name:
        folder = Path(name)
        if urls:
            policy.tokenizer.save_pretrained(folder)
        else:
            save_model(twin(policy.model, own=True), policy.tokenizer, folder)
        files = {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
    return Kit(
        recipe=settled(recipe).model_dump(mode="json", by_alias=True),
        files=files,
        context=policy.context,
        threads=torch.get_num_threads(),
        version=version,
        urls=urls,
        boxes=max(2, -(-recipe.sandboxes.boxes // recipe.cluster.players)),
        agents=agents or {},
    )


def unpack(kit: Kit, folder: Path) -> tuple[Recipe, Any, Engine]:
    """Return the recipe, the tokenizer and an engine that is not started yet."""
    import torch
    from transformers import AutoTokenizer

    from agentrl.learn.model import load_model

    torch.set_num_threads(kit.threads)
    for name, content in kit.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    recipe = Recipe.model_validate(kit.recipe)
    if kit.urls:
        from agentrl.engines.sglang.engine import SglangEngine as Servers

        assert isinstance(recipe.rollout.engine, SglangEngine)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        return recipe, tokenizer, Servers(urls=kit.urls, version=kit.version, max_context=kit.context, by_group=True)
    plain = recipe.model.model_copy(update={"lora": None}) if recipe.model.type == "pretrained" else recipe.model
    model, tokenizer = load_model(plain, folder=folder, device="cpu")
    model.eval()
    engine = make_engine(
        recipe.rollout.engine,
        model,
        max_context=kit.context,
        deterministic=recipe.run.deterministic,
        share=False,
        version=kit.version,
        experts=recipe.learner.routing == "replay",
    )
    return recipe, tokenizer, engine


def written(weights: Weights) -> bytes:
    """Return a policy's tensors as torch.save writes them."""
    import torch

    assert weights.tensors is not None
    buffer = io.BytesIO()
    torch.save({name: tensor.detach().cpu() for name, tensor in weights.tensors.items()}, buffer)
    return buffer.getvalue()


def facts(threads: int | None = None) -> dict[str, Any]:
    """Return what must be alike on all nodes, and where this one is."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "missing"
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "agentrl": f"{__version__} ({source_hash()})",
        "python": platform.python_version(),
        **versions,
        "processor": processor(),
        "threads": threads,
    }


@cache
def source_hash(package: Path = Path(__file__).parents[1]) -> str:
    """Return a hash over the source of agentrl and of its sandboxes: two checkouts of one version need not be alike.
    Environments and verifiers have hashes of their own."""
    digest = hashlib.sha256()
    folders = {name: Path(member.where) for name, member in catalogue.members("sandboxes").items()}
    for top, folder in {"": package, **folders}.items():
        for path in sorted(folder.rglob("*.py")) if folder.is_dir() else ():
            inside = path.relative_to(folder).parts
            if top or len(inside) < 3 or inside[0] not in catalogue.KINDS:  # in a wheel, members lie inside
                digest.update(repr((top, inside)).encode() + path.read_bytes())
    return digest.hexdigest()[:8]


def processor() -> str:
    """Return what kind of CPU this is: the last bits of a product depend on it."""
    names = ("model name", "CPU implementer", "CPU part", "flags", "Features")
    seen: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() in names:
                seen.setdefault(key.strip(), value.strip())
    except OSError:
        pass
    model = seen.get("model name") or f"{seen.get('CPU implementer', '')}/{seen.get('CPU part', '')}"
    features = sorted((seen.get("flags") or seen.get("Features") or "").split())
    vector = [name for name in features if name.startswith(("avx", "amx", "sve", "asimd", "bf16", "i8mm"))]
    return f"{platform.machine()} {model} {' '.join(vector)}".strip()
