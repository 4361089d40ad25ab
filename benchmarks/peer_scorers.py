"""Runs the red team over the reward functions that ship with TRL, verl and verifiers.

    python benchmarks/peer_scorers.py [--envs FOLDER] [--only NAME] [--write]

Each project is installed from the package index, in a pinned version, into a virtual environment of its own (kept in
FOLDER if one is named). Its functions run there exactly as `agentrl redteam --scorer` runs them. All forms of an attack
are played, and each submission that scores like the right one is told apart: those that a person would call wrong, and
those that give the right answer last after a wrong one. `--write` writes docs/evidence/peer_scorers.json and the table
in docs/redteam.md; `--table` writes the table from the evidence that is there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl import sandboxes
from agentrl.redteam.attack import FAMILIES, Attack, attacks
from agentrl.redteam.play import NotApplicable, Played, Variants, play
from agentrl.redteam.scorers import Row, Scorer, opened, scorer
from agentrl.redteam.suite import AttackTarget, controls
from agentrl.redteam.target import Target, survey
from agentrl.sandboxes.pool import Pool

ROOT = Path(__file__).parent.parent
EVIDENCE, PAGE = ROOT / "docs/evidence/peer_scorers.json", ROOT / "docs/redteam.md"
BEGIN, END = "<!-- peer scorers: written by benchmarks/peer_scorers.py -->", "<!-- end of peer scorers -->"
TORCH = ("torch==2.13.0",)
ENVIRONMENTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "trl 1.16.0": (
        ("--no-deps", "trl==1.16.0"),
        ("math-verify==0.9.0", "packaging", "transformers", "accelerate", "datasets", *TORCH),
    ),
    "verl 0.9.1": (
        ("--no-deps", "verl==0.9.1"),
        (
            "math-verify==0.9.0",
            "mathruler",
            "pylatexenc",
            "packaging",
            "tensordict",
            "omegaconf",
            "orjson",
            "ray",
            *TORCH,
        ),
        ("transformers", "datasets", "sympy"),
    ),
    "verifiers 0.4.0": (("verifiers==0.4.0", "math-verify==0.9.0"),),
    "verifiers 0.1.14": (("verifiers==0.1.14", "math-verify==0.9.0"),),
}
"""What each needs for its reward functions, in the order of the installs; the rest of verl and TRL is not installed."""
ALWAYS_WRONG = {
    *("I.denied", "I.unit_stripped", "I.sign_lost", "I.equation", "I.interval", "I.digits_joined"),
    *("I.invisible", "I.nothing", "I.unparsable", "I.evaluated", "I.evaluated_equal", "I.evaluated_names"),
    *("I.symbolic_injection", "I.tower_of_powers", "I.parser_bomb", "I.restated_problem"),
}
"""Attacks whose submissions nobody would take for the right answer, in whatever order they say it."""


@dataclass(frozen=True)
class Case:
    """One reward function, with a right and a wrong submission."""

    project: str
    target: str
    checks: str
    """What it claims to check; format and length are not correctness."""
    honest: str
    wrong: str
    columns: dict[str, Any] = field(default_factory=dict)
    prompt: str = "What is 17 * 24?"
    label: str = ""

    @property
    def name(self) -> str:
        return self.label or self.target.rpartition(":")[2]


TRL, VERL = "trl 1.16.0", "verl 0.9.1"
SCORE = "verl.utils.reward_score"
BOXED = ("\\boxed{408}", "\\boxed{409}")
CALL = '<think>Look it up.</think>\n<tool_call>\n{"name": "NAME", "parameters": {"city": "Bonn"}}\n</tool_call>'


def default(source: str, label: str, honest: str, wrong: str, truth: Any, checks: str, prompt: str = "") -> Case:
    """Return a case of verl's own dispatch by data source."""
    columns = {"data_source": source, "ground_truth": truth}
    more = {"prompt": prompt} if prompt else {}
    return Case(VERL, f"{SCORE}:default_compute_score", checks, honest, wrong, columns, label=label, **more)


