"""Small recipes, samples and models for the learner's tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from agentrl.errors import Fault
from agentrl.learn.learner import Learner
from agentrl.learn.model import load_model
from agentrl.recipe import Recipe
from agentrl.types import Group, Outcome, Segment, Source, Task, TrainingSample, Trajectory, Verdict

VOCABULARY = 270


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """Tiny tensors: more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make_recipe() -> Callable[..., Recipe]:
    """A recipe with a tiny scratch model; sections are laid over it."""

    def make(**sections: Any) -> Recipe:
        model = {"type": "scratch", "vocabulary": VOCABULARY, "layers": 2, "width": 32, "heads": 2, "context": 256}
        base = {
            "run": {"name": "test", "steps": 10},
            "model": model | sections.pop("model", {}),
            "envs": [{"name": "none"}],
            "learner": {"device": "cpu", "lr": 1e-2, "max_mismatch": 100.0} | sections.pop("learner", {}),
        }
        return Recipe.model_validate(base | sections)

    return make


@pytest.fixture
def make_learner(make_recipe: Callable[..., Recipe]) -> Callable[..., Learner]:
    """A learner on a tiny model; `double` makes it float64."""

    def make(*, double: bool = False, **sections: Any) -> Learner:
        recipe = make_recipe(**sections)
        model, tokenizer = load_model(recipe.model, device="cpu")
        return Learner(model.double() if double else model, tokenizer, recipe)

    return make


def segment(sources: Sequence[int], seed: int = 0, logprob: float = -5.5) -> Segment:
    """A segment with random tokens and the given sources."""
    kinds = np.array(sources, dtype=np.uint8)
    sampled = kinds == Source.SAMPLED
    random = np.random.default_rng(seed)
    return Segment(
        random.integers(5, VOCABULARY, len(kinds)).astype(np.int32),
        np.where(sampled, logprob - random.random(len(kinds)) * 0.2, 0).astype(np.float32),
        np.where(sampled, 0, -1).astype(np.int32),
        kinds,
    )


def joined(*parts: Segment) -> Segment:
    """Segments one after the other."""
    names = ("token_ids", "logprobs", "versions", "sources")
    return Segment(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


@pytest.fixture
def make_segment() -> Callable[..., Segment]:
    return segment


@pytest.fixture
def make_samples() -> Callable[..., list[TrainingSample]]:
    """Samples of many lengths: a group's prompt, turn, observation, turn."""

    def make(number: int = 8, *, seed: int = 0, group_size: int = 4) -> list[TrainingSample]:
        random = np.random.default_rng(seed)
        samples = []
        prompt = segment([])
        for i in range(number):
            if i % group_size == 0:
                prompt = segment([0] * int(random.integers(1, 20)), seed=1000 * seed + 500 + i)
            first, seen, second = (int(n) for n in random.integers(1, 20, 3))
            made = joined(prompt, segment([2] * first + [1] * seen + [2] * second, seed=1000 * seed + i))
            advantage = np.where(made.loss_mask, random.normal(), 0).astype(np.float32)
            nothing = np.zeros(len(made), np.float32)  # what a critic says, and should say
            samples.append(
                TrainingSample(
                    segment=made,
                    advantages=advantage,
                    weight=1.0,
                    group=i // group_size,
                    trajectory=i % group_size,
                    values=nothing,
                    returns=nothing,
                )
            )
        return samples

    return make


@pytest.fixture
def make_group() -> Callable[..., Group]:
    """A group from scores; None stands for an infra failure. `sources` may give each rollout segments of its own."""

    def make(
        scores: Sequence[float | None],
        *,
        number: int = 0,
        sources: Sequence[Sequence[Sequence[int]]] | None = None,
        turn_scores: Sequence[Sequence[float]] | None = None,
        states: Sequence[Sequence[str]] | None = None,
    ) -> Group:
        task = Task(id=f"t/{number}", split="train", level=1, prompt="p")
        made = []
        for i, score in enumerate(scores):
            outcome = (
                Outcome(ending="done", grade="graded", score=score)
                if score is not None
                else Outcome(ending="done", grade="infra_error", score=None, fault=Fault("sandbox", "infra", "lost"))
            )
            verdict = None if score is None else Verdict(score=score, turn_scores=tuple((turn_scores or [()] * 99)[i]))
            shapes = sources[i] if sources else [[0, 2, 2]]
            made.append(
                Trajectory(
                    task=task,
                    group=number,
                    index=i,
                    seed=0,
                    segments=tuple(segment(s) for s in shapes),
                    messages=(),
                    outcome=outcome,
                    verdict=verdict,
                    states=tuple(states[i]) if states else ("start",),
                )
            )
        return Group(task=task, number=number, trajectories=tuple(made))

    return make
