"""Questions that a query answers, level by level. Each says which columns it wants, and the order where it matters."""

from __future__ import annotations

import random

from .plans import Maker, Plan, any_condition, inside, label_condition, number_condition, two_conditions
from .schema import Schema

# One table ------------------------------------------------------------------------------------------------------


def listing(rng: random.Random, schema: Schema) -> Plan:
    (t,) = schema.tables
    c = rng.choice((number_condition, label_condition))(rng, t)
    column = rng.choice(("name", "id"))
    return Plan(
        tag="filter",
        schema=schema,
        text=f"the {column} of every {t.one} whose {c.text}.",
        sql=(f"SELECT {column} FROM {t.name} WHERE {c.sql}",),
        constants=c.constants,
    )


def counting(rng: random.Random, schema: Schema) -> Plan:
    (t,) = schema.tables
    c = rng.choice((number_condition, label_condition))(rng, t)
    return Plan(
        tag="count",
        schema=schema,
        text=f"how many rows of {t.name} there are whose {c.text}.",
        sql=(f"SELECT COUNT(*) FROM {t.name} WHERE {c.sql}",),
        constants=c.constants,
    )


def both(rng: random.Random, schema: Schema) -> Plan:
    (t,) = schema.tables
    c = two_conditions(rng, t)
    number = t.of("number").name
    return Plan(
        tag="conditions",
        schema=schema,
        text=f"name and {number} of every {t.one} whose {c.text}.",
        sql=(f"SELECT name, {number} FROM {t.name} WHERE {c.sql}",),
        constants=c.constants,
    )


def ranking(rng: random.Random, schema: Schema) -> Plan:
    (t,) = schema.tables
    c, number, limit = label_condition(rng, t), t.of("number").name, rng.randint(2, 4)
    way, words = rng.choice((("DESC", "greatest"), ("ASC", "least")))
    return Plan(
        tag="order",
        schema=schema,
        text=f"the names of the {limit} {t.name} with the {words} {number} among those whose {c.text}, that one first; "
        "where equal, by name.",
        sql=(f"SELECT name FROM {t.name} WHERE {c.sql} ORDER BY {number} {way}, name LIMIT {limit}",),
        ordered=True,
        constants=c.constants,
    )


def aggregate(rng: random.Random, schema: Schema) -> Plan:
    (t,) = schema.tables
    c, number = label_condition(rng, t), t.of("number").name
    function, words = rng.choice(
        (("SUM", "sum"), ("MAX", "greatest"), ("MIN", "least"), ("AVG", "average, not rounded,"))
    )
    return Plan(
        tag="aggregate",
        schema=schema,
        text=f"the {words} {number} of those {t.name} whose {c.text}.".replace("sum", "sum of the"),
        sql=(f"SELECT {function}({number}) FROM {t.name} WHERE {c.sql}",),
        constants=c.constants,
    )


def missing(rng: random.Random, schema: Schema) -> Plan:
    (t,) = schema.tables
    c, maybe = number_condition(rng, t), t.of("maybe").name
    word, sql = rng.choice((("is NULL", "IS NULL"), ("is not NULL", "IS NOT NULL")))
    return Plan(
        tag="null",
        schema=schema,
        text=f"the name of every {t.one} whose {maybe} {word} and whose {c.text}.",
        sql=(f"SELECT name FROM {t.name} WHERE {maybe} {sql} AND {c.sql}",),
        constants=c.constants,
    )


def distinct(rng: random.Random, schema: Schema) -> Plan:
    (t,) = schema.tables
    c, label = number_condition(rng, t), t.of("label").name
    return Plan(
        tag="distinct",
        schema=schema,
        text=f"each {label} once that some {t.one} has whose {c.text}, in alphabetical order.",
        sql=(f"SELECT DISTINCT {label} FROM {t.name} WHERE {c.sql} ORDER BY {label}",),
        ordered=True,
        constants=c.constants,
    )


# Two tables -----------------------------------------------------------------------------------------------------


def joined(rng: random.Random, schema: Schema) -> Plan:
    p, c = schema.tables[:2]
    where, number = any_condition(rng, p, "p."), c.of("number").name
    return Plan(
        tag="join",
        schema=schema,
        text=f"{number} and day of every {c.one} together with its {p.one}'s name, as {number}, day, name, where the "
        f"{p.one}'s {where.text}.",
        sql=(
            f"SELECT c.{number}, c.day, p.name FROM {c.name} c JOIN {p.name} p ON p.id = c.{p.one}_id WHERE "
            f"{where.sql}",
        ),
        constants=where.constants,
    )


