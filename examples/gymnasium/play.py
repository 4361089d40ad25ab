"""Solves one file chore through gymnasium, as the environment's own expert would."""

import gymnasium

import agentrl.envs  # registers agentrl/NAME-v0 for every environment

chore = gymnasium.make("agentrl/files-v0")
text, info = chore.reset(seed=0, options={"level": 1, "index": 0})
print(text)
task = agentrl.envs.load("files")().task("train", 1, 0)
reward, over = 0.0, False
for action in agentrl.envs.load("files")().expert(task):
    step = action if isinstance(action, str) else {"name": action.name, "arguments": dict(action.arguments)}
    text, reward, over, _, info = chore.step(step)
    print(step, "->", text)
print("reward", reward, "over", over)
chore.close()
