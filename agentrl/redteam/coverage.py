"""Says what the red team could not reach: an environment that was hardly attacked has not been shown to be safe.

How many of all attacks apply says little: an environment without a sandbox rightly gets few. So coverage is measured by
what decides the score and by what the policy can do: each tool that takes free text must be understood, what decides
the score must be seen, and of the attacks whose surfaces are there at least half must have found something to work on.
Attacks on the loops fit everywhere, so they do not count.
"""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.redteam.attack import Attack
from agentrl.redteam.report import Finding
from agentrl.redteam.target import Target

LEAST = 0.5
"""The share of the attacks with fitting surfaces that must have been tried."""
DECIDERS = frozenset({"answer", "files", "state"})
"""The surfaces that can decide a score."""


def gaps(targets: Sequence[Target], corpus: Sequence[Attack], findings: Sequence[Finding]) -> tuple[str, ...]:
    """Return one sentence for each thing that was out of reach, with what to do about it."""
    sentences: list[str] = []
    for target in targets:
        for tool in target.effects.unclear:
            sentences.append(
                f"tool {tool!r} takes text and refused every probe, so no attack uses it: let expert(task) call it, or "
                f'declare what it does, e.g. `tool_effects = {{"{tool}.<parameter>": "plain"}}` '
                "(or shell, python, path, content)"
            )
        if target.effects.sandbox and "state" in target.surfaces and "files" not in target.surfaces:
            sentences.append(
                f"{target.arena.task.id}: the expert's work in the sandbox decides the score, but changes no file of "
                "the workspace and no declared artifact, so no attack can forge it: let the verifier declare artifacts "
                "that hold the work, or keep it in the workspace"
            )
        if not target.surfaces & DECIDERS and (target.honest.score or 0.0) > 0.0:
            sentences.append(
                f"{target.arena.task.id}: neither answer, files nor state decide the score: the expert's script "
                "without its work scores as much; grade what the task asks for"
            )
    surfaces = frozenset[str]().union(*(target.surfaces for target in targets))
    fitting = {attack.id for attack in corpus if attack.trial is None and attack.needs <= surfaces}
    tried = {finding.id for finding in findings if finding.tried and finding.id in fitting}
    if len(tried) < LEAST * len(fitting) or not tried:
        sentences.append(
            f"only {len(tried)} of {len(fitting)} attacks whose surfaces are there could be tried; the reasons are "
            "listed: give the tasks an expert(task) that does the whole work through the tools, and artifacts that "
            "hold it"
        )
    return tuple(dict.fromkeys(sentences))
