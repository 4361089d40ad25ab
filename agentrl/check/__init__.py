"""The checks of `agentrl env check`: is an environment fit for training?"""
