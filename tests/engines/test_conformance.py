"""The same tests against every engine that gives tokens and logprobs.

Tolerance: logprobs of float32 engines lie within 1e-4 nats of one plain forward pass of transformers in float32; those
of bfloat16 engines on a GPU within 0.15.
"""

from __future__ import annotations

import asyncio
import copy
import os
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest
import torch

from agentrl.engines.base import Engine, Sampling, Weights
from agentrl.errors import EngineError
from agentrl.rollout.encoder import Span
from agentrl.rollout.sampling import SamplingParams
from agentrl.rollout.thinking import ThinkBudget, sample_turn
from agentrl.rollout.token_log import TokenLog
from agentrl.types import Completion

ON_GPU = os.environ.get("AGENTRL_DEVICE") == "cuda"
TOLERANCE = 0.15 if ON_GPU else 1e-4
PROMPT = [5, 17, 99, 201, 7, 42]
Forward = Callable[..., list[float]]
Run = Callable[[Callable[[Engine], Coroutine[Any, Any, None]]], None]

pytestmark = [pytest.mark.xdist_group("sglang"), pytest.mark.timeout(600)]  # a busy machine starts a server slowly


@pytest.fixture(params=["transformers", "deterministic", "sglang"])
def run(request: pytest.FixtureRequest, opened: Any) -> Run:
    """Run a test's body with a started engine."""

    def body(test: Callable[[Engine], Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            async with opened(request.param) as engine:
                await asyncio.wait_for(test(engine), 120)

        asyncio.run(main())

    return body


def close(one: Any, other: Any) -> bool:
    return len(one) == len(other) and all(abs(a - b) < TOLERANCE for a, b in zip(one, other, strict=True))


def test_greedy_tokens_are_the_models_likeliest_and_repeat(run: Run, logits: Any) -> None:
    async def test(engine: Engine) -> None:
        sampling = Sampling(max_tokens=12, temperature=0.0)
        first, *others = await asyncio.gather(*(engine.generate(PROMPT, sampling) for _ in range(3)))
        rows = logits([*PROMPT, *first.token_ids])[len(PROMPT) - 1 : -1]
        chosen = rows.gather(1, torch.tensor([[token] for token in first.token_ids]))[:, 0]
        assert float((rows.max(-1).values - chosen).max()) < TOLERANCE
        assert first.finish == "length"
        assert first.versions == (0,) * 12
        if not ON_GPU:  # there a batch's size changes the last bits
            assert [other.token_ids for other in others] == [first.token_ids] * 2
        again = [await engine.generate(PROMPT, sampling) for _ in range(2)]
        assert again[0].token_ids == again[1].token_ids

    run(test)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_tokens=40, temperature=1.0, seed=1),
        Sampling(max_tokens=40, temperature=0.6, seed=2),
        Sampling(max_tokens=40, temperature=1.3, top_p=0.7, seed=3),
        Sampling(max_tokens=40, temperature=1.0, top_k=5, seed=4),
    ],
    ids=["plain", "cold", "top-p", "top-k"],
)
def test_logprobs_are_those_of_the_whole_tempered_distribution(run: Run, forward: Forward, sampling: Sampling) -> None:
    async def test(engine: Engine) -> None:
        completion = await engine.generate(PROMPT, sampling)
        expected = forward(PROMPT, completion.token_ids, temperature=sampling.temperature)
        assert close(completion.logprobs, expected)

    run(test)


def test_a_turn_whose_thinking_is_closed_has_exact_masks_and_logprobs(run: Run, forward: Forward) -> None:
    """Forced tokens are neither sampled nor in the loss; what is sampled before and after them has the logprobs that a
    plain forward pass over the whole turn gives, which is what a learner computes."""
    close_block = (60, 61, 62)
    think = ThinkBudget(10, close_block, lambda token_ids: True)

    async def test(engine: Engine) -> None:
        log, prompts = TokenLog(), []
        log.append(Span(tuple(PROMPT), bytes(len(PROMPT))))
        turn = await sample_turn(
            engine,
            log,
            25,
            think=think,
            params=SamplingParams(temperature=0.8),
            stop_token_ids=(),
            seed=lambda part: 7 + part,
            name="0-0-0",
            retries=0,
            note=lambda prompt, new: prompts.append((prompt, len(new.token_ids))),
        )
        first = tuple(PROMPT) + turn.token_ids[:10]
        assert prompts == [(tuple(PROMPT), 10), (first + close_block, 12)]
        assert turn.token_ids[10:13] == close_block and len(turn.token_ids) == 25
        (segment,) = log.finished()
        assert segment.token_ids.tolist() == [*PROMPT, *turn.token_ids]
        assert segment.loss_mask.tolist() == [False] * 6 + [True] * 10 + [False] * 3 + [True] * 12
        assert segment.versions.tolist() == [-1] * 6 + [0] * 10 + [-1] * 3 + [0] * 12
        mask = segment.loss_mask
        expected = [0.0] * 6 + forward(PROMPT, turn.token_ids, temperature=0.8)
        assert close(segment.logprobs[mask].tolist(), [lp for lp, own in zip(expected, mask, strict=True) if own])

    run(test)


