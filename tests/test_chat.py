"""`agentrl chat`: the policy's calls are carried out in a real sandbox, lines come from pipes and terminals alike."""

import asyncio
import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentrl import chat, initial_policy
from agentrl.cli import main
from agentrl.envs import load
from agentrl.envs.task_check import task_of
from agentrl.learn.model import scratch_tokenizer
from agentrl.rollout.render import Renderer
from agentrl.rollout.request import EnvRuntime
from agentrl.rollout.scripted import ScriptedEngine
from agentrl.sandboxes import load as load_sandbox
from agentrl.sandboxes.pool import Pool
from agentrl.types import ToolCall
from tests.processes import interrupted_at_its_prompt

RECIPE = {
    "run": {"name": "c", "threads": 1},
    "model": {"type": "scratch", "layers": 1, "width": 32, "heads": 2, "vocabulary": 300, "context": 320},
    "envs": [{"name": "files", "levels": [1]}],
    "rollout": {"max_tokens": 8},
}


@contextmanager
def talking(actions: list[ToolCall | str], *, env: bool = True) -> Iterator[tuple[chat.Talk, list[str]]]:
    """Open a conversation with a policy that acts by a script; its tokens and its sandbox are real."""
    said: list[str] = []
    renderer = Renderer(scratch_tokenizer(["move a file"] * 9, 300))
    pool = Pool(load_sandbox("namespace")())
    try:
        yield (
            chat.Talk(
                policy=initial_policy.PolicyModel(None, None, renderer, 4096, None),
                engine=ScriptedEngine(renderer, actions),  # type: ignore[arg-type]
                runtime=EnvRuntime(name="files", make=load("files"), boxes=pool) if env else None,
                level=1,
                say=said.append,
            ),
            said,
        )
    finally:
        pool.close()


def test_calls_are_carried_out_in_a_sandbox_and_the_result_is_graded() -> None:
    task = task_of(load("files")(), "heldout", 1, 0)
    expert: Any = load("files")().expert(task)
    with talking([*expert, ToolCall(name="run", arguments={"command": "ls; printf 'a\\033[2Jb'"}), "seen"]) as (
        talk,
        said,
    ):

        async def conversation() -> None:
            await talk.begin()
            await talk.send(task.prompt)
            roles = [message.role for message in talk.messages]
            assert roles == ["system", "user", "assistant", "tool", "assistant"]
            await talk.send("what is there now?")
            await talk.grade()
            await talk.end()

        asyncio.run(conversation())
    assert said[0] == f"[task {task.id}] {task.prompt}"
    assert said[1].startswith("[policy] run({")
    assert said[2] == "[run] <out></out>"
    assert said[3] == "[policy] done"
    assert said[4].startswith("[policy] run({")
    assert "moon.csv" in said[5] and "\x1b" not in said[5]
    assert said[6:8] == ["[policy] seen", "[grade] score 1"]
    assert said[-1].startswith("[task files/heldout/1/1]")  # the next task follows


def test_without_an_environment_a_call_is_not_carried_out() -> None:
    with talking([ToolCall(name="run", arguments={"command": "true"}), "hello"], env=False) as (talk, said):

        async def conversation() -> None:
            await talk.begin()
            await talk.send("hi")
            await talk.send("again")
            await talk.grade()

        asyncio.run(conversation())
        assert [(m.role, m.tool_calls) for m in talk.messages] == [
            ("user", ()),
            ("assistant", ()),
            ("user", ()),
            ("assistant", ()),
        ]
    assert said[1] == "[chat] it called a tool, but there is no environment; name one with --env"
    assert said[2] == "[policy] hello"
    assert said[3] == "[chat] there is nothing to grade without an environment; name one with --env"


def test_a_conversation_that_fills_the_context_says_so() -> None:
    with talking(["x"], env=False) as (talk, said):
        talk.policy = initial_policy.PolicyModel(None, None, talk.policy.renderer, 4, None)
        asyncio.run(talk.send("hi"))
    assert said == ["[chat] the conversation fills the model's 4 tokens; /new begins again"]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(RECIPE))
    return path


def test_lines_come_from_a_pipe_until_it_ends(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("/tools\n/nonsense\n\n/new\n"))
    with pytest.raises(SystemExit) as end:
        main(["chat", str(recipe)])
    out, err = capsys.readouterr()
    assert (end.value.code or 0, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == f"{recipe}: files, namespace sandboxes; /help says what you can do"
    assert lines[1].startswith("[task files/heldout/1/0]")
    assert lines[2:4] == ["run", "there is no command /nonsense"]
    assert sum(line.startswith("[task files/heldout/1/0]") for line in lines) == 2  # /new begins it again
    assert any(line.startswith("[policy] ") for line in lines)


def test_what_a_policy_writes_cannot_command_the_terminal() -> None:
    assert chat.printable("a\x1b[2Jb\r\u202ec\n\td\x9b") == "a\\x1b[2Jb\\x0d\\x202ec\n\td\\x9b"


def test_ctrl_c_ends_it_at_the_prompt(recipe: Path) -> None:
    """In a real terminal; nothing of it stays behind."""
    status, shown = interrupted_at_its_prompt("chat", str(recipe))
    assert status == 0, shown
    assert "Traceback" not in shown
