"""A Python file that is graded, and the hostile forms of it that attacks submit."""

from __future__ import annotations

import ast
import posixpath
import re
from dataclasses import dataclass

from agentrl.redteam.play import NotApplicable


@dataclass(frozen=True, slots=True)
class Solution:
    """A Python file that is graded: as the expert leaves it, and as it is when nothing was done."""

    path: str
    honest: str
    broken: str

    def poisoned(self, payload: str) -> str:
        """Return the broken source with hostile code that runs first when it is imported."""
        future = re.match(r'(\s*("""(.|\n)*?"""|#.*\n)?\s*from __future__ import [^\n]*\n)', self.broken)
        head = future.group(0) if future else ""
        return f"{head}{payload}\n\n{self.broken[len(head) :]}"

    def hollow(self, returns: str, prelude: str = "") -> str:
        """Return the honest source with every function's body replaced by one returned expression."""
        tree = ast.parse(self.honest)
        body = ast.parse(f"return {returns}").body
        hollowed = False
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and not (node.name.startswith("__") and node.name.endswith("__")):
                node.body, hollowed = body, True
                node.decorator_list = [d for d in node.decorator_list if isinstance(d, ast.Name)]
        if not hollowed:
            raise NotApplicable("the solution defines no function")
        tree.body = [n for n in tree.body if not _is_main(n)]
        return f"{prelude}\n\n{ast.unparse(ast.fix_missing_locations(tree))}\n"

    def wrapped(self, helpers: str, wrapper: str, *, broken: bool = False) -> str:
        """Return a source that replaces, at its end, each of its functions by `wrapper(function)`."""
        names = self.functions
        if not names or "__main__" in self.honest:  # a program has done its work before its end is reached
            raise NotApplicable("the solution is not a module of functions")
        lines = "\n".join(f"{name} = {wrapper}({name})" for name in names)
        return f"{self.broken if broken else self.honest}\n\n{helpers}\n{lines}\n"

    @property
    def functions(self) -> tuple[str, ...]:
        """Names of the top-level functions that the honest source defines."""
        return tuple(n.name for n in ast.parse(self.honest).body if isinstance(n, ast.FunctionDef))

    @property
    def module(self) -> str:
        """The name it is imported by."""
        return posixpath.splitext(self.path)[0].replace("/", ".")


def _is_main(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)
