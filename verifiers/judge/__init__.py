"""Grades what only an opinion can: a model judges by a rubric, after its agreement with gold labels is measured."""

from .calibration import Calibration, Gold
from .prompt import Criterion
from .verifier import JudgeVerifier

__all__ = ["Calibration", "Criterion", "Gold", "JudgeVerifier"]
EXPORT = JudgeVerifier
