"""Testbeds: small environments, one for each kind of work a verifier grades, on which attacks are tried.

A testbed brings tasks, tools, an expert and wrong work; its verifier is one of ours, or a naive grader.
"""

from agentrl.redteam.testbeds.answers import Expressions, Numbers, Orders, Sets, Words
from agentrl.redteam.testbeds.base import Testbed
from agentrl.redteam.testbeds.code import Functions, Programs, Repositories
from agentrl.redteam.testbeds.judged import Judged, ScriptedExaminer
from agentrl.redteam.testbeds.state import Databases, Documents, Gits, Trees

__all__ = ["TESTBEDS", "ScriptedExaminer", "Testbed"]

TESTBEDS: dict[str, tuple[type[Testbed], ...]] = {
    "hidden_tests": (Functions, Programs, Repositories),
    "final_state": (Trees, Documents, Databases, Gits),
    "answer": (Numbers, Words, Sets, Orders, Expressions),
    "judge": (Judged,),
}
"""For each shipped verifier, by name, the testbeds on which it is tried."""
