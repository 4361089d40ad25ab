"""Shooting ranges: small environments, one for each kind of work a verifier grades, on which attacks are tried.

A range brings tasks, tools, an expert and wrong work; the verifier is put in: one of ours, or a naive foil.
"""

from agentrl.verifiers.redteam.ranges.answers import Expressions, Numbers, Orders, Sets, Words
from agentrl.verifiers.redteam.ranges.base import Range
from agentrl.verifiers.redteam.ranges.code import Functions, Programs, Repositories
from agentrl.verifiers.redteam.ranges.judged import Judged, ScriptedExaminer
from agentrl.verifiers.redteam.ranges.state import Databases, Documents, Gits, Trees

__all__ = ["RANGES", "Range", "ScriptedExaminer"]

RANGES: dict[str, tuple[type[Range], ...]] = {
    "hidden_tests": (Functions, Programs, Repositories),
    "final_state": (Trees, Documents, Databases, Gits),
    "answer": (Numbers, Words, Sets, Orders, Expressions),
    "judge": (Judged,),
}
"""For each shipped verifier, by name, the ranges on which it is tried."""
