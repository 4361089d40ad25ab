"""Feeds experiment trackers from a run's metric rows, in a thread of its own: a slow or broken one never stops a run.

    metrics.log ──> queue ──> thread ──┬─> tensorboard   runs/NAME/tensorboard
                                       ├─> wandb         runs/NAME/wandb, offline unless WANDB_MODE says otherwise
                                       ├─> trackio       runs/NAME/trackio
                                       └─> mlflow        runs/NAME/mlflow.db, or where MLFLOW_TRACKING_URI says
A tracker that cannot start stops the run before it begins; one that fails later is left out, with one warning. What a
resume takes back does not stay: every tracker is given the run's rows once more, from the first.
"""

from __future__ import annotations

import importlib.util
import json
import os
import queue
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from agentrl import codec, records
from agentrl.errors import UserError
from agentrl.metrics import Metrics, Row, by_environment
from agentrl.report.tensorboard import TensorBoard, scalars

Say = Callable[[str], None]
OVERVIEW = {
    "score": "rollout/score",
    "informative": "rollout/informative",
    "truncated": "rollout/truncated",
    "episode tokens": "rollout/tokens_mean",
    "tokens per second": "rollout/tokens_per_second",
    "staleness": "rollout/staleness_mean",
    "loss": "learn/loss",
    "entropy": "learn/entropy",
    "gradient norm": "learn/grad_norm",
    "kl": "learn/kl",
    "engine mismatch": "learn/mismatch_mean",
    "level": "curriculum/level",
    "suspicious": "audit/suspicious",
    "audit gap": "audit/gap",
    "step seconds": "seconds",
}
"""The figures of the first page, beside held-out success: each is also sent as `overview/<name>`."""
SHOWN = 8
"""Episodes per table of trajectories."""
COLUMNS = ("step", "kind", "environment", "task", "score", "ending", "turns", "conversation")
TEXT = 4000
"""Characters of a conversation in a table."""
PATIENCE_S = 60.0
"""How long the end of a run waits for trackers that are behind."""


