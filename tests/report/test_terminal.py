"""Progress: plain lines where there is no terminal, a panel where there is one."""

import io
import re
from typing import Any

import pytest
from rich.console import Console

from agentrl.report import board
from agentrl.report.board import Board, State, trend
from agentrl.report.terminal import Progress, sparkline

STEP = {
    "kind": "step", "step": 3, "rollout/score": 0.5, "rollout/informative": 0.75, "learn/loss": 0.1,
    "learn/entropy": 1.5, "rollout/tokens_per_second": 1234.0, "seconds": 2.0,
}  # fmt: skip
EVAL = {
    "kind": "eval", "step": 3, "stage": "rl", "split": "heldout",
    "eval/files/pass@1": {"value": 0.4, "low": 0.3, "high": 0.5},
    "eval/sql/pass@1": {"value": 0.1, "low": 0.0, "high": 0.2},
}  # fmt: skip


def test_a_sparkline_shows_values_between_0_and_1() -> None:
    assert sparkline([0.0, 0.5, 1.0, -1.0, 2.0]) == "▁▅█▁█"


def test_plain_lines_without_a_terminal() -> None:
    out = io.StringIO()
    with Progress(10, console=Console(file=out, width=200)) as progress:
        progress.show(STEP)
        progress.show(EVAL)
        progress.show({"kind": "alarm", "step": 3, "name": "x", "text": "entropy fell"})
    assert out.getvalue().splitlines() == [
        "step 3/10  score 0.500  informative 0.75  loss 0.1  entropy 1.5  1234 tokens/s  2.0 s  left 00:00:14",
        "files, heldout tasks after step 3 (rl): pass@1 0.400 [0.300, 0.500]",
        "sql, heldout tasks after step 3 (rl): pass@1 0.100 [0.000, 0.200]",
        "alarm: entropy fell",
    ]


def test_a_line_says_how_the_players_and_servers_of_a_cluster_fare() -> None:
    out = io.StringIO()
    names = ("players_lost", "episodes_lost", "episodes_repeated", "servers_lost")
    fine = STEP | {"rollout/players": 4} | dict.fromkeys([f"rollout/{name}" for name in names], 0)
    lost = {"rollout/players": 3, "rollout/players_lost": 1, "rollout/episodes_lost": 9, "rollout/episodes_repeated": 8}
    with Progress(10, console=Console(file=out, width=200)) as progress:
        progress.show(fine)
        progress.show(fine | lost)
        progress.show(fine | {"rollout/servers": 2})
        progress.show(fine | lost | {"rollout/servers": 1, "rollout/servers_lost": 1})
    told = [line.partition("left ")[2].partition("  ")[2] for line in out.getvalue().splitlines()]
    assert told == [
        "players 4",
        "players 3, 1 lost, 9 episodes lost, 8 repeated",
        "players 4  servers 2",
        "players 3, 1 lost, 9 episodes lost, 8 repeated  servers 1, 1 lost",
    ]


FULL = STEP | {
    "rollout/round_seconds": 1.5, "rollout/staleness_mean": 0.25, "rollout/staleness_max": 1,
}  # fmt: skip


def terminal(width: int = 80, **options: Any) -> Console:
    return Console(file=io.StringIO(), width=width, force_terminal=True, **options)