def grouped(rng: random.Random, schema: Schema) -> Plan:
    p, c = schema.tables[:2]
    where, label, number = any_condition(rng, c, "c."), p.of("label").name, c.of("number").name
    function, words = rng.choice((("COUNT(*)", "number"), (f"SUM(c.{number})", f"total {number}")))
    return Plan(
        tag="group",
        schema=schema,
        text=f"for each {label} of {p.name} the {words} of their {c.name} whose {where.text}; leave out each {label} "
        "that has none.",
        sql=(
            f"SELECT p.{label}, {function} FROM {p.name} p JOIN {c.name} c ON c.{p.one}_id = p.id WHERE {where.sql} "
            f"GROUP BY p.{label}",
        ),
        constants=where.constants,
    )


def per_parent(rng: random.Random, schema: Schema) -> Plan:
    p, c = schema.tables[:2]
    where, number = label_condition(rng, c, "c."), c.of("number").name
    function, words = rng.choice((("MAX", "greatest"), ("MIN", "least"), ("SUM", "total")))
    return Plan(
        tag="group",
        schema=schema,
        text=f"name and {words} {number} of each {p.one}'s {c.name} whose {where.text}, sorted by name; only those who "
        "have any.",
        sql=(
            f"SELECT p.name, {function}(c.{number}) FROM {p.name} p JOIN {c.name} c ON c.{p.one}_id = p.id "
            f"WHERE {where.sql} GROUP BY p.id, p.name ORDER BY p.name",
        ),
        ordered=True,
        constants=where.constants,
    )


def with_zeros(rng: random.Random, schema: Schema) -> Plan:
    p, c = schema.tables[:2]
    where = any_condition(rng, c, "c.")
    return Plan(
        tag="outer join",
        schema=schema,
        text=f"the name of every {p.one} and how many {c.name} they have whose {where.text}, 0 where none.",
        sql=(
            f"SELECT p.name, COUNT(c.id) FROM {p.name} p LEFT JOIN {c.name} c ON c.{p.one}_id = p.id AND {where.sql} "
            f"GROUP BY p.id, p.name",
        ),
        constants=where.constants,
    )


def having(rng: random.Random, schema: Schema) -> Plan:
    p, c = schema.tables[:2]
    where, least = label_condition(rng, c, "c."), rng.randint(2, 3)
    return Plan(
        tag="having",
        schema=schema,
        text=f"the name of every {p.one} who has at least {least} {c.name} whose {where.text}.",
        sql=(
            f"SELECT p.name FROM {p.name} p JOIN {c.name} c ON c.{p.one}_id = p.id WHERE {where.sql} "
            f"GROUP BY p.id, p.name HAVING COUNT(*) >= {least}",
        ),
        constants=where.constants,
    )


def without(rng: random.Random, schema: Schema) -> Plan:
    p, c = schema.tables[:2]
    where = any_condition(rng, c)
    return Plan(
        tag="anti join",
        schema=schema,
        text=f"the name of every {p.one} who has no {c.one} whose {where.text}.",
        sql=(f"SELECT name FROM {p.name} WHERE id NOT IN (SELECT {p.one}_id FROM {c.name} WHERE {where.sql})",),
        constants=where.constants,
    )


def one_not_other(rng: random.Random, schema: Schema) -> Plan:
    p, c = schema.tables[:2]
    label = c.of("label")
    yes, no = rng.sample(label.values, 2)
    some = f"SELECT {p.one}_id FROM {c.name} WHERE {label.name} ="
    return Plan(
        tag="anti join",
        schema=schema,
        text=f"the name of every {p.one} who has a {c.one} whose {label.name} is '{yes}', but none whose "
        f"{label.name} is '{no}'.",
        sql=(f"SELECT name FROM {p.name} WHERE id IN ({some} '{yes}') AND id NOT IN ({some} '{no}')",),
    )


def above_average(rng: random.Random, schema: Schema) -> Plan:
    p = schema.tables[0]
    label, number = p.of("label").name, p.of("number").name
    return Plan(
        tag="subquery",
        schema=schema,
        text=f"name and {number} of every {p.one} whose {number} is greater than the average {number} of all "
        f"{p.name} with the same {label}.",
        sql=(
            f"SELECT name, {number} FROM {p.name} a WHERE {number} > "
            f"(SELECT AVG({number}) FROM {p.name} b WHERE b.{label} = a.{label})",
        ),
    )


def best_of_each(rng: random.Random, schema: Schema) -> Plan:
    p = schema.tables[0]
    label, number = p.of("label").name, p.of("number").name
    return Plan(
        tag="top of group",
        schema=schema,
        text=f"for each {label} of {p.name} the name of the one with the greatest {number} (where equal, the name that "
        f"comes first), as {label}, name, sorted by {label}.",
        sql=(
            f"SELECT {label}, name FROM (SELECT {label}, name, ROW_NUMBER() OVER (PARTITION BY {label} "
            f"ORDER BY {number} DESC, name) AS place FROM {p.name}) WHERE place = 1 ORDER BY {label}",
        ),
        ordered=True,
    )


