"""Containers of a Docker daemon, hardened, with gVisor or Kata where they are installed."""

from agentrl.sandboxes.docker.backend import DockerBackend

__all__ = ["DockerBackend"]
EXPORT = DockerBackend