def drawn(state: State, width: int = 80) -> list[str]:
    """Draw the board as NO_COLOR shows it."""
    console = terminal(width, no_color=True, color_system=None)
    console.print(Board(state))
    assert isinstance(console.file, io.StringIO)
    return [re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip() for line in console.file.getvalue().splitlines()]


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop the clock, and say how much memory there is."""
    monkeypatch.setattr("agentrl.report.board.time.monotonic", lambda: 100.0)
    monkeypatch.setattr(board, "memory", lambda row: "1.5 GiB")


def test_the_board_at_eighty_columns(still: None) -> None:
    state = State(name="quick", steps=10, evaluate_every=5, began=40.0)
    for number in range(1, 5):
        state.add(FULL | {"step": number, "rollout/score": number / 8})
    state.add(EVAL | {"step": 0, "seconds": 7.0})
    state.add(EVAL | {"seconds": 7.0, "eval/files/pass@1": {"value": 0.6, "low": 0.5, "high": 0.7}})
    state.add({"kind": "alarm", "step": 3, "name": "signal", "text": "no group differs"})
    state.phase, state.since, state.done, state.total = "rollouts", 95.0, 7, 16
    assert drawn(state) == [
        "╭─ quick ──────────────────────────────────────────────────────────────────────╮",
        "│ ━━━━━━━━━━━━━━                       step 4 of 10 · 00:01:00 · left 00:00:26 │",
        "│ phase     rollouts: 7 of 16 (00:00:05)                                       │",
        "│ score     0.500  ▂▃▄▅  rising (+0.250 over 2 steps)                          │",
        "│ held-out  files 0.400 → 0.600 [0.500, 0.700] after step 3                    │",
        "│           sql 0.100 → 0.100 [0.000, 0.200] after step 3                      │",
        "│ alarms    signal                                                             │",
        "│ informative  0.75        tokens/s  1234        learner idle  75%             │",
        "│ staleness    0.2, max 1  entropy   1.5         memory        1.5 GiB         │",
        "╰──────────────────────────────────────────────────────────────────────────────╯",
    ]


def test_before_the_first_step_the_board_claims_no_score(still: None) -> None:
    state = State(name="quick", steps=40, began=100.0)
    state.phase, state.since, state.done, state.total = "warm start", 88.0, 25, 256
    assert drawn(state) == [
        "╭─ quick ──────────────────────────────────────────────────────────────────────╮",
        "│                                             step 0 of 40 · 00:00:00 · left – │",
        "│ phase     warm start: 25 of 256 (00:00:12)                                   │",
        "│ score     – (no step of RL yet)                                              │",
        "│ held-out  –                                                                  │",
        "│ memory  1.5 GiB                                                              │",
        "╰──────────────────────────────────────────────────────────────────────────────╯",
    ]


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_the_board_fits_any_width(still: None, width: int) -> None:
    state = State(name="a-rather-long-name-of-a-run", steps=100_000, evaluate_every=5)
    for number in range(300):
        state.add(FULL | {"step": number, "rollout/score": 0.5})
    state.add(EVAL)
    assert {len(line) for line in drawn(state, width)} == {min(width, 110)}


def test_the_board_stays_and_the_summary_stands_below_it() -> None:
    console = terminal()
    with Progress(10, name="quick", console=console) as progress:
        progress.phase("rollouts", 0, 8)
        progress.advance()
        progress.show(STEP)
        progress.phase("done")
        progress.settle()
        progress.say("the summary")
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "1234 tokens/s" not in shown  # a step is on the board, not also a line
    assert shown.rindex("╰──") < shown.rindex("the summary")
    assert not shown[shown.rindex("╰──") :].count("\x1b[2K")  # nothing was wiped after the last frame


def test_quiet_shows_results_and_verbose_shows_phases() -> None:
    lines = {}
    for show in ("quiet", "normal", "verbose"):
        out = io.StringIO()
        with Progress(10, show=show, console=Console(file=out, width=200)) as progress:
            progress.phase("learning")
            progress.say("tool calls: hermes")
            progress.show(STEP)
            progress.show(EVAL)
            progress.say("the summary", always=True)
        lines[show] = [line.split(" ")[0] for line in out.getvalue().splitlines()]
    assert lines == {
        "quiet": ["files,", "sql,", "the"],
        "normal": ["tool", "step", "files,", "sql,", "the"],
        "verbose": ["phase:", "tool", "step", "files,", "sql,", "the"],
    }


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    console = terminal(200)
    with Progress(10, console=console) as progress:
        progress.show(STEP)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().startswith("step 3/10  score 0.500")


def test_a_trend_needs_a_few_steps() -> None:
    assert [trend([0.5] * n) for n in (0, 3, 4)] == ["", "", "steady (+0.000 over 2 steps)"]
    assert trend([0.5, 0.5, 0.1, 0.1]) == "falling (-0.400 over 2 steps)"
