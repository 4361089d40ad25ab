"""The episode core: framing, permissions, timeouts, the ledger, and whose doing an error is."""

import asyncio
import random
import re
import threading
import time
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.envs import Environment, Permissions, tool
from agentrl.envs.episode import LATER, Episode
from agentrl.envs.play import Action, Played, Stage, drive, play
from agentrl.envs.tool_output import frame
from agentrl.errors import AgentError, AuthoringError, SandboxError
from agentrl.sandboxes.base import Sandbox, SandboxSpec
from agentrl.types import Done, Message, Observation, Split, Task, ToolCall, Verdict
from agentrl.verifiers.base import Artifact, Context, Submission, Verifier
from agentrl.verifiers.busy import off_the_clock


class Anything(Verifier):
    artifacts = (Artifact(),)

    async def verify(self, submission: Submission, context: Context) -> Verdict:
        return Verdict(score=1.0 if submission.answer == "yes" else 0.0, evidence=(f"answer {submission.answer!r}",))


class Bench(Environment):
    """A tool for each way that things go."""

    verifier = Anything()
    system = "Go."

    def task(self, split: Split, level: int, index: int) -> Task:
        return Task(id=f"bench/{split}/{level}/{index}", split=split, level=level, prompt="Do it.", secret={"a": "b"})

    def start(self) -> None:
        self.log: list[str] = [f"rng {self.rng.random():.6f}"]

    def state(self) -> Mapping[str, Any]:
        return {"log": self.log}

    def stop(self) -> None:
        self.log.append("stopped")

    def on_message(self, text: str) -> Observation | Done:
        return Observation(content="go on", role="user") if text == "more" else Done(text)

    @tool(output_limit=20)
    def say(self, text: str) -> str:
        """Say it back.

        Args:
            text: what
        """
        return text

    @tool(irreversible=True)
    def burn(self, what: str) -> str:
        """Burn a thing.

        Args:
            what: the thing
        """
        self.log.append(f"burnt {what}")
        return "ash"

    @tool
    def fail(self, how: str) -> str:
        """Fail.

        Args:
            how: in which way
        """
        raise {"value": ValueError("</out> no"), "infra": SandboxError("gone"), "bug": RuntimeError("oops")}[how]

    @tool(timeout_s=0.2)
    async def doze(self) -> str:
        """Sleep."""
        await asyncio.sleep(30)
        return ""

    @tool(terminal=True)
    def submit(self, answer: str) -> str:
        """Hand in.

        Args:
            answer: the answer
        """
        return answer

    @tool
    def data(self) -> dict[str, list[int]]:
        """Some data."""
        return {"é": [1, 2]}


class Boxed(Bench):
    """The same with a box."""

    def prepare(self, task: Task, rng: random.Random) -> SandboxSpec:
        return SandboxSpec(files={"a.txt": f"{rng.random():.6f}\n"})

    @tool(timeout_s=0.5)
    def run(self, command: str) -> str:
        """Run it.

        Args:
            command: what
        """
        return self.box.exec(["sh", "-c", command]).text


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(name=name, arguments=arguments)


def played(where: Stage, *actions: Action, kind: type[Environment] = Bench, **options: Any) -> Played:
    environment = kind()
    return asyncio.run(play(environment, environment.task("train", 1, 0), list(actions), where, **options))


def seen(result: Played) -> list[str]:
    return [m.content for m in result.messages[2:] if m.role != "assistant"]


def test_a_whole_episode(where: Stage) -> None:
    result = played(where, call("say", text="hello"), "more", call("submit", answer="yes"))
    assert [(m.role, m.content, m.name) for m in result.messages] == [
        ("system", "Go.", ""),
        ("user", "Do it.", ""),
        ("assistant", "", ""),
        ("tool", "<out>hello</out>", "say"),
        ("assistant", "more", ""),
        ("user", "go on", ""),
        ("assistant", "", ""),
    ]
    assert (result.score, result.outcome.ending) == (1.0, "done")
    assert result.ledger == {
        "calls": 2,
        "bad_calls": 0,
        "tool_errors": 0,
        "tool_timeouts": 0,
        "bytes_seen": 21,
        "denied": [],
        "dry_runs": [],
    }


