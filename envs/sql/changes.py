"""Changes of a database, by level. Each says exactly what the database must hold afterwards, column types included.

`t` is the only table; `p`, `c` and `g` are the parent, the child and the grandchild table.
"""

from __future__ import annotations

import random

from .plans import Maker, Request, any_condition, change, inside, label_condition, number_condition, two_conditions
from .schema import Schema, day
from .words import PEOPLE

# One table ------------------------------------------------------------------------------------------------------


def rename(rng: random.Random, schema: Schema) -> Request:
    (t,) = schema.tables
    who, column = rng.choice(PEOPLE), t.of("label")
    value = rng.choice(column.values)
    return change(
        "update",
        f"Set the {column.name} of the {t.one} named {who} to '{value}'.",
        f"UPDATE {t.name} SET {column.name} = '{value}' WHERE name = '{who}'",
        constants=((t.name, "name", who),),
    )


def remove(rng: random.Random, schema: Schema) -> Request:
    (t,) = schema.tables
    where = rng.choice((number_condition, label_condition))(rng, t)
    return change(
        "delete",
        f"Delete every {t.one} whose {where.text}.",
        f"DELETE FROM {t.name} WHERE {where.sql}",
        constants=where.constants,
    )


def add(rng: random.Random, schema: Schema) -> Request:
    (t,) = schema.tables
    who, label, number = rng.choice(PEOPLE), t.of("label"), t.of("number")
    value, count, key = rng.choice(label.values), inside(rng, number), rng.randint(100, 999)
    return change(
        "insert",
        f"Add the {t.one} {key}: name {who}, {label.name} '{value}', {number.name} {count}, no {t.of('maybe').name}.",
        f"INSERT INTO {t.name} (id, name, {label.name}, {number.name}) VALUES ({key}, '{who}', '{value}', {count})",
    )


def raise_by(rng: random.Random, schema: Schema) -> Request:
    (t,) = schema.tables
    where, number, by = two_conditions(rng, t), t.of("number").name, rng.randint(2, 20)
    way, words = rng.choice((("+", "Raise"), ("-", "Lower")))
    return change(
        "update",
        f"{words} the {number} by {by} of every {t.one} whose {where.text}.",
        f"UPDATE {t.name} SET {number} = {number} {way} {by} WHERE {where.sql}",
        constants=where.constants,
    )


def forget(rng: random.Random, schema: Schema) -> Request:
    (t,) = schema.tables
    where, maybe = two_conditions(rng, t), t.of("maybe").name
    return change(
        "update",
        f"Set the {maybe} to NULL of every {t.one} whose {where.text}.",
        f"UPDATE {t.name} SET {maybe} = NULL WHERE {where.sql}",
        constants=where.constants,
    )


# Two tables -----------------------------------------------------------------------------------------------------


def update_children(rng: random.Random, schema: Schema) -> Request:
    p, c = schema.tables[:2]
    where, label = any_condition(rng, p), c.of("label")
    value = rng.choice(label.values)
    return change(
        "update join",
        f"Set the {label.name} to '{value}' of all {c.name} of {p.name} whose {where.text}.",
        f"UPDATE {c.name} SET {label.name} = '{value}' WHERE {p.one}_id IN (SELECT id FROM {p.name} WHERE {where.sql})",
        constants=where.constants,
    )


def delete_children(rng: random.Random, schema: Schema) -> Request:
    p, c = schema.tables[:2]
    who, where = rng.choice(PEOPLE), any_condition(rng, c)
    return change(
        "delete join",
        f"Delete those {c.name} of the {p.one} named {who} whose {where.text}.",
        f"DELETE FROM {c.name} WHERE {where.sql} AND {p.one}_id = (SELECT id FROM {p.name} WHERE name = '{who}')",
        constants=(*where.constants, (p.name, "name", who)),
    )


def add_child(rng: random.Random, schema: Schema) -> Request:
    p, c = schema.tables[:2]
    who, label, number = rng.choice(PEOPLE), c.of("label"), c.of("number")
    value, count, key, when = rng.choice(label.values), inside(rng, number), rng.randint(100, 999), day(rng)
    return change(
        "insert join",
        f"Add the {c.one} {key} for the {p.one} named {who}: {label.name} '{value}', {number.name} {count}, day "
        f"'{when}'.",
        f"INSERT INTO {c.name} (id, {p.one}_id, {label.name}, {number.name}, day) "
        f"SELECT {key}, id, '{value}', {count}, '{when}' FROM {p.name} WHERE name = '{who}'",
        constants=((p.name, "name", who),),
    )


