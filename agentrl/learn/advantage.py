"""Computes advantages from scores, in numpy: one training sample for each segment of each graded trajectory.

    groups ── returns (one number per trajectory, or one per turn) ── estimator ── laid on tokens ── TrainingSample

A rollout without a score (infra or verifier error) counts neither in a baseline nor in the loss.
Weights act in the loss alone: a trajectory of weight 0 still counts in its group's baseline.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from agentrl.learn.algorithms import Algorithm, Estimator, resolve
from agentrl.recipe import AlgorithmSection
from agentrl.types import Group, TrainingSample, Trajectory

Floats = NDArray[np.float64]
Key = tuple[int, int]
"""(group number, trajectory index)."""

EPSILON = 1e-6


def advantages(
    groups: Sequence[Group],
    algorithm: AlgorithmSection,
    *,
    scores: Mapping[Key, float] | None = None,
    weights: Mapping[Key, float] | None = None,
    penalties: Mapping[Key, float] | None = None,
) -> list[TrainingSample]:
    """Return one sample for each segment, in the groups' order.

    `scores` replaces the outcome's score of a trajectory (reward shaping); `weights` says how much a trajectory counts
    in the loss (1 by default); `penalties` are taken from the scores that are compared (KL in the reward), and change
    nothing about what counts as solved.
    """
    row = resolve(algorithm)
    scores, weights, penalties = scores or {}, weights or {}, penalties or {}
    graded: list[list[Trajectory]] = [[t for t in g.trajectories if t.outcome.score is not None] for g in groups]
    returns = [[_returns(t, row, _score(t, scores)) for t in group] for group in graded]
    lengths = [[_turn_lengths(t) if row.credit == "turn" else [t.sampled_tokens] for t in group] for group in graded]
    ended = [[_score(t, scores) for t in group] for group in graded]
    if penalties:
        taken = [[penalties.get((t.group, t.index), 0.0) for t in group] for group in graded]
        returns = [[r - own for r, own in zip(*group, strict=True)] for group in zip(returns, taken, strict=True)]
    if row.has_critic:  # it makes the advantages later: learn/critic.py
        estimated = [[np.zeros(max(1, len(_turn_lengths(t)))) for t in group] for group in graded]
    else:
        estimated = estimate(row.advantage, returns, lengths, ended)
    if row.credit == "branch":
        return _branch_samples(row, graded, scores, weights)
    if row.credit == "state":
        estimated = [_with_states(row, *g) for g in zip(graded, estimated, ended, strict=True)]
    by_turn = row.credit != "trajectory"
    samples: list[TrainingSample] = []
    for trajectories, values in zip(graded, estimated, strict=True):
        for trajectory, value in zip(trajectories, values, strict=True):
            weight = weights.get((trajectory.group, trajectory.index), 1.0)
            score = _score(trajectory, scores)
            rewards = _turn_rewards(trajectory, score) if row.has_critic else None
            samples += _samples(trajectory, value, by_turn, weight, positive=score == 1.0, rewards=rewards)
    return samples


def state_advantages(estimator: Estimator, returns: Sequence[Floats], states: Sequence[Sequence[str]]) -> list[Floats]:
    """Compare the turns of a group's trajectories that began in equal states, by their returns from there on (GiGPO).

    A trajectory that comes back to a state stands there once for each visit. A state that nobody else was in, or that
    could not be told (""), gives 0.
    """
    places: dict[str, list[tuple[int, int]]] = {}
    for number, names in enumerate(states):
        for turn, name in enumerate(names):
            if name:
                places.setdefault(name, []).append((number, turn))
    result = [np.zeros(len(r)) for r in returns]
    for visits in places.values():
        values = GROUP_ESTIMATORS[estimator](np.array([returns[number][turn] for number, turn in visits]))
        for (number, turn), value in zip(visits, values, strict=True):
            result[number][turn] = value
    return result


def branch_advantages(rewards: Floats, values: Mapping[int, float], discount: float = 1.0) -> Floats:
    """Return the advantages of an episode's turns: r + γ·V(state after) − V(state before) (VinePPO).

    `rewards` holds one number per turn, the last with the final score; `values` those of the states before some turns,
    the first among them. Turns between two states with values share what was gained from one to the other.
    """
    result = np.zeros(len(rewards))
    known = sorted(turn for turn in values if turn < len(rewards))
    for first, end in itertools.pairwise([*known, len(rewards)]):
        gained = sum(discount**place * reward for place, reward in enumerate(rewards[first:end]))
        after = discount ** (end - first) * values[end] if end < len(rewards) else 0.0
        result[first:end] = gained + after - values[first]
    return result


def estimate(
    estimator: Estimator,
    returns: Sequence[Sequence[Floats]],
    tokens: Sequence[Sequence[Sequence[int]]] | None = None,
    ended: Sequence[Sequence[float]] | None = None,
) -> list[list[Floats]]:
    """Return the advantages of every group's trajectories from their returns.

    A trajectory's returns are an array with one number for all of it, or one per turn; each turn is compared with the
    same turn of the others. A trajectory that has ended before stands there with its number in `ended`, its final score
    (by default its last return): otherwise late turns would be compared with few others, mostly as good, and a lone
    one with none. `tokens` counts the sampled tokens of each return: the batch estimators whiten over tokens.
    """
    last = ended or [[float(r[-1]) if len(r) else 0.0 for r in group] for group in returns]
    both = list(zip(returns, last, strict=True))
    if estimator in ("batch", "batch_baseline"):
        centred = [_each_turn(_mean_baseline, *g) for g in both] if estimator == "batch_baseline" else returns
        counts = tokens or [[[1] * len(r) for r in group] for group in returns]
        return _whiten(centred, counts)
    if estimator == "batch_std":
        everything = np.concatenate([r for group in returns for r in group] or [np.zeros(0)])
        scale = _std(everything) + EPSILON
        return [[a / scale for a in _each_turn(_mean_baseline, *group)] for group in both]
    return [_each_turn(GROUP_ESTIMATORS[estimator], *group) for group in both]


def _mean_baseline(values: Floats) -> Floats:
    centred: Floats = values - values.mean()
    return centred if len(values) > 1 and values.max() > values.min() else np.zeros_like(values)


def _group(values: Floats) -> Floats:
    centred: Floats = _mean_baseline(values) / (_std(values) + EPSILON)
    return centred


def _leave_one_out(values: Floats) -> Floats:
    n = len(values)
    left_out: Floats = _mean_baseline(values) * (n / (n - 1)) if n > 1 else np.zeros_like(values)
    return left_out


def _maxrl(values: Floats) -> Floats:
    mean = float(values.mean())
    scaled: Floats = _mean_baseline(values) / mean if mean > 0 else np.zeros_like(values)
    # Without negative values this is so by itself; with them the mean may be next to 0, and the quotient anything.
    return scaled.clip(-1.0, len(values) - 1.0) if values.min() < 0 else scaled


GROUP_ESTIMATORS = {"group": _group, "mean": _mean_baseline, "leave_one_out": _leave_one_out, "maxrl": _maxrl}


def _std(values: Floats) -> float:
    """Return the standard deviation with Bessel's correction; 0 for fewer than two values."""
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0


