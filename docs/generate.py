"""Writes the generated pages: `python docs/generate.py`. A test checks that each is current."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from agentrl import declared_metrics
from agentrl.recipe import schema

ROOT = Path(__file__).resolve().parent.parent
NOTE = "<!-- Made by docs/generate.py; change the code it comes from instead. -->"


def recipe_page() -> str:
    """Return docs/recipe.md: every key of a recipe."""
    document = schema.schema()
    lines = [
        "# Recipe reference",
        NOTE,
        "",
        "A recipe is one YAML file that says everything about a training run. Every key is checked before anything "
        "starts; a mistake is reported with the key, what was found, what is allowed and the nearest right spelling. "
        "Only `run.name`, `model` and `envs` are required. `agentrl train RECIPE --set KEY=VALUE` overrides a key "
        "(`--set learner.lr=1e-5`, `--set envs.0.levels=[1,2]`), and `--print-recipe` shows the whole recipe with its "
        "defaults.",
        "",
        "`recipes/schema.json` (also: `agentrl recipe schema`) is the JSON Schema, from which editors complete and "
        "check keys. With the YAML language server, begin a recipe with:",
        "",
        "```yaml",
        "# yaml-language-server: $schema=./schema.json",
        "```",
        "",
        _table(("section", "default", "meaning"), [
            (f"[`{key}`](#{key})", _default(part, document), part["description"])
            for key, part in document["properties"].items()
            if not part.get("deprecated")
        ]),
    ]  # fmt: skip
    for key, part in document["properties"].items():
        if not part.get("deprecated"):
            lines += _section(key, part, document, "##")
    return "\n".join(lines) + "\n"


def metrics_page() -> str:
    """Return docs/metrics.md: every figure of a run's metrics."""
    groups = {
        "Every row": "",
        "rollout": "Rows of kind `step`: the episodes of the round that the step trained on.",
        "judge": "Rows of kind `step`: what verifiers asked the judge, where a recipe has one.",
        "reward": "Rows of kind `step`: what verifier and judge gave, where a recipe has `rewards.judged`.",
        "audit": "Rows of kind `step`: the [reward-hacking watch](audit.md).",
        "learn": "Rows of kind `step`: the learner, and sending its weights to the engine.",
        "curriculum": "Rows of kind `step`: what was drawn, and what the curriculum of each environment believes.",
        "eval": "Rows of kind `eval`: an evaluation, per environment.",
        "warm_start": "The row of kind `warm_start`.",
    }
    lines = [
        "# Metrics reference",
        NOTE,
        "",
        "A run writes `metrics.jsonl` in its folder: one JSON object per step, evaluation, warm start and alarm. "
        "TensorBoard shows the same figures where it is installed (`tensorboard --logdir runs`). A value that is not "
        "finite is written as null. A *share* is a number from 0 to 1.",
        "",
        "```python",
        "from pathlib import Path",
        "",
        "from agentrl import metrics",
        "",
        'steps = list(metrics.read(Path("runs/quickstart/metrics.jsonl"), "step"))',
        'print([row["rollout/score"] for row in steps])',
        "```",
    ]
    for group, about in groups.items():
        members = [
            m for m in declared_metrics.METRICS if (m.name.partition("/")[0] if "/" in m.name else "Every row") == group
        ]
        heading = group if group == "Every row" else f"{group}/"
        lines += ["", f"## {heading}", *([about, ""] if about else [])]
        lines.append(_table(("key", "unit", "meaning"), [(f"`{m.name}`", m.unit, m.meaning) for m in members]))
    return "\n".join(lines) + "\n"


API: dict[str, tuple[str, ...] | None] = {
    "agentrl": None,
    "agentrl.envs": None,
    "agentrl.envs.splits": ("draw", "Shuffle"),
    "agentrl.envs.data": ("Table", "rows"),
    "agentrl.envs.testing": ("play_script", "scripted_policy"),
    "agentrl.verifiers": None,
    "agentrl.verifiers.compose": (
        "all_of", "any_of", "weighted", "gated", "first_decisive", "process", "shaped", "OverLength", "Format",
    ),
    "agentrl.verifiers.answer": None,
    "agentrl.verifiers.final_state": None,
    "agentrl.verifiers.hidden_tests": None,
    "agentrl.verifiers.judge": None,
    "agentrl.sandboxes": None,
    "agentrl.data": None,
    "agentrl.types": ("Split", "Ending"),
}  # fmt: skip
"""The modules of docs/api.md, and the names of each; None stands for its `__all__`."""


