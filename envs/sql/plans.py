"""What a task asks for: a query to be written, or a change to be made. `questions` and `changes` make them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from .schema import Column, Constant, Schema, Table, day


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One task before its data is made."""

    tag: str
    schema: Schema
    text: str
    """What is asked."""
    sql: tuple[str, ...]
    """The reference: one query, or the statements of a change."""
    change: bool = False
    ordered: bool = False
    """Whether the order of a query's rows matters."""
    constants: tuple[Constant, ...] = ()

    @property
    def prompt(self) -> str:
        what = self.text if self.change else f"Write one query: {self.text}"
        return f"Tables: {self.schema.shown}. {what}"


Maker = Callable[[random.Random, Schema], Plan]


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition in words and in SQL."""

    text: str
    sql: str
    constants: tuple[Constant, ...]


_SIGNS = ((">", "greater than"), (">=", "at least"), ("<", "less than"), ("<=", "at most"))


def number_condition(rng: random.Random, table: Table, prefix: str = "") -> Condition:
    """The table's number against a constant well inside its range."""
    column = table.of("number")
    value = inside(rng, column)
    sign, words = rng.choice(_SIGNS)
    return Condition(
        f"{column.name} is {words} {value}",
        f"{prefix}{column.name} {sign} {value}",
        ((table.name, column.name, value),),
    )


def label_condition(rng: random.Random, table: Table, prefix: str = "") -> Condition:
    """The table's label against one of its values."""
    column = table.of("label")
    value = rng.choice(column.values)
    sign, words = rng.choice((("=", "is"), ("=", "is"), ("<>", "is not")))
    return Condition(
        f"{column.name} {words} '{value}'",
        f"{prefix}{column.name} {sign} '{value}'",
        ((table.name, column.name, value),),
    )


def day_condition(rng: random.Random, table: Table, prefix: str = "") -> Condition:
    """The table's day against a day."""
    value = day(rng, 2, 5)
    sign, words = rng.choice((("<", "before"), (">=", "on or after")))
    return Condition(f"day is {words} '{value}'", f"{prefix}day {sign} '{value}'", ((table.name, "day", value),))


def any_condition(rng: random.Random, table: Table, prefix: str = "") -> Condition:
    """One of the conditions that the table has columns for."""
    kinds = {column.kind for column in table.columns}
    makers = [number_condition]
    if "label" in kinds:
        makers.append(label_condition)
    if "day" in kinds:
        makers.append(day_condition)
    return rng.choice(makers)(rng, table, prefix)


def two_conditions(rng: random.Random, table: Table) -> Condition:
    """Two joined by and, or by or."""
    first, second = label_condition(rng, table), number_condition(rng, table)
    word = rng.choice(("and", "or"))
    return Condition(
        f"{first.text} {word} {second.text}",
        f"({first.sql} {word.upper()} {second.sql})",
        first.constants + second.constants,
    )


def inside(rng: random.Random, column: Column) -> int:
    """A number from the middle half of a column's range."""
    span = column.high - column.low
    return column.low + rng.randint(span // 4, max(span // 4 + 1, 3 * span // 4))
