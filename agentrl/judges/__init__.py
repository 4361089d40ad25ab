"""Judges: the models that verifiers ask, as recipes and commands name them."""

from agentrl.judges.calibration import Agreement, calibrate
from agentrl.judges.judge import Judge, make, named
from agentrl.judges.use import (
    UNUSED,
    WHAT_TO_WRITE,
    asked_by,
    closing,
    for_command,
    judge_of,
    measured,
    missing,
    needs_judge,
    open_judge,
)

__all__ = [
    "UNUSED",
    "WHAT_TO_WRITE",
    "Agreement",
    "Judge",
    "asked_by",
    "calibrate",
    "closing",
    "for_command",
    "judge_of",
    "make",
    "measured",
    "missing",
    "named",
    "needs_judge",
    "open_judge",
]
