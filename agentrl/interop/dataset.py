"""Any data set as an environment, from a recipe alone: the prompt, the answer, and how the answer is graded.

    envs:
      - name: dataset                # or dataset:NAME, where a recipe has several
        options: {path: rows.jsonl, prompt: question, answer: solution, verifier: math}

Rows come from .jsonl or .parquet files, from a folder that `datasets` saved, or from the Hugging Face hub. A row's
content decides its split, so that no question of one split is in another, however the file is sorted. Test sets for
evaluation have the split `test` alone: nothing here trains on them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from agentrl.envs import Environment
from agentrl.envs.data import Rows, Table, rows
from agentrl.errors import AuthoringError
from agentrl.interop.bridge import Bridge, checked
from agentrl.interop.code_tests import CodeTests, entry_of
from agentrl.types import SPLITS, Split, Task, ToolCall
from agentrl.verifiers.answer import Answer, MathAnswer
from agentrl.verifiers.answer.text import Extract
from agentrl.verifiers.base import Verifier
from agentrl.verifiers.judge import Criterion, Gold, JudgeVerifier

SYSTEMS = {
    "math": "Solve the problem. Think step by step, then give the final answer, alone on the last line: \\boxed{...}",
    "exact": "Answer the question. Think, then give the answer, alone on the last line: <answer>...</answer>",
    "code": "Write the Python code that is asked for. Finish with all of it in one block: ```python ... ```.",
    "judge": "Answer the question as well as you can.",
}
"""The system message of each way of grading: it says where the answer is looked for."""
_PLACE = re.compile(r"\{(\w+)\}")


class Options(BaseModel):
    """The options of the environment `dataset`."""

    model_config = ConfigDict(extra="forbid")

    path: str
    """A .jsonl or .parquet file, a folder that `datasets` saved or that is laid out as on the hub, or a name on the
    Hugging Face hub."""
    prompt: str
    """The column that holds the prompt, or a template such as "{question} Choose from {options}."."""
    answer: str = ""
    """The column of the answer; for `code` of a solution, where there is one; for `judge` of a reference."""
    verifier: Literal["math", "exact", "code", "judge"]
    """How the final message is graded."""
    after: str = ""
    """The answer is what follows the last of these marks in its column, such as "####"."""
    level: str = ""
    """The column of the level, a whole number; by default every row is of level 1."""
    tests: str = ""
    """For `code`: the column of the tests, a list of asserts or a text with `def check(candidate)`."""
    entry: str = ""
    """For `code`: the column of the function's name; by default what the tests call."""
    setup: str = ""
    """For `code`: the column of code that the tests need."""
    start: str = ""
    """For `code`: the column of the beginning of the function, where the prompt is one."""
    strict: bool = True
    """For `math` and `exact`: whether the answer must stand alone at the end of the message. Without it, words around
    the one answer are not looked at: "it is not \\boxed{7}" counts as 7. That suits the evaluation of other models."""
    ignore_case: bool = False
    """For `exact`: whether the case of letters is ignored."""
    rubric: list[dict[str, Any]] = Field(default_factory=list)
    """For `judge`: criteria with `name`, `question` and perhaps `weight`."""
    gold: str = ""
    """For `judge`: a JSONL file of graded submissions: `problem`, `text`, `passes`, perhaps `reference`."""
    min_letters: int = Field(default=8, ge=1)
    """For `judge`: a message with fewer letters and digits fails unread, since bare symbols can sway a judge."""
    config: str | None = None
    """For the hub: the configuration of the data set."""
    hub_split: str = "train"
    """For the hub: the split that is loaded."""
    revision: str | None = None
    """For the hub: the branch, tag or commit; a commit keeps what is trained on from changing."""
    evaluation_only: bool = False
    """Every row is of the split `test`, and training is refused. The default for the hub's split `test`."""
    system: str = ""
    """The system message, in place of the verifier's own."""


