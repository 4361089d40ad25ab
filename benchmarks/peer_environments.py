"""Runs the red team over what other projects ship, and writes the one table of it in docs/redteam.md.

    python benchmarks/peer_environments.py --openenv CHECKOUT --verifiers CHECKOUT --harbor FOLDER \\
        --reasoning-gym PYTHON [--write]

The checkouts are those of the projects' repositories, FOLDER an unpacked wheel of harbor; the packages are those that
`agentrl env get` installs. Each environment gets an honest solution from here, since it ships none, and a template is
filled with the smallest task that it can hold. Scorers of reasoning-gym are attacked as functions; the rows of TRL's
rewards are taken from the evidence that benchmarks/peer_scorers.py wrote. `--write` writes the table and
docs/evidence/peer_environments.json; `--table` only rebuilds the table from the evidence that is there.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from agentrl.interop import peers

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from benchmarks.peer_scorers import ALWAYS_WRONG  # noqa: E402

DOCS = ROOT / "docs"
EVIDENCE, PAGE = DOCS / "evidence/peer_environments.json", DOCS / "redteam.md"
SCORERS = DOCS / "evidence/peer_scorers.json"
BEGIN = "<!-- peer environments: written by benchmarks/peer_environments.py -->"
END = "<!-- end of peer environments -->"
OPENENV, VERIFIERS, HARBOR, REASONING = "openenv 0.10.0", "verifiers 0.4.0", "harbor 0.24.0", "reasoning-gym 0.1.25"
SCORED = ("chain_sum", "count_primes", "countdown", "letter_counting", "sentence_reordering", "word_sorting")
"""The data sets of reasoning-gym whose scorers are attacked."""
Report = dict[str, Any]
IN_PART = "A text that contains the right answer is paid in part, by design."
WHY = {
    "grid_world_env": "The server moves the walker itself; nothing but moves reaches it.",
    "maze_env": "Nothing is gained; an action that is no move raises in the server, and the episode has no score.",
    "connect4_env": "There is no opponent: the policy plays both sides, and either one's four in a row pays it.",
    "glossary": "The fact need only stand somewhere in the last reply, so a denied one counts.",
    "scratchpad": "The word need only stand somewhere in the last reply; it stands in the prompt as well.",
    "reverse_text": "The first pair of tags is compared; its part for likeness is meant, and counts only when whole.",
    "template-adapter": "Graded in the agent's own container, where reward files and processes of the agent remain. "
    "What has no score kept our stand-in for Harbor from copying the tests; Harbor's root may not mind.",
    "countdown": "Its scorer evaluates the answer: three texts end its process, or never return.",
}
"""One sentence on each environment: why it falls, or why it does not."""


def redteam(target: str, options: Mapping[str, Any] | None = None, path: str = "", sandbox: str = "process") -> Report:
    """Run `agentrl redteam --json` and return its report."""
    words = [word for key, value in (options or {}).items() for word in ("--option", f"{key}={json.dumps(value)}")]
    command = [sys.executable, "-m", "agentrl", "redteam", target, *words, "--sandbox", sandbox, "--parallel", "1"]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [path, str(ROOT)]))}
    result = subprocess.run([*command, "--json"], cwd=ROOT, env=variables, capture_output=True, text=True)
    if not result.stdout.strip().startswith("{"):
        raise SystemExit(f"{target} {options}: {result.stderr[-2000:]}")
    report: Report = json.loads(result.stdout.strip().splitlines()[-1])
    return report


@contextmanager
def served(module: str, path: Path) -> Iterator[str]:
    """Start the server of an OpenEnv environment in OpenEnv's own environment."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    start = f"import uvicorn; from {module} import app; uvicorn.run(app, host='127.0.0.1', port={port})"
    variables = {**os.environ, "PYTHONPATH": str(path), "ENABLE_WEB_INTERFACE": "false"}
    process = subprocess.Popen(
        [str(peers.environment("openenv")), "-c", start], env=variables, cwd=path, stderr=subprocess.DEVNULL
    )
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            if process.poll() is not None:
                raise SystemExit(f"the server of {module} ended with {process.returncode}")
            try:
                httpx.get(f"{url}/health", trust_env=False, timeout=2.0)
                break
            except httpx.HTTPError:
                time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait()


def row(project: str, name: str, report: Report) -> dict[str, Any]:
    """Return what the table says of one environment: only a full score counts, a part may be what the peer means."""
    gained = {a["id"]: a["score"] for a in report["attacks"] if a["succeeded"]}
    full = [id for id, score in gained.items() if score is not None and score >= 1.0 - 1e-9]
    part = [id for id, score in gained.items() if score is not None and id not in full]
    hedged = [id for id in full if id.startswith("I.") and id not in ALWAYS_WRONG]
    return {
        "project": project,
        "name": name,
        "controls": {control: result["score"] for control, result in report["controls"].items()},
        "tried": sum(a["result"] != "not applicable" for a in report["attacks"]),
        "fell": [id for id in full if id not in hedged],
        "hedged": hedged,
        "partly": part,
        "no score": [id for id, score in gained.items() if score is None],
    }


