"""The sampler without parts of it, and dynamic sampling, with a tiny real policy over the six levels of `words`.

    python -m benchmarks.curriculum_words [--seeds 6] [--jobs 2] [--arms two,"bare two"] [--out runs/words]
    python -m benchmarks.curriculum_words --summarise --out FOLDER [--figure FILE] [--json]
                                          # no training: FOLDER/*/metrics.jsonl is read

    warm start  ── once per seed ── random weights, then demonstrations of all levels
    runs        ── arm × seed, each from its seed's policy, each until it has sampled --tokens tokens

Needs two CPU cores and no accelerator: a run takes a minute or two. Arms, how they are compared and what is reported
are those of `curriculum_levels`, where a pretrained model is trained in the same way on a GPU.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks._runs import export, finished, options, play
from benchmarks.curriculum_levels import LACKING, draw_figure, name_of, of_arm, summarise, table

RECIPE = Path(__file__).parent.parent / "recipes" / "quickstart.yaml"
ENV = "words"
OURS = "two"
ARMS = (OURS, "dynamic two", "mild two", "plain two", "bare two")
TOKENS = 60_000
WHERE = Path(__file__).parent / ENV
COMMON = [
    f"envs=[{{name: {WHERE}}}]", "rollout.max_turns=1", "rollout.max_tokens=48", "rollout.group_size=8",
    "eval={split: heldout, tasks: 480, k: [1]}",
]  # fmt: skip
BEGIN = [
    *COMMON, "run.steps=0", "model={type: scratch, layers: 3, width: 64, heads: 4, vocabulary: 320, context: 96}",
    "warm_start={demonstrations: 12288, epochs: 6, lr: 5.0e-3, batch: 64, smoothing: 0.15}",
]  # fmt: skip
"""Three layers: with two it takes far longer to learn two operations in a row."""


def start_of(seed: int) -> str:
    return f"{ENV}-start-{seed}"


def settings(arm: str, seed: int, model: Path, tokens: int) -> list[str]:
    """What sets a run apart from the recipe."""
    return [
        f"run.seed={seed}", "run.steps=10000", f"run.tokens={tokens}", f"model={{path: {model}}}", "warm_start=null",
        *COMMON, "checkpoint={every: 0, keep: 1}", "learner.lr=3.0e-4", "learner.schedule=constant",
        *of_arm(arm),
    ]  # fmt: skip


def main() -> None:
    """Run what is missing, then report."""
    parser = options(__doc__, RECIPE, 6, Path("runs/words"))
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--tokens", type=int, help=f"what each run may sample ({TOKENS:,})")
    parser.add_argument("--figure", type=Path, help="write the curves to this file")
    chosen = parser.parse_args()
    arms = chosen.arms.split(",")
    if not chosen.summarise:
        lacks = {name_of(ENV, arm, seed): arm for seed in range(chosen.seeds) for arm in arms if arm in LACKING}

        def then(start: str) -> Mapping[str, Sequence[str]]:
            """All arms of a seed, side by side: whenever this is stopped, what is there can be compared."""
            seed = next((n for n in range(chosen.seeds) if start_of(n) == start), None)
            if seed is None:
                return {}
            model = export(chosen.out / start, chosen.out / f"{start}-model")
            tokens = chosen.tokens or TOKENS
            return {name_of(ENV, arm, seed): settings(arm, seed, model, tokens) + chosen.more for arm in arms}

        def module(run: str) -> Sequence[str]:
            return ("benchmarks._lacking", "; ".join(LACKING[lacks[run]])) if run in lacks else ("agentrl",)

        play(
            chosen.recipe, {start_of(seed): [f"run.seed={seed}", *BEGIN] for seed in range(chosen.seeds)}, chosen.out,
            at_once=chosen.jobs, minutes=chosen.minutes, then=then, module=module, keep=False,
        )  # fmt: skip
        wanted = [name_of(ENV, arm, seed) for seed in range(chosen.seeds) for arm in arms]
        if missing := [name for name in wanted if not finished(chosen.out, name)]:
            print(f"not finished: {', '.join(missing)}; start again to go on", file=sys.stderr)
    compared = chosen.tokens if chosen.summarise else None
    report = summarise(chosen.out, ENV, chosen.seeds, compared, OURS, apart=True)
    if report is None:
        raise SystemExit(f"{chosen.out}: no seed has two evaluations under `{OURS}` and another arm yet")
    if chosen.figure:
        draw_figure([report], chosen.figure)
    sys.stdout.write((json.dumps(report) if chosen.json else table(report)) + "\n")


if __name__ == "__main__":
    main()
