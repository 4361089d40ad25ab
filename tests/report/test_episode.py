"""An episode as text."""

from agentrl.report.episode import show
from agentrl.types import Message, Outcome, Segment, Task, ToolCall, Trajectory, Verdict


def test_an_episode_is_shown_turn_by_turn() -> None:
    call = ToolCall(name="run", arguments={"command": "mv a b"})
    trajectory = Trajectory(
        task=Task(id="files/heldout/1/0", split="heldout", level=1, prompt="Move a to b."),
        group=0,
        index=0,
        seed=0,
        segments=(Segment([1, 2], [0, -1], [-1, 0], [0, 2]),),  # type: ignore[arg-type]
        messages=(
            Message(role="user", content="Move a to b."),
            Message(role="assistant", content="", tool_calls=(call,)),
            Message(role="tool", content="line one\nline two"),
            Message(role="assistant", content="done"),
        ),
        outcome=Outcome(ending="done", grade="graded", score=1.0),
        verdict=Verdict(score=1.0, evidence=("all is right",)),
    )
    assert show(trajectory).splitlines() == [
        "files/heldout/1/0",
        "     task │ Move a to b.",
        "   policy │ run(command='mv a b')",
        "     tool │ line one",
        "          │ line two",
        "   policy │ done",
        "   ending │ done, graded, score 1",
        "  verdict │ all is right",
    ]