class Careful(Bench):
    one_call_per_message = True


def test_only_the_first_call_of_a_message_is_carried_out_where_the_next_depends_on_it(where: Stage) -> None:
    """A later call is not made at all: one that would end the episode does not."""
    both = Message(
        role="assistant", content="", tool_calls=(call("say", text="one"), call("submit", answer="yes"), call("hm"))
    )
    result = played(where, both, kind=Careful)
    later = f"error: {LATER}"
    assert (seen(result), result.score) == (["<out>one</out>", later, later], 0.0)
    assert (result.ledger["calls"], result.ledger["bad_calls"]) == (1, 2)
    assert played(where, both).score == 1.0


class Objects(Bench):
    """Objects to every answer but `sure`."""

    def objection(self, answer: str) -> str:
        return "" if answer == "sure" else f"{answer}?</out>\x1b"


def test_an_answer_is_sent_back_once_and_the_next_one_counts(where: Stage) -> None:
    result = played(where, "more", "no", call("say", text="hm"), "yes", kind=Objects)
    assert seen(result) == ["go on", "no?<\\/out>\\u001b", "<out>hm</out>"]
    assert [m.role for m in result.messages[2:]] == ["assistant", "user"] * 2 + ["assistant", "tool", "assistant"]
    assert (result.score, result.outcome.ending) == (1.0, "done")
    again = played(where, "yes", "no", "yes", kind=Objects)
    assert (again.score, again.outcome.ending, len(again.messages)) == (0.0, "done", 5)
    assert seen(played(where, "sure", kind=Objects)) == []


def test_an_answer_that_was_sent_back_counts_when_no_other_follows(where: Stage) -> None:
    result = played(where, "yes", call("say", text="hm"), kind=Objects)
    assert (result.score, result.outcome.ending) == (1.0, "max_turns")
    assert played(where, "yes", "", kind=Objects).score == 0.0, "an empty answer is an answer"


class ObjectsTwice(Objects):
    objections = 2


def test_as_many_answers_are_sent_back_as_the_environment_says(where: Stage) -> None:
    result = played(where, "a", "b", "yes", "no", kind=ObjectsTwice)
    assert seen(result) == ["a?<\\/out>\\u001b", "b?<\\/out>\\u001b"]
    assert (result.score, result.outcome.ending) == (1.0, "done")


@pytest.mark.parametrize("text", ['{"text": "hm"}', '{{"text": "hm"}}', '```json\n{"text": "hm"}\n```'])
def test_arguments_without_a_name_are_no_answer_but_once(where: Stage, text: str) -> None:
    """A model that leaves the name out means a call; sent again, the same words are its answer."""
    result = played(where, text, call("say", text="hm"), "yes")
    told = "These are arguments of say, and no call of it. To make one, write its name too: "
    assert seen(result) == [told + '{"name": "say", "arguments": {"text": "hm"}}', "<out>hm</out>"]
    assert (result.score, result.outcome.ending) == (1.0, "done")
    again = played(where, text, text, "yes")
    assert (again.score, again.outcome.ending, len(again.messages)) == (0.0, "done", 5)


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        '{"other": 1}',
        '{"text": 1}',
        '["text"]',
        '"text"',
        "{{}}",
        r'{"text": "\ud800"}',
        '{"a":' * 600 + "1",
        f'{{"text": "{"x" * 4_000}"}}',
    ],
)
def test_other_json_is_an_answer(where: Stage, text: str) -> None:
    assert seen(played(where, text)) == []


class EndsWithWords(Bench):
    """A message ends it, whatever it says."""

    on_message = Environment.on_message


class OnlyWords(Environment):
    """Nothing but a message ends it."""

    verifier = Bench.verifier
    task = Bench.task

    @tool
    def look(self) -> str:
        """Look."""
        return ""


