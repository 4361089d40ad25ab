"""Rollouts a simulated learner needs to reach a target, under our curriculum and others.

    python -m benchmarks.curriculum [--seeds 10] [--processes 2] [--runs FILE] [--json] [--figure docs/curriculum.png]

The learner has one skill (a logit) for each cluster of tasks, and for each task what it knows of that one by heart; a
task is passed with probability sigmoid(skill + by heart - difficulty). Both move by the policy gradient alone: sampled
binary rewards, advantages from agentrl.learn.advantage, a mean over the groups that are trained on, and a step like
Adam's, whose size hardly depends on how many of these groups carry a signal. Success is measured on tasks that are
never drawn, so what is known by heart does not count.

Every method trains on rounds of 32 groups that carry a signal: those without one are dropped and others drawn in their
place, as the recipe does by default. Only `uniform` keeps all; its rounds are three times as large, so that its first
steps hold as many groups with a signal as the others'. `small uniform` keeps rounds of 32, as one would who only turns
the filter off: a step then costs a third, and teaches less. Every rollout that begins counts as spent. All methods have
the same learning rate. With --runs every run is kept in that file as it ends, and read instead of repeated next time.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.curriculum.baselines import Levels, Pools, Uniform
from agentrl.curriculum.group_filter import GroupFilter
from agentrl.curriculum.group_stats import Choice, GroupStats
from agentrl.curriculum.learnability import Learnability
from agentrl.curriculum.sampler import Chooser
from agentrl.curriculum.tasks import Source, Tasks
from agentrl.recipe import GroupFilterSection, LearnabilityCurriculum, LevelsCurriculum, PoolsCurriculum
from agentrl.statistics import bootstrap
from benchmarks._simulated import GROUP, WORLDS, Floats, Ints, Learner, Rollouts, Simulated, World, number_of

ROUND = 32
"""Groups with a signal that a step is made of."""
LIMIT = 60_000
"""Groups after which a run is given up; it then counts as that many."""
METHODS: dict[str, Callable[[Tasks], Chooser] | None] = {
    "ours": lambda tasks: Learnability(LearnabilityCurriculum(), tasks),
    "uniform": Uniform,
    "small_uniform": Uniform,
    "dynamic_sampling": Uniform,
    "pools": lambda tasks: Pools(PoolsCurriculum(type="pools"), tasks),
    "levels": lambda tasks: Levels(LevelsCurriculum(type="levels"), tasks),
    "oracle": None,
}
"""The oracle knows every pass rate, and takes the tasks with the largest p(1-p)."""
FIRST = 300
"""The first seed. The worlds and the learning rate were settled on seeds 0 to 3."""
POINTS = 100
"""Points of a curve that are kept."""


class Method:
    """A chooser behind the array interface of the simulation."""

    def __init__(self, name: str, world: World, learner: Learner, seed: int) -> None:
        self._environment = Simulated(world, learner.tag)
        tasks = Tasks(Source(name="simulated", environment=self._environment), seed)
        self._rng = np.random.default_rng([seed, 1])
        self._learner = learner
        make = METHODS[name]
        self._chooser = make(tasks) if make else None
        self.dynamic = not name.endswith("uniform")
        self.round = 3 * ROUND if name == "uniform" else ROUND
        self.group_filter = GroupFilter(GroupFilterSection(dynamic_sampling=self.dynamic), max_tokens=1024)
        self._choices: list[Choice] = []
        self._seen: list[GroupStats] = []

    def draw(self, number: int, taken: Sequence[int]) -> Ints:
        """That many tasks."""
        if self._chooser is None:
            p = self._learner.rates()
            worth = p * (1 - p) + 1e-9 * self._rng.random(len(p))
            worth[list(taken)] = -1.0  # the same task twice under one policy teaches little
            return np.argpartition(-worth, number)[:number]
        self._choices = [self._chooser.choose(self._rng) for _ in range(number)]
        return np.array([number_of(choice.level, choice.index) for choice in self._choices])

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

    def observe(self, groups: Rollouts, version: int) -> None:
        """What came of the last draw; the sampler learns from it at once in the first step, later with the whole step
        (`settle`)."""
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
            self._seen.append(seen)
        if version == 0:
            self.settle()

    def settle(self) -> None:
        """Learn from what was observed."""
        for seen in self._seen:
            assert self._chooser is not None
            self._chooser.learn(seen)
        self._seen.clear()


@dataclass(frozen=True, slots=True)
class Run:
    """One run of one method."""

    rollouts: int
    steps: int
    reached: bool
    informative: float
    """Share of drawn groups whose scores differ, after the first fifth of the run."""
    curve: list[tuple[int, float]]


def run(world: World, method: str, seed: int) -> Run:
    """Train until the target is reached."""
    # The same world and luck of the draw for every method.
    learner = Learner(world, np.random.default_rng([seed, 0]))
    chooser = Method(method, world, learner, seed)
    spent = 0
    shares: list[tuple[int, int]] = []
    curve: list[tuple[int, float]] = []
    while True:
        curve.append((spent, learner.success()))
        if curve[-1][1] >= world.target or spent >= LIMIT * GROUP:
            break
        kept: list[tuple[Ints, Floats]] = []
        number, drawn, informative = 0, 0, 0
        taken: list[int] = []
        while number < chooser.round and (drawn == 0 or chooser.group_filter.may_refill(chooser.round, drawn)):
            groups = chooser.spare(learner.roll_out(chooser.draw(chooser.round - number, taken)))
            chooser.observe(groups, len(shares))
            drawn += len(groups.tasks)
            spent += int(groups.count.sum())
            informative += int(groups.informative.sum())
            taken += groups.tasks.tolist()
            keep = groups.informative | (not chooser.dynamic)
            kept.append((groups.tasks[keep], groups.gradient[keep]))
            number += int(keep.sum())
        chooser.settle()
        learner.step(*map(np.concatenate, zip(*kept, strict=True)))
        shares.append((informative, drawn))
    late = shares[len(shares) // 5 :]
    fraction = sum(a for a, _ in late) / max(1, sum(b for _, b in late))
    reached = curve[-1][1] >= world.target
    return Run(spent, len(shares), reached, fraction, [*curve[:: max(1, len(curve) // POINTS)], curve[-1]])


Job = tuple[int, str, int]
"""World, method and seed."""


def _job(job: Job) -> tuple[Job, Run]:
    world, method, seed = job
    return job, run(WORLDS[world], method, seed)


def collect(
    jobs: Sequence[Job], processes: int, kept: Path | None, play: Callable[[Job], tuple[Job, Run]] = _job
) -> dict[Job, Run]:
    """Every run: out of the file where it is there, otherwise made and added to it."""
    found: dict[Job, Run] = {}
    if kept and kept.exists():
        for line in kept.read_text(encoding="utf-8").splitlines():
            job, fields = json.loads(line)
            found[job[0], job[1], job[2]] = Run(**fields)
    missing = [job for job in jobs if job not in found]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for job, made in pool.imap_unordered(play, missing):
            found[job] = made
            if kept:
                with kept.open("a", encoding="utf-8") as file:
                    file.write(json.dumps([job, asdict(made)]) + "\n")
    return {job: found[job] for job in jobs}


def interval(values: Floats) -> tuple[float, float, float]:
    """Mean over worlds (columns) and seeds (rows), with a 95 % bootstrap interval over seeds."""
    found = bootstrap(np.nanmean(values, axis=1).tolist())
    return found.value, found.low, found.high


def summarise(logs: Floats, areas: Floats) -> dict[str, Any]:
    """By method, what it needs and reaches beside ours; arrays of methods × seeds × worlds."""
    found: dict[str, Any] = {}
    for number, method in enumerate(METHODS):
        if method != "ours" and not np.isnan(logs[number]).all():
            ratio = [math.exp(value) for value in interval(logs[number] - logs[0])]
            found[method] = {"rollouts": ratio, "area": interval(areas[number] - areas[0])}
    return found


def along(curve: Sequence[tuple[int, float]], spent: Floats) -> Floats:
    """Success after that many rollouts."""
    points = np.array(curve)
    return np.asarray(np.interp(spent, points[:, 0], points[:, 1]))


def measure(seeds: Sequence[int], processes: int, kept: Path | None) -> dict[str, Any]:
    """Every method in every world."""
    worlds = list(enumerate(WORLDS))
    jobs = [(n, m, s) for s in seeds for n, world in worlds for m in METHODS if m != "levels" or world.levels]
    runs = collect(jobs, processes, kept)
    logs, areas = (np.full((len(METHODS), len(seeds), len(WORLDS)), np.nan) for _ in range(2))
    for (number, method, seed), made in runs.items():
        at = list(METHODS).index(method), seeds.index(seed), number
        end = min(r.rollouts for (n, m, s), r in runs.items() if (n, s) == (number, seed) and m != "oracle")
        logs[at], areas[at] = math.log(made.rollouts), along(made.curve, np.linspace(0, end, 400)).mean()
    found: dict[str, Any] = {"all": summarise(logs, areas), "worlds": {}, "means": {}, "curves": {}}
    for number, world in worlds:
        found["worlds"][world.name] = summarise(logs[:, :, [number]], areas[:, :, [number]])
        means, curves = found["means"].setdefault(world.name, {}), found["curves"].setdefault(world.name, {})
        for method in ("ours", *found["worlds"][world.name]):
            of_method = [runs[number, method, seed] for seed in seeds]
            for key in ("rollouts", "steps", "informative"):
                means.setdefault(method, {})[key] = float(np.mean([getattr(made, key) for made in of_method]))
            spent = np.linspace(0, means[method]["rollouts"], POINTS)
            curves[method] = spent, np.mean([along(made.curve, spent) for made in of_method], axis=0)
    found["unreached"] = [job for job, made in runs.items() if not made.reached]
    found["seeds"] = len(seeds)
    return found


COLOURS = dict(
    zip(METHODS, ("tab:blue", "tab:gray", "tab:purple", "tab:orange", "tab:green", "tab:red", "black"), strict=True)
)


def draw_figure(found: dict[str, Any], path: str) -> None:
    """Success against rollouts in every world, and over all worlds what others need."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 3, figsize=(13, 7))
    for axis, (name, curves) in zip(axes.flat, found["curves"].items(), strict=False):
        for method, curve in curves.items():
            line = {"lw": 2.6 if method == "ours" else 1.4, "ls": "--" if method == "oracle" else "-"}
            axis.plot(*curve, label=method.replace("_", " "), color=COLOURS[method], **line)
        axis.set(title=name, xlim=(0, 2.5 * curves["ours"][0][-1]), xlabel="rollouts", ylabel="success, held out")
        axis.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:.0f}k")
    bars = axes.flat[-1]
    for place, (method, value) in enumerate(found["all"].items()):
        mean, low, high = value["rollouts"]
        bars.barh(place, mean, color=COLOURS[method], alpha=0.8, xerr=[[mean - low], [high - mean]])
    bars.set_yticks(range(len(found["all"])), [method.replace("_", " ") for method in found["all"]])
    bars.axvline(1.0, color=COLOURS["ours"], lw=2.6)
    bars.set(title="rollouts needed, all worlds (ours = 1)")
    bars.invert_yaxis()
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="upper center", ncols=len(METHODS), frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.95))
    figure.savefig(path, dpi=90)


def table(found: dict[str, Any]) -> str:
    """The figures as Markdown."""
    lines, others = list[str](), list(METHODS)[1:]
    for key, form in (("rollouts", "{:.2f} [{:.2f}, {:.2f}]"), ("area", "{:+.3f} [{:+.3f}, {:+.3f}]")):
        lines.append(f"| {key} | " + " | ".join(method.replace("_", " ") for method in others) + " |")
        lines.append("|---" * len(METHODS) + "|")
        for name, row in [*found["worlds"].items(), ("**all**", found["all"])]:
            cells = [form.format(*row[method][key]) if method in row else "" for method in others]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=10)
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
