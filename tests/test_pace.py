"""A limit of processor time catches what takes longer, on any machine."""

from __future__ import annotations

import time

import pytest

from tests.pace import USUAL_S, slowness, within


def test_what_takes_longer_than_it_may_fails_and_what_only_waits_does_not() -> None:
    with pytest.raises(AssertionError, match="s of processor time, where"), within(0.1 * USUAL_S):
        slowness()  # takes what the machine takes for `USUAL_S`
    with within(10 * USUAL_S):
        slowness()
        time.sleep(0.3)
