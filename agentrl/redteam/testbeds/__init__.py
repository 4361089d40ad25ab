"""Testbeds: small environments, one for each kind of work a verifier grades, on which attacks are tried.

A testbed brings tasks, tools, an expert and wrong work; its verifier is one of ours, or a naive grader.
"""

from agentrl.redteam.testbeds.answers import Expressions, Numbers, Orders, Sets, Words
from agentrl.redteam.testbeds.base import Testbed
from agentrl.redteam.testbeds.behaviour import Gauges, Means, Measures, SharedSuites, Suites, Tills
from agentrl.redteam.testbeds.code import Functions, Programs, Repositories
from agentrl.redteam.testbeds.judged import Compared, Grown, Judged, Scored, ScriptedExaminer
from agentrl.redteam.testbeds.state import Databases, Documents, Gits, Trees

__all__ = ["SHARED", "TESTBEDS", "Scored", "ScriptedExaminer", "Testbed"]

TESTBEDS: dict[str, tuple[type[Testbed], ...]] = {
    "hidden_tests": (Functions, Programs, Repositories, Tills, Gauges, Suites),
    "final_state": (Trees, Documents, Databases, Gits, Means),
    "answer": (Numbers, Words, Sets, Orders, Expressions, Measures),
    "judge": (Judged, Compared, Scored, Grown),
}
"""For each shipped verifier, by name, the testbeds on which it is tried."""
SHARED: tuple[type[Testbed], ...] = (SharedSuites,)
"""Testbeds of `mode="shared"`: code under test can forge its report there in the end, and its verdicts say so. Only the
attacks on tolerances, callbacks, exceptions and state are expected to gain nothing."""