class Dataset(Bridge):
    """Answer the questions of a data set; the options say which."""

    max_turns = 1
    options: ClassVar[Options]
    table: ClassVar[Table]

    @classmethod
    def made_from(cls, options: Mapping[str, Any]) -> type[Environment]:
        chosen = _checked(options)
        return environment_of(cls, chosen, _source(chosen), cls.name or "dataset")

    @classmethod
    def version_of(cls, options: Mapping[str, Any]) -> Any:
        return _stamp(str(options.get("path", "")))

    def size_of(self, split: Split, level: int) -> int | None:
        return self.table.size(split, level)

    def task(self, split: Split, level: int, index: int) -> Task:
        size = self.table.size(split, level)
        if split not in self.splits or not size:
            raise AuthoringError(f"{self.name} has no rows of split {split!r} and level {level}")
        options, row = self.options, self.table.row(split, level, index)
        secret = {"answer": _answer(options, row)}
        if options.verifier == "code":
            secret |= _tests(options, row)
        return Task(
            id=f"{self.name}/{split}/{level}/{index % size}",
            split=split,
            level=level,
            prompt=filled(options.prompt, row),
            secret=secret,
        )

    def expert(self, task: Task) -> Sequence[ToolCall | str]:
        answer = task.secret["answer"]
        if not answer:
            raise NotImplementedError("the data has no answers")
        shapes = {"math": "\\boxed{%s}", "exact": "<answer>%s</answer>", "code": "```python\n%s\n```", "judge": "%s"}
        return [shapes[self.options.verifier] % answer]


def environment_of(cls: type[Dataset], options: Options, source: Rows, name: str) -> type[Dataset]:
    """Return the environment of these rows."""
    everything = {"whole": True} if options.evaluation_only else {}
    level = (lambda row: _level(options, row)) if options.level else None
    table = Table(source, content=lambda row: filled(options.prompt, row), level=level, **everything)
    levels = table.levels
    splits = tuple(split for split in SPLITS if any(table.size(split, level) for level in levels))
    sizes = [table.size(split, level) for split in splits for level in levels]
    body: dict[str, Any] = {
        "__doc__": cls.__doc__,
        "__module__": __name__,
        "name": name,
        "options": options,
        "table": table,
        "levels": range(levels[0], levels[-1] + 1),
        "splits": splits,
        "size": max(1, min(sizes)),
        "system": options.system or SYSTEMS[options.verifier],
        "verifier": verifier_of(options),
    }
    return type(cls.__name__, (cls,), body)


def verifier_of(options: Options) -> Verifier:
    """Return what grades the answers."""
    verifier: Verifier
    if options.verifier == "math":
        verifier = MathAnswer(_expected, extract="boxed_alone" if options.strict else "boxed")
        return verifier
    if options.verifier == "exact":
        extract: Extract = "tag_alone" if options.strict else "tag"
        verifier = Answer(_expected, kind="exact", extract=extract, ignore_case=options.ignore_case)
        return verifier
    if options.verifier == "code":
        return CodeTests(_secret)
    try:
        criteria = [Criterion(**criterion) for criterion in options.rubric]
        source = rows(options.gold) if options.gold else []
        gold = [Gold(**dict(source[number])) for number in range(len(source))]
    except TypeError as error:
        raise AuthoringError(f"dataset: rubric or gold has the wrong fields: {error}") from None
    if not criteria or not gold:
        raise AuthoringError(
            "dataset: the verifier `judge` needs `rubric` (criteria with name and question) and `gold` (a JSONL file "
            "of submissions that people have graded: problem, text, passes), by which the judge is measured first"
        )
    short = [g.text for g in gold if g.passes and sum(map(str.isalnum, g.text)) < options.min_letters]
    if short:
        raise AuthoringError(
            f"dataset: `gold` says that {short[0]!r} passes, but a message with fewer than {options.min_letters} "
            "letters is not read; set `min_letters`"
        )
    reference = _expected if options.answer else None
    verifier = JudgeVerifier(criteria, gold=gold, reference=reference, min_letters=options.min_letters)
    return verifier


