"""Trains a tiny policy from Python and reads what came of it."""

import os
from pathlib import Path

import agentrl
from agentrl import metrics, recipe

STEPS = int(os.environ.get("STEPS", "20"))

# The shipped quickstart, with a few keys changed as --set would.
changes = [f"run.steps={STEPS}", "run.name=from-python", "eval.tasks=40", f"warm_start.epochs={min(16, 2 * STEPS)}"]
code = agentrl.train(recipe.load("quickstart", changes))
print("exit code", code)

rows = list(metrics.read(Path("runs/from-python/metrics.jsonl")))
for row in rows:
    if row["kind"] == "step":
        print(f"step {row['step']}: score {row['rollout/score']:.3f}, informative {row['rollout/informative']:.2f}")
for row in rows:
    if row["kind"] == "eval":
        print(f"held-out, {row['stage']}: {row['eval/files/pass@1']['value']:.3f}")