def _each_turn(function: Callable[[Floats], Floats], group: Sequence[Floats], ended: Sequence[float]) -> list[Floats]:
    """Apply `function` to the first returns of all trajectories, then to the second, ...; `ended` stands for those that
    have none."""
    result = [np.zeros(len(r)) for r in group]
    for turn in range(max((len(r) for r in group), default=0)):
        returns = [r[turn] if len(r) > turn else last for r, last in zip(group, ended, strict=True)]
        values = function(np.array(returns, dtype=np.float64))
        for advantages, value in zip(result, values, strict=True):
            if len(advantages) > turn:
                advantages[turn] = value
    return result


def _whiten(returns: Sequence[Sequence[Floats]], tokens: Sequence[Sequence[Sequence[int]]]) -> list[list[Floats]]:
    """Subtract the batch's mean and divide by its standard deviation, both over tokens."""
    values = np.concatenate([r for group in returns for r in group] or [np.zeros(0)])
    counts = np.array([n for group in tokens for trajectory in group for n in trajectory], dtype=np.float64)
    total = float(counts.sum())
    if total < 2 or not len(values) or values.max() == values.min():
        return [[np.zeros(len(r)) for r in group] for group in returns]
    mean = float((values * counts).sum() / total)
    variance = float((np.square(values - mean) * counts).sum() / (total - 1))
    scale = 1.0 / np.sqrt(variance + 1e-8)
    return [[(r - mean) * scale for r in group] for group in returns]


def _score(trajectory: Trajectory, shaped: Mapping[Key, float]) -> float:
    assert trajectory.outcome.score is not None
    return shaped.get((trajectory.group, trajectory.index), trajectory.outcome.score)


def _returns(trajectory: Trajectory, algorithm: Algorithm, score: float) -> Floats:
    """Return the score of the trajectory, or the return of each of its turns.

    Beside the advantages of states stands the whole reward of the trajectory: its score and all process rewards.
    """
    if algorithm.credit == "turn":
        return _turn_returns(trajectory, algorithm, score)
    process = trajectory.verdict.turn_scores if algorithm.credit == "state" and trajectory.verdict else ()
    return np.array([score + sum(process)], dtype=np.float64)


def _turn_returns(trajectory: Trajectory, algorithm: Algorithm, score: float) -> Floats:
    """Return for each turn the discounted sum of the rewards from there on."""
    rewards = _turn_rewards(trajectory, score)
    for turn in range(len(rewards) - 2, -1, -1):
        rewards[turn] += algorithm.discount * rewards[turn + 1]
    return rewards


