"""Rollouts a simulated learner needs to reach a target, under our curriculum and others.

    python benchmarks/curriculum.py [--seeds 20] [--processes 2] [--runs FILE] [--json] [--figure docs/curriculum.png]

The learner has one skill (a logit) for each cluster of tasks; a task is passed with probability
sigmoid(skill of its cluster - its difficulty). Skills move by the policy gradient alone: sampled binary rewards,
advantages from agentrl.learn.advantage, one plain gradient step a round with a constant divisor, so that no method
gains a larger learning rate by dropping groups. Every rollout that begins counts as spent, whether or not a gate
discards it; ours lets doubtful groups begin with half of theirs (`group_filter.probe`).
With --runs every run is kept in that file as it ends, and read instead of repeated the next time.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl.curriculum.baselines import Pools, Uniform
from agentrl.curriculum.group_filter import GroupFilter
from agentrl.curriculum.group_stats import Choice, GroupStats
from agentrl.curriculum.learnability import Learnability
from agentrl.curriculum.sampler import Chooser
from agentrl.curriculum.tasks import Source, Tasks
from agentrl.envs.base import Environment
from agentrl.learn.advantage import estimate
from agentrl.recipe import GroupFilterSection, LearnabilityCurriculum, PoolsCurriculum
from agentrl.types import Split, Task

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

GROUP, ROUND, CLUSTERS = 8, 32, 16
RATE = 0.025
LIMIT = 40_000
"""Groups after which a run is given up; it then counts as that many."""
METHODS = ("ours", "uniform", "dynamic_sampling", "pools", "oracle")
FIRST = 200
"""The first seed. The curriculum's constants were settled on seeds 0 to 3 and 100 to 103."""
POINTS = 60
"""Points of a curve that are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A task set and how it behaves."""

    name: str
    tasks: int = 1000
    cluster_sd: float = 2.5
    """How far clusters lie apart, in logits."""
    task_sd: float = 2.5
    """How far tasks of a cluster lie apart."""
    heavy: bool = False
    """Difficulty within a cluster is Student's t with 1.5 degrees of freedom."""
    hidden: bool = False
    """The curriculum is not told the clusters."""
    levels: bool = False
    """Clusters are levels of an endless generator."""
    transfer: float = 0.0
    """A skill that all clusters share learns too, at this fraction of the rate."""
    drift: float = 0.0
    """Each round skills move by noise of this size, tasks by half of it."""
    noise: float = 0.0
    """The verifier flips each verdict with this probability."""
    start: float = -2.5
    """Mean logit in the beginning."""
    target: float = 0.55
    """Mean pass rate over the task set that counts as done."""


WORLDS = (
    World(name="clustered"),
    World(name="hidden features", hidden=True),
    World(name="drifting", drift=0.05),
    World(name="heavy-tailed", heavy=True, task_sd=1.5),
    World(name="noisy verifier 5 %", noise=0.05),
    World(name="noisy verifier 15 %", noise=0.15),
    World(name="levels, endless", levels=True, task_sd=1.0, cluster_sd=4.0, transfer=0.05),
)


class Learner:
    """Skills by cluster, moved by the policy gradient through our own advantages."""

    def __init__(self, world: World, rng: np.random.Generator) -> None:
        self._world, self._rng = world, rng
        n = world.tasks
        self.cluster: Ints = np.arange(n) * CLUSTERS // n if world.levels else rng.integers(CLUSTERS, size=n)
        offset = rng.standard_normal(CLUSTERS)
        if world.levels:
            offset = -np.linspace(-1.0, 1.0, CLUSTERS)
        self.skill: Floats = world.start + world.cluster_sd * offset
        own = rng.standard_t(1.5, size=n) if world.heavy else rng.standard_normal(n)
        self.difficulty: Floats = world.task_sd * own
        # A group's advantages depend on how many of it passed: one call of the library for each possible count.
        self._passed, self._failed = np.zeros(GROUP + 1), np.zeros(GROUP + 1)
        for k in range(1, GROUP):
            scores = [np.array([1.0])] * k + [np.array([0.0])] * (GROUP - k)
            values = estimate("group", [scores])[0]
            self._passed[k], self._failed[k] = float(values[0][0]), float(values[-1][0])

    def rates(self) -> Floats:
        """The true pass rate of every task."""
        return _sigmoid(self.skill[self.cluster] - self.difficulty)

    def roll_out(self, tasks: Ints) -> Rollouts:
        """A group of every task."""
        p = self.rates()[tasks]
        right = self._rng.binomial(GROUP, p)
        lost = self._rng.binomial(right, self._world.noise) if self._world.noise else np.zeros_like(right)
        found = self._rng.binomial(GROUP - right, self._world.noise) if self._world.noise else lost
        score = right - lost + found
        good, bad = self._passed[score], self._failed[score]
        # Σ advantage · ∂ log π, with ∂ log π = 1 - p for a right answer and -p for a wrong one.
        gradient = good * ((right - lost) * (1 - p) - found * p) + bad * (lost * (1 - p) - (GROUP - right - found) * p)
        return Rollouts(tasks, score, gradient, np.full_like(score, GROUP))

    def step(self, kept: Sequence[Rollouts]) -> None:
        """One gradient step, and the world's own drift."""
        for groups in kept:
            np.add.at(self.skill, self.cluster[groups.tasks], RATE * groups.gradient / GROUP)
            self.skill += self._world.transfer * RATE * groups.gradient.sum() / GROUP
        if self._world.drift:
            self.skill += self._world.drift * self._rng.standard_normal(CLUSTERS)
            self.difficulty += 0.5 * self._world.drift * self._rng.standard_normal(len(self.difficulty))


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Groups: their tasks, how many rollouts passed of how many, and the gradient each gives its cluster's skill."""

    tasks: Ints
    score: Ints
    gradient: Floats
    count: Ints

    @property
    def informative(self) -> NDArray[np.bool_]:
        return (self.score > 0) & (self.score < self.count)


