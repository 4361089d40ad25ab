"""The embedded default: Linux namespaces, an overlay root, cgroups and a seccomp filter."""

from agentrl.sandboxes.namespace.backend import NamespaceBackend

__all__ = ["NamespaceBackend"]
EXPORT = NamespaceBackend
