"""Lets every submodule of a stand-in package import."""

import importlib.abc
import importlib.machinery
import sys
import types


class Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds any submodule of `package` but those named in `absent`; `attribute` gives its names."""

    def __init__(self, package, attribute, absent=()):
        self.package, self.attribute, self.absent = package, attribute, absent
        sys.meta_path.insert(0, self)

    def find_spec(self, fullname, path, target=None):
        if fullname.startswith(f"{self.package}.") and not any(name in fullname for name in self.absent):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__path__ = []
        module.__getattr__ = self.attribute
        return module

    def exec_module(self, module):
        pass
