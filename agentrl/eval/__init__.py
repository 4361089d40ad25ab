"""`agentrl eval`: policies of every kind under one protocol, their files, figures and comparisons."""