def test_top_k_keeps_to_the_likeliest_tokens(run: Run, logits: Any) -> None:
    async def test(engine: Engine) -> None:
        completion = await engine.generate(PROMPT, Sampling(max_tokens=30, top_k=2, seed=5))
        rows = logits([*PROMPT, *completion.token_ids])[len(PROMPT) - 1 : -1]
        pairs = zip(rows, completion.token_ids, strict=True)
        assert max(int((row > row[token] + TOLERANCE).sum()) for row, token in pairs) <= 1

    run(test)


def test_a_stop_token_ends_the_turn_and_is_kept(run: Run) -> None:
    async def test(engine: Engine) -> None:
        sampling = Sampling(max_tokens=12, temperature=0.0)
        if ON_GPU:
            await engine.generate(PROMPT, sampling)  # so that both below find the same in the prefix cache
        whole = await engine.generate(PROMPT, sampling)
        stop = whole.token_ids[5]
        at = whole.token_ids.index(stop)
        stopped = await engine.generate(PROMPT, Sampling(max_tokens=12, temperature=0.0, stop_token_ids=(stop,)))
        assert stopped.token_ids == whole.token_ids[: at + 1]
        assert stopped.finish == "stop"

    run(test)


def test_only_the_stop_tokens_given_end_a_turn(run: Run, model: Any) -> None:
    """Not the end token of the model's configuration, which a server knows of as well."""
    end = model.config.eos_token_id

    async def test(engine: Engine) -> None:
        drawn = [Sampling(max_tokens=300, temperature=1.3, seed=i) for i in range(16)]
        whole = await asyncio.gather(*(engine.generate(PROMPT, sampling) for sampling in drawn))
        assert {(len(one.token_ids), one.finish) for one in whole} == {(300, "length")}
        assert any(end in one.token_ids for one in whole)  # one in 310 or so

    run(test)


def test_many_requests_of_many_lengths_at_once(run: Run, forward: Forward) -> None:
    async def test(engine: Engine) -> None:
        prompts = [[3 + (i * 7 + j) % 300 for j in range(1 + 13 * (i % 9))] for i in range(30)]
        lengths = [1 + (i * 5) % 37 for i in range(30)]
        done = await asyncio.gather(
            *(
                engine.generate(p, Sampling(max_tokens=n, seed=i))
                for i, (p, n) in enumerate(zip(prompts, lengths, strict=True))
            )
        )
        for prompt, length, completion in zip(prompts, lengths, done, strict=True):
            assert (len(completion.token_ids), completion.finish) == (length, "length")
            assert close(completion.logprobs, forward(prompt, completion.token_ids))

    run(test)


def test_a_conversation_that_grows_keeps_exact_logprobs(run: Run, forward: Forward) -> None:
    async def test(engine: Engine) -> None:
        prompt = list(PROMPT)
        for turn in range(4):
            completion = await engine.generate(prompt, Sampling(max_tokens=50, seed=turn))
            assert close(completion.logprobs, forward(prompt, completion.token_ids))
            prompt += [*completion.token_ids, 11 + turn, 12, 13]
        assert engine.statistics()["cached_tokens"] > 100

    run(test)


def test_a_very_long_prompt(run: Run, forward: Forward) -> None:
    async def test(engine: Engine) -> None:
        prompt = [3 + (i * i) % 300 for i in range(3000)]
        completion = await engine.generate(prompt, Sampling(max_tokens=5, seed=1))
        assert close(completion.logprobs, forward(prompt, completion.token_ids))

    run(test)


def test_a_prompt_that_fills_the_context_gives_nothing(run: Run) -> None:
    async def test(engine: Engine) -> None:
        completion = await engine.generate([5] * 4096, Sampling(max_tokens=5))
        assert completion == Completion(token_ids=(), logprobs=(), versions=(), finish="length")

    run(test)


def test_a_token_that_is_not_the_models_fails_alone(run: Run) -> None:
    async def test(engine: Engine) -> None:
        for bad in ([5, 320], [-1, 5], []):
            with pytest.raises(EngineError, match="token"):
                await engine.generate(bad, Sampling(max_tokens=3))
        assert len((await engine.generate(PROMPT, Sampling(max_tokens=3, temperature=0.0))).token_ids) == 3

    run(test)


