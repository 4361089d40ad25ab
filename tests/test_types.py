"""The contracts of types.py: what may not exist cannot be built."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import Fault
from agentrl.types import (
    Completion,
    Group,
    Message,
    Outcome,
    Segment,
    Source,
    Task,
    TrainingSample,
    Trajectory,
    Verdict,
)

TASK = Task(id="t/train/1/0", split="train", level=1, prompt="p", setup={"a": 1}, secret={"answer": 42})
GRADED = Outcome(ending="done", grade="graded", score=1.0)


def segment(sources: list[int]) -> Segment:
    sampled = np.array(sources) == Source.SAMPLED
    n = len(sources)
    return Segment(
        np.arange(n, dtype=np.int32),
        np.where(sampled, -0.5, 0).astype(np.float32),
        np.where(sampled, 3, -1).astype(np.int32),
        np.array(sources, dtype=np.uint8),
    )


def test_the_loss_mask_is_true_exactly_on_sampled_tokens() -> None:
    s = segment([0, 0, 2, 2, 1, 0, 2])
    assert s.loss_mask.tolist() == [False, False, True, True, False, False, True]
    assert s.turns.tolist() == [-1, -1, 0, 0, -1, -1, 1]


@given(st.lists(st.sampled_from([0, 1, 2]), max_size=40))
def test_turns_count_runs_of_sampled_tokens(sources: list[int]) -> None:
    turns = segment(sources).turns.tolist()
    assert [t >= 0 for t in turns] == [s == 2 for s in sources]
    seen = [t for t in turns if t >= 0]
    assert seen == sorted(seen)
    assert sorted(set(seen)) == list(range(len(set(seen))))


def test_a_segment_with_wrong_arrays_is_refused() -> None:
    ids, versions = np.array([1, 2], np.int32), np.array([-1, 0], np.int32)
    logprobs, sources = np.array([0, -1], np.float32), np.array([0, 2], np.uint8)
    assert len(Segment(ids, logprobs, versions, sources)) == 2
    for wrong in [
        (ids[:1], logprobs, versions, sources),
        (ids, np.array([0, 0.5], np.float32), versions, sources),
        (ids, np.array([0, np.nan], np.float32), versions, sources),
        (ids, np.array([-1, -1], np.float32), versions, sources),
        (ids, logprobs, np.array([-1, -1], np.int32), sources),
        (ids, logprobs, np.array([0, 0], np.int32), sources),
        (ids, logprobs, versions, np.array([0, 7], np.uint8)),
        (np.array([-1, 2], np.int32), logprobs, versions, sources),
    ]:
        with pytest.raises(ValueError):
            Segment(*wrong)


def test_a_segment_cannot_be_written_to() -> None:
    with pytest.raises(ValueError):
        segment([0, 2]).token_ids[0] = 5


def test_a_trajectory_never_carries_a_secret() -> None:
    parts = dict(group=0, index=0, seed=1, segments=(segment([0, 2]),), messages=(), outcome=GRADED)
    with pytest.raises(ValueError, match="secret"):
        Trajectory(task=TASK, **parts)  # type: ignore[arg-type]
    trajectory = Trajectory(task=TASK.public(), **parts)  # type: ignore[arg-type]
    assert b"answer" not in pickle.dumps(trajectory)
    assert (trajectory.tokens, trajectory.sampled_tokens, trajectory.oldest_version) == (2, 1, 3)
    assert "42" not in repr(TASK)


@pytest.mark.parametrize("score", [float("nan"), float("inf"), -0.1, 1.1, True, "1", None])
def test_a_verdict_is_a_finite_number_in_the_unit_interval(score: object) -> None:
    with pytest.raises(ValueError):
        Verdict(score=score)  # type: ignore[arg-type]


def test_an_outcome_has_a_score_exactly_when_it_was_graded() -> None:
    fault = Fault("sandbox", "infra", "gone")
    assert Outcome(ending="max_turns", grade="graded", score=0.5).score == 0.5
    assert Outcome(ending="done", grade="infra_error", score=None, fault=fault).score is None
    for grade, score in [("graded", None), ("infra_error", 0.0), ("verifier_error", 1.0), ("graded", float("nan"))]:
        with pytest.raises(ValueError):
            Outcome(ending="done", grade=grade, score=score, fault=fault)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="fault"):
        Outcome(ending="done", grade="infra_error", score=None)


def test_a_group_without_a_spread_is_not_informative() -> None:
    def group(*scores: float | None) -> Group:
        fault = Fault("engine", "infra", "gone")
        outcomes = [
            Outcome(ending="done", grade="graded", score=s)
            if s is not None
            else Outcome(ending="done", grade="infra_error", score=None, fault=fault)
            for s in scores
        ]
        task = TASK.public()
        made = tuple(
            Trajectory(task=task, group=0, index=i, seed=0, segments=(segment([2]),), messages=(), outcome=o)
            for i, o in enumerate(outcomes)
        )
        return Group(task=task, number=0, trajectories=made)

    assert group(0.0, 1.0).informative
    assert not group(1.0, 1.0).informative
    assert not group(1.0, None).informative
    assert group(1.0, None, 0.5).scores == (1.0, 0.5)


def test_lengths_must_agree() -> None:
    with pytest.raises(ValueError):
        Completion(token_ids=(1,), logprobs=(), versions=(0,), finish="stop")
    with pytest.raises(ValueError):
        TrainingSample(segment=segment([2]), advantages=np.zeros(2, np.float32), weight=1, group=0, trajectory=0)
    with pytest.raises(ValueError):
        TrainingSample(segment=segment([2]), advantages=np.zeros(1, np.float32), weight=-1, group=0, trajectory=0)


def test_messages_compare_by_value() -> None:
    assert Message(role="user", content="x") == Message(role="user", content="x")
