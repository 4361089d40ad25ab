"""The gymnasium face: registered, checked by gymnasium itself, and the same core underneath."""

from typing import Any

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env

from agentrl import envs
from agentrl.catalogue import members
from agentrl.envs.gym_adapter import ActionSpace, GymEnv, Text
from agentrl.envs.tools import tools_of
from agentrl.errors import AuthoringError


@pytest.mark.parametrize("name", list(members("envs")))
def test_gymnasium_accepts_it(name: str) -> None:
    made = gymnasium.make(f"agentrl/{name}-v0", render_mode="ansi")
    try:
        check_env(made.unwrapped)
    finally:
        made.close()


def test_an_episode_by_hand() -> None:
    env = gymnasium.make("agentrl/countdown-v0", render_mode="ansi")
    first, info = env.reset(seed=5, options={"level": 1, "index": 3, "split": "heldout"})
    task = envs.load("countdown")().task("heldout", 1, 3)
    assert (first, info["task"], info["level"]) == (task.prompt, "countdown/heldout/1/3", 1)
    solution = task.secret["solution"]
    step = env.step({"name": "calculate", "arguments": {"expression": solution}})
    assert step[0].startswith(f"<out>{task.setup['target']}, the target. ") and step[1:4] == (0.0, False, False)
    ended: Any = env.step(solution)
    assert ended[:4] == ("", 1.0, True, False)
    assert (ended[4]["ending"], ended[4]["evidence"]) == ("done", ["the expression reaches the target"])
    assert str(env.render()).splitlines()[-1] == f"[assistant] {solution}"
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step("more")
    env.close()
    env.close()


def test_turns_that_run_out_truncate_and_are_graded() -> None:
    env = GymEnv("countdown", max_turns=2)
    env.reset(seed=1)
    call = {"name": "calculate", "arguments": {"expression": "1+1"}}
    seen = "<out>2, but not given, or used too often: 1, 1</out>"
    assert env.step(call)[:4] == (seen, 0.0, False, False)
    text, reward, terminated, truncated, info = env.step(call)
    assert (text, reward, terminated, truncated, info["ending"]) == (seen, 0.0, False, True, "max_turns")
    env.close()


def test_the_seed_decides_the_task_and_no_seed_moves_on() -> None:
    env = GymEnv("countdown")
    first, again = env.reset(seed=9)[1]["task"], env.reset(seed=9)[1]["task"]
    later = [env.reset()[1]["task"] for _ in range(4)]
    assert first == again
    assert len({first, *later}) == 5
    env.close()


def test_strange_options_and_actions_are_refused() -> None:
    env = GymEnv("countdown")
    with pytest.raises(AuthoringError, match="reset takes the options split, level and index, not colour"):
        env.reset(options={"colour": 1})
    env.reset(seed=0)
    with pytest.raises(AuthoringError, match="an action is a text or"):
        env.step(3)  # type: ignore[arg-type]
    env.close()


def test_spaces() -> None:
    acts = ActionSpace(tools_of(envs.load("files")), seed=1)
    samples = [acts.sample() for _ in range(50)]
    assert all(acts.contains(sample) for sample in samples)
    assert {type(sample) for sample in samples} == {str, dict}
    assert not acts.contains({"name": "rm", "arguments": {}})
    assert not acts.contains({"name": "run", "arguments": {"command": 3}})
    assert Text(5).contains("é\n") and not Text(5).contains("123456") and not Text(5).contains(3)
    assert acts == ActionSpace(tools_of(envs.load("files"))) and acts != ActionSpace({})
