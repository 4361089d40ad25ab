"""Starts the learner's ranks as processes, sends them commands, and notices when one dies or hangs.

    driver ── command ──> rank 0 ┐
           ── command ──> rank 1 ┼─ the same command on every rank; collectives run among them
           ── command ──> rank 2 ┘
           <── reply, or error ──── each; buckets of whole tensors from rank 0 alone, through shared memory
           <── pulse ────────────── each writes the time (a thread) and a count of what it has done (its work)

Whatever goes wrong in one rank ends all of them, so none waits in a collective for ever. A rank whose driver is gone
ends itself within seconds.
"""

from __future__ import annotations

import mmap
import os
import pickle
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

import torch

from agentrl.engines.transformers.decoding import checksum
from agentrl.errors import AgentRLError, LearnerError

PULSE = struct.Struct("dq")
"""What a rank writes about itself: the time of its last sign of life, and how far its work has got."""
SILENT_S = 120.0
"""A rank that shows no sign of life for this long is frozen: its thread writes one per second."""
GRACE_S = 5.0
"""How long other ranks may take to report after the first error: the first may only be a consequence."""


class Rank:
    """One process of the pool."""

    def __init__(self, number: int, process: subprocess.Popen[bytes], connection: Connection, log: Path) -> None:
        self.number = number
        self.process = process
        self.connection = connection
        self.log = log

    def __str__(self) -> str:
        return f"rank {self.number} of the learner (process {self.process.pid})"