CASES = (
    Case(TRL, "trl.rewards:accuracy_reward", "correctness", *BOXED, {"solution": "$408$"}),
    Case(
        TRL,
        "trl.rewards:reasoning_accuracy_reward",
        "correctness",
        "<think>Multiply.</think> \\boxed{408}",
        "<think>Multiply.</think> \\boxed{409}",
        {"solution": "$408$"},
    ),
    Case(
        TRL, "trl.rewards:get_cosine_scaled_reward(max_len=1000)", "correctness, length", *BOXED, {"solution": "$408$"}
    ),
    Case(TRL, "trl.rewards:think_format_reward", "format only", "<think>Multiply.</think> 408", "408"),
    Case(TRL, "trl.rewards:get_repetition_penalty_reward(ngram_size=2)", "repetition only", "It is 408", "no no no no"),
    Case(
        TRL,
        "trl.rewards:get_soft_overlong_punishment(max_completion_len=100, soft_punish_cache=20)",
        "length only",
        "It is 408",
        "It is 408. " * 20,
    ),
    default("openai/gsm8k", "gsm8k", "#### 408", "#### 409", "408", "correctness"),
    default("lighteval/MATH", "math_reward", *BOXED, "408", "correctness"),
    default("math_dapo", "math_dapo", "Answer: 408", "Answer: 409", "408", "correctness"),
    default("numina_olympiads", "prime_math", *BOXED, "408", "correctness"),
    default(
        "hiyouga/geometry3k",
        "geo3k",
        "<think>Multiply.</think>\\boxed{408}",
        "<think>Multiply.</think>\\boxed{409}",
        "408",
        "correctness 0.9, format 0.1",
    ),
    default(
        "searchR1_nq",
        "search_r1_like_qa_em",
        "<answer>apricot</answer>",
        "<answer>plum</answer>",
        {"target": ["apricot"]},
        "correctness",
        "Which fruit is it?",
    ),
    Case(
        VERL,
        f"{SCORE}.search_r1_like_qa_em:compute_score_subem",
        "correctness, by containment",
        "<answer>apricot</answer>",
        "<answer>plum</answer>",
        {"ground_truth": {"target": ["apricot"]}},
        "Which fruit is it?",
        "search_r1_like_qa_em compute_score_subem",
    ),
    Case(
        VERL, f"{SCORE}.math_verify:compute_score", "correctness", *BOXED, {"ground_truth": "408"}, label="math_verify"
    ),
    Case(
        VERL,
        f"{SCORE}.math_batch:compute_score_batched",
        "correctness",
        *BOXED,
        {"ground_truth": "408"},
        label="math_batch",
    ),
    Case(
        VERL,
        f"{SCORE}.rlla:compute_score",
        "tool call and format",
        CALL.replace("NAME", "weather"),
        CALL.replace("NAME", "news"),
        {"ground_truth": CALL.replace("NAME", "weather"), "extra_info": {"experiment_name": "qwen"}},
        "What is the weather in Bonn?",
        "rlla",
    ),
    default(
        "codecontests",
        "prime_code",
        "```python\ndef square(x):\n    return x * x\n```",
        "```python\ndef square(x):\n    return 5\n```",
        {"fn_name": "square", "inputs": ["3", "-4", "10", "0"], "outputs": ["9", "16", "100", "0"]},
        "correctness of code",
        "Write square(x).",
    ),
    Case(
        "verifiers 0.4.0", "verifiers.v1.utils.score:verify_boxed_math_answer", "correctness", *BOXED, {"answer": "408"}
    ),
    Case(
        "verifiers 0.4.0",
        "verifiers.v1.utils.score:compare_stdout_results",
        "a program's output",
        "408",
        "409",
        {"expected": "408"},
    ),
    Case("verifiers 0.1.14", "verifiers.rubrics.math_rubric:MathRubric()", "correctness", *BOXED, {"answer": "408"}),
)
ORDER = [f"{case.project} {case.name}" for case in CASES]
"""The order of the table."""


def reads_as(attack: Attack, case: Case, text: str) -> str:
    """Tell how a person reads a submission: as wrong, as right, or as the right answer given after a wrong one."""
    if attack.id in ALWAYS_WRONG or attack.family != "I" or case.honest not in text:
        return "wrong"
    if case.wrong not in text:
        return "right"
    return "wrong" if text.rfind(case.wrong) > text.rfind(case.honest) else "right last"


async def tried(attack: Attack, target: Target, case: Case) -> dict[str, Any] | None:
    """Play every form of an attack; None when it has nothing to work on."""
    if attack.needs - target.surfaces:
        return None
    outcome: dict[str, Any] = {}
    try:
        plays = attack.play(target)
        for script in plays if isinstance(plays, Variants) else [plays]:
            _sort(await play(target.arena, script), attack, target, case, outcome)
    except NotApplicable:
        return None
    return outcome


