"""Judges: the models that verifiers ask, as recipes and commands name them."""

from agentrl.judges.calibration import Agreement, calibrate
from agentrl.judges.evolving import EvolvingRubric, open_rubric
from agentrl.judges.judge import Judge, make, named, named_rewards
from agentrl.judges.rewards import judged_alone, reward_row, with_rewards
from agentrl.judges.tournament import Tournament
from agentrl.judges.use import (
    UNUSED,
    WHAT_TO_WRITE,
    asked_by,
    check_engine,
    closing,
    for_command,
    judge_of,
    measured,
    missing,
    needs_judge,
    open_judge,
    stages_of,
)

__all__ = [
    "UNUSED",
    "WHAT_TO_WRITE",
    "Agreement",
    "EvolvingRubric",
    "Judge",
    "Tournament",
    "asked_by",
    "calibrate",
    "check_engine",
    "closing",
    "for_command",
    "judge_of",
    "judged_alone",
    "make",
    "measured",
    "missing",
    "named",
    "named_rewards",
    "needs_judge",
    "open_judge",
    "open_rubric",
    "reward_row",
    "stages_of",
    "with_rewards",
]