class RankPool:
    """The rank processes of one learner."""

    def __init__(self, ranks: int, *, timeout_s: float) -> None:
        """Start the processes; `timeout_s` is how long none of them may get on before the run is given up."""
        self.folder = Path(tempfile.mkdtemp(prefix="agentrl-ranks-"))
        self.timeout_s = timeout_s
        self._pulses = os.memfd_create("agentrl-pulses")
        os.ftruncate(self._pulses, ranks * PULSE.size)
        self._pulse_map = mmap.mmap(self._pulses, ranks * PULSE.size)
        self.slots = [os.memfd_create(f"agentrl-bucket-{n}") for n in range(2)]
        """Memory in which rank 0 leaves buckets: one is filled while the other is used."""
        self._largest = 0
        self.ranks: list[Rank] = []
        self._closed = False
        self._lock = threading.RLock()
        """One command at a time: a server that is started again may want weights while the learner works."""
        try:
            for number in range(ranks):
                self.ranks.append(self._start(number, ranks))
        except BaseException:
            self.close()
            raise

    def _start(self, number: int, ranks: int) -> Rank:
        ours, theirs = socket.socketpair()
        log = self.folder / f"rank-{number}.log"
        package = str(Path(__file__).resolve().parents[2])
        paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
        handles = [theirs.fileno(), self._pulses, *self.slots]
        numbers = [os.getpid(), number, ranks]
        with log.open("wb") as output, theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "agentrl.learn.rank", str(self.folder), *map(str, numbers + handles)],
                pass_fds=handles,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                start_new_session=True,  # a Ctrl-C is the driver's to handle
            )
        return Rank(number, process, Connection(ours.detach()), log)

    # Commands -------------------------------------------------------------------------------------------------------

    def call(
        self,
        command: str,
        arguments: Sequence[tuple[Any, ...]] | tuple[Any, ...] = (),
        *,
        each: bool = False,
        on_bucket: Callable[[int, Any, str], None] = lambda slot, layout, digest: None,
        say: Callable[[str], None] = lambda text: None,
    ) -> list[Any]:
        """Run a command on every rank and return their results.

        `arguments` are the same for all ranks, or with `each` one tuple for every rank. `on_bucket` is called with
        each bucket that rank 0 has left in a slot; the next but one waits until it returns.
        """
        with self._lock:
            return self._call(command, arguments, each, on_bucket, say)

    def _call(
        self,
        command: str,
        arguments: Sequence[tuple[Any, ...]] | tuple[Any, ...],
        each: bool,
        on_bucket: Callable[[int, Any, str], None],
        say: Callable[[str], None],
    ) -> list[Any]:
        if self._closed:
            raise LearnerError("the learner's ranks have ended")
        for rank in self.ranks:
            own = arguments[rank.number] if each else arguments
            try:
                rank.connection.send_bytes(pickle.dumps((command, own), protocol=5))
            except OSError:
                self._fail({rank.number: None})
        results: dict[int, Any] = {}
        errors: dict[int, BaseException | None] = {}
        moved, last = time.monotonic(), self._progress()
        while len(results) < len(self.ranks) and not errors:
            waiting = [rank for rank in self.ranks if rank.number not in results]
            for rank in self._ready(waiting, 1.0):
                kind, value = self._receive(rank)
                if kind == "bucket":
                    self._hand_on(rank, partial(on_bucket, *value))
                    moved = time.monotonic()
                elif kind == "say":
                    say(value)
                elif kind == "error":
                    errors[rank.number] = value
                else:
                    results[rank.number] = value
            now = self._progress()
            if now != last:
                moved, last = time.monotonic(), now
            if not errors:
                self._check_pulse(waiting, moved)
        if errors:
            self._fail(errors)
        return [results[rank.number] for rank in self.ranks]

    def start(self, recipe: dict[str, Any], model: Path | None, threads: int) -> None:
        """Have every rank load the model, from a folder of ours or as the recipe says, and shard it."""
        options = (recipe, model and str(model), threads, self.timeout_s)
        self._largest = self.call("start", options)[0]

    def stream(self, use: Callable[[dict[str, torch.Tensor]], None]) -> None:
        """Call `use` with the policy's whole tensors, a bucket at a time; they are gone when it returns."""

        def on_bucket(slot: int, layout: list[tuple[str, torch.dtype, tuple[int, ...], int]], digest: str) -> None:
            memory = mmap.mmap(self.slots[slot], os.fstat(self.slots[slot]).st_size)
            bucket = {}
            for name, dtype, shape, start in layout:
                count = torch.Size(shape).numel()
                bucket[name] = torch.frombuffer(memory, dtype=dtype, count=count, offset=start).reshape(shape)
            if checksum(bucket) != digest:
                raise LearnerError("weights changed on their way from rank 0 of the learner; is the memory sound?")
            use(bucket)

        for handle in self.slots:
            os.ftruncate(handle, self._largest)
        self.call("weights", on_bucket=on_bucket)

    def _hand_on(self, rank: Rank, use: Callable[[], None]) -> None:
        """Use a bucket, and tell rank 0 that its memory is free; ranks in the middle of it are of no use any more."""
        try:
            use()
            rank.connection.send_bytes(b"taken")
        except BrokenPipeError:
            return  # its death is seen at the next look
        except BaseException:
            self.close()
            raise

    def _ready(self, ranks: Sequence[Rank], timeout_s: float) -> list[Rank]:
        ready = wait([rank.connection for rank in ranks], timeout_s)
        return [rank for rank in ranks if rank.connection in ready]

    def _receive(self, rank: Rank) -> tuple[str, Any]:
        try:
            kind, value = pickle.loads(rank.connection.recv_bytes())
        except (EOFError, OSError):
            return "error", None
        return kind, value

    # Faults ---------------------------------------------------------------------------------------------------------

    def _pulse(self, rank: Rank) -> tuple[float, int]:
        moment, count = PULSE.unpack_from(self._pulse_map, rank.number * PULSE.size)
        return moment, count

    def _progress(self) -> list[int]:
        return [self._pulse(rank)[1] for rank in self.ranks]

    def _check_pulse(self, waiting: Sequence[Rank], moved: float) -> None:
        """End the run when a rank is frozen, or when none gets on."""
        now = time.monotonic()
        for rank in waiting:
            moment = self._pulse(rank)[0]
            if moment and now - moment > min(SILENT_S, self.timeout_s):
                self._end(f"{rank} is frozen: it has shown no sign of life for {now - moment:.0f} s")
        if waiting and now - moved > self.timeout_s:
            behind = min(waiting, key=lambda rank: self._pulse(rank)[1])
            self._end(
                f"the learner's ranks have not got on for {now - moved:.0f} s (learner.rank_timeout_s is "
                f"{self.timeout_s:g}); {behind} is the furthest behind"
            )

    def _fail(self, errors: dict[int, BaseException | None]) -> None:
        """Raise what went wrong first: a death rather than an error, any error rather than a broken collective."""
        deadline = time.monotonic() + GRACE_S
        while len(errors) < len(self.ranks) and time.monotonic() < deadline:
            if any(error is None for error in errors.values()):
                break
            for rank in self._ready([r for r in self.ranks if r.number not in errors], 0.2):
                kind, value = self._receive(rank)
                if kind == "error":
                    errors[rank.number] = value
        for number, error in sorted(errors.items()):
            if error is None:
                rank = self.ranks[number]
                with suppress(subprocess.TimeoutExpired):
                    rank.process.wait(GRACE_S)
                self._end(f"{rank} died: {_how(rank)}")
        self.close()
        raise_first(errors)

    def _end(self, reason: str) -> None:
        self.close()
        raise ended(reason)

    def close(self) -> None:
        """End all processes and free what they shared. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        for rank in self.ranks:
            with suppress(ProcessLookupError):
                os.kill(rank.process.pid, signal.SIGKILL)  # they keep nothing that could be lost
        for rank in self.ranks:
            rank.process.wait()
            rank.connection.close()
        self._pulse_map.close()
        for handle in (self._pulses, *self.slots):
            os.close(handle)
        shutil.rmtree(self.folder, ignore_errors=True)


def raise_first(errors: Mapping[int, BaseException | None]) -> NoReturn:
    """Raise the error of the first rank that has one of its own: others may only say that a rank is gone."""

    def order(item: tuple[int, BaseException | None]) -> tuple[bool, int]:
        number, error = item
        ours = isinstance(error, torch.OutOfMemoryError | AgentRLError)
        return isinstance(error, RuntimeError) and not ours, number

    number, error = min(errors.items(), key=order)
    assert error is not None, "a rank that died is told apart before"
    if isinstance(error, AgentRLError | torch.OutOfMemoryError):
        raise error
    raise LearnerError(f"rank {number} of the learner failed: {type(error).__name__}: {error}") from error


def ended(reason: str) -> LearnerError:
    """Return the error that ends a run whose ranks cannot go on."""
    return LearnerError(f"{reason}. All ranks were ended; resume with --resume")


def _how(rank: Rank) -> str:
    """Say how a process ended, with the last lines it wrote."""
    code = rank.process.returncode
    how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
    with suppress(OSError):
        lines = rank.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-3:]
        return "; ".join([how, *(line.strip() for line in lines)])
    return how