def filled(template: str, row: Mapping[str, Any]) -> str:
    """Return a column, or a template with its columns filled in."""

    def value(name: str) -> str:
        if name not in row:
            raise AuthoringError(f"dataset: there is no column {name!r}; the columns are: {', '.join(map(str, row))}")
        part = row[name]
        if part is None:  # as a text it would be "null": a question nobody asked, or an answer that anybody can give
            raise AuthoringError(f"dataset: a row has nothing in its column {name!r}; leave such rows out")
        return part if isinstance(part, str) else json.dumps(part, ensure_ascii=False)

    return _PLACE.sub(lambda match: value(match[1]), template) if _PLACE.search(template) else value(template)


def _checked(options: Mapping[str, Any]) -> Options:
    chosen = checked("dataset", Options, options)
    if chosen.verifier in ("math", "exact") and not chosen.answer:
        raise AuthoringError(f"dataset: the verifier `{chosen.verifier}` needs `answer`, the column of the answer")
    if chosen.verifier == "code" and not chosen.tests:
        raise AuthoringError("dataset: the verifier `code` needs `tests`, the column of the tests")
    if re.match(r"test\b", chosen.hub_split) and "evaluation_only" not in options:
        chosen = chosen.model_copy(update={"evaluation_only": True})  # what others report their results on
    return chosen


def _source(options: Options) -> Rows:
    path = Path(options.path).expanduser()
    saved = path.is_dir() and any((path / name).is_file() for name in ("state.json", "dataset_dict.json"))
    if path.is_file() or saved or options.path.endswith((".jsonl", ".parquet")):
        return rows(path)
    if not path.is_dir() and not re.fullmatch(r"[\w.-]+/[\w.-]+|[\w.-]+", options.path):
        raise AuthoringError(f"dataset: {options.path}: no such file or folder")
    try:
        import datasets
    except ImportError as error:
        raise AuthoringError("dataset: reading from the hub needs `datasets`; pip install datasets") from error
    where = str(path) if path.is_dir() else options.path
    revision = None if path.is_dir() else options.revision
    try:
        if revision is not None:  # what `datasets` cannot find it takes from its cache: perhaps another revision
            from huggingface_hub import HfApi

            revision = HfApi().dataset_info(where, revision=revision).sha
        source: Rows = datasets.load_dataset(where, options.config, split=options.hub_split, revision=revision)
    except Exception as error:  # the library raises errors of many kinds
        what = "cannot be read" if path.is_dir() else "is no file here and cannot be loaded from the hub"
        raise AuthoringError(
            f"dataset: {options.path} {what}: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        ) from error
    return source


def _stamp(path: str) -> list[Any]:
    """Return what tells one version of a file from another."""
    file = Path(path).expanduser()
    return [str(file.resolve()), file.stat().st_mtime_ns, file.stat().st_size] if path and file.exists() else [path]


def _answer(options: Options, row: Mapping[str, Any]) -> str:
    if not options.answer:
        return ""
    text = filled(options.answer, row)
    if options.after:
        if options.after not in text:
            raise AuthoringError(f"dataset: there is no {options.after!r} in the answer {text[-80:]!r}")
        text = text.rsplit(options.after, 1)[1]
    return text.strip() if options.verifier != "code" else text


def _tests(options: Options, row: Mapping[str, Any]) -> dict[str, Any]:
    tests = row.get(options.tests)
    if not tests or not isinstance(tests, str | list | tuple):
        raise AuthoringError(f"dataset: column {options.tests!r} must hold tests: a text or a list, got {tests!r:.60}")
    listed = [tests] if isinstance(tests, str) else [str(test) for test in tests]
    try:
        entry = str(row[options.entry]) if options.entry else entry_of(listed)
    except SyntaxError as error:
        raise AuthoringError(f"dataset: the tests are no Python: {error}; set `entry`") from None
    setup = str(row.get(options.setup) or "") if options.setup else ""
    return {
        "tests": listed,
        "entry": entry,
        "setup": setup,
        "start": filled(options.start, row) if options.start else "",
    }


def _level(options: Options, row: Mapping[str, Any]) -> int:
    value = row.get(options.level)
    try:
        return int(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise AuthoringError(f"dataset: column {options.level!r} must hold whole numbers, got {value!r:.40}") from None


def _expected(task: Task) -> str:
    return str(task.secret["answer"])


def _secret(task: Task) -> Mapping[str, Any]:
    return task.secret
