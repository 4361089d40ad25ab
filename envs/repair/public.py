"""Public tests as text, from probes and the reference's results; and the runner that runs them in a sandbox."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from . import reference
from .program import Probe


@lru_cache(maxsize=256)
def _answers(program: str) -> tuple[tuple[reference.Result, ...], ...]:
    """Return the reference's results for each probe of the pool."""
    return tuple(tuple(reference.run(reference.names(program), probe)) for probe in reference.pool(program))


def text(program: str, numbers: Sequence[int]) -> str:
    """Return a test file for a module, from these probes of its pool."""
    probes = [reference.pool(program)[number] for number in numbers]
    names = sorted({name for probe in probes for name, _ in probe if not name.startswith(".")})
    lines = [f"from lib.{program} import {', '.join(names)}"]
    for place, (number, probe) in enumerate(zip(numbers, probes, strict=True), start=1):
        lines += ["", "", f"def test_{place}():"]
        lines += [f"    {line}" for line in _body(probe, _answers(program)[number])]
    return "\n".join(lines) + "\n"


def _body(probe: Probe, answers: Sequence[reference.Result]) -> list[str]:
    lines = []
    for (name, args), gave in zip(probe, answers, strict=True):
        written = f"{'thing' if name.startswith('.') else ''}{name}({', '.join(map(repr, args))})"
        if len(probe) > 1 and not name.startswith("."):
            lines.append(f"thing = {written}")
        elif gave.error:
            lines += ["try:", f"    got = {written}", f"except {gave.error}:", f"    got = {gave.error!r}"]
            lines.append(f"assert got == {gave.error!r}, got")
        else:
            lines += [f"got = {written}", f"assert got == {gave.value!r}, got"]
    return lines


RUNNER = """\
import importlib, os, sys, traceback
sys.dont_write_bytecode = True
sys.path.insert(0, os.getcwd())
passed = failed = 0
for file in sorted(os.listdir(".")):
    if not (file.startswith("test_") and file.endswith(".py")):
        continue
    try:
        module = importlib.import_module(file[:-3])
    except Exception as error:
        failed += 1
        print(f"{file}: cannot be imported: {type(error).__name__}: {error}")
        continue
    for name, test in vars(module).items():
        if not name.startswith("test_"):
            continue
        try:
            test()
            passed += 1
        except Exception as error:
            failed += 1
            frames = traceback.extract_tb(error.__traceback__)
            mine = [f for f in frames if os.path.basename(f.filename) == file][-1:]
            print(f"{file} {name}: {mine[0].line if mine else ''}")
            last = frames[-1]
            if isinstance(error, AssertionError) and last in mine and error.args:
                with open(file) as source:
                    call = source.read().splitlines()[last.lineno - 2].strip()
                print(f"  after {call}, got == {repr(error.args[0])[:200]}")
            else:
                print(f"  {type(error).__name__}: {error} ({os.path.relpath(last.filename)}, line {last.lineno})")
print(f"{passed} passed, {failed} failed")
"""
"""Runs every test function of every test file of the workspace, and prints what the failed ones got."""
