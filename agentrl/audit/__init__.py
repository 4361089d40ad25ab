"""The reward-hacking watch: signals that need no judge, what experts do to compare with, and `agentrl audit`."""
