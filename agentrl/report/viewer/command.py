"""`agentrl view`: opens the page over some runs, and serves it until Ctrl-C."""

from __future__ import annotations

import socket
import threading
import webbrowser
from collections.abc import Callable, Sequence
from pathlib import Path

from agentrl.errors import UserError
from agentrl.report.viewer.runs import find

PORT = 7600


def view(
    paths: Sequence[Path],
    *,
    port: int | None = None,
    host: str = "127.0.0.1",
    browser: bool = True,
    redteam: Path | None = None,
    say: Callable[[str], None] = print,
) -> int:
    """Serve the page; return when the user ends it."""
    import uvicorn

    from agentrl.report.viewer import server

    folders = list(paths) or [Path("runs")]
    if redteam is not None and not redteam.is_file():
        raise UserError(f"{redteam}: no such file; write one with `agentrl redteam ENV --json > FILE`")
    named = find(folders)
    if not named:
        raise UserError(f"{folders[0]}: no run there; name a run's folder, or a folder of runs")
    listener = _listen(host, port)
    real = listener.getsockname()[1]
    address = f"http://{'127.0.0.1' if host in ('0.0.0.0', '::') else host}:{real}/"
    link = f"{address}#/run/{next(iter(named))}" if len(named) == 1 else address
    runs = server.Runs(folders)
    config = uvicorn.Config(
        server.app(runs, hosts=[] if host == "127.0.0.1" else [host, socket.gethostname()], redteam=redteam),
        log_level="warning",
        lifespan="off",
        timeout_graceful_shutdown=1,
        server_header=False,
    )
    say(f"{len(named)} run{'s' if len(named) > 1 else ''}: {link} (Ctrl-C ends it)")
    if browser:
        threading.Timer(0.5, webbrowser.open, [link]).start()
    try:
        uvicorn.Server(config).run(sockets=[listener])
    except KeyboardInterrupt:
        pass
    finally:
        listener.close()
        runs.close()
    return 0


def _listen(host: str, port: int | None) -> socket.socket:
    """Open the port; without one asked for, the usual one, or any that is free."""
    last: OSError | None = None
    for number in (PORT, 0) if port is None else (port,):
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = socket.socket(family, socket.SOCK_STREAM)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, number))
            return listener
        except OSError as error:
            listener.close()
            last = error
    assert last is not None
    raise UserError(f"{host}:{port}: {last.strerror or last}; choose another with --port")
