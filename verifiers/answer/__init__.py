"""Grades a final answer that is text: exactly one answer, read with a strict grammar and compared exactly."""

from .expression import Expression, parse
from .verifier import Answer

__all__ = ["Answer", "Expression", "parse"]
EXPORT = Answer
