"""Questions that one query answers, by level. Each says which columns it wants, and the order where it matters.

`t` is the only table; `p`, `c` and `g` are the parent, the child and the grandchild table.
"""

from __future__ import annotations

import random

from .plans import Maker, Request, any_condition, inside, label_condition, number_condition, query, two_conditions
from .schema import Schema

# One table ------------------------------------------------------------------------------------------------------


def listing(rng: random.Random, schema: Schema) -> Request:
    (t,) = schema.tables
    where = rng.choice((number_condition, label_condition))(rng, t)
    column = rng.choice(("name", "id"))
    return query(
        "filter",
        f"the {column} of every {t.one} whose {where.text}.",
        f"SELECT {column} FROM {t.name} WHERE {where.sql}",
        constants=where.constants,
    )


def counting(rng: random.Random, schema: Schema) -> Request:
    (t,) = schema.tables
    where = rng.choice((number_condition, label_condition))(rng, t)
    return query(
        "count",
        f"how many rows of {t.name} there are whose {where.text}.",
        f"SELECT COUNT(*) FROM {t.name} WHERE {where.sql}",
        constants=where.constants,
    )


def both(rng: random.Random, schema: Schema) -> Request:
    (t,) = schema.tables
    where = two_conditions(rng, t)
    number = t.of("number").name
    return query(
        "conditions",
        f"name and {number} of every {t.one} whose {where.text}.",
        f"SELECT name, {number} FROM {t.name} WHERE {where.sql}",
        constants=where.constants,
    )


def ranking(rng: random.Random, schema: Schema) -> Request:
    (t,) = schema.tables
    where, number, limit = label_condition(rng, t), t.of("number").name, rng.randint(2, 4)
    way, words = rng.choice((("DESC", "greatest"), ("ASC", "least")))
    return query(
        "order",
        f"the names of the {limit} {t.name} with the {words} {number} among those whose {where.text}, that one first; "
        "where equal, by name.",
        f"SELECT name FROM {t.name} WHERE {where.sql} ORDER BY {number} {way}, name LIMIT {limit}",
        ordered=True,
        constants=where.constants,
    )


def aggregate(rng: random.Random, schema: Schema) -> Request:
    (t,) = schema.tables
    where, number = label_condition(rng, t), t.of("number").name
    function, words = rng.choice(
        (("SUM", "sum"), ("MAX", "greatest"), ("MIN", "least"), ("AVG", "average, not rounded,"))
    )
    return query(
        "aggregate",
        f"the {words} {number} of those {t.name} whose {where.text}.".replace("sum", "sum of the"),
        f"SELECT {function}({number}) FROM {t.name} WHERE {where.sql}",
        constants=where.constants,
    )


def missing(rng: random.Random, schema: Schema) -> Request:
    (t,) = schema.tables
    where, maybe = number_condition(rng, t), t.of("maybe").name
    word, sql = rng.choice((("is NULL", "IS NULL"), ("is not NULL", "IS NOT NULL")))
    return query(
        "null",
        f"the name of every {t.one} whose {maybe} {word} and whose {where.text}.",
        f"SELECT name FROM {t.name} WHERE {maybe} {sql} AND {where.sql}",
        constants=where.constants,
    )


def distinct(rng: random.Random, schema: Schema) -> Request:
    (t,) = schema.tables
    where, label = number_condition(rng, t), t.of("label").name
    return query(
        "distinct",
        f"each {label} once that some {t.one} has whose {where.text}, in alphabetical order.",
        f"SELECT DISTINCT {label} FROM {t.name} WHERE {where.sql} ORDER BY {label}",
        ordered=True,
        constants=where.constants,
    )


# Two tables -----------------------------------------------------------------------------------------------------


def joined(rng: random.Random, schema: Schema) -> Request:
    p, c = schema.tables[:2]
    where, number = any_condition(rng, p, "p."), c.of("number").name
    return query(
        "join",
        f"{number} and day of every {c.one} together with its {p.one}'s name, as {number}, day, name, where the "
        f"{p.one}'s {where.text}.",
        f"SELECT c.{number}, c.day, p.name FROM {c.name} c JOIN {p.name} p ON p.id = c.{p.one}_id WHERE {where.sql}",
        constants=where.constants,
    )