def _sort(played: Played, attack: Attack, target: Target, case: Case, outcome: dict[str, Any]) -> None:
    """Put what one form of an attack brought into its place; the shortest submission stands for each."""
    text = played.submission.answer if played.submission is not None else ""
    code = target.files(played.submission)
    shown = next(iter(code.values())).decode("utf-8", "replace") if code else text
    if played.score is None:
        reason = played.outcome.fault.cause if played.outcome.fault is not None else "no score"
        outcome.setdefault("no score", [shown[:300], reason.partition("no score: ")[2] or reason])
        return
    if played.score <= target.baseline + 1e-9 or not target.is_wrong(played.submission):
        return
    if attack.partial and played.score < 1.0 - 1e-9:
        return
    kind = "partly" if played.score < 1.0 - 1e-9 else reads_as(attack, case, text)
    if kind != "right" and len(shown) < len(outcome.get(kind, ["x" * 10**9])[0]):
        outcome[kind] = [shown, round(played.score, 4)]


async def measure(cases: list[Case], python: str, pool: Pool, families: str) -> AsyncIterator[dict[str, Any]]:
    """Run one function under its own interpreter, imported once for all of its cases."""
    rows = [Row(honest=case.honest, wrong=case.wrong, prompt=case.prompt, columns=case.columns) for case in cases]
    environment = scorer(cases[0].target, rows, python=python)
    attack_target = AttackTarget.of(cases[0].name, environment, per_level=len(rows))
    chosen = [attack for attack in attacks().values() if attack.family in families]
    places = asyncio.Semaphore(3)
    async with opened([attack_target], pool):
        verifier = environment.verifier
        assert isinstance(verifier, Scorer)
        for case, task, scale in zip(cases, attack_target.tasks, verifier.scales, strict=True):
            target = await survey(attack_target.arena(task, pool))

            async def one(attack: Attack, case: Case = case, target: Target = target) -> dict[str, Any] | None:
                async with places:
                    return await tried(attack, target, case)

            result: dict[str, Any] = {"honest": scale.honest, "wrong": scale.wrong}
            result["controls"] = {control.name: control.score for control in await controls(target)}
            outcomes = zip(chosen, await asyncio.gather(*map(one, chosen)), strict=True)
            brought = {attack.id: outcome for attack, outcome in outcomes if outcome is not None}
            result |= {"tried": len(brought), "called as": verifier.convention, "completions": verifier.shape}
            for kind in ("wrong", "right last", "partly", "no score"):
                taken = {name: outcome[kind] for name, outcome in brought.items() if kind in outcome}
                result[f"taken: {kind}"] = {name: [text[:300], value] for name, (text, value) in taken.items()}
            yield result


def install(project: str, folder: Path) -> str:
    """Install a project in a virtual environment of its own, unless it is there; return its interpreter."""
    python = folder / project.replace(" ", "-") / "bin/python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(python.parent.parent)], check=True)
        for packages in ENVIRONMENTS[project]:
            bounds = ["-c", str(ROOT / "constraints.txt")] if "torch==2.13.0" in packages else []
            subprocess.run([str(python), "-m", "pip", "-q", "install", *bounds, *packages], check=True)
    return str(python)


async def main(folder: Path, only: str, families: str, keep: Callable[[dict[str, Any]], None]) -> None:
    """Measure the chosen functions and hand each result to `keep`."""
    groups: dict[tuple[str, str, bool], list[Case]] = {}
    for case in CASES:
        if only in f"{case.project} {case.name}":
            groups.setdefault((case.project, case.target, "```" in case.honest), []).append(case)
    pool = Pool(sandboxes.load("namespace")(), ahead=0)
    try:
        for cases in groups.values():
            waiting = list(cases)
            try:
                async for result in measure(cases, install(cases[0].project, folder), pool, families):
                    keep(described(waiting.pop(0), result))
            except Exception as error:
                for case in waiting:
                    keep(described(case, {"not run": f"{type(error).__name__}: {error}"[:600]}))
    finally:
        pool.close()


def described(case: Case, result: dict[str, Any]) -> dict[str, Any]:
    """Return a result with what it is the result of, under its key."""
    about = {"project": case.project, "target": case.target, "checks": case.checks}
    return {f"{case.project} {case.name}": {**about, "submissions": [case.honest, case.wrong], **result}}


