"""The reference programs, by name."""

from __future__ import annotations

from ..program import Program
from . import algorithms, dates, graphs, money, parsers, structures, text

_ROOMS = (algorithms, text, parsers, structures, dates, money, graphs)
PROGRAMS: dict[str, Program] = {program.name: program for room in _ROOMS for program in room.PROGRAMS}
