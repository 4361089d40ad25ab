"""The process of one rank of the learner: waits for commands of `rank_pool`, and runs them on its `RankLearner`."""

from __future__ import annotations

import mmap
import os
import pickle
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from agentrl import seeds
from agentrl.engines.base import Delivery, Receipt
from agentrl.engines.transformers.decoding import checksum
from agentrl.errors import RecipeError
from agentrl.learn import rank_checkpoint
from agentrl.learn.model import load_model
from agentrl.learn.pack import Batch
from agentrl.learn.rank_learner import Exchange, RankLearner
from agentrl.learn.rank_pool import PULSE
from agentrl.learn.step_report import StepReport
from agentrl.learn.weights import stale
from agentrl.recipe import Recipe, WarmStartSection
from agentrl.types import TrainingSample

ALIGNMENT = 64
"""Tensors in a bucket begin at multiples of this many bytes."""


class RankCommands:
    """What a rank's commands do; each is a method of the same name. How it is reached is the subclass's."""

    def __init__(self, number: int, ranks: int) -> None:
        self.number, self.ranks = number, ranks
        self.learner: Any = None
        self._sender: Any = None

    def progress(self) -> None:
        """Tell the driver that this rank has got on."""
        raise NotImplementedError

    def say(self, text: str) -> None:
        """Have the driver say something."""
        raise NotImplementedError

    def hand_over(self, number: int, bucket: dict[str, Tensor]) -> None:
        """Give the driver a bucket; wait while it still has the last but one."""
        raise NotImplementedError

    def all_taken(self) -> None:
        """Wait until the driver has taken every bucket."""
        raise NotImplementedError

    def store(self) -> Any:
        """Return where the ranks find each other."""
        raise NotImplementedError

    def device(self, name: str) -> torch.device:
        """Return the device of this rank."""
        return _device(name, self.number, self.ranks)

    def start(self, recipe: dict[str, Any], model: str | None, threads: int, timeout_s: float) -> int:
        """Join the group, load the model and shard it; return the bytes of the largest bucket."""
        parsed = Recipe.model_validate(recipe)
        torch.set_num_threads(threads)
        torch.manual_seed(seeds.derive(parsed.run.seed, "torch", "rank", self.number))
        device = self.device(parsed.learner.device)
        limit = timedelta(seconds=2 * timeout_s + 60)  # the driver gives up before
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(backend, store=self.store(), rank=self.number, world_size=self.ranks, timeout=limit)
        exchange = Exchange(dist.new_group(backend="gloo", timeout=limit), self.progress)
        source = None if model is None else Path(model)
        loaded, tokenizer = load_model(parsed.model, seed=parsed.run.seed, folder=source, device="cpu")
        loaded.eval()
        self.learner = RankLearner(loaded, tokenizer, parsed, device=device, exchange=exchange)
        return max(sum(_room(t) for t in bucket.values()) for bucket in self.learner.buckets())

    def step(self, batch: Batch) -> StepReport:
        """Train on this rank's share of a batch."""
        report: StepReport = self.learner.step(batch)
        return report

    def counters(self) -> tuple[int, int, int]:
        """Return version, steps and skipped updates."""
        return self.learner.version, self.learner.steps, self.learner.skipped

    def coefficients(self) -> dict[str, Any]:
        """Return the coefficients that follow a target; every rank has the same."""
        state: dict[str, Any] = self.learner.coefficients.state_dict()
        return state

    def weights(self) -> None:
        """Hand the policy's whole tensors to the driver bucket by bucket; rank 0 alone does."""
        for number, bucket in enumerate(self.learner.buckets()):
            if self.number == 0:
                self.hand_over(number, bucket)
        self.all_taken()

    def publish(self, order: Delivery) -> Receipt | None:
        """Send the policy to servers: all ranks gather a bucket, rank 0 sends it."""
        from agentrl.engines.sglang.buckets import BucketSender

        if (receipt := stale(order, self.learner.version)) is not None:
            return receipt
        plan = self.learner.plan(order.bucket_bytes)
        if self.number:
            for _ in self.learner.buckets(plan):
                pass
            return None
        self._sender = self._sender or BucketSender(stable=False)
        sent: Receipt = self._sender.send(order, self.learner.buckets(plan), len(plan))
        return sent

    def adapter(self) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """Return the LoRA adapter's configuration and whole tensors, from rank 0."""
        whole = self.learner.whole_adapter()
        if whole is None or self.number:
            return None
        return whole[0], {name: tensor.cpu() for name, tensor in whole[1].items()}

    def write(self, folder: str) -> dict[str, tuple[int, str]]:
        """Write this rank's part of a checkpoint; return sizes and hashes of its files."""
        return rank_checkpoint.write(Path(folder), self.learner, self.number, self.ranks)

    def load(self, folder: str, counters: dict[str, Any]) -> None:
        """Resume from the shards in a folder, whatever number of ranks wrote them."""
        rank_checkpoint.load(Path(folder), self.learner, self.number, self.ranks)
        learner = self.learner
        learner.version, learner.steps, learner.skipped = (counters[n] for n in ("version", "steps", "skipped"))
        learner.coefficients.load_state_dict(counters.get("coefficients") or {})

    def adopt(self) -> None:
        """Start from the current weights."""
        self.learner.adopt()

    def fine_tune(self, samples: list[TrainingSample], section: WarmStartSection, seed: int) -> float:
        """Train on demonstrations; return the last mean loss."""
        from agentrl.learn.sharded_sft import fine_tune

        say = self.say if self.number == 0 else lambda text: None
        return fine_tune(self.learner, samples, section, seed=seed, rank=self.number, ranks=self.ranks, say=say)

    def release(self) -> None:
        """Release cached GPU memory."""
        self.learner.release()


