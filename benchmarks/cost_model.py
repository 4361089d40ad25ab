"""A model of training on many GPUs: what staleness buys, and which part saturates first. Nothing here is a measurement.

    python -m benchmarks.cost_model [--gpus 8,64,256,1024] [--staleness 0,1,2,4] [--set tool_seconds=2] [--json]

    engines (tokens/s, shared by the streams) ─> tools and grading (cores) ─> driver (one process) ─> learner ─┐
         ^───────────────────── at most k rounds outstanding while it learns, k + 1 while it waits <───────────┘

Inputs come from docs/evidence where something measured them (`measured`), follow from a measured figure by a formula
(`derived`), or are guesses for a dense model of 8B parameters (`guess`); the output lists each with its origin. Episode
lengths are log-normal; rounds are trained on in the order in which they began, as in rollout/scheduler.py; the first
steps are left out. More than 32 GPUs are simulated as 32 with what is shared (the driver) divided by as much, since
engines, learners and cores grow with the GPUs. A learner that spans a thousand GPUs without loss is assumed; today's
learner has one.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import random
import sys
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

EVIDENCE = Path(__file__).resolve().parents[1] / "docs" / "evidence"
LARGEST = 32
"""GPUs that are simulated one by one."""
SHARES = (0.25, 0.375, 0.5, 0.625)
"""Shares of the GPUs for the learner that are tried; the best is reported."""


class Input(NamedTuple):
    """One figure that goes into the model."""

    value: float
    origin: str
    """`measured: where`, `derived: how`, or `guess`."""


GUESSES = {
    "parameters": 8e9,
    "engine_tokens_per_s": 5000.0,
    "stream_tokens_per_s": 100.0,
    "episode_tokens": 1500.0,
    "tail": 1.0,
    "longest": 32768.0,
    "turns": 12.0,
    "tool_seconds": 0.5,
    "context_factor": 2.5,
    "publish_seconds": 5.0,
    "cores_per_gpu": 16.0,
    "group_size": 16.0,
    "groups_per_gpu": 2.0,
    "learner_tokens_per_s": 9000.0,
    "episode_cpu_s": 0.06,
    "driver_s": 0.002,
}
"""Everything per GPU but the driver. `tail`: the standard deviation of the lengths' logarithm; `context_factor`: tokens
trained per token sampled; `stream_tokens_per_s`: one episode alone on an engine."""


def inputs(evidence: Path = EVIDENCE, changes: Mapping[str, float] | None = None) -> dict[str, Input]:
    """Return every input: measured where there is evidence, else a guess; `changes` are the user's."""
    figures = {name: Input(value, "guess") for name, value in GUESSES.items()}
    figures.update(_measured(evidence, figures["parameters"].value))
    for name, value in (changes or {}).items():
        if name not in figures:
            raise SystemExit(f"no input {name!r}; there are: {', '.join(figures)}")
        figures[name] = Input(value, "said on the command line")
    return figures


def _measured(evidence: Path, parameters: float) -> Iterator[tuple[str, Input]]:
    for name in ("scale-16.json", "scale.json"):
        path = evidence / name
        if not path.exists():
            continue
        found = json.loads(path.read_text(encoding="utf-8"))
        repair = ((found.get("episodes") or {}).get("measured") or {}).get("repair")
        sizes = {row["tokens"]: row for row in (found.get("intake") or {}).get("measured") or ()}
        if repair:
            yield "episode_cpu_s", Input(repair["one_process_cpu_s"], f"measured: {name}, repair, one process")
        if 4000 in sizes:
            yield "driver_s", Input(sizes[4000]["driver_s_per_episode"], f"measured: {name}, 4,000 tokens")
        break
    path = evidence / "learner-h200.json"
    if path.exists():
        found = json.loads(path.read_text(encoding="utf-8"))
        row = next((r for r in found["rows"] if (r["section"], r["name"]) == ("qwen3-4k", "ours checkpointed")), None)
        if row is not None:
            speed = row["mfu"] * found["matrix_tflops"] * 1e12 / (6 * parameters)
            how = f"derived: a smaller model's share of peak, {row['mfu']:.3f} (learner-h200.json), over 6 x parameters"
            yield "learner_tokens_per_s", Input(speed, how)


class Plan(NamedTuple):
    """What is simulated."""

    gpus: int
    staleness: int
    learner_share: float
    steps: int = 10
    warm: int = 3
    """Steps at the beginning that are not counted."""


def simulate(figures: Mapping[str, Input], plan: Plan) -> dict[str, Any]:
    """Play some steps of one plan, and return its speed and how busy each part was."""
    at = {name: figure.value for name, figure in figures.items()}
    times = max(1.0, plan.gpus / LARGEST)
    gpus = plan.gpus / times
    learners = max(1.0, round(gpus * plan.learner_share))
    engines = max(1.0, gpus - learners)
    episodes = int(at["groups_per_gpu"] * gpus * at["group_size"])
    speed, cores = engines * at["engine_tokens_per_s"], gpus * at["cores_per_gpu"]
    world = _World(at, speed, cores, at["driver_s"] * times, episodes)
    learns = learners * at["learner_tokens_per_s"]
    trained, learning_s, done, until = 0.0, 0.0, 0, math.inf
    began = 0.0
    while done < plan.steps:
        waits = until == math.inf
        world.fill((done + plan.staleness + 1) * episodes)
        if world.next_event(until) == "learnt":
            waits, until, done = True, math.inf, done + 1
            if done == plan.warm:
                began, world.sampled, trained, learning_s = world.now, 0.0, 0.0, 0.0
        if waits and done < plan.steps and world.ready[done][0] == episodes:
            tokens = world.ready.pop(done)[1]
            trained += tokens
            took = tokens * at["context_factor"] / learns
            learning_s += took
            until = world.now + took + at["publish_seconds"]
    counted, wall = done - plan.warm, world.now - began
    rate = episodes * counted / wall
    busy = {
        "engines": world.sampled / world.engine_speed / wall,
        "learner": learning_s / wall,
        "driver": rate * world.driver_s,
        "tools": rate * at["episode_cpu_s"] / world.cores,
    }
    first = max(busy, key=lambda part: busy[part])
    return {
        "gpus": plan.gpus,
        "staleness": plan.staleness,
        "learner_share": plan.learner_share,
        "step_s": wall / counted,
        "trained_tokens_per_s_and_gpu": trained / wall / gpus,
        "episodes_per_s": rate * times,
        "busy": busy,
        "saturates_first": first if busy[first] >= 0.5 else "none: it waits for the longest episode",
        "gpus_at_which_the_driver_is_full": plan.gpus / busy["driver"] if busy["driver"] else math.inf,
    }


