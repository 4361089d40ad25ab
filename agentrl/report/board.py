"""Draws the live display of a run: phase, step, score and its trend, held-out success, speed, memory, time left."""

from __future__ import annotations

import os
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from agentrl.metrics import Row, by_environment

BARS = "▁▂▃▄▅▆▇█"
TREND = 10
"""Steps of which the newest mean is compared with the mean of as many before."""
NARROW = 72
"""Columns below which the smaller figures stand two in a row instead of three."""


@dataclass(slots=True)
class State:
    """What the display knows of a run so far."""

    name: str = ""
    steps: int = 0
    evaluate_every: int = 0
    began: float = field(default_factory=time.monotonic)
    phase: str = "loading"
    since: float = field(default_factory=time.monotonic)
    """When the phase began."""
    done: int | None = None
    """Of the phase: how much of `total` is done."""
    total: int | None = None
    row: Row = field(default_factory=dict)
    """The newest step's; empty until there is one."""
    scores: deque[float] = field(default_factory=lambda: deque(maxlen=200))
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=20))
    heldout: dict[str, list[tuple[int, dict[str, float]]]] = field(default_factory=dict)
    """By environment: pass@1 of each evaluation, with its step."""
    evaluation_seconds: float = 0.0
    alarms: list[str] = field(default_factory=list)

    def add(self, row: Row) -> None:
        """Take in one metric row."""
        if row["kind"] == "step":
            self.row = row
            self.scores.append(row.get("rollout/score") or 0.0)
            self.seconds.append(row.get("seconds") or 0.0)
        elif row["kind"] == "eval":
            self.evaluation_seconds = row.get("seconds") or 0.0
            for env, figures in by_environment(row).items():
                self.heldout.setdefault(env, []).append((row["step"], figures["pass@1"]))
        elif row["kind"] == "alarm":
            self.alarms.append(row["name"])

    def left(self) -> float | None:
        """Return about how many seconds remain: the steps, and the evaluations among them."""
        if not self.seconds:
            return None
        step = int(self.row["step"])
        ahead = self.steps - step
        evaluations = (self.steps // self.evaluate_every - step // self.evaluate_every) if self.evaluate_every else 0
        seconds: float = ahead * sum(self.seconds) / len(self.seconds) + evaluations * self.evaluation_seconds
        return max(0.0, seconds)


def sparkline(values: list[float], width: int = 40) -> str:
    """Return the last values as a row of bars between 0 and 1."""
    return "".join(BARS[min(7, max(0, int(value * 8)))] for value in values[-width:])


def trend(scores: list[float]) -> str:
    """Say in a word where the score goes: the mean of the newest steps against that of the steps before."""
    count = min(TREND, len(scores) // 2)
    if count < 2:
        return ""
    change = sum(scores[-count:]) / count - sum(scores[-2 * count : -count]) / count
    word = "steady" if abs(change) < 0.02 else ("rising" if change > 0 else "falling")
    return f"{word} ({change:+.3f} over {count} steps)"


def clock(seconds: float | None) -> str:
    """Write a duration as hours, minutes and seconds."""
    if seconds is None:
        return "–"
    whole = int(seconds)
    return f"{whole // 3600:02d}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def number(value: float | None) -> str:
    """Write a figure with four digits; a dash where there is none."""
    return "–" if value is None else f"{value:.4g}"


def interval(score: dict[str, float]) -> str:
    """Write a figure with its interval."""
    return f"{score['value']:.3f} [{score['low']:.3f}, {score['high']:.3f}]"


def players(row: Row) -> list[str]:
    """Say how the players and servers of a cluster fare, where there are any."""
    if "rollout/players" not in row:
        return []
    lost, gone, repeated = (row[f"rollout/{name}"] for name in ("players_lost", "episodes_lost", "episodes_repeated"))
    trouble = f", {lost} lost, {gone} episodes lost, {repeated} repeated" if lost or gone or repeated else ""
    texts = [f"players {row['rollout/players']}{trouble}"]
    if "rollout/servers" in row:
        dead = row["rollout/servers_lost"]
        texts.append(f"servers {row['rollout/servers']}" + (f", {dead} lost" if dead else ""))
    return texts


def memory(row: Row) -> str:
    """Return the accelerator's peak memory, or on a CPU what this process holds now."""
    if row.get("learn/memory_gib"):
        return f"{row['learn/memory_gib']:.1f} GiB (GPU)"
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return "–"
    return f"{pages * os.sysconf('SC_PAGE_SIZE') / 2**30:.1f} GiB"


class Board:
    """The display of a state; drawn again whenever rich refreshes it, so that its clocks go on."""

    def __init__(self, state: State) -> None:
        self.state = state

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        state, row = self.state, self.state.row
        width = options.max_width
        step = row.get("step", 0)
        head = Table.grid(expand=True, padding=(0, 1))
        head.add_column(ratio=1)
        head.add_column(no_wrap=True)
        passed = clock(time.monotonic() - state.began)
        # Without colours only the part that is done is drawn.
        times = f"step {step} of {state.steps} · {passed} · left {clock(state.left())}"
        head.add_row(ProgressBar(total=max(1, state.steps), completed=step), Text(times))
        main = Table.grid(padding=(0, 2))
        main.add_column(style="dim", no_wrap=True)
        main.add_column(overflow="ellipsis", no_wrap=True)
        main.add_row("phase", Text(self._phase()))
        main.add_row("score", self._score(width - 18, "utf" in console.encoding.lower()))
        for place, env in enumerate(list(state.heldout) or [""]):
            main.add_row("" if place else "held-out", Text(self._heldout(env, state.heldout.get(env, []))))
        if state.alarms:
            count = f"{len(state.alarms)}: " if len(state.alarms) > 1 else ""
            main.add_row("alarms", Text(count + ", ".join(state.alarms), style="bold red"))
        for text in players(row):
            main.add_row("cluster", Text(text))
        small = Table.grid(padding=(0, 2))
        columns = 2 if width < NARROW else 3
        for _ in range(columns):
            small.add_column(style="dim", no_wrap=True)
            small.add_column(no_wrap=True, min_width=10)
        cells = self._figures()
        for at in range(0, len(cells), columns):
            small.add_row(*[part for cell in cells[at : at + columns] for part in cell])
        title = Text(state.name or "run", style="bold")
        yield Panel(Group(head, main, small), title=title, title_align="left", width=min(width, 110))

    def _phase(self) -> str:
        state = self.state
        done = "" if state.done is None else f": {state.done}"
        of = f" of {state.total}" if done and state.total else ""
        return f"{state.phase}{done}{of} ({clock(time.monotonic() - state.since)})"

    def _score(self, room: int, bars: bool) -> Text:
        scores = list(self.state.scores)
        if not scores:
            return Text("– (no step of RL yet)")
        words = trend(scores)
        line = sparkline(scores, max(0, min(40, room - len(words) - 10))) if bars else ""
        style = "green" if words.startswith("rising") else ("red" if words.startswith("falling") else "")
        return Text.assemble((f"{scores[-1]:.3f}", "bold"), "  ", (line, "cyan"), "  " if line else "", (words, style))

    def _heldout(self, env: str, curve: list[tuple[int, dict[str, float]]]) -> str:
        if not curve:
            return "–"
        step, newest = curve[-1]
        before = f"{curve[0][1]['value']:.3f} → " if len(curve) > 1 else ""
        return f"{env} {before}{interval(newest)} after step {step}"

    def _figures(self) -> list[tuple[str, str]]:
        row = self.state.row
        if not row:
            return [("memory", memory(row))]
        waited, whole = row.get("rollout/round_seconds"), row.get("seconds")
        idle = min(1.0, waited / whole) if waited is not None and whole else None
        ages = row.get("rollout/staleness_mean", 0.0), row.get("rollout/staleness_max", 0)
        return [
            ("informative", f"{row.get('rollout/informative', 0.0):.2f}"),
            ("tokens/s", f"{row.get('rollout/tokens_per_second', 0.0):.0f}"),
            ("learner idle", "–" if idle is None else f"{idle:.0%}"),
            (
                "staleness",
                f"{ages[0]:.1f}, max {ages[1]:.0f}",
            ),
            ("entropy", number(row.get("learn/entropy"))),
            ("memory", memory(row)),
        ]
