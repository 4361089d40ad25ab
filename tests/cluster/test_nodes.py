"""`agentrl doctor --cluster` examines every node, names those that differ, and exits with 1 where a run would fail."""

from __future__ import annotations

import copy
import http.server
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentrl import doctor
from agentrl.cluster import nodes as examination
from agentrl.cluster.kit import EXACT, facts, source_hash
from agentrl.recipe import Recipe
from tests.cluster.rollouts import RECIPE, small_recipe

NODE = {"NodeManagerHostname": "far", "NodeManagerAddress": "10.0.0.7"}


def report_on(recipe: dict[str, Any], folder: Path) -> tuple[int, dict[str, Any]]:
    """Run the command on the session's cluster."""
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump({**recipe, "run": {**recipe["run"], "out": str(folder / "runs")}}))
    said: list[str] = []
    code = doctor.examine_cluster(path, as_json=True, say=said.append)
    return code, json.loads(said[0])


def test_a_cluster_of_equal_nodes_is_fit(nodes: Any, tmp_path: Path) -> None:
    code, report = report_on({**RECIPE, "cluster": {"players": 3}}, tmp_path)
    assert (code, report["fit"], report["fails"], report["differs"]) == (0, True, [], [])
    assert len(report["nodes"]) == 3
    for node in report["nodes"]:
        found = node["measured"]
        assert (node["players"], node["fails"], node["unused"]) == (2, [], [])
        assert {"namespace": True, "process": True}.items() <= {
            s["name"]: s["works"] for s in found["sandboxes"]
        }.items()
        assert found["facts"]["torch"] == facts()["torch"]
        assert abs(found["skew_s"]) <= found["skew_within_s"] + 0.05
        assert found["disk_free"] > 0 and found["memory_free"] > 0 and found["run_folder"]
        names = [env["name"] for env in RECIPE["envs"]]
        assert set(found["sources"]) == {f"{what} {name}" for what in ("environment", "verifier of") for name in names}
    assert list(tmp_path.iterdir()) == [tmp_path / "recipe.yaml"]  # no marker stays behind


@pytest.mark.skipif(not os.environ.get("AGENTRL_FULL"), reason="starts one more node; set AGENTRL_FULL")
def test_a_node_with_another_torch_is_named(nodes: Any, tmp_path: Path) -> None:
    """A real raylet whose workers have another version of torch: a run that must repeat to the bit would fail."""
    fake = tmp_path / "packages" / "torch-1.0.dist-info"
    fake.mkdir(parents=True)
    (fake / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.0\n")
    extra = nodes.add_node(num_cpus=2, object_store_memory=80 << 20, env_vars={"PYTHONPATH": str(fake.parent)})
    try:
        exact = {**RECIPE, "run": {**RECIPE["run"], "deterministic": True}, "cluster": {"players": 3}}
        code, report = report_on(exact, tmp_path)
    finally:
        nodes.remove_node(extra)
    named = [[problem["text"] for problem in node["fails"]] for node in report["nodes"] if node["fails"]]
    here = facts()["torch"]
    assert (code, report["fit"]) == (1, False)
    assert named == [[f"it cannot repeat to the bit what is computed here: torch 1.0, here {here}"]]


@pytest.fixture(scope="module")
def answer() -> dict[str, Any]:
    """What this machine answers, as a node would."""
    recipe = small_recipe(envs=[{"name": "files", "levels": [1]}]).model_dump(mode="json", by_alias=True)
    good = doctor.Finding(name="namespace", works=True)
    return examination.Examiner(lambda: [good]).examine(examination.Errand(recipe=recipe)) | {
        "skew_s": 0.001,
        "skew_within_s": 0.002,
        "disk_free": 100 << 30,
        "memory_free": 100 << 30,
    }


def judged(answer: dict[str, Any], recipe: Recipe | None = None, room: int = 2) -> examination.NodeReport:
    """Judge a changed answer against the unchanged one of this machine."""
    here = {"facts": facts(), "sources": dict(HERE)}
    return examination._judge(NODE, answer, room, recipe or small_recipe(envs=[{"name": "files"}]), here)


HERE: dict[str, str] = {}


@pytest.fixture(autouse=True)
def _sources(request: pytest.FixtureRequest) -> None:
    if "answer" in request.fixturenames:
        HERE.update(request.getfixturevalue("answer")["sources"])


def test_what_each_fault_means_for_a_run(answer: dict[str, Any]) -> None:
    """A run fails, goes on without the node, or uses it all the same; each message says what to do."""
    assert judged(answer) == examination.NodeReport(name="far (10.0.0.7)", players=2, measured=answer)
    changes: dict[str, tuple[str, Any, str]] = {
        "sources": (
            "fails",
            {**answer["sources"], "verifier of files": "x"},
            "the source of verifier of files differs",
        ),
        "sandboxes": (
            "unused",
            [{"name": "namespace", "works": False, "missing": ["no user namespaces"], "fix": "sysctl"}],
            "the sandbox 'namespace' does not work: no user namespaces",
        ),
        "disk_free": ("unused", 1 << 20, "only 1 MiB of disk are free"),
        "memory_free": ("differs", 1 << 20, "1 MiB of memory are free for 2 players"),
        "skew_s": ("differs", -7.5, "its clock is -7.5 s off"),
        "servers": ("fails", {"http://127.0.0.1:1": {"error": "refused"}}, "the SGLang server http://127.0.0.1:1"),
        "folders": ("differs", {"/models/a": "another one"}, "/models/a holds another model there"),
        "facts": ("differs", {**answer["facts"], "agentrl": "0.0.1"}, "agentrl 0.0.1, here "),
    }
    for name, (kind, value, text) in changes.items():
        report = judged({**copy.deepcopy(answer), name: value})
        problems = {each: getattr(report, each) for each in ("fails", "unused", "differs")}
        assert {each: len(found) for each, found in problems.items()} == {
            "fails": 0, "unused": 0, "differs": 0, kind: 1
        }, name  # fmt: skip
        assert problems[kind][0].text.startswith(text) and problems[kind][0].fix, problems[kind]


@pytest.mark.parametrize("name", ["agentrl", "python", "torch", "transformers", "numpy", "ray", "processor"])
def test_every_difference_of_a_node_is_named(name: str, answer: dict[str, Any]) -> None:
    """It is said and no more; where a run must repeat to the bit and the difference matters for that, the run fails."""
    other = {**answer, "facts": {**answer["facts"], name: "another"}}
    report = judged(other)
    text = f"another kind of CPU (another, here {facts()[name]})" if name == "processor" else f"{name} another, here "
    assert (report.fails, report.unused, len(report.differs)) == ((), (), 1)
    assert report.differs[0].text.startswith(text + ("" if name == "processor" else facts()[name]))
    exact = small_recipe(envs=[{"name": "files"}], run={**RECIPE["run"], "deterministic": True})
    assert bool(judged(other, exact).fails) == (name in EXACT)


def test_two_checkouts_of_one_version_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "envs" / "mine").mkdir(parents=True)
    (tmp_path / "a.py").write_text("a = 1")
    before = source_hash(tmp_path)
    (tmp_path / "envs" / "mine" / "__init__.py").write_text("EXPORT = 1")  # a member of a wheel, or none of a checkout
    source_hash.cache_clear()
    assert source_hash(tmp_path) == before
    (tmp_path / "a.py").write_text("a = 2")
    source_hash.cache_clear()
    assert source_hash(tmp_path) != before