def _turn_rewards(trajectory: Trajectory, score: float) -> Floats:
    """Return each turn's reward: the verifier's score for it. The last turn gets the final score as well, and process
    rewards beyond the last turn. A continuation begins with the first turn of its own."""
    rewards = np.zeros(len(_turn_lengths(trajectory)))
    if not len(rewards):
        return rewards
    process = trajectory.verdict.turn_scores if trajectory.verdict else ()
    for turn, reward in enumerate(process[trajectory.branch_turn or 0 :]):
        rewards[min(turn, len(rewards) - 1)] += reward
    rewards[-1] += score
    return rewards


def _with_states(
    row: Algorithm, trajectories: Sequence[Trajectory], episodes: Sequence[Floats], scores: Sequence[float]
) -> list[Floats]:
    """Return the advantages of each trajectory's turns: its own, plus those among turns of equal states."""
    returns = [_turn_returns(t, row, score) for t, score in zip(trajectories, scores, strict=True)]
    for trajectory, turns in zip(trajectories, returns, strict=True):
        if len(trajectory.states) != len(turns):
            raise ValueError(
                f"a trajectory of {trajectory.task.id} has {len(turns)} turns and {len(trajectory.states)} states; "
                "algorithm.credit: state needs the state before each turn"
            )
    steps = state_advantages(row.advantage, returns, [t.states for t in trajectories])
    return [episode[0] + row.state_weight * step for episode, step in zip(episodes, steps, strict=True)]


def _branch_samples(
    row: Algorithm, groups: Sequence[Sequence[Trajectory]], scores: Mapping[Key, float], weights: Mapping[Key, float]
) -> list[TrainingSample]:
    """Return the samples of episodes whose turns are valued by continuations, and of those if they are trained on."""
    episodes: list[Trajectory] = []
    values: list[Floats] = []
    for group in groups:
        starts = [_first_return(t, row, _score(t, scores)) for t in group]
        for place, trajectory in enumerate(group):
            others = starts[:place] + starts[place + 1 :]
            played: dict[int, list[tuple[Trajectory, float]]] = {}
            for branch in trajectory.branches:
                if branch.outcome.score is not None and branch.branch_turn is not None:
                    value = _first_return(branch, row, _score(branch, scores))
                    played.setdefault(branch.branch_turn, []).append((branch, value))
            # The first state is that of the whole group: the other episodes are continuations from it.
            states = {0: sum(others) / len(others) if others else starts[place]}
            states |= {turn: sum(value for _, value in each) / len(each) for turn, each in played.items()}
            rewards = _turn_rewards(trajectory, _score(trajectory, scores))
            episodes.append(trajectory)
            values.append(branch_advantages(rewards, states, row.discount))
            if row.train_branches:
                returns = _turn_returns(trajectory, row, _score(trajectory, scores))
                for turn, each in played.items():
                    total = sum(value for _, value in each) + returns[turn]
                    episodes += [branch for branch, _ in each]
                    values += [np.full(branch.turns, value - (total - value) / len(each)) for branch, value in each]
    if row.advantage == "batch":
        (values,) = _whiten([values], [[_turn_lengths(t) for t in episodes]])
    samples: list[TrainingSample] = []
    for trajectory, advantage in zip(episodes, values, strict=True):
        weight = weights.get((trajectory.group, trajectory.index), 1.0)
        samples += _samples(trajectory, advantage, True, weight, positive=_score(trajectory, scores) == 1.0)
    return samples


def _first_return(trajectory: Trajectory, row: Algorithm, score: float) -> float:
    """Return the discounted sum of all rewards of an episode, or of a continuation from its border on."""
    returns = _turn_returns(trajectory, row, score)
    return float(returns[0]) if len(returns) else score


def _turn_lengths(trajectory: Trajectory) -> list[int]:
    """Return the number of sampled tokens of each turn, over all segments."""
    lengths: list[int] = []
    for segment in trajectory.segments:
        turns = segment.turns
        lengths += np.bincount(turns[turns >= 0]).tolist()
    return lengths


def _samples(
    trajectory: Trajectory,
    values: Floats,
    by_turn: bool,
    weight: float,
    *,
    positive: bool = False,
    rewards: Floats | None = None,
) -> list[TrainingSample]:
    """Return the trajectory's segments with its advantages laid on their sampled tokens."""
    if trajectory.usage is not None:
        raise ValueError(f"{trajectory.task.id} was played by a chat endpoint: it has no token ids to train on")
    samples: list[TrainingSample] = []
    first = 0
    for segment in trajectory.segments:
        turns = segment.turns
        last = int(turns.max(initial=-1)) + 1
        if last == 0:
            continue  # nothing was sampled here: nothing to learn
        ends = (turns >= 0) & (np.append(turns[1:], -1) != turns)
        laid = None if rewards is None else np.where(ends, rewards[first : first + last][turns], 0.0)
        of_token = values[first : first + last][turns] if by_turn else np.full(len(segment), values[0])
        first += last
        samples.append(
            TrainingSample(
                segment=segment,
                advantages=np.where(turns >= 0, of_token, 0.0).astype(np.float32),
                weight=weight,
                group=trajectory.group,
                trajectory=trajectory.index,
                positive=positive,
                rewards=None if laid is None else laid.astype(np.float32),
            )
        )
    return samples
