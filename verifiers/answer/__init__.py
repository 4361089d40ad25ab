"""Grades a final answer that is text: exactly one answer, read with a strict grammar and compared exactly."""

from .expression import Expression, parse
from .latex import MathAnswer
from .verifier import Answer

__all__ = ["Answer", "Expression", "MathAnswer", "parse"]
EXPORT = Answer
