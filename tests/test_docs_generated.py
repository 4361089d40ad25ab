"""Generated pages are what their generator makes now: `python docs/generate.py` writes them."""

import runpy
from collections.abc import Callable

import pytest

from agentrl.catalogue import CHECKOUT

PAGES: dict[str, Callable[[], str]] = runpy.run_path(str(CHECKOUT / "docs" / "generate.py"))["PAGES"]


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_current(name: str) -> None:
    assert (CHECKOUT / name).read_text(encoding="utf-8") == PAGES[name](), "run python docs/generate.py"
