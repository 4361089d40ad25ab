"""Examines every node of a cluster before a run uses it: `agentrl doctor --cluster`.

An actor without a share of the CPU runs on each node and tries there what a player would need: the same packages and
environments, sandboxes, room on the disk, the way to the SGLang servers. The driver compares the answers with itself.
"""

from __future__ import annotations

import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from agentrl.catalogue import for_children
from agentrl.cluster.actor import LEAST_DISK
from agentrl.cluster.kit import EXACT, facts
from agentrl.cluster.server_actor import fingerprint, resources
from agentrl.recipe import Recipe, SglangEngine
from agentrl.rollout.runtimes import runtimes, source_versions

EXAMINE_S = 180.0
"""A node that has not answered after this many seconds is reported as one that does not."""
SKEW_S = 1.0
LOW_DISK, LOW_MEMORY = 2 << 30, 1 << 30
PINGS = 5
UPLOAD = 4 << 20
"""Bytes sent to each server to measure the bandwidth."""
SAME_VERSION = (
    "install there what is installed here: the same agentrl, the same packages (pip install -c constraints.txt)"
)

Check = Callable[[], Sequence[Any]]


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong, and what to do about it."""

    text: str
    fix: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """One node."""

    name: str
    """Host name and address."""
    players: int
    """Players that fit on it."""
    measured: Mapping[str, Any]
    """What was found there; empty where it did not answer."""
    fails: tuple[Problem, ...] = ()
    """A run with this node fails."""
    unused: tuple[Problem, ...] = ()
    """A run goes on without this node's players."""
    differs: tuple[Problem, ...] = ()
    """A run uses the node all the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterReport:
    """The whole cluster."""

    nodes: list[NodeReport]
    fails: tuple[Problem, ...] = ()
    differs: tuple[Problem, ...] = ()

    @property
    def fit(self) -> bool:
        """Whether a run would work."""
        stopped = self.fails or any(node.fails for node in self.nodes)
        return not stopped and any(node.players and not node.unused for node in self.nodes)

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain data."""
        return {"fit": self.fit, **asdict(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Errand:
    """What a node is asked to try."""

    recipe: Mapping[str, Any] | None = None
    urls: tuple[str, ...] = ()
    folders: Mapping[str, str] = field(default_factory=dict)
    """Folders and the fingerprint that each has for the driver."""
    marker: str = ""
    """A file that the driver has written into the run's folder."""


class Examiner:
    """Runs on the node that is examined."""

    def __init__(self, sandboxes: Check) -> None:
        self._sandboxes = sandboxes

    def now(self) -> float:
        """Return this node's clock."""
        return time.time()

    def examine(self, errand: Errand) -> dict[str, Any]:
        """Try everything; nothing that is missing raises."""
        folder = tempfile.gettempdir()
        recipe = None if errand.recipe is None else Recipe.model_validate(errand.recipe)
        return {
            "facts": facts(),
            "sandboxes": [asdict(finding) for finding in self._sandboxes()],
            "temporary": folder,
            "disk_free": shutil.disk_usage(folder).free,
            "memory_free": memory_free(),
            "sources": {} if recipe is None else _sources(recipe),
            "sglang": _sglang(recipe),
            "servers": {url: way_to(url) for url in errand.urls},
            "folders": {path: _seen(Path(path), mark) for path, mark in errand.folders.items()},
            "run_folder": bool(errand.marker) and Path(errand.marker).is_file(),
        }


def _sources(recipe: Recipe) -> dict[str, str]:
    """Return hashes of the environments' sources here, or what keeps them from being loaded."""
    try:
        with runtimes(recipe, elsewhere=True) as environments:
            return source_versions(environments)
    except Exception as error:
        return {"error": " ".join(str(error).split()) or type(error).__name__}


def _sglang(recipe: Recipe | None) -> str:
    """Return what is missing to launch a server here, "" where nothing is."""
    from agentrl.engines.sglang import install

    if recipe is None or not isinstance(recipe.rollout.engine, SglangEngine) or not recipe.rollout.engine.launch:
        return ""
    python = recipe.rollout.engine.python or install.python(recipe.rollout.engine.device == "cpu")
    return "" if python.exists() else f"there is no interpreter for SGLang at {python}"


def _seen(folder: Path, mark: str) -> str:
    if not folder.is_dir():
        return "not there"
    return "the same" if fingerprint(folder) == mark else "another one"


def memory_free() -> int:
    """Return the bytes that may still be taken here: the machine's, or what a container's limit leaves."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) << 10
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with suppress(OSError, ValueError):
            group = Path("/sys/fs/cgroup")
            free = min(free, int((group / limit).read_text()) - int((group / used).read_text()))
    return free


def way_to(url: str) -> dict[str, Any]:
    """Measure the way to a server: the least time of an answer, and how fast a large request arrives there."""
    import httpx

    try:
        with httpx.Client(base_url=url, timeout=10.0, trust_env=False) as client:
            client.get("/health").raise_for_status()
            latency = min(_seconds(lambda: client.get("/health")) for _ in range(PINGS))
            body = {"rid": "agentrl-doctor-has-no-such-request", "abort_all": False, "pad": "x" * UPLOAD}
            upload = min(_seconds(lambda: client.post("/abort_request", json=body)) for _ in range(2))
    except httpx.HTTPError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"latency_ms": round(latency * 1e3, 2), "mib_per_s": round((UPLOAD >> 20) / upload, 1)}


def _seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


# The driver's side ------------------------------------------------------------------------------------------------


def examine(recipe: Recipe | None, sandboxes: Check) -> ClusterReport:
    """Examine all nodes of the cluster that this process is connected to. `sandboxes` runs there and tries them."""
    section = recipe.cluster if recipe is not None else None
    share = section.cpus if section is not None else 1.0
    cluster: Any = ray
    nodes = [node for node in cluster.nodes() if node["Alive"]]
    errand, marker, problems = _errand(recipe)
    try:
        answers = _ask(nodes, errand, sandboxes)
    finally:
        if marker is not None:
            marker.unlink(missing_ok=True)
    here = {"facts": facts(), "sources": {} if recipe is None else _sources(recipe)}
    reports = []
    for node, answer in zip(nodes, answers, strict=True):
        room = int(node["Resources"].get("CPU", 0.0) / share)
        reports.append(_judge(node, answer, room, recipe, here))
    fails, differs = _judge_cluster(nodes, reports, recipe)
    return ClusterReport(nodes=reports, fails=(*problems, *fails), differs=differs)


def _errand(recipe: Recipe | None) -> tuple[Errand, Path | None, list[Problem]]:
    """Return what nodes are asked, the marker to remove afterwards, and what is wrong here."""
    if recipe is None:
        return Errand(), None, []
    problems, marker = [], None
    out = (recipe.run.out / recipe.run.name).absolute()
    folder = next(parent for parent in (out, *out.parents) if parent.is_dir())
    try:
        marker = folder / f".agentrl-doctor-{secrets.token_hex(8)}"
        marker.touch()
    except OSError as error:
        marker = None
        problems.append(Problem(f"the run's folder {out} cannot be written: {error.strerror}", "set run.out"))
    folders = {}
    if recipe.model.type == "pretrained":
        path = recipe.model.path.absolute()
        if path.is_dir():
            folders[str(path)] = fingerprint(path)
        else:
            problems.append(Problem(f"there is no model folder {path} here", "set model.path"))
    engine = recipe.rollout.engine
    errand = Errand(
        recipe=recipe.model_dump(mode="json", by_alias=True),
        urls=tuple(engine.urls) if isinstance(engine, SglangEngine) else (),
        folders=folders,
        marker=str(marker or ""),
    )
    return errand, marker, problems


def _ask(nodes: Sequence[Mapping[str, Any]], errand: Errand, sandboxes: Check) -> list[dict[str, Any]]:
    """Have every node examine itself, all at once; a node that cannot answers with an error."""
    options: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0}
    if variables := for_children():
        options["runtime_env"] = {"env_vars": variables}
    kind: Any = ray.remote(**options)(Examiner)
    actors: list[Any] = []
    calls: list[Any] = []
    for node in nodes:
        place = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        actors.append(kind.options(scheduling_strategy=place).remote(sandboxes))
        calls.append(actors[-1].examine.remote(errand))
    answers, deadline = [], time.monotonic() + EXAMINE_S
    for actor, call in zip(actors, calls, strict=True):
        try:
            answer = ray.get(call, timeout=max(1.0, deadline - time.monotonic()))
            answer |= _clock(actor)
        except ray.exceptions.GetTimeoutError:
            answer = {"error": f"it did not answer within {EXAMINE_S:.0f} s"}
        except ray.exceptions.RayError as error:
            answer = {"error": (str(error).strip().splitlines() or [type(error).__name__])[-1]}
        answers.append(answer)
    for actor in actors:
        ray.kill(actor)
    return answers


def _clock(actor: Any) -> dict[str, float]:
    """Compare clocks as NTP does: the quickest answer bounds the difference best."""
    readings = []
    for _ in range(PINGS):
        sent, began = time.time(), time.perf_counter()
        there = ray.get(actor.now.remote(), timeout=30.0)
        took = time.perf_counter() - began
        readings.append((took, there - sent - took / 2))
    took, skew = min(readings)
    return {"skew_s": round(skew, 4), "skew_within_s": round(took / 2, 4)}


def _judge(
    node: Mapping[str, Any], answer: dict[str, Any], room: int, recipe: Recipe | None, here: Mapping[str, Any]
) -> NodeReport:
    """Say what a run would make of a node's answer."""
    name = f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
    if "error" in answer:
        text = f"it cannot be examined: {answer['error']}"
        fails = [Problem(text, "see whether the node runs, and has the same agentrl installed")]
        return NodeReport(name=name, players=room, measured={}, fails=tuple(fails))
    fails, unused, differs = _versions(answer, recipe, here), [], []
    if not fails:
        differs += _variations(answer["facts"], here["facts"])
    wanted = {section.sandbox for section in recipe.envs} if recipe is not None else {"namespace"}
    for finding in answer["sandboxes"]:
        if finding["name"] in wanted and not finding["works"]:
            text = f"the sandbox {finding['name']!r} does not work: {', '.join(finding['missing'])}"
            unused.append(Problem(text, finding["fix"]))
    free, memory = answer["disk_free"], answer["memory_free"]
    if free < LOW_DISK:
        problem = Problem(
            f"only {free >> 20} MiB of disk are free in {answer['temporary']}", "make room, or set TMPDIR"
        )
        (unused if free < LEAST_DISK else differs).append(problem)
    if memory < LOW_MEMORY * max(1, room):
        text = f"{memory >> 20} MiB of memory are free for {max(1, room)} players, which take about 1 GiB each"
        differs.append(Problem(text, "end what else runs there, or raise cluster.cpus so that fewer players fit"))
    if abs(answer["skew_s"]) - answer["skew_within_s"] > SKEW_S:
        text = f"its clock is {answer['skew_s']:+.1f} s off: log lines and times of episodes do not compare"
        differs.append(Problem(text, "run chrony or another NTP service on every node"))
    for url, way in answer["servers"].items():
        if "error" in way:
            unreachable = Problem(f"the SGLang server {url} cannot be reached: {way['error']}", _reach(url))
            fails.append(unreachable)
    for path, seen in answer["folders"].items():
        if seen == "another one":
            differs.append(Problem(f"{path} holds another model there", "copy the folder, or share it between nodes"))
    if not room:  # no player goes there: whatever it lacks is of no matter
        fails, unused, differs = [], [], [*fails, *unused, *differs]
    return NodeReport(
        name=name, players=room, measured=answer, fails=tuple(fails), unused=tuple(unused), differs=tuple(differs)
    )


def _versions(answer: Mapping[str, Any], recipe: Recipe | None, here: Mapping[str, Any]) -> list[Problem]:
    """Return what keeps a run from using this node together with the driver."""
    there, problems = answer["facts"], []
    absent = [name for name in ("torch", "transformers") if there[name] == "missing"]
    if absent:
        problems.append(Problem(f"{', '.join(absent)} cannot be imported", "pip install 'agentrl[train,ray]'"))
    sources = answer["sources"]
    if "error" in sources:
        problems.append(Problem(f"the recipe's environments cannot be loaded: {sources['error']}", SAME_VERSION))
    else:
        other = [name for name, version in here["sources"].items() if sources.get(name) != version]
        if other:
            problems.append(Problem(f"the source of {', '.join(other)} differs from the one here", SAME_VERSION))
    if recipe is not None and recipe.run.deterministic and recipe.rollout.engine.type == "transformers":
        exact = [name for name in EXACT if there[name] != here["facts"][name]]
        if exact:
            text = f"it cannot repeat to the bit what is computed here: {_compared(exact, there, here['facts'])}"
            problems.append(Problem(text, "use nodes of one kind, or set run.deterministic: false"))
    return problems


def _variations(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[Problem]:
    names = [
        name for name in ("agentrl", "python", "torch", "transformers", "numpy", "ray") if there[name] != here[name]
    ]
    problems = [Problem(_compared(names, there, here), SAME_VERSION)] if names else []
    if there["processor"] != here["processor"]:
        text = f"another kind of CPU ({there['processor']}, here {here['processor']}): logprobs differ in the last bits"
        problems.append(Problem(text, "use nodes of one kind where a run must repeat to the bit"))
    return problems


def _compared(names: Sequence[str], there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    return "; ".join(f"{name} {there[name]}, here {here[name]}" for name in names)


def _reach(url: str) -> str:
    if urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1"):
        return "a loopback address means another machine on every node: name the server's own address"
    return "start the server with --host set to an address of its network, and open its port"


def _judge_cluster(
    nodes: Sequence[Mapping[str, Any]], reports: Sequence[NodeReport], recipe: Recipe | None
) -> tuple[tuple[Problem, ...], tuple[Problem, ...]]:
    """Return what is wrong with all nodes together: too little room for players or servers."""
    fails, differs = [], []
    room = sum(report.players for report in reports if not report.unused and not report.fails)
    wanted = recipe.cluster.players if recipe is not None and recipe.cluster is not None else 1
    more = "add nodes, or lower cluster.players or cluster.cpus"
    if not room:
        fails.append(Problem("no node can hold a player", more))
    elif room < wanted:
        differs.append(Problem(f"{wanted} players are wanted, and only {room} find room", more))
    engine = recipe.rollout.engine if recipe is not None else None
    if isinstance(engine, SglangEngine) and engine.launch:
        needs = resources(engine)
        able = [
            node
            for node, report in zip(nodes, reports, strict=True)
            if report.measured and not report.measured["sglang"]
        ]
        places = sum(int(min(node["Resources"].get(kind, 0.0) / much for kind, much in needs.items())) for node in able)
        shown = " and ".join(f"{much:g} {kind}" for kind, much in needs.items())
        if places < engine.servers:
            text = (
                f"{engine.servers} SGLang servers of {shown} each are wanted, and nodes with SGLang have room for "
                f"{places}"
            )
            (differs if places else fails).append(
                Problem(
                    text, "run `agentrl engine install sglang` on each node with GPUs, or lower rollout.engine.servers"
                )
            )
    return tuple(fails), tuple(differs)


def as_text(report: ClusterReport) -> str:
    """Return the report for a terminal."""
    lines = [f"cluster: {'a run would work' if report.fit else 'a run would fail'}"]
    lines += _lines("  ", "!", report.fails) + _lines("  ", "-", report.differs)
    for node in report.nodes:
        state = (
            "fails a run" if node.fails else "is not used" if node.unused else "differs" if node.differs else "works"
        )
        lines.append(f"{node.name}: {state}; room for {node.players} players")
        found = node.measured
        if found:
            versions = found["facts"]
            names = ("agentrl", "python", "torch", "transformers", "ray")
            lines.append(f"  {', '.join(f'{name} {versions[name]}' for name in names)}")
            lines.append(f"  {versions['processor'][:100]}")
            works = [finding["name"] for finding in found["sandboxes"] if finding["works"]]
            lines.append(f"  sandboxes that work: {', '.join(works) or 'none'}")
            room = f"disk {found['disk_free'] >> 20} MiB free, memory {found['memory_free'] >> 20} MiB free"
            clock = f"{found['skew_s'] * 1e3:+.1f} ms (± {found['skew_within_s'] * 1e3:.1f})"
            lines.append(f"  {room}, clock {clock}")
            for url, way in found["servers"].items():
                if "error" not in way:
                    lines.append(f"  {url}: {way['latency_ms']} ms, {way['mib_per_s']} MiB/s")
            lines += [f"  {path}: {seen}" for path, seen in found["folders"].items()]
        lines += _lines("  ", "!", node.fails) + _lines("  ", "!", node.unused) + _lines("  ", "-", node.differs)
    return "\n".join(lines)


def _lines(indent: str, mark: str, problems: Sequence[Problem]) -> list[str]:
    lines = []
    for problem in problems:
        lines.append(f"{indent}{mark} {problem.text}")
        lines += [f"{indent}  fix: {problem.fix}"] if problem.fix else []
    return lines
