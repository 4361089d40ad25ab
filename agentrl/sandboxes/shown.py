"""Reads the name of an image that is `host` with more in it: `host:python3.11.2:/data:/cache/x=/opt/x`.

A folder of the machine is shown in its own place, or in the place below /opt that stands behind it, so that no sandbox
sees where it lies. `pythonVERSION` refuses a root with another interpreter. See docs/sandboxes.md.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from agentrl.errors import AuthoringError

PREFIX = "host:"
SAYS_PYTHON = "import platform; print(platform.python_version())"
"""What an interpreter runs to say its version."""
_PYTHON = re.compile(r"python(\d[\w.+]*)")
_PLACED = re.compile(r"(.+)=(/opt/[A-Za-z0-9_-][A-Za-z0-9_.-]*)")


@dataclass(frozen=True, slots=True)
class HostImage:
    """What an image adds to `host`."""

    folders: tuple[tuple[str, str], ...]
    """Each folder of the machine, and where sandboxes see it."""
    python: str = ""
    """The version that its Python must have; any if empty."""


def parse(image: str) -> HostImage | None:
    """Return what the image of that name adds to `host`; None if it is another kind of image."""
    if not image.startswith(PREFIX):
        return None
    folders: list[tuple[str, str]] = []
    python = ""
    for part in filter(None, image[len(PREFIX) :].split(":")):
        if version := _PYTHON.fullmatch(part):
            python = version[1]
            continue
        placed = _PLACED.fullmatch(part)
        path, place = placed.groups() if placed else (part, part)
        if not path.startswith("/") or os.path.normpath(path) != path or path == "/" or not os.path.isdir(path):
            raise AuthoringError(f"image {image!r} of a sandbox shows {path!r}, which is no folder of this machine")
        folders.append((path, place))
    places = [place for _, place in folders]
    if len(set(places)) != len(places):
        raise AuthoringError(f"image {image!r} of a sandbox shows two folders in one place")
    return HostImage(tuple(sorted(folders)), python)