def printed(interpreter: str, path: Path, code: str) -> Any:
    """Return what a line of a peer's own Python prints, read as JSON."""
    command = [str(peers.environment(interpreter)), "-c", code]
    result = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(path)}, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"{code}: {result.stderr[-1000:]}")
    return json.loads(result.stdout.splitlines()[-1])


def way_out(maze: list[list[int]]) -> list[int]:
    """Return the moves from the first cell of a maze to the last: up 0, down 1, left 2, right 3."""
    rows, columns = len(maze), len(maze[0])
    ways: dict[tuple[int, int], list[int]] = {(0, 0): []}
    waiting = [(0, 0)]
    for r, c in waiting:
        for move, (y, x) in enumerate(((r - 1, c), (r + 1, c), (r, c - 1), (r, c + 1))):
            if 0 <= y < rows and 0 <= x < columns and not maze[y][x] and (y, x) not in ways:
                ways[y, x] = [*ways[r, c], move]
                waiting.append((y, x))
    return ways[rows - 1, columns - 1]


def of_openenv(checkout: Path, folder: Path) -> Iterator[dict[str, Any]]:
    """Attack samples of OpenEnv."""
    envs = checkout / "envs"
    code = (
        "import json; from maze_env.server.maze_env_environment import DEFAULT_MAZE as m; print(json.dumps(m.tolist()))"
    )
    moves: dict[str, list[dict[str, Any]]] = {
        "grid_world_env": [{"action": move} for move in ["DOWN"] * 4 + ["RIGHT"] * 4],
        "maze_env": [{"action": move} for move in way_out(printed("openenv", envs, code))],
        "connect4_env": [{"column": column} for column in (0, 1) * 3 + (0,)],
    }
    highest = {"maze_env": 10.0}
    for name, actions in moves.items():
        solution = folder / f"{name}.json"
        solution.write_text(json.dumps([{"name": "act", "arguments": arguments} for arguments in actions]))
        score = {"of": "last", "low": 0, "high": highest.get(name, 1.0)}
        with served(f"{name}.server.app", envs) as url:
            report = redteam("openenv", {"url": url, "score": score, "turns": 40, "expert": str(solution)})
        yield row(OPENENV, name, report)