class RankProcess(RankCommands):
    """A rank as a process beside its driver."""

    def __init__(self, folder: Path, number: int, ranks: int, connection: Connection, pulses: int, slots: list[int]):
        super().__init__(number, ranks)
        self.folder = folder
        self.connection = connection
        self._slots = slots
        self._pulse_map = mmap.mmap(pulses, ranks * PULSE.size)
        self._count = 0
        self._unanswered: list[int] = []

    def progress(self) -> None:
        """Tell the driver that this rank has got on."""
        self._count += 1
        PULSE.pack_into(self._pulse_map, self.number * PULSE.size, time.monotonic(), self._count)

    def watch(self, driver: int) -> None:
        """Show a sign of life every second, and end when the driver is gone; runs in a thread."""
        while os.getppid() == driver:
            PULSE.pack_into(self._pulse_map, self.number * PULSE.size, time.monotonic(), self._count)
            time.sleep(1.0)
        shutil.rmtree(self.folder, ignore_errors=True)
        os._exit(1)

    def store(self) -> Any:
        """Return where the ranks find each other: a file beside their logs."""
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        return dist.FileStore(str(self.folder / "rendezvous"), self.ranks)  # type: ignore[attr-defined]

    def hand_over(self, number: int, bucket: dict[str, Tensor]) -> None:
        """Leave a bucket in one of two slots of shared memory."""
        slot = number % 2
        while slot in self._unanswered:
            self._taken()
        size = sum(map(_room, bucket.values()))
        layout, start = [], 0
        with mmap.mmap(self._slots[slot], size) as memory:
            for name, tensor in bucket.items():
                flat = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=start)
                flat.copy_(tensor.reshape(-1))
                del flat  # the map cannot be closed while something looks into it
                layout.append((name, tensor.dtype, tuple(tensor.shape), start))
                start += _room(tensor)
        self._unanswered.append(slot)
        self.connection.send_bytes(pickle.dumps(("bucket", (slot, layout, checksum(bucket)))))

    def all_taken(self) -> None:
        """Wait until the driver has taken every bucket."""
        while self._unanswered:
            self._taken()

    def _taken(self) -> None:
        assert self.connection.recv_bytes() == b"taken"
        self._unanswered.pop(0)
        self.progress()

    def say(self, text: str) -> None:
        """Have the driver say something."""
        self.connection.send_bytes(pickle.dumps(("say", text)))

    def serve(self) -> None:
        """Run commands until the driver closes the connection."""
        while True:
            try:
                command, arguments = pickle.loads(self.connection.recv_bytes())
            except (EOFError, OSError):
                return
            try:
                result = getattr(self, command)(*arguments)
                self.progress()
                self.connection.send_bytes(pickle.dumps(("done", result), protocol=5))
            except Exception as error:
                self.connection.send_bytes(pickle.dumps(("error", _portable(error, self.number))))
                time.sleep(60.0)  # others may wait in a collective; the driver ends all ranks


def _room(tensor: Tensor) -> int:
    """Return the bytes that a tensor takes in a bucket."""
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT


def _device(name: str, number: int, ranks: int) -> torch.device:
    """Return the device of a rank: a GPU of its own each, or the CPU for all."""
    count = torch.cuda.device_count()
    if name == "cpu" or (name == "auto" and count == 0):
        return torch.device("cpu")
    if name not in ("auto", "cuda"):
        raise RecipeError(f"learner.device: {name} is one device, but learner.ranks is {ranks}; use auto, cpu or cuda")
    if count < ranks:
        raise RecipeError(f"learner.ranks is {ranks}, but this machine has {count} GPUs; every rank needs its own")
    return torch.device("cuda", number)


def _portable(error: Exception, number: int) -> Exception:
    """Return an error that the driver can raise again."""
    if isinstance(error, torch.OutOfMemoryError):
        return torch.OutOfMemoryError(f"rank {number}: {str(error).partition(chr(10))[0]}")
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return ValueError(f"{type(error).__name__}: {error}")
    return error


@contextmanager
def _printed() -> Iterator[None]:
    """Write a traceback into the rank's log whatever happens."""
    try:
        yield
    except BaseException:
        import traceback

        traceback.print_exc()
        raise


def main(arguments: list[str]) -> None:
    """Run a rank; the arguments are those of `RankPool`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    folder, (driver, number, ranks, connection, pulses, *slots) = Path(arguments[0]), map(int, arguments[1:])
    process = RankProcess(folder, number, ranks, Connection(connection), pulses, slots)
    threading.Thread(target=process.watch, args=(driver,), daemon=True).start()
    with _printed():
        process.serve()
    os._exit(0)  # no farewell to a process group whose other ranks may be gone


if __name__ == "__main__":
    main(sys.argv[1:])
