"""Fills the `Learnability` section of environments' READMEs from what `agentrl env profile --out FILE` wrote.

python -m benchmarks.readme docs/evidence/profiles/*.json
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl import catalogue
from agentrl.errors import AgentRLError, UserError
from agentrl.profile import bars

HEADING = "## Learnability"


def section(profiles: Sequence[Mapping[str, Any]]) -> str:
    """The section of one environment: a table for each model that was tried."""
    parts = [HEADING]
    for profile in profiles:
        tasks = max((row["tasks"] for row in profile["levels"]), default=0)
        low, high = profile["band"]
        budget = profile["budget"]
        turns = f"{budget['max_turns']} turns" if budget["max_turns"] else "the environment's own number of turns"
        said = (
            f"**{profile['model']}** ({profile['engine']}, {profile['date']}): {tasks} tasks of each level of the "
            f"{profile['split']} split, {profile['samples']} rollouts a task, at most {turns} and "
            f"{budget['max_tokens']} sampled tokens, temperature {budget['temperature']:g}."
        )
        band = f"mean in [{low:g}, {high:g}]"
        rows = [
            f"| level | tasks | mean score | solved | informative | {band} | tasks by mean score |",
            "|---|---|---|---|---|---|---|",
            *(
                f"| {row['level']} | {row['tasks']} | {row['score']:.3f} | {row['solved']:.3f} | "
                f"{row['informative']:.2f} | {row['in_band']:.2f} | `{_bars(row['histogram'])}` |"
                for row in profile["levels"]
            ),
        ]
        ungraded = sum(row["ungraded"] for row in profile["levels"])
        parts += [_wrapped(said), "\n".join(rows)]
        if ungraded:
            parts.append(f"{ungraded} rollouts could not be graded and count nowhere.")
    explained = (
        "Informative: the share of tasks whose rollouts scored differently, without which a group teaches nothing. The "
        "last column counts tasks in tenths of their mean score, from 0 on the left to 1 on the right. To measure it "
        f"for another model: `agentrl env profile {profiles[0]['env']} --recipe RECIPE --model FOLDER`."
    )
    parts.append(_wrapped(explained))
    return "\n\n".join(parts) + "\n"


def _bars(histogram: Sequence[int]) -> str:
    return bars(histogram).replace(" ", "·")  # Markdown drops blanks at the ends


def _wrapped(text: str, width: int = 120) -> str:
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return "\n".join(lines)


def filled(readme: str, text: str) -> str:
    """The page with that section in the place of the old one, or at its end."""
    old = re.search(rf"^{HEADING}\n.*?(?=^## |\Z)", readme, re.MULTILINE | re.DOTALL)
    if old is None:
        return f"{readme.rstrip()}\n\n{text}"
    rest = readme[old.end() :]
    return readme[: old.start()] + text + (f"\n{rest}" if rest else "")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profiles", nargs="+", type=Path, help="files that `agentrl env profile --out` wrote")
    by_env: dict[str, list[Mapping[str, Any]]] = {}
    for path in parser.parse_args(argv).profiles:
        try:
            profile = json.loads(path.read_text(encoding="utf-8"))
            by_env.setdefault(profile["env"], []).append(profile)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise UserError(f"{path} is no profile that `agentrl env profile --out` wrote: {error}") from None
    for env, profiles in by_env.items():
        found = catalogue.members("envs").get(env)
        page = Path(found.where if found else env) / "README.md"
        if not page.is_file():
            raise UserError(f"there is no README of an environment {env!r} to fill (looked for {page})")
        page.write_text(filled(page.read_text(encoding="utf-8"), section(profiles)), encoding="utf-8")
        print(f"filled {page}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except AgentRLError as problem:
        print(problem, file=sys.stderr)
        sys.exit(2)