def table(evidence: dict[str, Any]) -> str:
    """Write the table, and what each function took for right."""
    counted = ("tried", "wrong taken for right", "right after wrong", "partly paid", "no score")
    lines = [f"| function | checks | honest, wrong, empty | {' | '.join(counted)} |", "|---" * 8 + "|"]
    details = []
    for key, row in evidence["scorers"].items():
        if "not run" in row:
            lines.append(f"| {key} | {row['checks']} | not run: {row['not run'][:80]} | | | | | |")
            continue
        wrong, last, partly, none = (row[f"taken: {kind}"] for kind in ("wrong", "right last", "partly", "no score"))
        empty = row["controls"]["empty"]
        earned = "no score" if empty is None else f"{row['wrong'] + empty * (row['honest'] - row['wrong']):g}"
        if empty == 1.0 and row["honest"] > row["wrong"]:
            earned = f"≥ {row['honest']:g}"
        first = f"{row['honest']:g}, {row['wrong']:g}, {earned}"
        counts = f"{row['tried']} | {len(wrong)} | {len(last)} | {len(partly)} | {len(none)}"
        if "only" in row["checks"]:  # it makes no claim about the answer that a wrong one could break
            counts = f"{row['tried']} | – | – | – | {len(none)}"
        lines.append(f"| {key} | {row['checks']} | {first} | {counts} |")
        details.append(sentence(key, row))
    missing = [name for name in ORDER if name not in evidence["scorers"]]
    details += [f"- Not measured yet: {', '.join(missing)}."] if missing else []
    return "\n".join([*lines, "", *details])


def sentence(key: str, row: dict[str, Any]) -> str:
    """Say what one function took for right, with the shortest submission."""
    if "only" in row["checks"]:
        return f"- **{key}** checks {row['checks']} and does not claim more: any text of that kind has its full score."
    parts = []
    for kind, verb in (("wrong", "takes for right"), ("partly", "pays partly")):
        taken = row[f"taken: {kind}"]
        if taken:
            attack = min(taken, key=lambda name: len(taken[name][0]))
            rest = [name for name in taken if name != attack]
            more = f"; also {', '.join(rest)}" if rest else ""
            parts.append(f"{verb} {code(taken[attack][0])} ({attack}){more}")
    if row["taken: no score"]:
        attack, (text, reason) = next(iter(row["taken: no score"].items()))
        parts.append(f"gives no score to {code(text)} ({attack}): {reason[:160]}")
    if row["taken: right last"]:
        parts.append(f"takes the last of two answers ({', '.join(row['taken: right last'])})")
    return f"- **{key}** " + ("; ".join(parts) if parts else "took nothing wrong for right") + "."


def code(text: str) -> str:
    """Return text as code on one line of a page."""
    short = text if len(text) <= 90 else text[:60] + " … " + text[-20:]
    line = "".join(c if c.isprintable() else " " if c == "\n" else f"\\x{ord(c):02x}" for c in short)
    line = line.replace("|", "\\|").replace("<!--", "<!\\-\\-")
    return f"`` {line} ``" if line.strip() else "an empty text"


def write_page(evidence: dict[str, Any]) -> None:
    """Put the table between its marks on the page."""
    text = PAGE.read_text(encoding="utf-8")
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    PAGE.write_text(f"{head}{BEGIN}\n{table(evidence)}\n{END}{tail}", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", type=Path, help="where the environments are, or are made and kept")
    parser.add_argument("--only", default="", help="only functions whose name contains this")
    parser.add_argument("--families", default="".join(FAMILIES)[:10], help="only attacks of these families")
    parser.add_argument("--write", action="store_true", help="write the evidence and the table of the page")
    parser.add_argument("--table", action="store_true", help="only write the table from the evidence that is there")
    options = parser.parse_args()
    if options.table:
        write_page(json.loads(EVIDENCE.read_text(encoding="utf-8")))
        sys.exit()
    measured: dict[str, Any] = {"scorers": {}}

    def keep(result: dict[str, Any]) -> None:
        """Add a result to what is measured and, if asked, to the evidence and the page."""
        measured["scorers"] |= result
        print(json.dumps(result)[:300], file=sys.stderr, flush=True)
        if options.write:
            before = json.loads(EVIDENCE.read_text(encoding="utf-8"))["scorers"] if EVIDENCE.exists() else {}
            together = {**before, **result}
            kept = {name: together[name] for name in ORDER if name in together}
            machine = {"python": platform.python_version(), "machine": platform.machine()}
            EVIDENCE.write_text(json.dumps({**machine, "scorers": kept}, indent=1) + "\n", encoding="utf-8")
            write_page({"scorers": kept})

    with tempfile.TemporaryDirectory(prefix="agentrl-peers-") as temporary:
        asyncio.run(main((options.envs or Path(temporary)).absolute(), options.only, options.families, keep))
    print(table(measured))
