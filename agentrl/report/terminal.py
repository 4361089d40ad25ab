"""Live progress of a run: a panel in a terminal, plain lines anywhere else. It only reads metric rows."""

from __future__ import annotations

import sys
import time
from collections import deque
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from agentrl.metrics import Row

BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: list[float], width: int = 40) -> str:
    """The last values as a row of bars between 0 and 1."""
    return "".join(BARS[min(7, max(0, int(value * 8)))] for value in values[-width:])


class Progress:
    """`with Progress(steps) as progress: progress.show(row)`; rows are what metrics.log returned."""

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
        """A line that stays: stages, alarms, results."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def show(self, row: Row) -> None:
        """Take in one row and show it."""
        if row["kind"] == "eval":
            score = row["pass@1"]
            self._heldout = f"{score['value']:.3f} [{score['low']:.3f}, {score['high']:.3f}]"
            self.say(f"{row['split']} tasks after step {row['step']} ({row['stage']}): pass@1 {self._heldout}")
        elif row["kind"] == "step":
            self._row = row
            self._scores.append(row.get("score") or 0.0)
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
            f"score {row.get('score', 0.0):.3f}",
            f"informative {row.get('informative', 0.0):.2f}",
            f"loss {_number(row.get('loss'))}",
            f"entropy {_number(row.get('entropy'))}",
            f"{row.get('tokens_per_s', 0.0):.0f} tokens/s",
            f"{row.get('seconds', 0.0):.1f} s",
            f"left {self._left()}",
        ]
        return "  ".join(parts)

    def _panel(self) -> Table:
        row: dict[str, Any] = self._row
        table = Table.grid(padding=(0, 2))
        table.add_row("step", f"{row.get('step', 0)} of {self.steps}", "time left", self._left())
        table.add_row("score", f"{row.get('score', 0.0):.3f}", "", sparkline(list(self._scores)))
        table.add_row("held-out", self._heldout, "informative", f"{row.get('informative', 0.0):.2f}")
        table.add_row("tokens/s", f"{row.get('tokens_per_s', 0.0):.0f}", "entropy", _number(row.get("entropy")))
        return table


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"
