"""Where the nodes of a syntax tree stand in the text, and what may stand there: for tasks that break programs."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from typing import AnyStr, Generic


class Spans(Generic[AnyStr]):
    """A source, and the spans of its nodes. Offsets of the syntax tree count bytes: a text must be ASCII."""

    def __init__(self, source: AnyStr) -> None:
        self.source: AnyStr = source
        self.lines = [0]
        for line in source.splitlines(keepends=True):
            self.lines.append(self.lines[-1] + len(line))

    def at(self, node: ast.stmt | ast.expr) -> tuple[int, int]:
        """Return where a node begins and ends; a decorated one begins with its first decorator."""
        assert node.end_lineno is not None and node.end_col_offset is not None
        first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))])
        return self.lines[first - 1] + node.col_offset, self.lines[node.end_lineno - 1] + node.end_col_offset

    def whole(self, node: ast.stmt) -> tuple[int, int]:
        """Return the span of a statement with its indentation and line end."""
        assert node.end_lineno is not None
        return self.lines[node.lineno - 1], self.lines[node.end_lineno]


def other_variables(parameters: Iterable[str], inside: Sequence[ast.Name]) -> Iterator[tuple[ast.Name, str]]:
    """Yield each variable that a function reads, with the name of another one of its variables."""
    names = sorted({*parameters, *(node.id for node in inside if isinstance(node.ctx, ast.Store))})
    for node in inside:
        if isinstance(node.ctx, ast.Load) and node.id in names and len(names) > 1:
            other = names[(names.index(node.id) + 1 + node.col_offset % (len(names) - 1)) % len(names)]
            if other != node.id:
                yield node, other
