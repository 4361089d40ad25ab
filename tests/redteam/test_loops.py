"""Attacks on rollouts, scheduler and evaluation: every one of them breaks an ordinary loop, and none breaks ours."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from agentrl import envs
from agentrl.catalogue import members
from agentrl.cli import main
from agentrl.engines.base import Sampling
from agentrl.errors import AuthoringError
from agentrl.redteam import suite
from agentrl.redteam.attack import Attack, attacks, family_of
from agentrl.redteam.byte_tokenizer import renderer
from agentrl.redteam.command import chosen
from agentrl.redteam.coverage import gaps
from agentrl.redteam.loops import OURS, Loops, Policy, Says, Stand, Tries, stalls
from agentrl.redteam.naive_loops import NAIVE_LOOPS
from agentrl.redteam.report import Finding
from agentrl.redteam.target import survey
from agentrl.redteam.testbeds import TESTBEDS, ScriptedExaminer
from agentrl.redteam.trials import figure
from agentrl.sandboxes.pool import Pool
from agentrl.types import Message, Split, Task, ToolCall

FULL = os.environ.get("AGENTRL_FULL") == "1"
LOOPED = {id: attack for id, attack in attacks().items() if attack.trial is not None}
BEDS = {f"{name}/{kind.__name__.lower()}": kind for name, kinds in TESTBEDS.items() for kind in kinds}
BED = "final_state/trees"
QUICK = {"L.unclosed_thoughts", "L.nearly_the_format"}
WAITING = {"K.kills_its_sandbox", "K.exhausts_its_sandbox", "K.cannot_be_collected", "K.takes_its_time"}
WAITING |= {id for id, attack in LOOPED.items() if attack.family == "L"} - QUICK
"""An ordinary loop waits seconds for these: tried with AGENTRL_FULL=1."""


def attack_target(name: str) -> suite.AttackTarget:
    kind = BEDS[name] if name in BEDS else envs.load(name)
    levels = list(kind.levels)[:1]
    return suite.AttackTarget.of(name, kind, levels=levels, judge=ScriptedExaminer())


def stand_of(name: str, boxes: Pool, **options: Any) -> Stand:
    attacked = attack_target(name)
    return Stand.of(asyncio.run(survey(attacked.arena(attacked.tasks[0], boxes))), **options)


@pytest.fixture(scope="module")
def stand(boxes: Pool) -> Stand:
    return stand_of("files", boxes, slack_s=1.0, again=0)


@pytest.mark.timeout(300)
def test_no_attack_gains_on_our_loops(boxes: Pool) -> None:
    report = asyncio.run(suite.run(attack_target("files"), boxes, chosen=list(LOOPED.values())))
    assert [(f.id, f.result, f.evidence) for f in report.breaches] == []
    assert [f.id for f in report.findings if not f.tried] == []


def test_no_attack_gains_on_a_testbed(boxes: Pool) -> None:
    quick = [attack for id, attack in LOOPED.items() if id not in WAITING]
    report = asyncio.run(suite.run(attack_target(BED), boxes, chosen=quick))
    assert [(f.id, f.result, f.evidence) for f in report.breaches] == []
    assert [f.id for f in report.findings if not f.tried] == []


@pytest.mark.skipif(not FULL, reason="every environment is attacked with AGENTRL_FULL=1")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [*sorted(members("envs")), *BEDS])
def test_no_attack_gains_anywhere(name: str, boxes: Pool) -> None:
    report = asyncio.run(suite.run(attack_target(name), boxes, chosen=list(LOOPED.values())))
    assert [(f.id, f.result, f.evidence) for f in report.breaches] == []


async def fallen(attack: Attack, stand: Stand, loops: Loops) -> bool:
    blank = Finding(id=attack.id, family=attack.family, title=attack.title, result="not applicable")
    return (await suite.through_loops(attack, blank, stand, loops)).succeeded


@pytest.mark.parametrize("id", [i for i in LOOPED if FULL or i in QUICK or i not in WAITING])
def test_each_attack_gains_on_an_ordinary_loop(id: str, stand: Stand) -> None:
    assert any(asyncio.run(fallen(LOOPED[id], stand, loops)) for loops in NAIVE_LOOPS.values())


def test_an_ordinary_loop_tells_right_from_wrong_without_cheating(stand: Stand) -> None:
    (problem,) = stand.problems(1)
    both: list[Loops] = [NAIVE_LOOPS["constant"], OURS]
    for loops in both:
        trained = asyncio.run(loops.train(stand, [stand.wrong]))
        figures = asyncio.run(loops.evaluate({"attacked": stand}, [Tries(problem, (stand.wrong, stand.honest))]))
        assert (trained.scores, figures.rate("attacked")) == ((0.0, 1.0), 0.5)
        mistral = asyncio.run(loops.train(stand.speaking("mistral"), [stand.wrong]))
        assert mistral.scores == (0.0, 1.0)


@pytest.mark.parametrize("template", ["chatml", "mistral"])
def test_the_renderer_of_bytes_only_appends_and_reads_what_it_writes(template: str) -> None:
    used = renderer(template)
    turn = Message(role="assistant", content="", tool_calls=(ToolCall(name="look", arguments={"path": "é<|im_end|"}),))
    assert (used.native, dict(used.report.rewrites)) == (True, {})
    read = used.parse(used.write(turn))
    assert [(c.name, dict(c.arguments), c.error) for c in read.tool_calls] == [("look", {"path": "é<|im_end|"}, None)]


def test_a_policy_says_its_script_and_starts_it_again_for_a_retry() -> None:
    used = renderer()

    def turns(attempt: int) -> list[Any]:
        return [Says(text=f"try {attempt}"), Says(text="cut", ends=False)]

    policy = Policy(used, lambda group, index: turns)

    async def say(name: str) -> tuple[str, str]:
        completion = await policy.generate((), Sampling(max_tokens=9), request_id=name)
        return used.decode(completion.token_ids), completion.finish

    names = ("3-0-0-0", "3-0-1-0", "3-0-0-0", "3-1-0-0")
    assert [asyncio.run(say(name)) for name in names] == [
        ("try 0<|im_end|>", "stop"), ("cut", "length"), ("try 1<|im_end|>", "stop"), ("try 0<|im_end|>", "stop")
    ]  # fmt: skip


def test_standstills_of_the_event_loop_are_seen_also_at_the_end() -> None:
    async def run() -> float:
        async with stalls() as stall:
            await asyncio.sleep(0.05)
            time.sleep(0.3)
        return float(stall.longest_s)

    assert 0.25 < asyncio.run(run()) < 5.0


def test_a_figure_above_the_truth_is_a_gain_and_one_below_it_lost_an_honest_try() -> None:
    results = [figure("pass@1", reported, 0.5).result for reported in (0.75, 0.5, 0.25, float("nan"))]
    assert results == ["gained", "held", "evaded", "evaded"]


def test_a_level_with_few_tasks_gives_those_that_it_has(stand: Stand) -> None:
    class Few(type(stand.runtime.make())):  # type: ignore[misc]
        def size_of(self, split: Split, level: int) -> int:
            return 2

        def task(self, split: Split, level: int, index: int) -> Task:
            if index > 1:
                raise AuthoringError(f"there is no task {index}")
            return super().task(split, level, index)  # type: ignore[no-any-return]

    few = stand.playing(Few)
    ids = {few.task.id, *(Few().task("heldout", few.task.level, index).id for index in range(2))}
    assert {problem.task.id for problem in few.problems(8)} == ids


def test_families_are_found_by_letter_and_by_name() -> None:
    names = ("K", "k", "drop", "Freeze", "evaluation", "leaks", "Z", "", "e")
    assert [family_of(name) for name in names] == ["K", "K", "K", "L", "M", "F", None, None, "E"]
    assert [a.id for a in chosen(["drop"], ())] == [id for id in attacks() if id.startswith("K.")]


def test_attacks_on_the_loops_do_not_count_as_coverage_of_a_verifier(stand: Stand) -> None:
    """They fit everywhere: an environment that nothing else could be tried on must not look well covered by them."""
    corpus = list(attacks().values())
    tried = [Finding(id=a.id, family=a.family, title=a.title, result="held") for a in corpus if a.trial is not None]
    (sentence,) = gaps([stand.target], corpus, tried)
    assert sentence.startswith("only 0 of ")


def test_an_exception_that_leaves_the_loops_is_a_breach(stand: Stand) -> None:
    class Broken:
        name = "broken"

        async def train(self, *_: Any) -> Any:
            raise RuntimeError("no")

    blank = Finding(id="K.x", family="K", title="x", result="not applicable")
    broken: Any = Broken()
    finding = asyncio.run(suite.through_loops(LOOPED["K.broken_json"], blank, stand, broken))
    assert (finding.result, finding.evidence) == ("evaded", ("it ended the run: RuntimeError: no",))


def test_the_families_run_by_name_from_the_command_line(boxes: Pool, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["redteam", "countdown", "--level", "1", "--family", "evaluation"])
    shown = capsys.readouterr().out
    assert end.value.code == 0
    assert "M  Evaluation: inflated figures" in shown and "0 succeeded" in shown


ENDLESS = '''
from agentrl.envs import Environment, tool
from agentrl.types import Task, ToolCall, Verdict
from agentrl.verifiers.base import Context, Submission, Verifier


class Exact(Verifier):
    async def verify(self, submission: Submission, context: Context) -> Verdict:
        VERIFY
        return Verdict(score=float(submission.answer == "right"))

    async def probe(self, context: Context) -> None:
        return None


class Endless(Environment):
    levels = range(1, 2)
    verifier = Exact()

    def task(self, split, level, index):
        return Task(id=f"endless/{split}/{index}", split=split, level=level, prompt="Say right.")

    @tool(timeout_s=2.0)
    def look(self) -> str:
        """Look."""
        TOOL
        return "nothing"

    def expert(self, task):
        return [ToolCall(name="look", arguments={}), "right"]


EXPORT = Endless
'''


@pytest.mark.parametrize(
    ("place", "said", "code"),
    [("TOOL", "used up its 2 s in the expert's episode", 2), ("VERIFY", "nothing has moved for", 1)],
)
def test_an_endless_loop_of_an_environment_ends_the_command(
    place: str, said: str, code: int, member: Callable[[str, str], str]
) -> None:
    source = ENDLESS.replace(place, "while True: pass").replace("TOOL", "pass").replace("VERIFY", "pass")
    name = member(f"endless_{place.lower()}", source)
    script = "from agentrl.check import watchdog; watchdog.STILL_S = 3.0; from agentrl.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", script, "redteam", name], capture_output=True, text=True, timeout=90, env=os.environ
    )
    assert (done.returncode, said in done.stderr) == (code, True), done.stdout + done.stderr
