"""For development only: plain subprocesses in a temporary folder. It isolates nothing."""

from agentrl.sandboxes.process.backend import ProcessBackend

__all__ = ["ProcessBackend"]
EXPORT = ProcessBackend
