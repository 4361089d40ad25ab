"""Joins the Ray cluster that RAY_ADDRESS names, or starts Ray on this machine for as long as a run lasts.

A Ray port runs any code that reaches it, so that every cluster must ask for a token. One that we start has a random
token of its own, listens on the loopback alone, keeps its files in a private folder and is gone when the block ends.
What a run that was killed left of its folder is removed when the next one starts.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from agentrl.cluster.own_node import OWN_NODE
from agentrl.errors import InfraError, RecipeError, UserError
from agentrl.recipe import ClusterSection

Say = Callable[[str], None]

HEALTH_CHECKS = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}
"""A node that does not answer for three seconds counts as dead. Ray's own settings take up to a minute."""
ONE_NODE = {**HEALTH_CHECKS, "health_check_failure_threshold": 30}
"""Where there is one node, nothing goes on without it: it may be too busy to answer for a minute (a check waits for a
second, and begins a second after the one before)."""
OWN_ADDRESS = "127.0.0.1"
"""Where a Ray that we start listens, and what it calls its one node."""
STORE_BYTES = 256 << 20
"""Ray's shared memory on a machine where we start it; what does not fit goes to disk."""
NEW_TOKEN = "make one with `ray get-auth-token --generate`, start every node with RAY_AUTH_MODE=token and that token"
ROOT, PREFIX, OWNER = Path("/tmp"), "agentrl-ray-", "owner"
"""Where Ray's files are: a short path, since sockets lie in it. `owner` is locked for as long as the run lives."""
START_S = "120"
"""How long Ray waits for its own daemon; its own setting is too short for a busy machine."""
PROBE_S = 60.0
PROBE = (
    "import sys\n"
    "from ray._raylet import GcsClient\n"
    "from ray.exceptions import AuthenticationError\n"
    "try:\n"
    "    GcsClient(address=sys.argv[1]).internal_kv_get(b'agentrl', None)\n"
    "    print('let in')\n"
    "except AuthenticationError:\n"
    "    print('refused')\n"
)
"""Reads from a cluster without a token: only one that anybody may join lets it in."""


@contextmanager
def connected(
    section: ClusterSection, *, store_bytes: int = STORE_BYTES, say: Say = lambda text: None
) -> Iterator[None]:
    """Be connected to a cluster during the block. A connection that the caller has made already is used and kept."""
    try:
        import ray
    except ImportError as error:
        raise RecipeError(f"cluster: Ray cannot be imported ({error}); pip install 'agentrl[ray]'") from error
    if ray.is_initialized():
        with OWN_NODE.watched():
            yield
        return
    address = os.environ.get("RAY_ADDRESS", "")
    with (
        OWN_NODE.watched(),
        _signals_kept(),
        _joined(ray, address, say) if address else _started(ray, section, store_bytes, say),
    ):
        yield


@contextmanager
def _joined(ray: Any, address: str, say: Say) -> Iterator[None]:
    """Join a running cluster that asks for a token."""
    if "://" in address:
        raise UserError(
            f"RAY_ADDRESS is {address}: a run must be on a node of the cluster; start it there, or send it with "
            "`ray job submit -- agentrl train RECIPE`"
        )
    mode = os.environ.get("RAY_AUTH_MODE")
    if mode is not None and mode.lower() != "token":
        raise UserError(f"RAY_AUTH_MODE is {mode}: anybody who reaches the cluster could run code there; {NEW_TOKEN}")
    if not token():
        raise UserError(f"there is no token for the Ray cluster at {address}; {NEW_TOKEN}")
    if address == "auto":
        raise UserError("RAY_ADDRESS is auto: name the head node instead, as HOST:PORT")
    with _environment({"RAY_AUTH_MODE": "token"}):
        if without_token(address) == "let in":
            raise UserError(f"the Ray cluster at {address} asks nobody for a token, so anybody could run code there; "
                            f"{NEW_TOKEN}")  # fmt: skip
        try:
            ray.init(address=address, namespace=f"agentrl-{secrets.token_hex(4)}", **_quiet())
        except (ConnectionError, RuntimeError, ray.exceptions.RayError) as error:
            raise UserError(f"the Ray cluster at {address} (RAY_ADDRESS) cannot be joined: {_first(error)}") from error
        nodes = [node for node in ray.nodes() if node["Alive"]]
        say(f"joined the Ray cluster at {address}: {len(nodes)} nodes, {_cpus(ray):g} CPU cores")
        try:
            yield
        finally:
            OWN_NODE.shut_down(ray)