def test_a_tool_that_was_made_up_to_end_with_is_answered_with_how_to_end(where: Stage) -> None:
    (told,) = seen(played(where, call("end"), "yes", kind=EndsWithWords))
    assert told.endswith("data; to end, call submit")
    (told,) = seen(played(where, call("end"), "yes", kind=OnlyWords))
    assert told.endswith("the tools are: look; to end, write your answer as a message without a call")


def test_an_answer_that_a_tool_gives_is_sent_back_in_the_same_way(where: Stage) -> None:
    submit = [call("submit", answer=text) for text in ("no", "yes")]
    result = played(where, *submit, call("say", text="never"), kind=Objects)
    assert (result.score, result.outcome.ending, seen(result)) == (1.0, "done", ["no?<\\/out>\\u001b"])
    assert [(m.role, m.name) for m in result.messages[3:4]] == [("tool", "submit")]
    assert seen(played(where, call("submit", answer="sure"), kind=Objects)) == []


def test_calls_that_follow_an_answer_that_was_sent_back_are_carried_out() -> None:
    async def main() -> tuple[list[str], bool]:
        environment = Objects()
        episode = Episode(environment, environment.task("train", 1, 0), seed=0, boxes=None)  # type: ignore[arg-type]
        await episode.start()
        calls = (call("submit", answer="no"), call("say", text="b"))
        step = await episode.act(Message(role="assistant", content="", tool_calls=calls))
        return [o.content for o in step.observations], step.done

    assert asyncio.run(main()) == (["no?<\\/out>\\u001b", "<out>b</out>"], False)


def test_episodes_with_and_without_an_answer_sent_back_are_not_in_the_same_state() -> None:
    async def state(*texts: str, kind: type[Objects] = Objects) -> str:
        environment = kind()
        episode = Episode(environment, environment.task("train", 1, 0), seed=0, boxes=None)  # type: ignore[arg-type]
        await episode.start()
        for text in texts:
            await episode.act(Message(role="assistant", content=text))
        return await episode.state()

    plain, sent_back, other = (asyncio.run(state(*texts)) for texts in (["more"], ["yes", "more"], ["no", "more"]))
    assert len({plain, sent_back, other}) == 3
    assert sent_back == asyncio.run(state("yes", "more"))
    once, twice = (asyncio.run(state(*texts, kind=ObjectsTwice)) for texts in (["no", "more"], ["a", "no", "more"]))
    assert once != twice, "one of them may be sent back once more"


def test_bad_calls_are_answered_and_cost_a_turn(where: Stage) -> None:
    bad = (call("nope"), call("say"), ToolCall(name="say", error="the call is not JSON"), call("start"))
    result = played(where, *bad)
    assert seen(result) == [
        "error: there is no tool 'nope'; the tools are: say, burn, fail, doze, submit, data; to end, call submit",
        "error: say: text is missing",
        "error: the call is not JSON",
        "error: there is no tool 'start'; the tools are: say, burn, fail, doze, submit, data; to end, call submit",
    ]
    assert (result.ledger["bad_calls"], result.outcome.ending, result.score) == (4, "max_turns", 0.0)


def test_output_is_framed_cut_and_cannot_leave_its_frame(where: Stage) -> None:
    result = played(where, call("say", text="</out> hi"), call("say", text="x" * 30), call("data"))
    assert seen(result) == [
        "<out><\\/out> hi</out>",
        f"<out>{'x' * 20}</out> [cut: 20 of 30 characters]",
        '<out>{"é": [1, 2]}</out>',
    ]


@given(st.text(alphabet=st.one_of(st.sampled_from("</out> OUT\n\r\x1b"), st.characters()), max_size=60))
def test_nothing_closes_a_frame(text: str) -> None:
    content, _ = frame(text, 1000)
    inside = content.removeprefix("<out>").removesuffix("</out>")
    assert content == f"<out>{inside}</out>"
    assert re.search(r"<\s*/?\s*out\b", inside, re.IGNORECASE) is None
    assert "\x1b" not in inside and "\r" not in inside
    content.encode("utf-8")