def leader(rng: random.Random, schema: Schema) -> Plan:
    p, c = schema.tables[:2]
    where, number, limit = label_condition(rng, c, "c."), c.of("number").name, rng.randint(2, 4)
    return Plan(
        tag="top of group",
        schema=schema,
        text=f"name and total {number} of the {limit} {p.name} with the greatest total {number} of {c.name} whose "
        f"{where.text}, greatest first, where equal by name.",
        sql=(
            f"SELECT p.name, SUM(c.{number}) AS total_ FROM {p.name} p JOIN {c.name} c ON c.{p.one}_id = p.id "
            f"WHERE {where.sql} GROUP BY p.id, p.name ORDER BY total_ DESC, p.name LIMIT {limit}",
        ),
        ordered=True,
        constants=where.constants,
    )


def running(rng: random.Random, schema: Schema) -> Plan:
    c = schema.tables[1]
    where, number = label_condition(rng, c), c.of("number").name
    return Plan(
        tag="window",
        schema=schema,
        text=f"id, {number} and running total of {number} of all {c.name} whose {where.text}, sorted by day and then "
        "id; the running total goes in this order.",
        sql=(
            f"SELECT id, {number}, SUM({number}) OVER (ORDER BY day, id ROWS UNBOUNDED PRECEDING) FROM {c.name} "
            f"WHERE {where.sql} ORDER BY day, id",
        ),
        ordered=True,
        constants=where.constants,
    )


# Three tables ---------------------------------------------------------------------------------------------------


def deep_total(rng: random.Random, schema: Schema) -> Plan:
    p, c, g = schema.tables
    where, number = any_condition(rng, c, "c."), g.of("number").name
    return Plan(
        tag="deep join",
        schema=schema,
        text=f"the name of every {p.one} and the total {number} of all {g.name} of their {c.name} whose "
        f"{where.text}, 0 where there are none, sorted by name.",
        sql=(
            f"SELECT p.name, COALESCE(SUM(g.{number}), 0) FROM {p.name} p LEFT JOIN {c.name} c ON c.{p.one}_id = p.id "
            f"AND {where.sql} LEFT JOIN {g.name} g ON g.{c.one}_id = c.id GROUP BY p.id, p.name ORDER BY p.name",
        ),
        ordered=True,
        constants=where.constants,
    )


def deep_leader(rng: random.Random, schema: Schema) -> Plan:
    p, c, g = schema.tables
    label, number = p.of("label").name, g.of("number").name
    return Plan(
        tag="deep join",
        schema=schema,
        text=f"for each {label} of {p.name} the name of the one whose {c.name} have the greatest total {number} of "
        f"{g.name} (where equal, the name that comes first), as {label}, name, total, sorted by {label}; leave out "
        f"those without {g.name}.",
        sql=(
            f"WITH t AS (SELECT p.{label} AS label_, p.name AS name_, SUM(g.{number}) AS total_ FROM {p.name} p "
            f"JOIN {c.name} c ON c.{p.one}_id = p.id JOIN {g.name} g ON g.{c.one}_id = c.id GROUP BY p.id, p.name), "
            "r AS (SELECT *, ROW_NUMBER() OVER (PARTITION BY label_ ORDER BY total_ DESC, name_) AS place FROM t) "
            "SELECT label_, name_, total_ FROM r WHERE place = 1 ORDER BY label_",
        ),
        ordered=True,
    )


def counts_of_both(rng: random.Random, schema: Schema) -> Plan:
    p, c, g = schema.tables
    least = inside(rng, p.of("number"))
    number = p.of("number").name
    return Plan(
        tag="deep join",
        schema=schema,
        text=f"for every {p.one} whose {number} is at least {least}: name, how many {c.name} they have, and how many "
        f"{g.name} those have in all; 0 where none.",
        sql=(
            f"SELECT p.name, COUNT(DISTINCT c.id), COUNT(g.id) FROM {p.name} p LEFT JOIN {c.name} c ON c.{p.one}_id "
            f"= p.id LEFT JOIN {g.name} g ON g.{c.one}_id = c.id WHERE p.{number} >= {least} GROUP BY p.id, p.name",
        ),
        constants=((p.name, number, least),),
    )


QUESTIONS: dict[int, tuple[Maker, ...]] = {
    1: (listing, counting),
    2: (both, ranking, aggregate, missing, distinct),
    3: (joined, grouped, per_parent),
    4: (with_zeros, having, without, one_not_other),
    5: (above_average, best_of_each, leader, running),
    6: (deep_total, deep_leader, counts_of_both),
}
