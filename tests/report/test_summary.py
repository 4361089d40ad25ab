"""What a run says at its end follows from its results."""

from pathlib import Path
from typing import Any

from agentrl.report.summary import closing


def evaluation(value: float, step: int) -> dict[str, Any]:
    return {"kind": "eval", "step": step, "eval/files/pass@1": {"value": value, "low": 0.0, "high": 1.0}}


def commands(*rows: dict[str, Any]) -> list[str]:
    lines = closing(Path("runs/a b"), 40, rows)
    return [line.strip().split("  ")[0] for line in lines[lines.index("next:") + 1 :]]


def test_what_to_do_next_follows_from_what_came_out() -> None:
    view, ev = "agentrl view 'runs/a b'", "agentrl eval 'runs/a b' --k 1,8"
    chat, export = "agentrl chat 'runs/a b'", "agentrl model export 'runs/a b' DIR"
    longer = "agentrl train 'runs/a b'/recipe.yaml --resume --set run.steps=80"
    assert commands() == [view, ev, chat, export]
    assert commands(evaluation(0.1, 0), evaluation(0.1, 40)) == [view, longer, ev]
    assert commands(evaluation(0.1, 0), evaluation(0.7, 40)) == [view, ev, chat, longer, export]
    assert commands(evaluation(0.1, 0), evaluation(0.97, 40)) == [view, ev, chat, export]


def test_levels_beyond_the_frontier_are_named() -> None:
    levels = {"1": 0.9, "2": 0.6, "3": 0.05, "4": 0.0}
    last = {**evaluation(0.4, 40), "eval/files/levels": levels, "eval/sql/pass@1": {"value": 0.9}}
    (line,) = [line for line in closing(Path("r"), 40, [evaluation(0.1, 0), last]) if "export" in line]
    assert (
        "it hardly ever solves levels 3, 4 of files: go on from DIR after an expert's demonstrations of all levels"
        in line
    )
    last["eval/files/levels"] = dict.fromkeys("1234", 0.05)  # a policy that can do nothing yet has no frontier
    assert not any("hardly" in line for line in closing(Path("r"), 40, [evaluation(0.1, 0), last]))


def test_alarms_come_first() -> None:
    alarms = [{"kind": "alarm", "step": step, "name": name} for step, name in ((3, "signal"), (9, "entropy"))]
    assert closing(Path("r"), 4, alarms)[0] == (
        "alarms: signal at step 3, 1 more; look at them before you trust the result"
    )