def test_tokens_are_told_on_the_way_and_change_nothing(run: Run) -> None:
    """What is told only grows, is the beginning of what is returned, and comes long before it."""

    async def first_told(engine: Engine, limit: int) -> int:
        told: list[tuple[int, ...]] = []
        sampling = Sampling(max_tokens=limit, temperature=0.0)
        plain = await engine.generate(PROMPT, sampling)
        completion = await engine.generate(
            PROMPT, replace(sampling, on_tokens=lambda tokens: told.append(tuple(tokens)))
        )
        if not ON_GPU:
            assert (completion.token_ids, completion.finish) == (plain.token_ids, plain.finish)
            assert completion.versions == plain.versions and close(completion.logprobs, plain.logprobs)
        assert told == [completion.token_ids[: len(tokens)] for tokens in told]
        assert sorted(told, key=len) == told
        return len(told[0])

    async def test(engine: Engine) -> None:
        limit = 40
        while await first_told(engine, limit) == limit:  # a busy machine may hear of a short turn when it is over
            limit *= 4
            assert limit < 4000

    run(test)


async def cancelled(engine: Engine, wait: float) -> int:
    """How many of eight were cancelled on their way; the others had come to their limit by then. Every other one is a
    stream."""
    tasks = [
        asyncio.ensure_future(
            engine.generate(
                PROMPT, Sampling(max_tokens=3500, seed=i, on_tokens=(lambda tokens: None) if i % 2 else None)
            )
        )
        for i in range(8)
    ]
    await asyncio.sleep(wait)
    for task in tasks:
        task.cancel()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    return sum(isinstance(e, asyncio.CancelledError) for e in ended)


def test_cancelling_aborts_the_request(run: Run) -> None:
    async def test(engine: Engine) -> None:
        wait = 0.1 if ON_GPU else 0.3
        counts = [await cancelled(engine, wait)]
        while counts[-1] < 5:  # the machine's pace decides how long to wait
            wait /= 2
            counts.append(await cancelled(engine, wait))
        await engine.generate(PROMPT, Sampling(max_tokens=2))
        assert engine.statistics()["aborted"] == sum(counts)

    run(test)


def test_pause_stops_sampling_and_resume_goes_on(run: Run, forward: Forward) -> None:
    async def test(engine: Engine) -> None:
        task = asyncio.ensure_future(engine.generate(PROMPT, Sampling(max_tokens=200, seed=3)))
        await asyncio.sleep(0.05)
        await engine.pause()
        late = asyncio.ensure_future(engine.generate(PROMPT, Sampling(max_tokens=2, temperature=0.0)))
        await asyncio.sleep(0.5)
        assert not late.done()
        await engine.resume()
        completion = await task
        assert len((await late).token_ids) == 2
        assert close(completion.logprobs, forward(PROMPT, completion.token_ids))

    run(test)


def changed(model: Any) -> Any:
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.1)
    return other


async def published_on_the_way(engine: Engine, other: Any, wait: float) -> Completion:
    """A completion of a stream during which weights change; what is told only grows."""
    told: list[tuple[int, ...]] = []
    sampling = Sampling(max_tokens=400, seed=9, on_tokens=lambda tokens: told.append(tuple(tokens)))
    task = asyncio.ensure_future(engine.generate(PROMPT, sampling))
    await asyncio.sleep(wait)
    await engine.publish(Weights(version=1, tensors=dict(other.named_parameters())))
    completion = await task
    assert told == [completion.token_ids[: len(tokens)] for tokens in told]
    return completion


async def mixed(engine: Engine, model: Any, other: Any) -> Completion:
    """A completion that both weights had a part in; the machine's pace decides how long to wait."""
    wait = 0.1
    while True:
        completion = await published_on_the_way(engine, other, wait)
        if set(completion.versions) == {0, 1}:
            return completion
        wait = wait / 2 if 1 not in completion.versions else wait * 2
        await engine.publish(Weights(version=0, tensors=dict(model.named_parameters())))


def check_mixed(completion: Completion, forward: Forward, model: Any, other: Any) -> None:
    old = completion.versions.count(0)
    assert completion.versions == (0,) * old + (1,) * (len(completion.versions) - old)
    by_old = forward(PROMPT, completion.token_ids, by=model)
    by_new = forward(PROMPT, completion.token_ids, by=other)
    assert close(completion.logprobs[:old], by_old[:old])
    assert close(completion.logprobs[old:], by_new[old:])
    assert not close(completion.logprobs, by_old)


def test_a_weight_update_is_seen_by_the_next_token(run: Run, forward: Forward, model: Any) -> None:
    async def test(engine: Engine) -> None:
        other = changed(model)
        completion = await mixed(engine, model, other)
        assert engine.version == 1
        check_mixed(completion, forward, model, other)
        after = await engine.generate(PROMPT, Sampling(max_tokens=5, seed=1))
        assert after.versions == (1,) * 5
        assert close(after.logprobs, forward(PROMPT, after.token_ids, by=other))

    run(test)


def test_wrong_weights_are_refused_and_the_engine_goes_on(run: Run, forward: Forward) -> None:
    async def test(engine: Engine) -> None:
        with pytest.raises(EngineError):
            await engine.publish(Weights(version=7))
        assert engine.version == 0
        completion = await engine.generate(PROMPT, Sampling(max_tokens=5, seed=1))
        assert close(completion.logprobs, forward(PROMPT, completion.token_ids))

    run(test)