@contextmanager
def _started(ray: Any, section: ClusterSection, store_bytes: int, say: Say) -> Iterator[None]:
    """Start Ray on this machine, and end it with everything that runs in it."""
    _remove_stale()
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=ROOT))
    private = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_raylet_start_wait_time_s": START_S,
        "RAY_prestart_worker_first_driver": "0",  # players have workers of their own
        # Ray runs workers below everything else on a machine, where they wait for processors that others use
        "RAY_worker_niceness": os.environ.get("RAY_worker_niceness", "0"),  # noqa: SIM112
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # for a node of its own: its address is 127.0.0.1, on any system
    }
    try:
        with _locked(folder), _environment(private):
            say(f"starting Ray on this machine for {section.players} players")
            try:
                ray.init(
                    address="local",
                    num_cpus=max(os.cpu_count() or 1, -(-section.players * section.cpus // 1)),
                    object_store_memory=store_bytes,
                    include_dashboard=False,
                    _node_ip_address=OWN_ADDRESS,
                    _temp_dir=str(folder / "ray"),  # Ray lets everybody into it; the folder around it is ours alone
                    _system_config=ONE_NODE,
                    **_quiet(),
                )
            except Exception as error:  # Ray raises plain exceptions here, for one where a busy machine takes too long
                OWN_NODE.shut_down(ray)
                raise InfraError(f"Ray could not start on this machine: {_first(error)}") from error
            try:
                yield
            finally:
                OWN_NODE.shut_down(ray)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Show that a folder is in use for as long as this process lives. Its lock is there before its name is."""
    unnamed = folder / f"{OWNER}.new"
    with unnamed.open("w") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        unnamed.rename(folder / OWNER)
        yield


def _remove_stale() -> None:
    """Remove the folders of runs that were killed. A folder whose owner lives is locked; others' cannot be opened."""
    for owner in ROOT.glob(f"{PREFIX}*/{OWNER}"):
        with suppress(OSError), owner.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(owner.parent, ignore_errors=True)


def token() -> str:
    """Return the token that this process shows, from where Ray takes it; "" where there is none."""
    if own := os.environ.get("RAY_AUTH_TOKEN"):
        return own.strip()
    for file in (os.environ.get("RAY_AUTH_TOKEN_PATH"), Path.home() / ".ray" / "auth_token"):
        if file and Path(file).is_file():
            return Path(file).read_text(encoding="utf-8").strip()
    return ""


def without_token(address: str) -> str:
    """Return what a cluster does with somebody who has no token: `let in` or `refused`. Raise where it cannot be asked.

    In a process of its own: a token, once read, stays with the process.
    """
    plain = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    plain |= {"RAY_AUTH_MODE": "disabled", "RAY_gcs_rpc_server_connect_timeout_s": "5"}
    command = [sys.executable, "-c", PROBE, address]
    try:
        probe = subprocess.run(command, env=plain, capture_output=True, text=True, timeout=PROBE_S, check=False)
        said = probe.stdout.split("\n")
    except subprocess.TimeoutExpired:
        said = []
    for outcome in ("let in", "refused"):
        if outcome in said:
            return outcome
    raise UserError(f"there is no answer from the Ray cluster at {address} (RAY_ADDRESS); does its head node run?")


def _quiet() -> dict[str, Any]:
    return {"log_to_driver": False, "logging_level": logging.ERROR}


def _cpus(ray: Any) -> float:
    return float(ray.cluster_resources().get("CPU", 0.0))


def _first(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


@contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the block, and have Ray read them again where it has been imported before."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    _reread()
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        _reread()


def _reread() -> None:
    from ray import _raylet
    from ray._private import ray_constants

    native: Any = _raylet
    ray_constants.ENABLE_RAY_CLUSTER = os.environ.get("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER") != "0"
    native.Config.initialize("")
    native.AuthenticationTokenLoader.instance().reset_cache()


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Put back the caller's signal handlers, which ray.init replaces with its own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            with suppress(TypeError, ValueError):  # a handler that was not set from Python cannot be set again
                signal.signal(number, handler)
