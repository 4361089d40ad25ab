"""Makes every environment known to gymnasium as `agentrl/<name>-v0`, as soon as both packages are imported.

Importing gymnasium takes a quarter of a second, so `import agentrl` does not do it: it registers at once when gymnasium
is there already, and otherwise when it is imported later.
"""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from agentrl.catalogue import members


def register() -> None:
    """Tell gymnasium of every environment that can be found; call it again when there are new ones."""
    import gymnasium

    for name in members("envs"):
        id = f"agentrl/{name}-v0"
        if id not in gymnasium.registry:
            gymnasium.register(id, entry_point="agentrl.envs.gym_adapter:GymEnv", kwargs={"name": name})


def register_when_imported() -> None:
    """Register now, or when gymnasium is imported."""
    if "gymnasium" in sys.modules:
        register()
    else:
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds gymnasium once, as everybody would, and has its loader register the environments afterwards."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != "gymnasium":
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        register()