def drop_idle(rng: random.Random, schema: Schema) -> Request:
    p, c = schema.tables[:2]
    where = any_condition(rng, c)
    return change(
        "delete join",
        f"Delete every {p.one} who has no {c.one} whose {where.text}; leave {c.name} as it is.",
        f"DELETE FROM {p.name} WHERE id NOT IN (SELECT {p.one}_id FROM {c.name} WHERE {where.sql})",
        constants=where.constants,
    )


def store_count(rng: random.Random, schema: Schema) -> Request:
    p, c = schema.tables[:2]
    where, number = any_condition(rng, c), p.of("number").name
    return change(
        "update join",
        f"Set the {number} of every {p.one} to how many {c.name} they have whose {where.text}.",
        f"UPDATE {p.name} SET {number} = (SELECT COUNT(*) FROM {c.name} WHERE {p.one}_id = {p.name}.id AND "
        f"{where.sql})",
        constants=where.constants,
    )


def steps_of(rng: random.Random, schema: Schema) -> Request:
    p = schema.tables[0]
    number, maybe = p.of("number"), p.of("maybe").name
    low = inside(rng, number)
    high = low + max(2, (number.high - number.low) // 6)
    return change(
        "case",
        f"Set the {maybe} of every {p.one} to 'low' where the {number.name} is below {low}, to 'high' where it is "
        f"{high} or more, and to 'middle' in between.",
        f"UPDATE {p.name} SET {maybe} = CASE WHEN {number.name} < {low} THEN 'low' WHEN {number.name} >= {high} "
        "THEN 'high' ELSE 'middle' END",
        constants=((p.name, number.name, low), (p.name, number.name, high)),
    )


# Several statements ---------------------------------------------------------------------------------------------


def merge(rng: random.Random, schema: Schema) -> Request:
    p, c = schema.tables[:2]
    one, other = rng.sample(PEOPLE, 2)
    id_of = f"(SELECT id FROM {p.name} WHERE name ="
    number = p.of("number").name
    return change(
        "merge",
        f"{other} and {one} are the same {p.one}. Give all {c.name} of {other} to {one}, add {other}'s {number} "
        f"to {one}'s, then delete the {p.one} {other}.",
        f"UPDATE {c.name} SET {p.one}_id = {id_of} '{one}') WHERE {p.one}_id = {id_of} '{other}')",
        f"UPDATE {p.name} SET {number} = {number} + (SELECT {number} FROM {p.name} WHERE name = '{other}') "
        f"WHERE name = '{one}'",
        f"DELETE FROM {p.name} WHERE name = '{other}'",
        constants=((p.name, "name", one), (p.name, "name", other)),
    )


def cascade(rng: random.Random, schema: Schema) -> Request:
    p, c, g = schema.tables
    where = any_condition(rng, p)
    mine = f"{p.one}_id IN (SELECT id FROM {p.name} WHERE {where.sql})"
    return change(
        "cascade",
        f"Delete every {p.one} whose {where.text}, with all their {c.name} and the {g.name} of those.",
        f"DELETE FROM {g.name} WHERE {c.one}_id IN (SELECT id FROM {c.name} WHERE {mine})",
        f"DELETE FROM {c.name} WHERE {mine}",
        f"DELETE FROM {p.name} WHERE {where.sql}",
        constants=where.constants,
    )


def spread(rng: random.Random, schema: Schema) -> Request:
    p, c, g = schema.tables
    where, number, total = any_condition(rng, c), g.of("number").name, c.of("number").name
    return change(
        "update join",
        f"Set the {total} of every {c.one} whose {where.text} to the total {number} of its {g.name}, 0 where it "
        f"has none; then delete every {c.one} whose {total} is 0.",
        f"UPDATE {c.name} SET {total} = (SELECT COALESCE(SUM({number}), 0) FROM {g.name} WHERE {c.one}_id = "
        f"{c.name}.id) WHERE {where.sql}",
        f"DELETE FROM {c.name} WHERE {total} = 0",
        constants=where.constants,
    )


# Migrations -----------------------------------------------------------------------------------------------------


def summary(rng: random.Random, schema: Schema) -> Request:
    p, c = schema.tables[:2]
    label, number = p.of("label").name, c.of("number").name
    return change(
        "new table",
        f"Create the table summary({label} TEXT, {p.name} INTEGER, {number} REAL): for each {label} of "
        f"{p.name} how many of them have it, and the total {number} of all their {c.name}, 0 where none.",
        f"CREATE TABLE summary ({label} TEXT, {p.name} INTEGER, {number} REAL)",
        f"INSERT INTO summary SELECT p.{label}, COUNT(DISTINCT p.id), COALESCE(SUM(c.{number}), 0) FROM {p.name} p "
        f"LEFT JOIN {c.name} c ON c.{p.one}_id = p.id GROUP BY p.{label}",
    )


def archive(rng: random.Random, schema: Schema) -> Request:
    c = schema.tables[1]
    label, number, ref = c.of("label").name, c.of("number").name, c.of("ref").name
    when = day(rng, 2, 5)
    return change(
        "archive",
        f"Create the table old_{c.name}({c.one}_id INTEGER, {label} TEXT, {number} REAL), copy id, {label} and "
        f"{number} of every {c.one} with a day before '{when}' into it, then delete those {c.name}. Delete the column "
        f"{ref} of {c.name}.",
        f"CREATE TABLE old_{c.name} ({c.one}_id INTEGER, {label} TEXT, {number} REAL)",
        f"INSERT INTO old_{c.name} SELECT id, {label}, {number} FROM {c.name} WHERE day < '{when}'",
        f"DELETE FROM {c.name} WHERE day < '{when}'",
        f"ALTER TABLE {c.name} DROP COLUMN {ref}",
        constants=((c.name, "day", when),),
    )


def normalise(rng: random.Random, schema: Schema) -> Request:
    p = schema.tables[0]
    label = p.of("label").name
    return change(
        "normalise",
        f"Move the {label} into a table of its own: create {label}_list(id INTEGER, name TEXT) with each "
        f"{label} of {p.name} once, numbered from 1 in alphabetical order; give {p.name} a new last column "
        f"{label}_id INTEGER that refers to it; then delete the column {label} of {p.name}.",
        f"CREATE TABLE {label}_list (id INTEGER, name TEXT)",
        f"INSERT INTO {label}_list SELECT ROW_NUMBER() OVER (ORDER BY {label}), {label} FROM "
        f"(SELECT DISTINCT {label} FROM {p.name})",
        f"ALTER TABLE {p.name} ADD COLUMN {label}_id INTEGER",
        f"UPDATE {p.name} SET {label}_id = (SELECT id FROM {label}_list WHERE name = {p.name}.{label})",
        f"ALTER TABLE {p.name} DROP COLUMN {label}",
    )


def last_day(rng: random.Random, schema: Schema) -> Request:
    p, c = schema.tables[:2]
    where = any_condition(rng, c)
    return change(
        "new column",
        f"Give {p.name} two new last columns: last_day TEXT, the latest day of their {c.name} whose "
        f"{where.text} (NULL where none), and then {c.name} INTEGER, how many those are. Then rename the table "
        f"{c.name} to all_{c.name}.",
        f"ALTER TABLE {p.name} ADD COLUMN last_day TEXT",
        f"ALTER TABLE {p.name} ADD COLUMN {c.name} INTEGER",
        f"UPDATE {p.name} SET last_day = (SELECT MAX(day) FROM {c.name} WHERE {p.one}_id = {p.name}.id AND "
        f"{where.sql}), {c.name} = (SELECT COUNT(*) FROM {c.name} WHERE {p.one}_id = {p.name}.id AND {where.sql})",
        f"ALTER TABLE {c.name} RENAME TO all_{c.name}",
        constants=where.constants,
    )


CHANGES: dict[int, tuple[Maker, ...]] = {
    1: (rename, remove, add),
    2: (raise_by, forget),
    3: (update_children, delete_children, add_child),
    4: (drop_idle, store_count, steps_of),
    5: (merge, cascade, spread),
    6: (summary, archive, normalise, last_day),
}
