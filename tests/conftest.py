"""For the whole suite: `make test` draws the same examples every time; `make test-full` looks for new ones."""

import os

from hypothesis import settings

settings.register_profile("same", derandomize=True)
if not os.environ.get("AGENTRL_FULL"):
    settings.load_profile("same")
