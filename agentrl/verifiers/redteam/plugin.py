"""A pytest plugin: `pytest --agentrl-env NAME` runs one test for each attack and control."""
