"""Grades what only an opinion can: a model judges by a rubric, after its agreement with gold labels is measured."""

from .calibration import Calibration, Gold
from .comparison import Versus, compare
from .prompt import Criterion, Rubric
from .scalar import Scalar
from .verifier import JudgeVerifier

__all__ = ["Calibration", "Criterion", "Gold", "JudgeVerifier", "Rubric", "Scalar", "Versus", "compare"]
EXPORT = JudgeVerifier