def of_verifiers(checkout: Path, folder: Path) -> Iterator[dict[str, Any]]:
    """Attack examples of verifiers; the data of one comes from here, since its own is on the hub."""
    environments = checkout / "environments"
    texts = [f"the word number {number} is {word}" for number, word in enumerate(("pear", "plum", "fig", "date") * 3)]
    data = folder / "texts"
    data.mkdir()
    (data / "train.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    code = "import json; from glossary.servers.facts import FACTS; print(json.dumps(list(FACTS.values())))"
    facts = printed("verifiers", environments / "glossary", code)
    code = "import json; from scratchpad.taskset import WORDS; print(json.dumps(WORDS))"
    words = printed("verifiers", environments / "scratchpad", code)
    cases: dict[str, tuple[list[Any], dict[str, Any]]] = {
        "glossary": ([[f"<answer>{fact}</answer>"] for fact in facts], {}),
        "scratchpad": (
            [[{"name": "scratchpad_roundtrip", "arguments": {"word": word}}, word] for word in words],
            {},
        ),
        "reverse_text": (
            [[f"<reversed_text>{text[::-1]}</reversed_text>"] for text in texts],
            {"config": {"dataset_name": str(data)}},
        ),
    }
    for name, (solutions, more) in cases.items():
        file = folder / f"{name}.json"  # every third row, from the second one on, is held out
        by_task = {f"verifiers/heldout/1/{at}": actions for at, actions in enumerate(solutions[1::3])}
        file.write_text(json.dumps(by_task))
        options = {"id": name.replace("_", "-"), "expert": str(file), **more}
        yield row(VERIFIERS, name, redteam("verifiers", options, str(environments / name)))


def of_harbor(package: Path, folder: Path) -> Iterator[dict[str, Any]]:
    """Attack a task made from Harbor's template: the template's own reward lines, with a one-line test put in."""
    source = next(package.glob("**/template-adapter/task-template"))
    task = folder / "template-adapter"
    shutil.copytree(source, task)
    (task / "instruction.md").write_text("Write the word hello to hello.txt.\n")
    (task / "solution/solve.sh").write_text("#!/bin/bash\necho hello > hello.txt\n")
    script = (task / "tests/test.sh").read_text(encoding="utf-8")
    test = "grep -qx hello hello.txt\n"
    (task / "tests/test.sh").write_text(script.replace("# Generate reward", f"{test}# Generate reward", 1))
    yield row(HARBOR, "template-adapter", redteam(str(task), sandbox="namespace"))


def of_reasoning(python: Path, folder: Path) -> Iterator[dict[str, Any]]:
    """Attack scorers of reasoning-gym: one entry each, its own answer against that of another entry."""
    for name in SCORED:
        source = "import json, reasoning_gym\nD = reasoning_gym.create_dataset({!r}, size=9, seed=1)\nE = D[0]\n"
        source = source.format(name) + "def score(text):\n    return D.score_answer(text, E)\n"
        (folder / f"rg_{name}.py").write_text(source)
        code = f"import rg_{name} as m; print(m.json.dumps([m.E['question'], *(d['answer'] for d in m.D)]))"
        command = [str(python), "-c", code]
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
        question, honest, *others = json.loads(result.stdout.splitlines()[-1])
        wrong = next(other for other in others if other != honest)
        command = [sys.executable, "-m", "agentrl", "redteam", "--scorer", f"rg_{name}:score", "--python", str(python)]
        command += ["--honest", honest, "--wrong", wrong, "--convention", "text", "--parallel", "2", "--json"]
        variables = {**os.environ, "PYTHONPATH": str(ROOT)}
        result = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
        if not result.stdout.strip().startswith("{"):
            raise SystemExit(f"{name}: {result.stderr[-2000:]}")
        yield row(REASONING, name, json.loads(result.stdout.strip().splitlines()[-1]))


def of_functions() -> list[dict[str, Any]]:
    """Return the rows of TRL's rewards, as the script that measures them left them."""
    rows = []
    for key, scorer in json.loads(SCORERS.read_text(encoding="utf-8"))["scorers"].items():
        if key.startswith("trl ") and "not run" not in scorer:
            only = "only" in scorer["checks"]
            shown = {kind: [] if only else list(scorer[f"taken: {kind}"]) for kind in ("wrong", "right last", "partly")}
            why = f"It checks {scorer['checks']}" + (" and claims no more." if only else ".")
            project, name = " ".join(key.split()[:2]), scorer["target"].partition(":")[2].partition("(")[0]
            rows.append(
                {
                    "project": project,
                    "name": name,
                    "controls": {"oracle": 1.0, "no-op": 0.0},
                    "tried": scorer["tried"],
                    "fell": shown["wrong"],
                    "hedged": shown["right last"],
                    "partly": shown["partly"],
                    "no score": list(scorer["taken: no score"]),
                    "why": why,
                }
            )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Write the table."""
    head = (
        "project",
        "what",
        "expert, idle",
        "tried",
        "wrong taken for right",
        "hedged answer paid",
        "partly",
        "no score",
        "why",
    )
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for entry in rows:
        shares = ", ".join(f"{entry['controls'].get(name):g}" for name in ("oracle", "no-op"))
        fell = f"{len(entry['fell'])}: {', '.join(entry['fell'])}" if entry["fell"] else "0"
        why = entry.get("why") or WHY.get(entry["name"], IN_PART)
        counts = (fell, len(entry["hedged"]), len(entry["partly"]), len(entry["no score"]))
        cells = (entry["project"], entry["name"], shares, entry["tried"], *counts, why)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def write_page(rows: list[dict[str, Any]]) -> None:
    """Put the table between its marks on the page."""
    page = PAGE.read_text(encoding="utf-8")
    before, after = page.split(BEGIN)[0], page.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n{table([*rows, *of_functions()])}\n{END}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--openenv", type=Path, help="a checkout of huggingface/OpenEnv")
    parser.add_argument("--verifiers", type=Path, help="a checkout of PrimeIntellect-ai/verifiers")
    parser.add_argument("--harbor", type=Path, help="an unpacked wheel, or a checkout, of harbor")
    parser.add_argument("--reasoning-gym", type=Path, metavar="PYTHON", help="an interpreter that has reasoning-gym")
    parser.add_argument("--write", action="store_true", help="write the evidence and the table")
    parser.add_argument("--table", action="store_true", help="only write the table from the evidence that is there")
    chosen = parser.parse_args()
    rows: list[dict[str, Any]] = json.loads(EVIDENCE.read_text(encoding="utf-8"))
    if not chosen.table:
        parts = {
            "openenv": (of_openenv, OPENENV),
            "verifiers": (of_verifiers, VERIFIERS),
            "harbor": (of_harbor, HARBOR),
            "reasoning_gym": (of_reasoning, REASONING),
        }
        for name, (attacked, project) in parts.items():
            source: Path | None = getattr(chosen, name)
            if source is None:
                continue
            with tempfile.TemporaryDirectory() as scratch:
                rows = [entry for entry in rows if entry.get("project") != project]
                for entry in attacked(source.absolute(), Path(scratch)):
                    rows.append(entry)
                    print(json.dumps(entry), file=sys.stderr, flush=True)
            if chosen.write:
                EVIDENCE.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print(table([*rows, *of_functions()]))
    if chosen.write or chosen.table:
        write_page(rows)


if __name__ == "__main__":
    main()
