"""Generate schemas and their data: a parent table, a child table, and a grandchild table.

    customers(id, name, city, age, phone)  <-  orders(id, customer_id, status, total, day)  <-  items(id, order_id, ...)

Names of tables and columns, labels and ranges are drawn at random; the shape is always the same.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Literal

from .words import DOMAINS, PEOPLE, Domain

Kind = Literal["id", "name", "label", "number", "maybe", "ref", "day"]
Row = tuple[Any, ...]
Data = dict[str, list[Row]]
Constant = tuple[str, str, Any]
"""(table, column, value): a value that a request mentions, which the data should contain."""
STEP = 1 / 128
"""How close a number may lie to a constant. Like all numbers here it is exact in binary: sums do not depend on their
order, and no other constant can replace the right one in a condition."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column and what it contains."""

    name: str
    kind: Kind
    values: tuple[str, ...] = ()
    low: int = 0
    high: int = 0

    @property
    def type(self) -> str:
        return "REAL" if self.kind == "number" else "INTEGER" if self.kind in ("id", "ref") else "TEXT"


@dataclass(frozen=True, slots=True)
class Table:
    """A table; `one` is what one of its rows is called."""

    name: str
    one: str
    columns: tuple[Column, ...]

    def of(self, kind: Kind) -> Column:
        """Return its column of that kind."""
        return next(column for column in self.columns if column.kind == kind)

    @property
    def create(self) -> str:
        """Return the statement that creates it."""
        columns = [f"{c.name} {c.type}{' PRIMARY KEY' if c.kind == 'id' else ''}" for c in self.columns]
        return f"CREATE TABLE {self.name} ({', '.join(columns)})"

    @property
    def shown(self) -> str:
        return f"{self.name}({', '.join(column.name for column in self.columns)})"


@dataclass(frozen=True, slots=True)
class Schema:
    """One to three tables; each refers to the one before it."""

    tables: tuple[Table, ...]

    @property
    def creates(self) -> tuple[str, ...]:
        """Return the statements that create it."""
        return tuple(table.create for table in self.tables)

    @property
    def shown(self) -> str:
        """As a prompt shows it."""
        return ", ".join(table.shown for table in self.tables)

    def data(
        self,
        rng: random.Random,
        constants: tuple[Constant, ...],
        *,
        fewest: int = 5,
        most: int = 11,
        alike: bool = False,
    ) -> Data:
        """Return rows for every table.

        Values near the constants are frequent, and `alike` makes values repeat: careless queries go wrong at ties and
        at the ends of ranges.
        """
        rows_by_table: Data = {}
        for depth, table in enumerate(self.tables):
            count = rng.randint(fewest, most) * (2 if depth else 1)
            own = [c for c in constants if c[0] == table.name]
            parents = [row[0] for row in rows_by_table[self.tables[depth - 1].name]] if depth else []
            forced = [value for _, column, value in own if table.columns[1].kind == "name" and column == "name"]
            names = [*forced, *rng.sample([n for n in PEOPLE if n not in forced], count)][:count]
            rows = [
                tuple(_cell(column, number, names, parents, own, rng, alike) for column in table.columns)
                for number in range(count)
            ]
            rng.shuffle(rows)
            rows_by_table[table.name] = rows
        return rows_by_table


def _cell(
    column: Column,
    number: int,
    names: list[str],
    parents: list[int],
    constants: list[Constant],
    rng: random.Random,
    alike: bool,
) -> Any:
    """Return the value of one column of one row."""
    close = [value for _, name, value in constants if name == column.name]
    if column.kind == "id":
        return number + 1
    if column.kind == "name":
        return names[number]
    if column.kind == "ref":
        return rng.choice(parents[: max(2, 2 * len(parents) // 3)])  # some parents have no children
    if column.kind == "label":
        return rng.choice([*column.values, *close])
    if column.kind == "maybe":
        return None if rng.random() < 0.4 else f"{column.name}-{rng.randint(10, 99)}"
    if column.kind == "day":
        if close and rng.random() < 0.3:
            return rng.choice(close)
        return f"2024-{rng.randint(1, 6):02}-15" if alike else day(rng)
    if close and rng.random() < 0.45:
        return rng.choice(close) + rng.choice([-STEP, 0.0, 0.0, STEP])
    if alike:
        return (column.low + column.high) // 2 + rng.choice([0.0, 0.0, STEP])
    return rng.randint(4 * column.low, 4 * column.high) / 4


def day(rng: random.Random, first: int = 1, last: int = 6) -> str:
    """Return a day of these months of 2024."""
    return f"2024-{rng.randint(first, last):02}-{rng.randint(1, 28):02}"


def schema(rng: random.Random, depth: int) -> Schema:
    """Return a schema of `depth` tables."""
    domain: Domain = rng.choice(DOMAINS)
    parent, child, grand = (rng.choice(names) for names in (domain.parents, domain.children, domain.grands))
    label, values = rng.choice(domain.labels)
    rest = [
        Column(label, "label", tuple(rng.sample(values, 4))),
        _number(rng, domain.numbers),
        Column(rng.choice(domain.maybe), "maybe"),
    ]
    rng.shuffle(rest)
    first = Table(*parent, (Column("id", "id"), Column("name", "name"), *rest))
    label, values = rng.choice(domain.child_labels)
    rest = [Column(label, "label", values), _number(rng, domain.child_numbers), Column("day", "day")]
    rng.shuffle(rest)
    second = Table(*child, (Column("id", "id"), Column(f"{parent[1]}_id", "ref"), *rest))
    third = Table(*grand, (Column("id", "id"), Column(f"{child[1]}_id", "ref"), _number(rng, domain.grand_numbers)))
    return Schema((first, second, third)[:depth])


def _number(rng: random.Random, options: tuple[tuple[str, int, int], ...]) -> Column:
    name, low, high = rng.choice(options)
    return Column(name, "number", (), low, high)
