"""Runs the red team over environments that ship with OpenEnv and verifiers, through the bridges.

    python benchmarks/peer_environments.py --openenv CHECKOUT --verifiers CHECKOUT [--write]

The checkouts are those of the two projects' repositories; their packages are those that `agentrl env get` installs.
Each environment gets an honest solution from here, since it ships none. `--write` writes the table in docs/redteam.md
and docs/evidence/peer_environments.json.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from agentrl.interop import peers

ROOT = Path(__file__).parent.parent
EVIDENCE, PAGE = ROOT / "docs/evidence/peer_environments.json", ROOT / "docs/redteam.md"
BEGIN = "<!-- peer environments: written by benchmarks/peer_environments.py -->"
END = "<!-- end of peer environments -->"


def redteam(target: str, options: dict[str, Any], path: str = "") -> dict[str, Any]:
    """Run `agentrl redteam --json` on a bridge and return its report."""
    words = [word for key, value in options.items() for word in ("--option", f"{key}={json.dumps(value)}")]
    command = [sys.executable, "-m", "agentrl", "redteam", target, *words, "--sandbox", "process", "--parallel", "1"]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [path, str(ROOT)]))}
    result = subprocess.run([*command, "--json"], cwd=ROOT, env=variables, capture_output=True, text=True)
    if not result.stdout.strip().startswith("{"):
        raise SystemExit(f"{target} {options}: {result.stderr[-2000:]}")
    report: dict[str, Any] = json.loads(result.stdout.strip().splitlines()[-1])
    return report


@contextmanager
def served(module: str, path: Path) -> Iterator[str]:
    """Start the server of an OpenEnv environment in OpenEnv's own environment."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    start = f"import uvicorn; from {module} import app; uvicorn.run(app, host='127.0.0.1', port={port})"
    variables = {**os.environ, "PYTHONPATH": str(path), "ENABLE_WEB_INTERFACE": "false"}
    process = subprocess.Popen([str(peers.environment("openenv")), "-c", start], env=variables, cwd=path)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                httpx.get(f"{url}/health", trust_env=False, timeout=2.0)
                break
            except httpx.HTTPError:
                time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait()


def row(name: str, version: str, report: dict[str, Any]) -> dict[str, Any]:
    """Return what the table says of one environment."""
    breaches = [a["id"] for a in report["attacks"] if a["succeeded"]]
    tried = sum(a["result"] != "not applicable" for a in report["attacks"])
    controls = {control: part["score"] for control, part in report["controls"].items()}
    return {"environment": name, "version": version, "controls": controls, "tried": tried, "succeeded": breaches}


def run(openenv: Path, verifiers: Path) -> list[dict[str, Any]]:
    """Attack each environment with a solution of ours."""
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        solution = folder / "solution.json"
        path = str(verifiers / "environments" / "glossary")
        script = "import json; from glossary.servers.facts import FACTS; print(json.dumps(list(FACTS.values())))"
        variables = {**os.environ, "PYTHONPATH": path}
        listed = subprocess.run(
            [str(peers.environment("verifiers")), "-c", script], env=variables, capture_output=True, text=True
        )
        facts = json.loads(listed.stdout.splitlines()[-1])
        solution.write_text(json.dumps({"verifiers/heldout/1/0": [f"<answer>{facts[1]}</answer>"]}))
        report = redteam("verifiers", {"id": "glossary", "expert": str(solution)}, path)
        rows.append(row("glossary", "verifiers 0.4.0", report))

        moves = [{"name": "act", "arguments": {"action": move}} for move in ["DOWN"] * 4 + ["RIGHT"] * 4]
        solution.write_text(json.dumps(moves))
        with served("grid_world_env.server.app", openenv / "envs") as url:
            options = {"url": url, "score": {"of": "last", "low": 0, "high": 1}, "expert": str(solution)}
            report = redteam("openenv", options)
        rows.append(row("grid_world_env", "openenv 0.10.0", report))
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| environment | package | oracle | no-op | attacks tried | succeeded |", "|---|---|---|---|---|---|"]
    for entry in rows:
        which = ", ".join(entry["succeeded"]) or "none"
        controls = entry["controls"]
        cells = (entry["environment"], entry["version"], controls.get("oracle"), controls.get("no-op"), entry["tried"])
        lines.append(f"| {' | '.join(map(str, cells))} | {len(entry['succeeded'])}: {which} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--openenv", type=Path, required=True, help="a checkout of huggingface/OpenEnv")
    parser.add_argument("--verifiers", type=Path, required=True, help="a checkout of PrimeIntellect-ai/verifiers")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    rows = run(arguments.openenv.resolve(), arguments.verifiers.resolve())
    print(table(rows))
    if arguments.write:
        EVIDENCE.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        page = PAGE.read_text(encoding="utf-8")
        before, after = page.split(BEGIN)[0], page.split(END)[1]
        PAGE.write_text(f"{before}{BEGIN}\n{table(rows)}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