def test_a_node_without_room_for_players_may_lack_anything(answer: dict[str, Any]) -> None:
    report = judged({**answer, "disk_free": 0, "sources": {"error": "no such environment"}}, room=0)
    assert (report.fails, report.unused, len(report.differs)) == ((), (), 2)


def test_a_node_that_does_not_answer_fails_the_run() -> None:
    report = judged({"error": "ModuleNotFoundError: No module named 'agentrl'"})
    whole = examination.ClusterReport(nodes=[report])
    assert not whole.fit
    assert examination.as_text(whole).splitlines() == [
        "cluster: a run would fail",
        "far (10.0.0.7): fails a run; room for 2 players",
        "  ! it cannot be examined: ModuleNotFoundError: No module named 'agentrl'",
        "    fix: see whether the node runs, and has the same agentrl installed",
    ]


def test_room_for_players_and_servers_is_counted(answer: dict[str, Any]) -> None:
    engine = {"type": "sglang", "servers": 4, "flags": ["--tp", "2"]}
    rollout = {**RECIPE["rollout"], "engine": engine}
    recipe = small_recipe(envs=[{"name": "files"}], rollout=rollout, cluster={"players": 9})
    good = judged({**answer, "sglang": ""}, recipe, room=4)
    fails, differs = examination._judge_cluster([{"Resources": {"GPU": 3.0, "CPU": 4.0}}] * 2, [good, good], recipe)
    assert fails == ()
    assert [problem.text for problem in differs] == [
        "9 players are wanted, and only 8 find room",
        "4 SGLang servers of 2 GPU each are wanted, and nodes with SGLang have room for 2",
    ]


@pytest.fixture
def server() -> Iterator[str]:
    """A web server that answers as SGLang does, 20 ms late."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            threading.Event().wait(0.02)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.do_GET()

        def log_message(self, *_: Any) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()
        thread.join()


def test_the_way_to_a_server_is_measured(server: str) -> None:
    way = examination.way_to(server)
    assert set(way) == {"latency_ms", "mib_per_s"}
    assert way["latency_ms"] >= 20 and 0 < way["mib_per_s"] < 4 / 0.02
    assert "ConnectError" in examination.way_to("http://127.0.0.1:1")["error"]
