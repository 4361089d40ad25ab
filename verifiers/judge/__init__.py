"""Grades what only an opinion can: a model judges by a rubric, calibrated against labels before it is believed."""

from .calibration import Calibration, Gold
from .prompt import Criterion
from .verifier import JudgeVerifier

__all__ = ["Calibration", "Criterion", "Gold", "JudgeVerifier"]
EXPORT = JudgeVerifier
