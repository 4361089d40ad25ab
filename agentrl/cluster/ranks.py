"""The learner's ranks as Ray actors in a placement group, on whichever nodes have room for them.

    driver ── command ──> rank 0 ┐
           ── command ──> rank 1 ┼─ one thread works, another answers how far it has got
           ── command ──> rank 2 ┘
           <── buckets of whole tensors ── rank 0, two at most, where the driver wants them

As with processes of one machine, whatever goes wrong in one rank ends all of them.
"""

from __future__ import annotations

import fcntl
import os
import queue
import shutil
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from agentrl.cluster.server_actor import fingerprint, node_address
from agentrl.engines.sglang.server import free_port
from agentrl.errors import InfraError, LearnerError, RecipeError
from agentrl.learn.rank import RankCommands, _portable
from agentrl.learn.rank_pool import GRACE_S, ended, raise_first
from agentrl.recipe import Recipe

if TYPE_CHECKING:
    import torch
    from torch import Tensor

PLACE_S = 60.0
"""How long nodes may take to have room."""
POLL_S = 1.0


class RankActor(RankCommands):
    """One rank, in a process that Ray started on some node."""

    def __init__(self, number: int, ranks: int) -> None:
        super().__init__(number, ranks)
        self._meeting = ("", 0)
        self._count = 0
        self._lines: list[str] = []
        self._buckets: queue.Queue[dict[str, Tensor] | None] = queue.Queue(maxsize=1)
        self._folder = ""

    def meeting(self) -> tuple[str, int]:
        """Return an address of this node where ranks can find each other."""
        host = node_address()
        return host, free_port(host)

    def prepare(self, meeting: tuple[str, int], folder: str, run: str, mark: str) -> tuple[bool, bool]:
        """Remember where to meet; tell whether this node sees the model's folder, and the run's."""
        self._meeting = meeting
        model = Path(folder)
        has_model = not folder or (model.is_dir() and fingerprint(model) == mark)
        return has_model, not run or (Path(run) / "recipe.yaml").is_file()

    def receive(self, files: Mapping[str, bytes]) -> str:
        """Take the model's files, on a node that does not see them; return their folder."""
        self._folder = tempfile.mkdtemp(prefix="agentrl-rank-")
        for name, content in files.items():
            (Path(self._folder) / name).write_bytes(content)
        return self._folder

    def start(self, recipe: dict[str, Any], model: str | None, threads: int, timeout_s: float) -> int:
        """Load the model, as every rank does; files of it that were sent are not needed any more then."""
        try:
            return super().start(recipe, model, threads, timeout_s)
        finally:
            if self._folder:
                shutil.rmtree(self._folder, ignore_errors=True)

    def process(self) -> int:
        """Return the process id."""
        return os.getpid()

    @ray.method(concurrency_group="work")
    def run(self, command: str, arguments: tuple[Any, ...]) -> tuple[str, Any]:
        """Run a command; return its result, or the error that it raised."""
        try:
            result = getattr(self, command)(*arguments)
            self.progress()
            return "done", result
        except Exception as error:
            return "error", _portable(error, self.number)

    @ray.method(concurrency_group="side")
    def pulse(self) -> tuple[int, list[str]]:
        """Return how far the work has got, and what was said since."""
        lines, self._lines = self._lines, []
        return self._count, lines

    @ray.method(concurrency_group="side")
    def next_bucket(self) -> list[dict[str, Tensor] | None]:
        """Return the next bucket as a list of one; None is the end, an empty list means that there is none yet."""
        try:
            return [self._buckets.get(timeout=POLL_S)]
        except queue.Empty:
            return []

    def progress(self) -> None:
        """Count that this rank has got on."""
        self._count += 1

    def say(self, text: str) -> None:
        """Have the driver say something, when it next looks."""
        self._lines.append(text)

    def hand_over(self, number: int, bucket: dict[str, Tensor]) -> None:
        """Keep a copy of a bucket for the driver."""
        self._buckets.put({name: tensor.to("cpu", copy=True) for name, tensor in bucket.items()})

    def all_taken(self) -> None:
        """Mark the end of the buckets."""
        if self.number == 0:
            self._buckets.put(None)

    def store(self) -> Any:
        """Return where the ranks find each other: at rank 0's node."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        host, port = self._meeting
        if "GLOO_SOCKET_IFNAME" not in os.environ and (name := interface(node_address())):
            os.environ["GLOO_SOCKET_IFNAME"] = name
        limit = timedelta(seconds=120)
        return TCPStore(host, port, self.ranks, is_master=self.number == 0, timeout=limit)

    def device(self, name: str) -> torch.device:
        """Return the device: the GPU that Ray set aside for this rank, or the CPU."""
        import torch

        return torch.device("cuda", 0) if on_gpu(name, torch.cuda.is_available()) else torch.device("cpu")


class RayRankPool:
    """The ranks of one learner on a cluster; used like `RankPool`."""

    def __init__(self, recipe: Recipe) -> None:
        """Find room for the ranks and start them; Ray must be connected."""
        section = recipe.learner
        self.timeout_s = section.rank_timeout_s
        self.folder = Path(tempfile.mkdtemp(prefix="agentrl-ranks-"))
        self._run = recipe.run.out / recipe.run.name
        self._lock = threading.RLock()
        self._closed = False
        cluster: Any = ray
        gpus = float(cluster.cluster_resources().get("GPU", 0.0))
        needs = {"CPU": 1.0, "GPU": 1.0} if on_gpu(section.device, gpus > 0) else {"CPU": 0.01}
        self._group = placement_group([needs] * section.ranks, strategy="PACK")
        self.ranks: list[Any] = []
        try:
            if not self._group.wait(PLACE_S):
                total = ", ".join(f"{cluster.cluster_resources().get(kind, 0.0):g} {kind}" for kind in needs)
                each = " and ".join(f"{much:g} {kind}" for kind, much in needs.items())
                raise RecipeError(
                    f"learner.ranks is {section.ranks}, and each needs {each}, but the cluster has {total} in all; "
                    "lower it or add nodes"
                )
            groups = {"work": 1, "side": 2}
            kind = cluster.remote(max_restarts=0, max_task_retries=0, concurrency_groups=groups)(RankActor)
            for number in range(section.ranks):
                place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=number)
                options = {"num_cpus": needs["CPU"], "num_gpus": needs.get("GPU", 0)}
                actor = kind.options(scheduling_strategy=place, **options).remote(number, section.ranks)
                self.ranks.append(actor)
        except BaseException:
            self.close()
            raise

    def start(self, recipe: dict[str, Any], model: Path | None, threads: int) -> None:
        """Have every rank load the model, where its node sees the folder or from files that are sent, and shard it."""
        own = model or Path(recipe["model"]["path"])
        run = str(self._run.absolute()) if (self._run / "recipe.yaml").is_file() else ""
        try:
            meeting = self._get(self.ranks[0].meeting.remote())
            known = [rank.prepare.remote(meeting, str(own), run, fingerprint(own)) for rank in self.ranks]
            seen = self._get(known)
            if not all(sees_run for _, sees_run in seen):
                raise RecipeError(
                    f"run.out: a node with one of the learner's ranks does not see {self._run}; ranks write their "
                    "parts of a checkpoint themselves, so it must lie on storage that all nodes share"
                )
            folders: list[str | None] = [None if model is None else str(model) for _ in self.ranks]
            blind = [number for number, (has_model, _) in enumerate(seen) if not has_model]
            if blind:
                files = ray.put({file.name: file.read_bytes() for file in own.iterdir() if file.is_file()})
            for number in blind:
                folders[number] = self._get(self.ranks[number].receive.remote(files))
        except RayError as error:
            self._end(f"a rank of the learner ended or stood still while it started: {_first_line(error)}")
        arguments = []
        for folder in folders:
            data = recipe
            if folder is not None and model is None:
                data = recipe | {"model": recipe["model"] | {"path": folder}}
            arguments.append((data, folder if model is not None else None, threads, self.timeout_s))
        self.call("start", arguments, each=True)

    def call(
        self,
        command: str,
        arguments: Sequence[tuple[Any, ...]] | tuple[Any, ...] = (),
        *,
        each: bool = False,
        say: Callable[[str], None] = lambda text: None,
    ) -> list[Any]:
        """Run a command on every rank and return their results. `arguments` as for `RankPool.call`."""
        with self._lock:
            return self._collect(self._send(command, arguments, each), say)

    def stream(self, use: Callable[[dict[str, Tensor]], None]) -> None:
        """Call `use` with the policy's whole tensors, a bucket at a time."""
        with self._lock:
            calls = self._send("weights", (), False)
            while True:
                next_one = self.ranks[0].next_bucket.remote()
                try:
                    (bucket,) = self._get(next_one) or [{}]
                except GetTimeoutError:  # a bucket may be lost with it: the rest must not be used
                    self._end(f"rank 0 of the learner handed no weights over for {self.timeout_s:.0f} s")
                except RayError:
                    break  # which rank died is seen below
                if bucket is None or (not bucket and ray.wait(list(calls), timeout=0)[0] and self._failed(calls)):
                    break
                use(bucket)
            self._collect(calls, lambda text: None)

    def _failed(self, calls: Mapping[Any, int]) -> bool:
        """Tell whether a rank has ended its work with an error."""
        for ref in ray.wait(list(calls), num_returns=len(calls), timeout=0)[0]:
            try:
                if ray.get(ref)[0] == "error":
                    return True
            except RayError:
                return True
        return False

    def _send(self, command: str, arguments: Any, each: bool) -> dict[Any, int]:
        if self._closed:
            raise LearnerError("the learner's ranks have ended")
        return {
            rank.run.remote(command, arguments[number] if each else arguments): number
            for number, rank in enumerate(self.ranks)
        }

    def _collect(self, calls: dict[Any, int], say: Callable[[str], None]) -> list[Any]:
        """Wait for all ranks, for as long as they get on."""
        results: dict[int, Any] = {}
        moved, last = time.monotonic(), [0] * len(self.ranks)
        while len(results) < len(self.ranks):
            waiting = [ref for ref, number in calls.items() if number not in results]
            ready, _ = ray.wait(waiting, num_returns=1, timeout=POLL_S)
            errors: dict[int, Exception | None] = {}
            for ref in ready:
                self._take(ref, calls[ref], results, errors)
            if errors:
                self._fail(calls, results, errors)
            if not ready:
                now = self._pulses(last, say)
                if now != last:
                    moved, last = time.monotonic(), now
                if time.monotonic() - moved > self.timeout_s:
                    behind = min((n for n in calls.values() if n not in results), key=lambda number: last[number])
                    self._end(
                        f"the learner's ranks have not got on for {time.monotonic() - moved:.0f} s "
                        f"(learner.rank_timeout_s is {self.timeout_s:g}); rank {behind} is the furthest behind"
                    )
        self._pulses(last, say)
        return [results[number] for number in range(len(self.ranks))]

    def _take(self, ref: Any, number: int, results: dict[int, Any], errors: dict[int, Exception | None]) -> None:
        try:
            kind, value = ray.get(ref)
        except RayError:
            errors[number] = None
            return
        if kind == "error":
            errors[number] = value
        else:
            results[number] = value

    def _pulses(self, last: list[int], say: Callable[[str], None]) -> list[int]:
        """Ask every rank how far it has got; one that does not answer has not got on."""
        asked = {rank.pulse.remote(): number for number, rank in enumerate(self.ranks)}
        counts = list(last)
        for ref in ray.wait(list(asked), num_returns=len(asked), timeout=5.0)[0]:
            with suppress(RayError):
                counts[asked[ref]], lines = ray.get(ref)
                for line in lines:
                    say(line)
        return counts

    def _fail(self, calls: dict[Any, int], results: dict[int, Any], errors: dict[int, Exception | None]) -> None:
        """Raise what went wrong first: a death rather than an error, any error rather than a broken collective."""
        waiting = [ref for ref, number in calls.items() if number not in results and number not in errors]
        for ref in ray.wait(waiting, num_returns=len(waiting), timeout=GRACE_S)[0] if waiting else []:
            self._take(ref, calls[ref], results, errors)
        for number, error in sorted(errors.items()):
            if error is None:
                self._end(f"rank {number} of the learner died, or its node")
        self.close()
        raise_first(errors)

    def _get(self, asked: Any) -> Any:
        """Wait for what ranks answer, not for ever: where Ray is gone from this machine nothing would come."""
        return ray.get(asked, timeout=self.timeout_s)

    def _end(self, reason: str) -> None:
        self.close()
        raise ended(reason)

    def close(self) -> None:
        """End all ranks and free their places. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        with suppress(RayError, InfraError):
            for rank in self.ranks:
                ray.kill(rank)
            remove_placement_group(self._group)
        shutil.rmtree(self.folder, ignore_errors=True)


def on_gpu(name: str, available: bool) -> bool:
    """Return whether ranks are on GPUs, by the recipe's `learner.device`."""
    if name not in ("auto", "cpu", "cuda"):
        raise RecipeError(f"learner.device: {name} is one device, but there are learner.ranks; use auto, cpu or cuda")
    return name == "cuda" or (name == "auto" and available)


def interface(address: str) -> str | None:
    """Return the network interface that has an address."""
    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
            answer = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", name.encode()))  # SIOCGIFADDR
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