def grouped(rng: random.Random, schema: Schema) -> Request:
    p, c = schema.tables[:2]
    where, label, number = any_condition(rng, c, "c."), p.of("label").name, c.of("number").name
    function, words = rng.choice((("COUNT(*)", "number"), (f"SUM(c.{number})", f"total {number}")))
    return query(
        "group",
        f"for each {label} of {p.name} the {words} of their {c.name} whose {where.text}; leave out each {label} "
        "that has none.",
        f"SELECT p.{label}, {function} FROM {p.name} p JOIN {c.name} c ON c.{p.one}_id = p.id WHERE {where.sql} "
        f"GROUP BY p.{label}",
        constants=where.constants,
    )


def per_parent(rng: random.Random, schema: Schema) -> Request:
    p, c = schema.tables[:2]
    where, number = label_condition(rng, c, "c."), c.of("number").name
    function, words = rng.choice((("MAX", "greatest"), ("MIN", "least"), ("SUM", "total")))
    return query(
        "group",
        f"name and {words} {number} of each {p.one}'s {c.name} whose {where.text}, sorted by name; only those who "
        "have any.",
        f"SELECT p.name, {function}(c.{number}) FROM {p.name} p JOIN {c.name} c ON c.{p.one}_id = p.id "
        f"WHERE {where.sql} GROUP BY p.id, p.name ORDER BY p.name",
        ordered=True,
        constants=where.constants,
    )


def with_zeros(rng: random.Random, schema: Schema) -> Request:
    p, c = schema.tables[:2]
    where = any_condition(rng, c, "c.")
    return query(
        "outer join",
        f"the name of every {p.one} and how many {c.name} they have whose {where.text}, 0 where none.",
        f"SELECT p.name, COUNT(c.id) FROM {p.name} p LEFT JOIN {c.name} c ON c.{p.one}_id = p.id AND {where.sql} "
        f"GROUP BY p.id, p.name",
        constants=where.constants,
    )


def having(rng: random.Random, schema: Schema) -> Request:
    p, c = schema.tables[:2]
    where, least = label_condition(rng, c, "c."), rng.randint(2, 3)
    return query(
        "having",
        f"the name of every {p.one} who has at least {least} {c.name} whose {where.text}.",
        f"SELECT p.name FROM {p.name} p JOIN {c.name} c ON c.{p.one}_id = p.id WHERE {where.sql} "
        f"GROUP BY p.id, p.name HAVING COUNT(*) >= {least}",
        constants=where.constants,
    )


def without(rng: random.Random, schema: Schema) -> Request:
    p, c = schema.tables[:2]
    where = any_condition(rng, c)
    return query(
        "anti join",
        f"the name of every {p.one} who has no {c.one} whose {where.text}.",
        f"SELECT name FROM {p.name} WHERE id NOT IN (SELECT {p.one}_id FROM {c.name} WHERE {where.sql})",
        constants=where.constants,
    )


def one_not_other(rng: random.Random, schema: Schema) -> Request:
    p, c = schema.tables[:2]
    label = c.of("label")
    yes, no = rng.sample(label.values, 2)
    some = f"SELECT {p.one}_id FROM {c.name} WHERE {label.name} ="
    return query(
        "anti join",
        f"the name of every {p.one} who has a {c.one} whose {label.name} is '{yes}', but none whose "
        f"{label.name} is '{no}'.",
        f"SELECT name FROM {p.name} WHERE id IN ({some} '{yes}') AND id NOT IN ({some} '{no}')",
    )


def above_average(rng: random.Random, schema: Schema) -> Request:
    p = schema.tables[0]
    label, number = p.of("label").name, p.of("number").name
    return query(
        "subquery",
        f"name and {number} of every {p.one} whose {number} is greater than the average {number} of all "
        f"{p.name} with the same {label}.",
        f"SELECT name, {number} FROM {p.name} a WHERE {number} > "
        f"(SELECT AVG({number}) FROM {p.name} b WHERE b.{label} = a.{label})",
    )