def api_page() -> str:
    """Return docs/api.md: the public names, from `__all__` and docstrings."""
    pages = {module: names or tuple(import_module(module).__all__) for module, names in API.items()}
    home = {name: module for module, names in pages.items() for name in names if module != "agentrl"}
    lines = [
        "# API reference",
        NOTE,
        "",
        "The public SDK: what environments, verifiers and scripts of your own may import. Everything else may move at "
        "any time. Guides: [authoring](authoring.md), [sandbox and verifier API](sandbox_api.md), "
        "[verifiers](verifiers.md).",
    ]
    for module, names in pages.items():
        lines += ["", f"## {module}", _paragraph(import_module(module).__doc__)]
        elsewhere = [name for name in names if module == "agentrl" and name in home]
        if elsewhere:
            links = ", ".join(f"[`{name}`](#{_anchor(name)})" for name in sorted(elsewhere))
            lines += ["", f"From the sections below: {links}."]
        for name in sorted(set(names) - set(elsewhere), key=lambda name: (name.lower(), name.swapcase())):
            lines += ["", f"### {name}", *_described(module, name)]
    return "\n".join(lines) + "\n"


def _described(module: str, name: str) -> list[str]:
    """Return the signature, docstring, fields and methods of a public name."""
    node, following = _definition(module, name)
    if isinstance(node, ast.Assign | ast.AnnAssign):
        return ["```python", _code(node), "```", *_text(following)]
    if isinstance(node, ast.ClassDef):
        return _described_class(node)
    return ["```python", _signature(node, name), "```", *_text(ast.get_docstring(node))]


def _described_class(node: ast.ClassDef) -> list[str]:
    methods = [part for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)]
    bases = ", ".join(_code(base) for base in node.bases if _code(base) not in ("ABC", "Protocol"))
    init = next((method for method in methods if method.name == "__init__"), None)
    head = f"class {node.name}({bases})" if bases else f"class {node.name}"
    lines = ["```python", head, *([_signature(init, node.name)] if init else []), "```"]
    lines += _text(ast.get_docstring(node))
    fields = []
    for part, after in zip(node.body, [*node.body[1:], ast.Pass()], strict=True):
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name) and part.target.id[0] != "_":
            fields.append((f"`{part.target.id}`", f"`{_code(part.annotation)}`", _default_of(part), _doc(after)))
    if fields:
        lines += ["", _table(("field", "type", "default", "meaning"), fields)]
    public = [method for method in methods if not method.name.startswith("_")]
    if public:
        lines += [""]
    for method in public:
        first = _paragraph(ast.get_docstring(method))
        lines.append(f"- `{_signature(method, method.name)}`" + (f": {first}" if first else ""))
    return lines


