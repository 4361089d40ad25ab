"""The checks of `agentrl env check`: whether an environment is fit for training."""