def best_of_each(rng: random.Random, schema: Schema) -> Request:
    p = schema.tables[0]
    label, number = p.of("label").name, p.of("number").name
    return query(
        "top of group",
        f"for each {label} of {p.name} the name of the one with the greatest {number} (where equal, the name that "
        f"comes first), as {label}, name, sorted by {label}.",
        f"SELECT {label}, name FROM (SELECT {label}, name, ROW_NUMBER() OVER (PARTITION BY {label} "
        f"ORDER BY {number} DESC, name) AS place FROM {p.name}) WHERE place = 1 ORDER BY {label}",
        ordered=True,
    )


def leader(rng: random.Random, schema: Schema) -> Request:
    p, c = schema.tables[:2]
    where, number, limit = label_condition(rng, c, "c."), c.of("number").name, rng.randint(2, 4)
    return query(
        "top of group",
        f"name and total {number} of the {limit} {p.name} with the greatest total {number} of {c.name} whose "
        f"{where.text}, greatest first, where equal by name.",
        f"SELECT p.name, SUM(c.{number}) AS total_ FROM {p.name} p JOIN {c.name} c ON c.{p.one}_id = p.id "
        f"WHERE {where.sql} GROUP BY p.id, p.name ORDER BY total_ DESC, p.name LIMIT {limit}",
        ordered=True,
        constants=where.constants,
    )


def running(rng: random.Random, schema: Schema) -> Request:
    c = schema.tables[1]
    where, number = label_condition(rng, c), c.of("number").name
    return query(
        "window",
        f"id, {number} and running total of {number} of all {c.name} whose {where.text}, sorted by day and then "
        "id; the running total goes in this order.",
        f"SELECT id, {number}, SUM({number}) OVER (ORDER BY day, id ROWS UNBOUNDED PRECEDING) FROM {c.name} "
        f"WHERE {where.sql} ORDER BY day, id",
        ordered=True,
        constants=where.constants,
    )


# Three tables ---------------------------------------------------------------------------------------------------


def deep_total(rng: random.Random, schema: Schema) -> Request:
    p, c, g = schema.tables
    where, number = any_condition(rng, c, "c."), g.of("number").name
    return query(
        "deep join",
        f"the name of every {p.one} and the total {number} of all {g.name} of their {c.name} whose "
        f"{where.text}, 0 where there are none, sorted by name.",
        f"SELECT p.name, COALESCE(SUM(g.{number}), 0) FROM {p.name} p LEFT JOIN {c.name} c ON c.{p.one}_id = p.id "
        f"AND {where.sql} LEFT JOIN {g.name} g ON g.{c.one}_id = c.id GROUP BY p.id, p.name ORDER BY p.name",
        ordered=True,
        constants=where.constants,
    )


def deep_leader(rng: random.Random, schema: Schema) -> Request:
    p, c, g = schema.tables
    label, number = p.of("label").name, g.of("number").name
    return query(
        "deep join",
        f"for each {label} of {p.name} the name of the one whose {c.name} have the greatest total {number} of "
        f"{g.name} (where equal, the name that comes first), as {label}, name, total, sorted by {label}; leave out "
        f"those without {g.name}.",
        f"WITH t AS (SELECT p.{label} AS label_, p.name AS name_, SUM(g.{number}) AS total_ FROM {p.name} p "
        f"JOIN {c.name} c ON c.{p.one}_id = p.id JOIN {g.name} g ON g.{c.one}_id = c.id GROUP BY p.id, p.name), "
        "r AS (SELECT *, ROW_NUMBER() OVER (PARTITION BY label_ ORDER BY total_ DESC, name_) AS place FROM t) "
        "SELECT label_, name_, total_ FROM r WHERE place = 1 ORDER BY label_",
        ordered=True,
    )


def counts_of_both(rng: random.Random, schema: Schema) -> Request:
    p, c, g = schema.tables
    least = inside(rng, p.of("number"))
    number = p.of("number").name
    return query(
        "deep join",
        f"for every {p.one} whose {number} is at least {least}: name, how many {c.name} they have, and how many "
        f"{g.name} those have in all; 0 where none.",
        f"SELECT p.name, COUNT(DISTINCT c.id), COUNT(g.id) FROM {p.name} p LEFT JOIN {c.name} c ON c.{p.one}_id "
        f"= p.id LEFT JOIN {g.name} g ON g.{c.one}_id = c.id WHERE p.{number} >= {least} GROUP BY p.id, p.name",
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
