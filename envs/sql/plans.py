"""What a task asks for: a query to write, or a change to make. `questions` and `changes` make the requests."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from .schema import Column, Constant, Schema, Table, day


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked, in words and in SQL."""

    tag: str
    text: str
    sql: tuple[str, ...]
    """The reference: one query, or the statements of a change."""
    constants: tuple[Constant, ...] = ()
    ordered: bool = False
    """Whether the order of a query's rows matters."""
    change: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """One task before its data is made."""

    schema: Schema
    request: Request

    @property
    def prompt(self) -> str:
        """The text that the policy is shown."""
        what = self.request.text if self.request.change else f"Write one query: {self.request.text}"
        return f"Tables: {self.schema.shown}. {what}"


Maker = Callable[[random.Random, Schema], Request]


def query(tag: str, text: str, sql: str, *, constants: tuple[Constant, ...] = (), ordered: bool = False) -> Request:
    """Ask for a query."""
    return Request(tag, text, (sql,), constants, ordered)


def change(tag: str, text: str, *sql: str, constants: tuple[Constant, ...] = ()) -> Request:
    """Ask for a change that takes these statements."""
    return Request(tag, text, sql, constants, change=True)


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition in words and in SQL."""

    text: str
    sql: str
    constants: tuple[Constant, ...]


_SIGNS = ((">", "greater than"), (">=", "at least"), ("<", "less than"), ("<=", "at most"))


def number_condition(rng: random.Random, table: Table, prefix: str = "") -> Condition:
    """Compare the table's number with a constant well inside its range."""
    column = table.of("number")
    value = inside(rng, column)
    sign, words = rng.choice(_SIGNS)
    return Condition(
        f"{column.name} is {words} {value}",
        f"{prefix}{column.name} {sign} {value}",
        ((table.name, column.name, value),),
    )


def label_condition(rng: random.Random, table: Table, prefix: str = "") -> Condition:
    """Compare the table's label with one of its values."""
    column = table.of("label")
    value = rng.choice(column.values)
    sign, words = rng.choice((("=", "is"), ("=", "is"), ("<>", "is not")))
    return Condition(
        f"{column.name} {words} '{value}'",
        f"{prefix}{column.name} {sign} '{value}'",
        ((table.name, column.name, value),),
    )


def day_condition(rng: random.Random, table: Table, prefix: str = "") -> Condition:
    """Compare the table's day with a day."""
    value = day(rng, 2, 5)
    sign, words = rng.choice((("<", "before"), (">=", "on or after")))
    return Condition(f"day is {words} '{value}'", f"{prefix}day {sign} '{value}'", ((table.name, "day", value),))


def any_condition(rng: random.Random, table: Table, prefix: str = "") -> Condition:
    """Return one of the conditions that the table has columns for."""
    kinds = {column.kind for column in table.columns}
    makers = [number_condition]
    if "label" in kinds:
        makers.append(label_condition)
    if "day" in kinds:
        makers.append(day_condition)
    return rng.choice(makers)(rng, table, prefix)


def two_conditions(rng: random.Random, table: Table) -> Condition:
    """Join a condition on the label and one on the number, by `and` or by `or`."""
    first, second = label_condition(rng, table), number_condition(rng, table)
    word = rng.choice(("and", "or"))
    return Condition(
        f"{first.text} {word} {second.text}",
        f"({first.sql} {word.upper()} {second.sql})",
        first.constants + second.constants,
    )


def inside(rng: random.Random, column: Column) -> int:
    """Return a number from the middle half of a column's range."""
    span = column.high - column.low
    return column.low + rng.randint(span // 4, max(span // 4 + 1, 3 * span // 4))
