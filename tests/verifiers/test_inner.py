"""Programs for sandboxes: complete as text, with the one codec in front, and nothing of agentrl to import."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from typing import Any

import pytest

from agentrl.verifiers.inner import LOADER, compiled, source_of
from agentrl.verifiers.values import Malformed, Opaque, decode, encode

HIDDEN = "agentrl.verifiers.hidden_tests"
PROGRAMS = [
    (HIDDEN, "inside"),
    (HIDDEN, "inside_agent"),
    (HIDDEN, "inside_tests"),
    (HIDDEN, "inside_shared"),
    ("agentrl.verifiers.final_state", "inside_database"),
    ("agentrl.envs.sql", "inside"),
]


@pytest.mark.parametrize(("package", "name"), PROGRAMS)
def test_a_program_is_complete(package: str, name: str) -> None:
    tree = ast.parse(source_of(package, name))
    compile(tree, name, "exec")
    modules = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    tops = {module.split(".")[0] for module in modules}
    assert tops <= set(sys.stdlib_module_names) | {"pytest", "_pytest"}


def test_only_one_file_knows_the_tags() -> None:
    for package, name in PROGRAMS:
        own = source_of(package, name).replace(source_of("agentrl.verifiers", "tagged").partition("\n")[2], "")
        assert not any(tag in own for tag in ('"l"', '"z"', '"i"', '"f"')), name


def shipped() -> dict[str, Any]:
    """The codec as a sandbox gets it."""
    names: dict[str, Any] = {"__name__": "shipped"}
    exec(source_of("agentrl.verifiers", "tagged"), names)
    return names


def test_both_sides_speak_the_same_form() -> None:
    inside = shipped()
    value = {1: [2.5, (b"x", None)], "a": {True, "b"}, (1, 2): frozenset({3})}
    form = inside["encode"](value)
    assert form == encode(value)
    assert decode(json.loads(json.dumps(form))) == value == inside["decode"](form)


def test_what_exceeds_the_limits_of_the_trusted_side() -> None:
    inside = shipped()
    deep: Any = 1
    for _ in range(100):
        deep = [deep]
    kept: list[Any] = []

    def reference(value: Any) -> dict[str, Any]:
        kept.append(value)
        return {"o": len(kept) - 1, "type": type(value).__name__}

    for value in (10**3_999, [10**5_000], object()):
        assert isinstance(decode(inside["encode"](value, reference)), Opaque | list)
    form = inside["encode"](deep, reference)
    assert [type(value) for value in kept] == [int, int, object, list]
    for too_deep in (form, encode(deep)):
        with pytest.raises(Malformed):
            decode(too_deep)
    assert inside["decode"](encode(deep), trusted=True) == deep
    assert inside["decode"](form, lambda reference: kept[reference["o"]], max_depth=61) == deep


def test_equal_members_are_refused_unless_they_are_trusted() -> None:
    twice: Any = {"d": [["a", None], ["a", True]]}
    forms: list[Any] = [twice, {"s": ["a", "a"]}, {"i": "1_0"}, {"q": 1}, {"s": [{"l": []}]}]
    for form in forms:
        with pytest.raises(Malformed):
            decode(form)
    assert shipped()["decode"](twice, trusted=True) == {"a": True}


def test_the_loader_runs_the_compiled_program_or_its_source() -> None:
    order = json.dumps({"files": {}, "module": "math", "steps": []}).encode()
    program = compiled(HIDDEN, "inside")
    tag, _, rest = program.partition(b" ")
    for message in (program, b"other-" + tag + b" " + rest):
        command = f"import os\nos.dup2(0, 3)\nos.dup2(1, 4)\n{LOADER}"
        done = subprocess.run([sys.executable, "-c", command], input=message + order, capture_output=True, check=True)
        assert json.loads(done.stdout) == {"steps": []}