def test_a_tool_that_says_no_is_told_and_a_bug_is_not(where: Stage) -> None:
    result = played(where, call("fail", how="value"))
    assert seen(result) == ["<out>error: <\\/out> no</out>"]
    assert result.ledger["tool_errors"] == 1
    with pytest.raises(SandboxError, match="gone"):
        played(where, call("fail", how="infra"))
    with pytest.raises(RuntimeError, match="oops"):
        played(where, call("fail", how="bug"))


@pytest.mark.parametrize(
    ("permissions", "answer", "ledger"),
    [
        (Permissions(), "<out>ash</out>", ([], [])),
        (Permissions(irreversible="deny"), "permission denied", (["burn"], [])),
        (Permissions(irreversible="dry_run"), "dry run: accepted, but not carried out", ([], ["burn"])),
        (Permissions(irreversible="ask"), "permission denied", (["burn"], [])),
        (Permissions(irreversible="ask", ask=lambda name, a: a == {"what": "x"}), "<out>ash</out>", ([], [])),
        (Permissions(irreversible="deny", tools={"burn": "allow"}), "<out>ash</out>", ([], [])),
    ],
)
def test_irreversible_tools_pass_the_policy(
    where: Stage, permissions: Permissions, answer: str, ledger: tuple[list[str], list[str]]
) -> None:
    stage = Stage(boxes=where.boxes, permissions=permissions)
    result = played(stage, call("burn", what="x"), call("say", text="still here"))
    assert seen(result) == [answer, "<out>still here</out>"]
    assert (result.ledger["denied"], result.ledger["dry_runs"]) == ledger


def test_a_tool_that_hangs_on_the_host_ends_the_episode(where: Stage) -> None:
    began = time.monotonic()
    result = played(where, call("doze"))
    assert time.monotonic() - began < 10
    assert (result.outcome.ending, result.outcome.grade, result.score) == ("agent_error", "graded", 0.0)
    assert result.outcome.fault is not None and result.outcome.fault.blame == "agent"


def test_a_command_that_hangs_comes_back_with_what_it_wrote(where: Stage) -> None:
    result = played(where, call("run", command="echo first; sleep 30"), call("run", command="echo next"), kind=Boxed)
    assert seen(result) == ["<out>first\n[timed out]</out>", "<out>next</out>"]
    assert result.ledger["timeouts"] == 1


def test_the_box_ledger_is_merged(where: Stage) -> None:
    result = played(where, call("run", command="rm a.txt; echo x > b.txt"), call("nope"), kind=Boxed)
    wanted = ("created", "changed", "deleted", "execs", "calls", "bad_calls")
    assert {key: result.ledger[key] for key in wanted} == {
        "created": ["b.txt"],
        "changed": [],
        "deleted": ["a.txt"],
        "execs": 1,
        "calls": 2,
        "bad_calls": 1,
    }


def test_the_seed_decides_the_episode(where: Stage) -> None:
    async def opening(seed: int) -> tuple[str, list[str]]:
        environment = Boxed()
        episode = Episode(environment, environment.task("train", 1, 0), seed=seed, boxes=where.boxes)
        try:
            await episode.start()
            assert isinstance(environment.box, Sandbox)
            return await episode.digest(), environment.log
        finally:
            await episode.close()

    one, same, other = (asyncio.run(opening(seed)) for seed in (1, 1, 2))
    assert one == same
    assert one[0] != other[0] and one[1] != other[1]


def test_the_secret_stays_outside_and_stop_is_called(where: Stage) -> None:
    async def run() -> tuple[Bench, Submission]:
        environment = Bench()
        episode = Episode(environment, environment.task("train", 1, 0), seed=0, boxes=where.boxes)
        await episode.start()
        await episode.act(Message(role="assistant", content="yes"))
        submission = await episode.finish()
        with pytest.raises(AuthoringError, match="is over"):
            await episode.act(Message(role="assistant", content="again"))
        await episode.close()
        return environment, submission

    environment, submission = asyncio.run(run())
    assert environment.given.secret == {} and submission.task.secret == {"a": "b"}
    assert environment.log[1:] == ["stopped"]


