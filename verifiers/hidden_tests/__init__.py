"""Grades code on tests that it never sees: functions and classes, command-line programs, whole repositories."""

from .cases import Case, Raised, Ref, Returned, Step, differential, example, holds, metamorphic, raises, script
from .functions import HiddenTests
from .programs import ProgramTests, Ran, run
from .repository import RepositoryTests

__all__ = [
    "Case",
    "HiddenTests",
    "ProgramTests",
    "Raised",
    "Ran",
    "Ref",
    "RepositoryTests",
    "Returned",
    "Step",
    "differential",
    "example",
    "holds",
    "metamorphic",
    "raises",
    "run",
    "script",
]
EXPORT = HiddenTests
