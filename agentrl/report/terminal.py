"""Shows the progress of a run from its metric rows: a live board in a terminal, plain lines anywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Literal

from rich.console import Console
from rich.live import Live

from agentrl.metrics import Row, by_environment
from agentrl.report.board import Board, State, clock, interval, number, players, sparkline

__all__ = ["Progress", "Show", "sparkline"]
Show = Literal["quiet", "normal", "verbose"]
"""How much is shown. quiet: results, alarms and the summary; normal: stages and steps, in a terminal the board;
verbose: also each phase as it begins, and in a terminal the steps as lines above the board."""


class Progress:
    """Use it as `with Progress(steps) as progress: progress.show(row)`; rows are what `Metrics.log` returned."""

    def __init__(
        self,
        steps: int,
        *,
        name: str = "",
        evaluate_every: int = 0,
        show: Show = "normal",
        console: Console | None = None,
    ) -> None:
        self.console = console or Console(file=sys.stderr)
        self.state = State(name=name, steps=steps, evaluate_every=evaluate_every)
        self._show = show
        self._live: Live | None = None

    def __enter__(self) -> Progress:
        if self.console.is_terminal and not self.console.is_dumb_terminal and self._show != "quiet":
            self._live = Live(
                Board(self.state),
                console=self.console,
                refresh_per_second=2,
                redirect_stdout=sys.stdout.isatty(),
                vertical_overflow="crop",
            )
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.settle()

    def settle(self) -> None:
        """Leave the board as it is now; what is said from here on stands below it."""
        if self._live:
            self._live.stop()
            self._live = None

    def say(self, text: str, *, always: bool = False) -> None:
        """Print a line that stays; `always`: also where little is to be shown."""
        if always or self._show != "quiet":
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def detail(self, text: str) -> None:
        """Print a line about what the board shows already, where there is none or every step is to be told."""
        if self._live is None or self._show == "verbose":
            self.say(text)

    def phase(self, name: str, done: int | None = None, total: int | None = None) -> None:
        """Say what the run is doing now, and how far it is."""
        if name != self.state.phase:
            self.state.since = time.monotonic()
            if self._show == "verbose":
                self.say(f"phase: {name}")
        self.state.phase, self.state.done, self.state.total = name, done, total

    def recall(self, rows: Iterable[Row]) -> None:
        """Take in what a run that is resumed had reached."""
        for row in rows:
            self.state.add(row)

    def advance(self) -> None:
        """Count one more of the phase's parts."""
        if self.state.done is not None:
            self.state.done += 1

    def show(self, row: Row) -> None:
        """Show one row."""
        self.state.add(row)
        if row["kind"] == "eval":
            for env, figures in by_environment(row).items():
                score = interval(figures["pass@1"])
                where = f"{env}, {row['split']} tasks after step {row['step']} ({row['stage']})"
                lost = figures.get("ungraded", 0)
                without = f"; {lost} of {figures['tries']} tries failed for reasons outside the policy" if lost else ""
                self.say(f"{where}: pass@1 {score}{without}", always=True)
        elif row["kind"] == "step":
            self.detail(self._line(row))
        elif row["kind"] == "alarm":
            self.say(f"alarm: {row['text']}", always=True)
        if self._live:
            self._live.refresh()

    def _line(self, row: Row) -> str:
        parts = [
            f"step {row['step']}/{self.state.steps}",
            f"score {row.get('rollout/score', 0.0):.3f}",
            f"informative {row.get('rollout/informative', 0.0):.2f}",
            f"loss {number(row.get('learn/loss'))}",
            f"entropy {number(row.get('learn/entropy'))}",
            f"{row.get('rollout/tokens_per_second', 0.0):.0f} tokens/s",
            f"{row.get('seconds', 0.0):.1f} s",
            f"left {clock(self.state.left())}",
            *players(row),
        ]
        return "  ".join(parts)