class Simulated(Environment):
    """The task set as the curriculum sees it."""

    def __init__(self, world: World, cluster: Ints) -> None:
        super().__init__()
        self._cluster, self._world = cluster, world
        self.__dict__["levels"] = range(1, CLUSTERS + 1) if world.levels else range(1, 2)
        self.__dict__["size"] = None if world.levels else world.tasks

    def task(self, split: Split, level: int, index: int) -> Task:
        return Task(id=f"{level}/{index}", split=split, level=level, tags=self.tags(index), prompt="")

    def tags(self, index: int) -> tuple[str, ...]:
        """What the curriculum is told beside the level."""
        shown = not (self._world.hidden or self._world.levels)
        return (f"cluster {self._cluster[index]}",) if shown else ()


class Method:
    """A chooser behind the array interface of the simulation."""

    def __init__(self, name: str, world: World, learner: Learner, seed: int) -> None:
        self._environment = Simulated(world, learner.cluster)
        tasks = Tasks(Source(name="simulated", environment=self._environment), seed)
        self._levels = world.levels
        self._per_level = world.tasks // CLUSTERS
        self._rng = np.random.default_rng([seed, 1])
        self._learner = learner
        self._chooser: Chooser | None = None
        if name in ("uniform", "dynamic_sampling"):
            self._chooser = Uniform(tasks)
        elif name == "pools":
            self._chooser = Pools(PoolsCurriculum(type="pools"), tasks)
        elif name == "ours":
            self._chooser = Learnability(LearnabilityCurriculum(), tasks)
        dynamic = name in ("ours", "dynamic_sampling")
        self.group_filter = GroupFilter(GroupFilterSection(dynamic_sampling=dynamic), max_tokens=1024)
        self.dynamic = dynamic
        self._choices: list[Choice] = []

    def draw(self, number: int, taken: Sequence[int]) -> Ints:
        """That many tasks."""
        if self._chooser is None:
            return self._best(number, taken)
        self._choices = [self._chooser.choose(self._rng) for _ in range(number)]
        if not self._levels:
            return np.array([choice.index for choice in self._choices])
        return np.array([(c.level - 1) * self._per_level + c.index % self._per_level for c in self._choices])

    def spare(self, groups: Rollouts) -> Rollouts:
        """The groups as the gate lets them be rolled out: some end after their first half."""
        if self._chooser is None:
            return groups
        score, count = groups.score.copy(), groups.count.copy()
        for at, choice in enumerate(self._choices):
            first = self.group_filter.begin_with(GROUP, choice.belief)
            if first < GROUP:
                passed = int(self._rng.hypergeometric(score[at], GROUP - score[at], first))
                if self.group_filter.may_spare([1.0] * passed + [0.0] * (first - passed), GROUP - first, choice.belief):
                    score[at], count[at] = passed, first
        return Rollouts(groups.tasks, score, groups.gradient, count)

    def _best(self, number: int, taken: Sequence[int]) -> Ints:
        p = self._learner.rates()
        worth = p * (1 - p) + 1e-9 * self._rng.random(len(p))
        worth[list(taken)] = -1.0
        return np.argpartition(-worth, number)[:number]

    def observe(self, groups: Rollouts, version: int) -> None:
        """What came of the last draw."""
        if self._chooser is None:
            return
        columns = (groups.tasks.tolist(), groups.score.tolist(), groups.count.tolist())
        for choice, task, score, count in zip(self._choices, *columns, strict=True):
            mean = score / count
            seen = GroupStats(
                level=choice.level,
                index=choice.index,
                tags=self._environment.tags(task),
                count=count,
                total=float(score),
                spread=mean * (1 - mean) * count / (count - 1),
                informative=0 < score < count,
                censored=False,
                version=version,
                predicted=None,
            )
            self._chooser.learn(seen)


