"""The red team: attacks that try to gain a score they did not earn, and the suite that runs them."""