def _definition(module: str, name: str) -> tuple[Any, str]:
    """Return the syntax node that defines a name, following imports, and the docstring below an assignment."""
    path = Path(str(import_module(module).__file__))
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found: Any = None
    for part, after in zip(tree.body, [*tree.body[1:], ast.Pass()], strict=True):
        if isinstance(part, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and part.name == name:
            found = part  # the last one: the implementation after its overloads
        targets = part.targets if isinstance(part, ast.Assign) else [getattr(part, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            alias = part.value.id if isinstance(part, ast.Assign) and isinstance(part.value, ast.Name) else ""
            return _definition(module, alias) if alias else (part, _doc(after))
    if found is not None:
        return found, ""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and any((alias.asname or alias.name) == name for alias in node.names):
            source = f"{module}.{node.module}" if node.level else str(node.module)
            return _definition(source, next(a.name for a in node.names if (a.asname or a.name) == name))
    raise LookupError(f"{module}.{name} is public, but {path} neither defines nor imports it")


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> str:
    if any(_code(mark) in ("property", "cached_property") for mark in node.decorator_list):
        return f"{name}: {_code(node.returns)}" if node.returns else name
    arguments = _code(node.args)
    for first in ("self", "cls"):
        arguments = arguments.removeprefix(first).removeprefix(", ")
    returns = f" -> {_code(node.returns)}" if node.returns and node.name != "__init__" else ""
    return f"{'await ' if isinstance(node, ast.AsyncFunctionDef) else ''}{name}({arguments}){returns}"


def _default_of(field: ast.AnnAssign) -> str:
    if field.value is None:
        return ""
    text = _code(field.value)
    if not text.startswith("field("):
        return f"`{text}`"
    factories = [word.value for word in getattr(field.value, "keywords", []) if word.arg == "default_factory"]
    if not factories or not isinstance(factories[0], ast.Name):
        return ""
    name = factories[0].id
    return {"dict": "`{}`", "list": "`[]`"}.get(name, f"`{name}()`")


def _code(node: ast.AST) -> str:
    """Return the source of a node; `ast` writes the mode 0o644 in decimal."""
    return re.sub(r"\b420\b", "0o644", ast.unparse(node))


def _doc(node: ast.AST) -> str:
    """Return the text of a docstring that stands below a field."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return " ".join(node.value.value.split())
    return ""


def _text(docstring: str | None) -> list[str]:
    """Return a docstring as Markdown: paragraphs, and indented parts as they stand."""
    lines: list[str] = []
    for part in (docstring or "").split("\n\n"):
        if not part.strip():
            continue
        rest = part.splitlines()
        indented = any(line.startswith("    ") for line in rest)
        lines += ["", *(["```text", *rest, "```"] if indented else [" ".join(part.split())])]
    return lines


def _paragraph(docstring: str | None) -> str:
    return " ".join((docstring or "").strip().split("\n\n")[0].split())


def _anchor(name: str) -> str:
    return name.lower()


def audit_page() -> str:
    """Return docs/audit.md with its tables from docs/evidence/audit.json."""
    path = ROOT / "docs/audit.md"
    evidence = json.loads((ROOT / "docs/evidence/audit.json").read_text(encoding="utf-8"))
    families = [
        (f"{family}: {row['title']}", f"{row['caught']} of {row['rewarded']}", f"{row['caught'] / row['rewarded']:.0%}")
        for family, row in evidence["families"].items()
    ]
    honest = [(name, f"{row['alarms']} of {row['played']}") for name, row in evidence["honest"].items()]
    runs = [
        (row["env"], row["verifier"], "yes" if row["audits"] else "no",
         " → ".join(f"{x:.2f}" for x in row["hack_share"]),
         " → ".join(f"{x:.2f}" for x in row["score"]),
         ", ".join(f"{name} at step {step}" for name, step in row["alarms"].items()) or "none",
         "caught" if row["suspicious"] else "not suspicious")
        for row in evidence["runs"]
    ]  # fmt: skip
    tables = {
        "families": _table(("attacks that a naive grader rewards", "caught", "recall"), families),
        "honest": _table(("honest play", "false alarms"), honest),
        "runs": _table(("environment", "verifier", "audit verifier", "share of the hack", "training score", "alarms",
                        "`agentrl audit`"), runs),
    }  # fmt: skip
    return _filled(path, tables)


def repositories_page() -> str:
    """Return docs/repositories.md with its tables from docs/evidence/repositories.json."""
    evidence = json.loads((ROOT / "docs/evidence/repositories.json").read_text(encoding="utf-8"))
    built = [row for row in evidence["packages"] if "tasks" in row]
    rows = [
        (f"{row['package']} {row['version']}", row["kind"], f"{row['build_minutes']:.0f}",
         f"{row['grading']} of {row['tests']}", ", ".join(f"{level}: {n}" for level, n in row["levels"].items()),
         str(row["tasks"]), f"{row['mutation_score']:.2f}", str(row.get("functions_by_calls", "not tried")),
         _verdict_time(row), _attacks(row))
        for row in built
    ]  # fmt: skip
    heads = ("package", "kind", "build, minutes", "tests that grade", "tasks per level", "tasks", "mutation score",
             "functions through calls", "seconds per verdict", "red team: gained of tried")  # fmt: skip
    summary = evidence["summary"]
    sums = (
        f"{summary['packages']} packages, {summary['tasks']} verified tasks, {summary['verified_per_hour']} verified "
        "per hour. "
    )
    tried = f"{summary['attacks_gained']} of {summary['attacks_tried']} attacks gained anything."
    sums += tried if summary["attacks_tried"] else "The red team has not been run to its end on any of them yet."
    refused = [
        (f"{row['package']} {row['version']}", row["refused"]) for row in evidence["packages"] if "refused" in row
    ]
    refusals = _table(("package", "why not"), refused) if refused else ""
    tables = {"packages": _table(heads, rows), "sums": sums, "refused": refusals}
    return _filled(ROOT / "docs/repositories.md", tables)


def _verdict_time(row: Mapping[str, Any]) -> str:
    return f"{row['verdict_seconds']:.1f}" if "verdict_seconds" in row else "not measured"


def _attacks(row: Mapping[str, Any]) -> str:
    """Return how the red team fared, and on how much of its attacks."""
    if "redteam" not in row:
        return "not run"
    team = row["redteam"]
    part = "all attacks" if team["attacks"] == team["of"] else f"{team['attacks']} of {team['of']} attacks"
    return f"{len(team['gained'])} of {team['tried']} ({part})"


def _filled(path: Path, tables: Mapping[str, str]) -> str:
    """Return a page with its marked parts replaced."""
    text = path.read_text(encoding="utf-8")
    for name, table in tables.items():
        text = re.sub(
            rf"(<!-- {name} -->\n).*?(<!-- end -->)", lambda m, t=table: f"{m[1]}{t}\n{m[2]}", text, flags=re.S
        )
    return text


PAGES: dict[str, Callable[[], str]] = {
    "docs/recipe.md": recipe_page,
    "docs/metrics.md": metrics_page,
    "docs/api.md": api_page,
    "docs/audit.md": audit_page,
    "docs/repositories.md": repositories_page,
    "recipes/schema.json": schema.as_text,
}
"""Each generated file, and what makes its text."""


def _section(key: str, part: Mapping[str, Any], document: Mapping[str, Any], heading: str) -> list[str]:
    """Return the heading and table of a section, of each of its kinds, and of the sections below it."""
    models = [document["$defs"][name] for name in _references(part)]
    lines = ["", f"{heading} {key}"]
    if len(models) > 1 or part.get("type") == "array":
        lines += [part["description"], ""]
    for model in models:
        kind = model["properties"]["type"].get("const") if len(models) > 1 else None
        lines += [f"{heading}# {key}, type: {kind}"] if kind else []
        rows = [(f"`{name}`", _type(entry), _default(entry, document, name in model.get("required", [])),
                 entry["description"]) for name, entry in model["properties"].items()]  # fmt: skip
        lines += [model["description"], "", _table(("key", "type", "default", "meaning"), rows), ""]
        for name, entry in model["properties"].items():
            if _references(entry):
                lines += [*_section(f"{key}.{name}", entry, document, f"{heading}#")[1:], ""]
    return lines[:-1]


def _references(part: Mapping[str, Any]) -> list[str]:
    """Return the names of the sections that a schema refers to."""
    if "$ref" in part:
        return [part["$ref"].rpartition("/")[2]]
    inner = [*part.get("oneOf", []), *part.get("anyOf", []), *([part["items"]] if "items" in part else [])]
    return [name for entry in inner for name in _references(entry)]


def _type(part: Mapping[str, Any]) -> str:
    """Return the type of a key in words."""
    if _references(part):
        return "section"
    if "const" in part:
        return f"`{part['const']}`"
    if "enum" in part:
        return ", ".join(f"`{value}`" for value in part["enum"])
    if "anyOf" in part:
        return " or ".join(_type(entry) for entry in part["anyOf"] if entry.get("type") != "null")
    if part["type"] == "array":
        inner = part["items"] if "items" in part else part["prefixItems"][0]
        plural = {"string": "text", "integer": "integers", "number": "numbers"}[inner["type"]]
        return f"list of {plural}{_bounds(inner)}"
    names = {"string": part.get("format", "text"), "boolean": "true or false", "object": "mapping"}
    return names.get(part["type"], part["type"]) + _bounds(part)


def _bounds(part: Mapping[str, Any]) -> str:
    """Return the allowed range of a number in words; upper bounds that nobody meets are left out."""
    low, above = part.get("minimum"), part.get("exclusiveMinimum")
    high, below = part.get("maximum"), part.get("exclusiveMaximum")
    high = None if high is not None and high >= 10**6 else high
    below = None if below is not None and below >= 10**6 else below
    words = [
        f"≥ {low:g}" if low is not None else "",
        f"> {above:g}" if above is not None else "",
        f"≤ {high:g}" if high is not None else "",
        f"< {below:g}" if below is not None else "",
    ]
    return " " + ", ".join(word for word in words if word) if any(words) else ""


def _default(part: Mapping[str, Any], document: Mapping[str, Any], required: bool = False) -> str:
    if required or "default" not in part:
        return "required"
    default = part["default"]
    if default == {} and _references(part):
        return "its defaults"
    return "–" if default is None else f"`{json.dumps(default)}`"


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    cells = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells)


if __name__ == "__main__":
    for name, page in PAGES.items():
        (ROOT / name).write_text(page(), encoding="utf-8")
        print(name)