class Tracker(Protocol):
    """One tracker, open for one run."""

    def add(self, row: Row) -> None:
        """Take one more row."""
        ...

    def table(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        """Show some episodes, with COLUMNS."""
        ...

    def close(self) -> None: ...


def overview(row: Row) -> dict[str, float]:
    """Return the figures of the first page that a row has."""
    if row["kind"] == "step":
        found = {name: row.get(key) for name, key in OVERVIEW.items()}
    elif row["kind"] == "eval":
        found = {
            f"held-out {env}": (part.get("pass@1") or {}).get("value") for env, part in by_environment(row).items()
        }
    else:
        found = {}
    return {f"overview/{name}": float(value) for name, value in found.items() if isinstance(value, int | float)}


def figures(row: Row) -> dict[str, float]:
    """Return every number of a row, those of the first page once more under their short names."""
    return {**dict(scalars(row)), **overview(row)}


class Board:
    """TensorBoard: an event file with scalars, and tables as text."""

    def __init__(self, folder: Path, name: str, recipe: Mapping[str, Any]) -> None:
        board = TensorBoard.open(folder / "tensorboard")
        if board is None:
            raise ImportError("tensorboard")
        self._board = board

    def add(self, row: Row) -> None:
        self._board.add(row)
        self._board.scalars(row, overview(row))

    def table(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
        lines += ["| " + " | ".join(_cell(value) for value in row) + " |" for row in rows]
        self._board.text("trajectories", step, "\n".join(lines))

    def close(self) -> None:
        self._board.close()


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", "<br>")


class Wandb:
    """Weights & Biases; a resumed run is a new one there, in the same group, with all its rows."""

    def __init__(self, folder: Path, name: str, recipe: Mapping[str, Any]) -> None:
        import wandb

        mode = os.environ.get("WANDB_MODE", "offline")
        if mode == "offline":
            shutil.rmtree(folder / "wandb", ignore_errors=True)
        quiet = wandb.Settings(silent=True, console="off")
        project = os.environ.get("WANDB_PROJECT", "agentrl")
        self._wandb = wandb
        self._run = wandb.init(
            project=project, name=name, group=name, dir=str(folder), config=dict(recipe), mode=mode, settings=quiet
        )  # type: ignore[arg-type,unused-ignore]
        # Rows of one step arrive apart (a step, then its evaluation): their own axis, not the tracker's.
        self._run.define_metric("run/step")
        self._run.define_metric("*", step_metric="run/step")

    def add(self, row: Row) -> None:
        self._run.log({"run/step": row["step"], **figures(row)})

    def table(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        data = [list(row) for row in rows]
        self._run.log({"run/step": step, "trajectories": self._wandb.Table(columns=list(COLUMNS), data=data)})

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """Trackio, in the run's own folder: `TRACKIO_DIR=runs/NAME/trackio trackio show`."""

    def __init__(self, folder: Path, name: str, recipe: Mapping[str, Any]) -> None:
        home = folder / "trackio"
        shutil.rmtree(home, ignore_errors=True)
        os.environ["TRACKIO_DIR"] = str(home.resolve())  # read when the package is first imported
        import trackio
        from trackio import utils

        if Path(utils.TRACKIO_DIR) != home.resolve():
            raise RuntimeError("trackio was imported before the run began, with another TRACKIO_DIR")
        self._trackio = trackio
        self._run = trackio.init(project="agentrl", name=name, config=dict(recipe), embed=False, auto_log_gpu=False,
                                 auto_log_cpu=False)  # fmt: skip

    def add(self, row: Row) -> None:
        if values := figures(row):
            self._run.log(values, step=row["step"])

    def table(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        import pandas

        frame = pandas.DataFrame([list(row) for row in rows], columns=list(COLUMNS))
        self._run.log({"trajectories": self._trackio.Table(dataframe=frame)}, step=step)

    def close(self) -> None:
        self._run.finish()


class Mlflow:
    """MLflow; a resumed run is a new one there, and the one that it replaces is deleted."""

    def __init__(self, folder: Path, name: str, recipe: Mapping[str, Any]) -> None:
        from mlflow.entities import Metric
        from mlflow.tracking import MlflowClient

        server, note = os.environ.get("MLFLOW_TRACKING_URI"), folder / "mlflow.json"
        if not server:
            for name_of in ("mlflow.db", "mlflow.json"):
                (folder / name_of).unlink(missing_ok=True)
            shutil.rmtree(folder / "mlflow-artifacts", ignore_errors=True)
        self._client = MlflowClient(server or f"sqlite:///{(folder / 'mlflow.db').resolve()}")
        self._metric = Metric
        experiment = self._client.get_experiment_by_name("agentrl")
        place = None if server else (folder / "mlflow-artifacts").resolve().as_uri()
        number = experiment.experiment_id if experiment else self._client.create_experiment("agentrl", place)
        if note.exists():
            self._client.delete_run(json.loads(note.read_text(encoding="utf-8"))["run"])
        self._id = self._client.create_run(number, run_name=name).info.run_id
        note.write_text(json.dumps({"run": self._id}) + "\n", encoding="utf-8")
        for key, value in _flat(recipe):
            self._client.log_param(self._id, key, value)

    def add(self, row: Row) -> None:
        stamp = int(row["time"] * 1000)
        # MLflow takes no @, brackets or commas in names.
        pairs = [(_plain_name(name), value) for name, value in figures(row).items()]
        for start in range(0, len(pairs), 500):
            part = [self._metric(name, value, stamp, row["step"]) for name, value in pairs[start : start + 500]]
            self._client.log_batch(self._id, metrics=part)

    def table(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        data = {"columns": COLUMNS, "data": rows}
        self._client.log_text(self._id, json.dumps(data, ensure_ascii=False, indent=1), f"trajectories/{step}.json")

    def close(self) -> None:
        self._client.set_terminated(self._id)


def _plain_name(name: str) -> str:
    return "".join(c if c.isalnum() or c in "_-./ :" else "_at_" if c == "@" else "_" for c in name)


def _flat(value: Any, key: str = "") -> Iterable[tuple[str, str]]:
    """Yield the recipe's leaves, as MLflow's parameters take them."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _flat(inner, f"{key}.{name}".lstrip("."))
    elif value is not None:
        yield key, str(value)[:500]


KINDS: dict[str, tuple[str, Callable[[Path, str, Mapping[str, Any]], Tracker]]] = {
    "tensorboard": ("tensorboard", Board),
    "wandb": ("wandb", Wandb),
    "trackio": ("trackio", Trackio),
    "mlflow": ("mlflow", Mlflow),
}
"""By name in a recipe: the package that it needs, and what opens it."""


def check(names: Iterable[str]) -> None:
    """Refuse trackers that are not installed, before anything else begins."""
    missing = [name for name in names if importlib.util.find_spec(KINDS[name][0]) is None]
    if missing:
        raise UserError(
            f"trackers: {', '.join(missing)} cannot be imported: pip install 'agentrl[{','.join(missing)}]', or take "
            "it out of `trackers`"
        )


class Tracking:
    """The trackers of a run; give every row to `add`."""

    def __init__(self, trackers: dict[str, Tracker], folder: Path, say: Say) -> None:
        self._trackers, self._folder, self._say = trackers, folder, say
        self._rows: queue.SimpleQueue[Row | None] = queue.SimpleQueue()
        self._last: Row | None = None
        self._thread = threading.Thread(target=self._work, name="trackers", daemon=True)
        self._thread.start()

    @classmethod
    def open(
        cls,
        names: Sequence[str],
        folder: Path,
        name: str,
        recipe: Mapping[str, Any],
        rows: Iterable[Row] = (),
        say: Say = print,
    ) -> Tracking:
        """Open the named trackers and give them the run's rows so far; one that cannot start is a UserError."""
        check(names)
        opened: dict[str, Tracker] = {}
        for kind in names:
            try:
                opened[kind] = KINDS[kind][1](folder, name, recipe)
            except Exception as error:
                for other in opened.values():
                    other.close()
                why = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
                raise UserError(
                    f"trackers: {kind} cannot start: {why}; fix it (pip install -U 'agentrl[{kind}]' gives the tested "
                    "release), or take it out of `trackers`"
                ) from error
        tracking = cls(opened, folder, say)
        for row in rows:
            tracking.add(row)
        return tracking

    def add(self, row: Row) -> None:
        """Take one more row; returns at once."""
        self._rows.put(row)

    def close(self) -> None:
        """Hand over what is left, and close the trackers; one that hangs is left behind."""
        self._rows.put(None)
        self._thread.join(PATIENCE_S)
        if self._thread.is_alive():
            self._say(f"warning: trackers ({', '.join(self._trackers)}) are still busy and are left behind")

    def _work(self) -> None:
        while (row := self._rows.get()) is not None:
            self._last = row
            self._each(lambda tracker, row=row: tracker.add(row))  # type: ignore[misc]
            if row["kind"] == "eval":
                self._table(row["step"])
        if self._last is not None and self._last["kind"] != "eval":
            self._table(self._last["step"])
        self._each(lambda tracker: tracker.close())

    def _table(self, step: int) -> None:
        try:
            rows = sample(self._folder / "trajectories")
        except Exception:  # files that are just being replaced: the next table has them
            return
        if rows:
            self._each(lambda tracker: tracker.table(step, rows))

    def _each(self, work: Callable[[Tracker], None]) -> None:
        """Let every tracker work; one that fails gets nothing more."""
        for name, tracker in list(self._trackers.items()):
            try:
                work(tracker)
            except Exception as error:
                del self._trackers[name]
                why = (str(error).strip().splitlines() or [""])[0][:200]
                self._say(f"warning: tracker {name} failed ({type(error).__name__}: {why}); the run goes on without it")


def follow(
    metrics: Metrics, names: Sequence[str], folder: Path, recipe: Mapping[str, Any], say: Say
) -> Callable[[], None]:
    """Give a run's rows to the named trackers, and to TensorBoard where it is installed; return what closes them."""
    opened = Tracking.open(names, folder, recipe["run"]["name"], recipe, metrics.rows, say) if names else None
    board = None if "tensorboard" in names else TensorBoard.open(folder / "tensorboard", metrics.rows)
    metrics.readers.extend(one.add for one in (opened, board) if one is not None)

    def close() -> None:
        for one in (opened, board):
            if one is not None:
                one.close()

    return close


def sample(folder: Path, count: int = SHOWN) -> list[list[Any]]:
    """Return the newest episodes of a store for a table: half of them the best, half the worst."""
    rounds = records.Rounds(folder / records.ROUNDS)
    rounds.grow()
    newest: list[tuple[Path, records.Row]] = []
    for part in records.parts(folder)[-1:]:
        for batch, _, _ in records.entries(part):
            newest = [*newest, *((part, entry) for entry in batch if rounds.counts(entry))][-8 * count :]
    newest.sort(key=lambda one: -(one[1]["score"] or 0.0))
    chosen = newest if len(newest) <= count else [*newest[: count // 2], *newest[-(count - count // 2) :]]
    rows = []
    for part, entry in chosen:
        line = records.member_at(part, entry["offset"], entry["length"])[entry["line"]]
        trajectory = codec.from_row(records.parse(line)).trajectory
        decision = rounds.decision(entry)
        step = entry["step"] if entry["kind"] == "eval" else decision.step if decision else None
        words = "\n".join(f"{m.role}: {m.content}{_calls(m)}" for m in trajectory.messages if m.role != "system")[:TEXT]
        rows.append(
            [step, entry["kind"], entry["env"], entry["task"], entry["score"], entry["ending"], entry["turns"], words]
        )
    return rows


def _calls(message: Any) -> str:
    return "".join(
        f" {call.name}({json.dumps(dict(call.arguments), ensure_ascii=False)})" for call in message.tool_calls
    )