@dataclass(frozen=True, slots=True)
class Run:
    """One run of one method."""

    rollouts: int
    reached: bool
    informative: float
    """Share of drawn groups whose scores differ, after the first fifth of the run."""
    curve: list[tuple[int, float]]


def run(world: World, method: str, seed: int) -> Run:
    """Train until the target is reached."""
    # The same world and luck of the draw for every method.
    learner = Learner(world, np.random.default_rng([seed, 0]))
    chooser = Method(method, world, learner, seed)
    spent, version = 0, 0
    shares: list[tuple[int, int]] = []
    curve: list[tuple[int, float]] = []
    while True:
        success = float(learner.rates().mean())
        curve.append((spent, success))
        if success >= world.target or spent >= LIMIT * GROUP:
            break
        kept: list[Rollouts] = []
        number, drawn, informative = 0, 0, 0
        taken: list[int] = []
        while number < ROUND and (drawn == 0 or chooser.group_filter.may_refill(ROUND, drawn)):
            groups = chooser.spare(learner.roll_out(chooser.draw(ROUND - number, taken)))
            chooser.observe(groups, version)
            drawn += len(groups.tasks)
            spent += int(groups.count.sum())
            informative += int(groups.informative.sum())
            taken += groups.tasks.tolist()
            keep = groups.informative if chooser.dynamic else np.ones(len(groups.tasks), dtype=bool)
            kept.append(Rollouts(groups.tasks[keep], groups.score[keep], groups.gradient[keep], groups.count[keep]))
            number += int(keep.sum())
        learner.step(kept)
        version += 1
        shares.append((informative, drawn))
    late = shares[len(shares) // 5 :]
    fraction = sum(a for a, _ in late) / max(1, sum(b for _, b in late))
    return Run(spent, spent < LIMIT * GROUP, fraction, [*curve[:: max(1, len(curve) // POINTS)], curve[-1]])


def _sigmoid(x: Floats) -> Floats:
    found: Floats = 1.0 / (1.0 + np.exp(-np.clip(x, -60.0, 60.0)))
    return found


Job = tuple[int, str, int]
"""World, method and seed."""


def _job(job: Job) -> tuple[Job, Run]:
    world, method, seed = job
    return job, run(WORLDS[world], method, seed)


def collect(jobs: Sequence[Job], processes: int, kept: Path | None) -> dict[Job, Run]:
    """Every run: out of the file where it is there, otherwise made and added to it."""
    found: dict[Job, Run] = {}
    if kept and kept.exists():
        for line in kept.read_text(encoding="utf-8").splitlines():
            job, fields = json.loads(line)
            found[job[0], job[1], job[2]] = Run(**fields)
    missing = [job for job in jobs if job not in found]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for job, made in pool.imap_unordered(_job, missing):
            found[job] = made
            if kept:
                with kept.open("a", encoding="utf-8") as file:
                    file.write(json.dumps([job, asdict(made)]) + "\n")
    return {job: found[job] for job in jobs}


def interval(logs: Floats, rng: np.random.Generator) -> dict[str, float]:
    """Geometric mean with a 95 % bootstrap interval over seeds; rows are seeds, columns worlds."""
    seeds = logs.mean(axis=1)
    again = seeds[rng.integers(len(seeds), size=(4000, len(seeds)))].mean(axis=1)
    low, high = np.quantile(again, [0.025, 0.975])
    return {"mean": math.exp(seeds.mean()), "low": math.exp(low), "high": math.exp(high)}


def summarise(rollouts: dict[str, Floats], informative: Floats) -> dict[str, Any]:
    """Ratios of rollouts over seeds (rows) and worlds (columns). Above 1 ours needs fewer; vs_oracle: what it needs."""
    rng = np.random.default_rng(0)
    logs = {method: np.log(values) for method, values in rollouts.items()}
    found: dict[str, Any] = {
        f"vs_{method}": interval(logs[method] - logs["ours"], rng)
        for method in ("uniform", "dynamic_sampling", "pools")
    }
    found["vs_oracle"] = interval(logs["ours"] - logs["oracle"], rng)
    found["informative_fraction"] = interval(np.log(informative), rng)
    return found


def measure(seeds: Sequence[int], processes: int, kept: Path | None) -> dict[str, Any]:
    """Every method in every world."""
    jobs = [(world, method, seed) for seed in seeds for world in range(len(WORLDS)) for method in METHODS]
    runs = collect(jobs, processes, kept)
    rollouts = {
        method: np.array(
            [[float(runs[world, method, seed].rollouts) for world in range(len(WORLDS))] for seed in seeds]
        )
        for method in METHODS
    }
    informative = np.array([[runs[world, "ours", seed].informative for world in range(len(WORLDS))] for seed in seeds])
    found = summarise(rollouts, informative)
    found["worlds"] = {
        world.name: {
            **summarise({m: v[:, [number]] for m, v in rollouts.items()}, informative[:, [number]]),
            "rollouts": {m: float(v[:, number].mean()) for m, v in rollouts.items()},
            "informative": {m: float(np.mean([runs[number, m, seed].informative for seed in seeds])) for m in METHODS},
        }
        for number, world in enumerate(WORLDS)
    }
    found["unreached"] = sum(not r.reached for r in runs.values())
    found["seeds"] = len(seeds)
    found["curves"] = {
        world.name: {m: runs[number, m, seeds[0]].curve for m in METHODS} for number, world in enumerate(WORLDS)
    }
    return found


COLOURS = {
    "ours": "tab:blue", "uniform": "tab:gray", "dynamic_sampling": "tab:orange", "pools": "tab:green", "oracle": "black"
}  # fmt: skip


def draw_figure(found: dict[str, Any], path: str) -> None:
    """Success against rollouts in every world (one seed), and over all worlds and seeds what others need."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 4, figsize=(13, 6))
    for axis, (name, curves) in zip(axes.flat, found["curves"].items(), strict=False):
        for method, curve in curves.items():
            axis.plot(
                *zip(*curve, strict=True),
                label=method.replace("_", " "),
                color=COLOURS[method],
                lw=2.2 if method == "ours" else 1.2,
                ls="--" if method == "oracle" else "-",
            )
        axis.set_title(name, fontsize=10)
        axis.set_ylim(0.2, 0.57)
        axis.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:.0f}k")
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes[:, 0]:
        axis.set_ylabel("mean pass rate")
    for axis in (*axes[0, 3:], *axes[1, :3]):
        axis.set_xlabel("rollouts")
    bars = axes[1, 3]
    for place, method in enumerate(("uniform", "dynamic_sampling", "pools", "oracle")):
        value = found[f"vs_{method}"]
        mean, low, high = (value[key] ** (-1 if method == "oracle" else 1) for key in ("mean", "low", "high"))
        bars.barh(
            place, mean, color=COLOURS[method], alpha=0.8, xerr=[[mean - min(low, high)], [max(low, high) - mean]]
        )
        bars.text(0.05, place, method.replace("_", " "), va="center", color="white", fontsize=9)
    bars.axvline(1.0, color=COLOURS["ours"], lw=2.2)
    bars.set_title("rollouts needed, ours = 1 (all worlds)", fontsize=10)
    bars.invert_yaxis()
    bars.set_yticks([])
    bars.spines[["top", "right", "left"]].set_visible(False)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="upper center", ncols=5, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.95))
    figure.savefig(path, dpi=90)


def table(found: dict[str, Any]) -> str:
    """The figures as Markdown."""

    def cell(value: dict[str, float]) -> str:
        return f"{value['mean']:.2f} [{value['low']:.2f}, {value['high']:.2f}]"

    keys = ("vs_uniform", "vs_dynamic_sampling", "vs_pools", "vs_oracle", "informative_fraction")
    lines = ["| world | " + " | ".join(key.replace("_", " ") for key in keys) + " |", "|---" * (len(keys) + 1) + "|"]
    for name, row in [*found["worlds"].items(), ("**all**", found)]:
        lines.append(f"| {name} | " + " | ".join(cell(row[key]) for key in keys) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--runs", type=Path, help="keep every run in this file, and read those that are there")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--figure", help="write the curves to this file")
    options = parser.parse_args()
    found = measure(range(FIRST, FIRST + options.seeds), options.processes, options.runs)
    if options.figure:
        draw_figure(found, options.figure)
    del found["curves"]
    sys.stdout.write((json.dumps(found, indent=1) if options.json else table(found)) + "\n")


if __name__ == "__main__":
    main()