def test_a_dead_box_is_the_agents_doing(where: Stage) -> None:
    class Dead(Boxed):
        def on_message(self, text: str) -> Observation | Done:
            raise AgentError("the box is gone")

    result = played(where, "hello", kind=Dead)
    assert (result.outcome.ending, result.outcome.grade, result.score) == ("agent_error", "graded", 0.0)


def test_no_box_is_a_clear_error() -> None:
    with pytest.raises(AuthoringError, match=r"Bench uses self.box, but its prepare\(\) returned no SandboxSpec"):
        _ = Bench().box


def test_an_episode_given_up_while_it_starts_stops_what_it_started(where: Stage) -> None:
    class Slow(Boxed):
        def start(self) -> None:
            self.log = ["starting"]
            time.sleep(0.5)
            self.log.append("started")

    async def run() -> list[str]:
        environment = Slow()
        episode = Episode(environment, environment.task("train", 1, 0), seed=0, boxes=where.boxes)
        starting = asyncio.ensure_future(episode.start())
        while not hasattr(environment, "log"):
            await asyncio.sleep(0.01)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        await episode.close()
        assert not environment.box.alive
        return environment.log

    assert asyncio.run(run()) == ["starting", "started", "stopped"]


def test_a_start_that_fails_is_told_whatever_stop_says(where: Stage) -> None:
    class Half(Bench):
        def start(self) -> None:
            raise RuntimeError("no world today")

    with pytest.raises(RuntimeError, match="no world today"):  # and not that `log` is missing in stop()
        played(where, "yes", kind=Half)


def test_only_a_person_is_asked_off_the_event_loop(where: Stage) -> None:
    threads: list[str] = []

    def ask(name: str, arguments: Mapping[str, Any]) -> bool:
        threads.append(threading.current_thread().name)
        return True

    stage = Stage(boxes=where.boxes, permissions=Permissions(irreversible="ask", ask=ask))
    assert seen(played(stage, call("burn", what="x"), call("say", text="y"))) == ["<out>ash</out>", "<out>y</out>"]
    assert len(threads) == 1 and threads[0] != threading.main_thread().name


class Plain(Environment):
    """Nothing but a task."""

    verifier = Anything()

    def task(self, split: Split, level: int, index: int) -> Task:
        return Task(id="plain", split=split, level=level, prompt="Say yes.")


def test_what_an_author_left_alone_takes_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []

    async def off_loop(function: Any, *args: Any, **options: Any) -> Any:
        called.append(function.method.__name__)
        return function(*args, **options)

    async def whole(environment: Environment) -> str:
        task = environment.task("train", 1, 0)
        episode = Episode(environment, task, seed=0, boxes=None)  # type: ignore[arg-type]
        await episode.start()
        assert (await episode.act(Message(role="assistant", content="yes"))).done
        answer = (await episode.finish()).answer
        await episode.close()
        return answer

    monkeypatch.setattr("agentrl.envs.episode.off_loop", off_loop)
    assert asyncio.run(whole(Plain())) == "yes" and called == []
    assert asyncio.run(whole(Bench())) == "yes" and called == ["start", "on_message", "state", "stop"]


@pytest.mark.parametrize(("gone", "ending"), [(True, "done"), (False, "timeout")])
def test_waiting_for_a_server_that_is_gone_is_not_the_episodes_time(gone: bool, ending: str, where: Stage) -> None:
    """A policy's own slowness ends its episode; what stops the clock does not."""

    async def policy(episode: Episode) -> Action:
        with off_the_clock() if gone else nullcontext():
            await asyncio.sleep(0.5)
        return "yes"

    async def main() -> Played:
        environment = Bench()
        task = environment.task("train", 1, 0)
        episode = Episode(environment, task, seed=0, boxes=where.boxes)
        return await drive(episode, policy, where.context(task.id), turns=1, tool_seconds=0.2, wall_seconds=0.2)

    assert asyncio.run(main()).outcome.ending == ending
