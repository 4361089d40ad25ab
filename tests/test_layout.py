"""The rooms of the package: imports run one way, without a circle, and torch stays below learn/ and in engines."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

ORDER = """
cli
sdk chat
loop eval profile preflight
warm_start
check
redteam
doctor
assembly
serving
cluster
interop
initial_policy
alarms
data
audit
evaluation
judges
learn curriculum
rollout
repos
engines
envs
verifiers
sandboxes
runfolder
recipe
report
metrics records
codec hashing declared_metrics
types seeds statistics
gymnasium_plugin
catalogue
errors extras event_loop
"""
"""From the top down: a room imports from the lines below its own, and from itself."""
RANK = {room: number for number, line in enumerate(ORDER.strip().splitlines()) for room in line.split()}
MEMBERS = ("envs", "verifiers", "sandboxes")


def sources() -> dict[str, Path]:
    """Every module of the product, by its import name."""
    modules = {}
    for file in (ROOT / "agentrl").rglob("*.py"):
        modules[".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")] = file
    for kind in MEMBERS:
        for file in (ROOT / kind).rglob("*.py"):
            name = ".".join(("agentrl", *file.relative_to(ROOT).with_suffix("").parts))
            modules[name.removesuffix(".__init__")] = file
    return {name: file for name, file in modules.items() if "shims" not in file.parts and "inner" not in file.parts}


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def imports(name: str, file: Path) -> Iterator[str]:
    """What a module imports, wherever in it, imports for type checkers included."""
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


@cache
def graph() -> dict[str, set[str]]:
    """Which module imports which."""
    modules = sources()
    arrows: dict[str, set[str]] = {}
    for name, file in modules.items():
        arrows[name] = set()
        for target in imports(name, file):
            while target and target not in modules:
                target = target.rpartition(".")[0]
            if target not in ("", "agentrl", name):
                arrows[name].add(target)
    return arrows


def room(module: str) -> str:
    return module.split(".")[1]


def test_every_module_is_in_a_room() -> None:
    rooms = {room(module) for module in sources() if module not in ("agentrl", "agentrl.__main__")}
    assert rooms - set(RANK) == set()
    assert set(RANK) - rooms == set()


def test_imports_run_one_way() -> None:
    against = [
        f"{module} imports {target}"
        for module, targets in graph().items()
        if module not in ("agentrl", "agentrl.__main__")
        for target in sorted(targets)
        if room(module) != room(target) and RANK[room(module)] >= RANK[room(target)]
    ]
    assert against == []


def test_there_is_no_circle() -> None:
    arrows = {module: {t for t in targets if t != "agentrl"} for module, targets in graph().items()}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        for target in sorted(arrows[module]):
            # A package's __init__ is loaded before its modules anyhow: what it offers of them is no circle.
            if module.startswith(f"{target}.") or target.startswith(f"{module}."):
                continue
            if circle := visit(target, (*path, module)):
                return circle
        done.add(module)
        return []

    assert [circle for module in sorted(arrows) if (circle := visit(module, ()))] == []


def test_torch_stays_where_it_belongs() -> None:
    """At the top of a module only in learn/ and in engines that need it: everything else must load without it."""
    allowed = ("agentrl.learn.", "agentrl.engines.")
    early = []
    for name, file in sources().items():
        for node in tree(file).body:
            roots = []
            if isinstance(node, ast.Import):
                roots = [alias.name.split(".")[0] for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                roots = [(node.module or "").split(".")[0]]
            if {"torch", "transformers", "trl", "peft"} & set(roots) and not name.startswith(allowed):
                early.append(name)
    assert early == []


def test_ray_stays_in_the_cluster() -> None:
    """Only agentrl/cluster imports ray, and nothing imports that at the top of a module: only a recipe with `cluster`
    brings it in."""
    outside, early = [], []
    for name, file in sources().items():
        inside = name.startswith("agentrl.cluster")
        if not inside and any(target.split(".")[0] == "ray" for target in imports(name, file)):
            outside.append(name)
        for node in tree(file).body:
            if isinstance(node, ast.ImportFrom) and not inside and (node.module or "").startswith("agentrl.cluster"):
                early.append(name)
    assert (outside, early) == ([], [])