class _World:
    """Episodes on their way: sampled, in tools and grading, taken in by the driver, ready to train on."""

    def __init__(self, at: Mapping[str, float], engine_speed: float, cores: float, driver_s: float, each: int) -> None:
        self.at, self.engine_speed, self.cores, self.driver_s, self.episodes = at, engine_speed, cores, driver_s, each
        self.now = self.sampled = 0.0
        self.ready: defaultdict[int, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
        """How many episodes of a round are ready, and their tokens."""
        self._begun = 0
        self._random = random.Random(0)
        self._each = 0.0  # tokens that every stream has got since the start
        self._streams: list[tuple[float, int, float]] = []
        self._tools: list[tuple[float, int, float]] = []
        self._taking: deque[tuple[float, int, float]] = deque()
        self._driver_free = 0.0

    def fill(self, allowed: int) -> None:
        """Begin episodes until as many have begun as are allowed."""
        for number in range(self._begun, allowed):
            length = self._random.lognormvariate(math.log(self.at["episode_tokens"]), self.at["tail"])
            length = min(self.at["longest"], max(16.0, length))
            heapq.heappush(self._streams, (self._each + length, number // self.episodes, length))
        self._begun = max(self._begun, allowed)

    def next_event(self, learnt: float) -> str:
        """Go to what happens next; return what it was."""
        streams = len(self._streams)
        speed = min(self.at["stream_tokens_per_s"], self.engine_speed / streams) if streams else 0.0
        events = [(learnt, "learnt")]
        if streams:
            events.append((self.now + (self._streams[0][0] - self._each) / speed, "sampled"))
        if self._tools:
            events.append((self._tools[0][0], "graded"))
        if self._taking:
            events.append((self._taking[0][0], "taken"))
        when, what = min(events)
        assert when < math.inf, "nothing is under way"
        self._each += speed * (when - self.now)
        self.sampled += speed * streams * (when - self.now)
        self.now = when
        if what == "sampled":
            _, round_number, length = heapq.heappop(self._streams)
            wall = self.at["turns"] * self.at["tool_seconds"] + self.at["episode_cpu_s"]
            wanted = (len(self._tools) + 1) * self.at["episode_cpu_s"] / (wall or 1.0)  # cores, on average
            heapq.heappush(self._tools, (when + wall * max(1.0, wanted / self.cores), round_number, length))
        elif what == "graded":
            _, round_number, length = heapq.heappop(self._tools)
            self._driver_free = max(self._driver_free, when) + self.driver_s
            self._taking.append((self._driver_free, round_number, length))
        elif what == "taken":
            _, round_number, length = self._taking.popleft()
            count, tokens = self.ready[round_number]
            self.ready[round_number] = (count + 1, tokens + length)
        return what


def table(figures: Mapping[str, Input], gpus: list[int], staleness: list[int]) -> list[dict[str, Any]]:
    """Return the best plan of every size and staleness."""
    rows = []
    for count in gpus:
        for k in staleness:
            tried = [simulate(figures, Plan(count, k, share)) for share in SHARES]
            rows.append(max(tried, key=lambda row: row["trained_tokens_per_s_and_gpu"]))
    return rows


def main() -> int:
    """Print the model's table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", default="8,64,256,1024")
    parser.add_argument("--staleness", default="0,1,2,4")
    parser.add_argument("--set", action="append", default=[], dest="changes", metavar="INPUT=VALUE")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    changes = {name: float(value) for name, _, value in (change.partition("=") for change in options.changes)}
    figures = inputs(changes=changes)
    rows = table(figures, *([int(n) for n in text.split(",")] for text in (options.gpus, options.staleness)))
    if options.json:
        listed = {name: figure._asdict() for name, figure in figures.items()}
        print(json.dumps({"what": "a model, not a measurement", "inputs": listed, "rows": rows}, indent=2))
        return 0
    print("A model, not a measurement. Inputs:")
    for name, figure in figures.items():
        print(f"  {name:22} {figure.value:12.6g}  {figure.origin}")
    for row in rows:
        busy = "  ".join(f"{part} {share:.2f}" for part, share in row["busy"].items())
        print(
            f"{row['gpus']:5} GPUs  staleness {row['staleness']}  {row['trained_tokens_per_s_and_gpu']:6.0f} trained "
            f"tokens/s and GPU  {row['episodes_per_s']:6.1f} episodes/s  busy: {busy}  "
            f"first: {row['saturates_first']}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
