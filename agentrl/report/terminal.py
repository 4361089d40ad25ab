"""Shows the progress of a run from its metric rows: a panel in a terminal, plain lines anywhere else."""

from __future__ import annotations

import sys
import time
from collections import deque
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from agentrl.metrics import Row, by_environment

BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: list[float], width: int = 40) -> str:
    """Return the last values as a row of bars between 0 and 1."""
    return "".join(BARS[min(7, max(0, int(value * 8)))] for value in values[-width:])


class Progress:
    """Use it as `with Progress(steps) as progress: progress.show(row)`; rows are what `Metrics.log` returned."""

    def __init__(self, steps: int, *, console: Console | None = None) -> None:
        self.steps = steps
        self.console = console or Console(file=sys.stderr)
        self._scores: deque[float] = deque(maxlen=200)
        self._seconds: deque[float] = deque(maxlen=20)
        self._row: Row = {}
        self._heldout = "–"
        self._note = ""
        self._live: Live | None = None

    def __enter__(self) -> Progress:
        if self.console.is_terminal:
            self._live = Live(self._panel(), console=self.console, refresh_per_second=4, transient=True)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()
            self._live = None

    def say(self, text: str) -> None:
        """Print a line that stays: stages, alarms, results."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def show(self, row: Row) -> None:
        """Show one row."""
        if row["kind"] == "eval":
            scores = {env: _interval(figures["pass@1"]) for env, figures in by_environment(row).items()}
            self._heldout = ", ".join(f"{env} {score}" for env, score in scores.items())
            for env, score in scores.items():
                self.say(f"{env}, {row['split']} tasks after step {row['step']} ({row['stage']}): pass@1 {score}")
        elif row["kind"] == "step":
            self._row = row
            self._scores.append(row.get("rollout/score") or 0.0)
            self._seconds.append(row.get("seconds") or 0.0)
            if self._live is None:
                self.say(self._line(row))
        elif row["kind"] == "alarm":
            self.say(f"alarm: {row['text']}")
        if self._live:
            self._live.update(self._panel())

    def _left(self) -> str:
        if not self._seconds:
            return "–"
        left = (self.steps - self._row.get("step", 0)) * sum(self._seconds) / len(self._seconds)
        return time.strftime("%H:%M:%S", time.gmtime(max(0.0, left)))

    def _line(self, row: Row) -> str:
        parts = [
            f"step {row['step']}/{self.steps}",
            f"score {row.get('rollout/score', 0.0):.3f}",
            f"informative {row.get('rollout/informative', 0.0):.2f}",
            f"loss {_number(row.get('learn/loss'))}",
            f"entropy {_number(row.get('learn/entropy'))}",
            f"{row.get('rollout/tokens_per_second', 0.0):.0f} tokens/s",
            f"{row.get('seconds', 0.0):.1f} s",
            f"left {self._left()}",
            *_players(row),
        ]
        return "  ".join(parts)

    def _panel(self) -> Table:
        row: dict[str, Any] = self._row
        table = Table.grid(padding=(0, 2))
        table.add_row("step", f"{row.get('step', 0)} of {self.steps}", "time left", self._left())
        table.add_row("score", f"{row.get('rollout/score', 0.0):.3f}", "", sparkline(list(self._scores)))
        table.add_row("held-out", self._heldout, "informative", f"{row.get('rollout/informative', 0.0):.2f}")
        speed = f"{row.get('rollout/tokens_per_second', 0.0):.0f}"
        table.add_row("tokens/s", speed, "entropy", _number(row.get("learn/entropy")))
        for text in _players(row):
            table.add_row("cluster", text, "", "")
        return table


def _interval(score: dict[str, float]) -> str:
    return f"{score['value']:.3f} [{score['low']:.3f}, {score['high']:.3f}]"


def _players(row: Row) -> list[str]:
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


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"
