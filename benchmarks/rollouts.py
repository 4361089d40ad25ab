"""What rollouts cost besides the model: overhead of a turn, whole graded episodes, rendering, waiting.

    python benchmarks/rollouts.py [--only overhead,graded,rendering,waiting] [--json]

overhead    everything but the model and the tool, with a scripted stand-in for the engine and an environment without
            a box, at 256 concurrent episodes; wall and processor time of a turn
graded      whole episodes of `repair` in namespace boxes, groups of 16 and 256 at once, half played by its expert and
            half without an edit, and graded: with as many places for boxes as episodes (graders then wait for
            places), and with half as many more; by episode
rendering   append-only bridges against rendering and tokenising the whole conversation at every turn, 8 to 128 turns
waiting     episodes with heavy-tailed turns: in step (every turn waits for the slowest) against free running; the
            engine is a stand-in that sleeps
Two things that are compared run in one process, one after the other, several times in turn; the table shows medians.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from agentrl import envs, sandboxes
from agentrl.engines.base import Sampling
from agentrl.envs import Environment, tool, tools_of
from agentrl.rollout.encoder import Span
from agentrl.rollout.render import Renderer
from agentrl.rollout.request import Budget, EnvRuntime, RolloutId
from agentrl.rollout.rollout import rollout
from agentrl.rollout.scripted import ScriptedEngine
from agentrl.sandboxes.pool import Pool
from agentrl.types import Completion, Message, Split, Task, ToolCall, Trajectory, Verdict
from agentrl.verifiers.base import Context, Submission, Verifier
from benchmarks._parts import report, seconds

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CORPUS = [
    "The tool returned a line of text, 17 files and a number; look at the path and go on with the next one.\n"
] * 50
RESULT = "The tool returned a line of text, 17 files and a number.\n" * 4


class Fine(Verifier):
    """Everything is right."""

    async def verify(self, submission: Submission, context: Context) -> Verdict:
        return Verdict(score=1.0)


class Echo(Environment):
    """One tool that costs nothing."""

    verifier = Fine()

    def task(self, split: Split, level: int, index: int) -> Task:
        return Task(id=f"echo/{split}/{level}/{index}", split=split, level=level, prompt="Look at the paths.")

    @tool
    async def look(self, path: str) -> str:
        """Look at a path.

        Args:
            path: where
        """
        return RESULT


class NoBoxes:
    @asynccontextmanager
    async def box(self, spec: Any) -> Any:
        raise AssertionError("this environment needs no box")
        yield


class Stand:
    """In place of an engine: answers with what it is given, after as long as it is told."""

    def __init__(self, turn: Sequence[int], delay: Callable[[str], float] | None = None) -> None:
        self.turn, self.delay = tuple(turn), delay

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str = "") -> Completion:
        await asyncio.sleep(self.delay(request_id) if self.delay else 0)
        count = len(self.turn)
        return Completion(token_ids=self.turn, logprobs=(-1.0,) * count, versions=(0,) * count, finish="stop")


def renderer() -> Renderer:
    """A ChatML renderer over a small byte-level tokenizer."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=1000, initial_alphabet=alphabet, show_progress=False)
    )
    backend.add_special_tokens([AddedToken(t, special=True) for t in ("<|im_start|>", "<|im_end|>")])
    make: Any = PreTrainedTokenizerFast
    tokenizer = make(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.chat_template = TEMPLATE
    return Renderer(tokenizer)


CALL = Message(role="assistant", content="", tool_calls=(ToolCall(name="look", arguments={"path": "/a/b/c"}),))


# Overhead --------------------------------------------------------------------------------------------------------


def overhead(render: Renderer, *, concurrency: int = 256, turns: int = 16, repeats: int = 5) -> dict[str, float]:
    """Milliseconds of a turn, over episodes of `turns` turns, their beginning and end included."""
    engine = Stand(render.write(CALL))
    world = EnvRuntime(name="echo", make=Echo, boxes=NoBoxes())
    budget = Budget(context=1 << 20, tokens=1 << 20, turns=turns)
    task = Echo().task("train", 1, 0)

    async def episodes() -> tuple[float, float]:
        wall, cpu = time.perf_counter(), time.process_time()
        made = await asyncio.gather(
            *(
                rollout(engine, render, world, task, rollout_id=RolloutId(seed=0, group=0, index=i), budget=budget)
                for i in range(concurrency)
            )
        )
        assert all(t.outcome.score == 1.0 for t in made)
        count = concurrency * turns
        return (time.perf_counter() - wall) / count * 1e3, (time.process_time() - cpu) / count * 1e3

    asyncio.run(episodes())
    found = [asyncio.run(episodes()) for _ in range(repeats)]
    return {
        "concurrency": concurrency,
        "wall_ms_a_turn": statistics.median(w for w, _ in found),
        "wall_ms_a_turn_best": min(w for w, _ in found),
        "cpu_ms_a_turn": statistics.median(c for _, c in found),
        "cpu_ms_a_turn_best": min(c for _, c in found),
        "target_ms": 1.0,
    }


# Graded ----------------------------------------------------------------------------------------------------------


def graded(
    render: Renderer, *, episodes: int = 512, concurrency: int = 256, repeats: int = 2
) -> list[dict[str, float]]:
    """Milliseconds of an episode: by the clock, of this process's time, of the machine's; and of its grading, queueing
    included."""
    kind = envs.load("repair")
    tasks = [kind().task("train", 1, index) for index in range(episodes // 16)]
    budget = Budget(context=1 << 20, tokens=1 << 20)

    async def play(pool: Pool) -> list[float]:
        world = EnvRuntime(name="repair", make=kind, boxes=pool)
        places = asyncio.Semaphore(concurrency)

        async def one(group: int, index: int) -> Trajectory:
            task = tasks[group]
            actions = kind().expert(task)
            if index % 2:
                actions = [action for action in actions if isinstance(action, str) or action.name != "edit"]
                actions.append("done")  # the first is sent back: nothing was changed
            async with places:
                place = RolloutId(seed=0, group=group, index=index)
                script = ScriptedEngine(render, actions)
                return await rollout(script, render, world, task, rollout_id=place, budget=budget)

        before = time.perf_counter(), time.process_time(), _machine_time()
        made = await asyncio.gather(*(one(*divmod(number, 16)) for number in range(episodes)))
        after = time.perf_counter(), time.process_time(), _machine_time()
        assert all(t.outcome.score == 1 - t.index % 2 for t in made)
        grading = statistics.median(t.verdict.cost_s for t in made if t.verdict is not None)
        return [*((b - a) / episodes * 1e3 for a, b in zip(before, after, strict=True)), grading * 1e3]

    rows = []
    for limit in (concurrency, concurrency * 3 // 2) * repeats:
        with Pool(sandboxes.load("namespace")(), limit=limit) as pool:
            wall, cpu, machine, grading = asyncio.run(play(pool))
        rows.append({"places": limit, "wall_ms": wall, "cpu_ms": cpu, "machine_ms": machine, "grading_ms": grading})
    return rows


def _machine_time() -> float:
    """Seconds that all processors together have worked since the machine started."""
    with open("/proc/stat") as file:
        user, nice, system, _, _, *rest = map(int, file.readline().split()[1:])
    return (user + nice + system + sum(rest[:2])) / os.sysconf("SC_CLK_TCK")


# Rendering -------------------------------------------------------------------------------------------------------


def rendering(
    render: Renderer, *, lengths: Sequence[int] = (8, 16, 32, 64, 128), repeats: int = 3
) -> list[dict[str, float]]:
    """Milliseconds that all prompts of an episode cost, appended and rendered anew."""
    opening = [Message(role="system", content="Use the tools."), Message(role="user", content="Look at the paths.")]
    answer = Message(role="tool", content=RESULT, name="look")
    schemas = [t.schema() for t in tools_of(Echo).values()]

    def appended(turns: int) -> Span | None:
        span: Span | None = render.prompt(opening, schemas)
        for _ in range(turns):
            span = render.bridge([answer], render.end_of_turn)
        return span

    def anew(turns: int) -> Span:
        messages = list(opening)
        span = render.prompt(messages, schemas)
        for _ in range(turns):
            messages += [CALL, answer]
            span = render.prompt(messages, schemas)
        return span

    rows = []
    for turns in lengths:
        ours, theirs = [], []
        for _ in range(repeats):
            ours.append(seconds(lambda n=turns: appended(n)))  # type: ignore[misc]
            theirs.append(seconds(lambda n=turns: anew(n)))  # type: ignore[misc]
        mine, other = statistics.median(ours) * 1e3, statistics.median(theirs) * 1e3
        rows.append(
            {
                "turns": turns,
                "appended_ms": mine,
                "appended_ms_a_turn": mine / turns,
                "anew_ms": other,
                "anew_ms_a_turn": other / turns,
                "times_faster": other / mine,
            }
        )
    return rows


# Waiting ---------------------------------------------------------------------------------------------------------


def waiting(render: Renderer, *, episodes: int = 128, places: int = 32, repeats: int = 3) -> dict[str, float]:
    """Seconds for the same episodes: 2 to 12 turns, each turn's time from a heavy tail (Pareto, shape 1.5, capped)."""
    rng = random.Random(0)
    plans = [
        [min(0.4, 0.008 * rng.paretovariate(1.5)) for _ in range(rng.choice((2, 3, 3, 4, 6, 12)))]
        for _ in range(episodes)
    ]
    world = EnvRuntime(name="echo", make=Echo, boxes=NoBoxes())
    task = Echo().task("train", 1, 0)

    def delay(request: str) -> float:
        _, index, turn, _ = map(int, request.split("-"))
        return plans[index][turn]

    engine = Stand(render.write(CALL), delay)

    async def free() -> None:
        gate = asyncio.Semaphore(places)

        async def one(index: int) -> None:
            async with gate:
                budget = Budget(context=1 << 20, tokens=1 << 20, turns=len(plans[index]))
                await rollout(
                    engine, render, world, task, rollout_id=RolloutId(seed=0, group=0, index=index), budget=budget
                )

        await asyncio.gather(*(one(i) for i in range(episodes)))

    async def in_step() -> None:
        """Batches of `places` episodes; every turn of a batch waits for its slowest, a batch for its longest."""
        for first in range(0, episodes, places):
            batch = range(first, min(episodes, first + places))
            for turn in range(max(len(plans[i]) for i in batch)):
                await asyncio.gather(*(asyncio.sleep(plans[i][turn]) for i in batch if turn < len(plans[i])))

    slow, fast = [], []
    for _ in range(repeats):
        slow.append(seconds(lambda: asyncio.run(in_step())))
        fast.append(seconds(lambda: asyncio.run(free())))
    work = sum(map(sum, plans)) / places
    return {
        "episodes": episodes,
        "places": places,
        "in_step_s": statistics.median(slow),
        "free_s": statistics.median(fast),
        "ideal_s": work,
        "times_faster": statistics.median(slow) / statistics.median(fast),
    }


if __name__ == "__main__":
    render = renderer()
    sys.exit(
        report(
            __doc__,
            {
                "overhead": lambda: overhead(render),
                "graded": lambda: graded(render),
                "rendering": lambda: rendering(render),
                "waiting": lambda: waiting(render),
            },
        )
    )
