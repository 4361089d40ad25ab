"""Progress: plain lines where there is no terminal, a panel where there is one."""

import io

from rich.console import Console

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


def test_a_panel_in_a_terminal() -> None:
    out = io.StringIO()
    with Progress(10, console=Console(file=out, width=120, force_terminal=True)) as progress:
        progress.show(STEP)
    shown = out.getvalue()
    assert "3 of 10" in shown and "▅" in shown and "1234" in shown
