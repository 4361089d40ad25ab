"""Every check by name, in the order they run.

The names that the field has agreed on are kept: seed_control, episode_determinism, episode_isolation, oracle_max,
floor_gap, canary_floor, oracle_containment, no_solution_leakage, verifier_determinism, replayability.
"""

from agentrl.envs import checks_tasks, checks_verdicts
from agentrl.envs.bench import ALL, Bench, Failed

__all__ = ["ALL", "Bench", "Failed", "checks_tasks", "checks_verdicts"]
