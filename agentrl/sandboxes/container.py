"""Tells whether this process runs in a container or pod, whose rules decide which sandboxes work in it."""

from __future__ import annotations

import os

MARKS = ("/.dockerenv", "/run/.containerenv")
"""Files that Docker and Podman leave in every container."""


def in_container() -> bool:
    """Whether this is a container or a pod, as far as it can be seen from inside."""
    return "KUBERNETES_SERVICE_HOST" in os.environ or any(os.path.exists(path) for path in MARKS)
