"""Trains a tiny policy from Python and reads what came of it."""

import os

import agentrl

STEPS = int(os.environ.get("STEPS", "20"))

# The shipped quickstart, with a few keys changed as --set would.
changes = {"run": {"name": "from-python", "steps": STEPS}, "eval": {"tasks": 40}}
run = agentrl.train("quickstart", **changes, warm_start__epochs=min(16, 2 * STEPS))
print(run)

for row in run.rows():
    print(f"step {row['step']}: score {row['rollout/score']:.3f}, informative {row['rollout/informative']:.2f}")
for evaluation in run.evaluations():
    print(f"held-out, {evaluation['stage']}: {evaluation['pass@1']['value']:.3f}")
