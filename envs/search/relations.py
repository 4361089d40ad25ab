"""The language of the corpus: the relations, how a question asks for them, and how a document states them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Relation:
    """A relation that gives each subject one object."""

    key: str
    source: str
    """The kind of its subjects."""
    target: str
    """The kind of its objects."""
    changes: bool
    """The object may change over time, so documents of different dates may disagree."""
    asks: tuple[str, str]
    """A noun phrase for the object: in the words of the first sentence below, and in other words."""
    tells: tuple[str, str, str]
    """Sentences: {x} is the subject, {y} the object. The first is the plain one."""


_CHANGES, _FIXED = True, False
RELATIONS = (
    Relation("home", "person", "town", _CHANGES,
        ("the town where {x} lives", "the place of residence of {x}"),
        ("{x} lives in the town of {y}.", "{x} keeps a house in {y}.", "These days {x} is settled in {y}.")),
    Relation("birth", "person", "town", _FIXED,
        ("the town where {x} was born", "the birthplace of {x}"),
        ("{x} was born in the town of {y}.", "{x} first saw daylight in {y}.", "The cradle of {x} stood in {y}.")),
    Relation("trade", "person", "guild", _CHANGES,
        ("the guild that {x} works for", "the guild that employs {x}"),
        ("{x} works for the guild {y}.", "{x} earns a living with {y}.", "The wages of {x} come from {y}.")),
    Relation("teacher", "person", "person", _FIXED,
        ("the teacher of {x}", "the person who taught {x}"),
        ("The teacher of {x} is {y}.", "{x} learnt everything from {y}.", "{y} took {x} on as a pupil.")),
    Relation("heir", "person", "person", _FIXED,
        ("the heir of {x}", "the person to inherit from {x}"),
        ("The heir of {x} is {y}.", "{x} leaves everything to {y}.", "By will, all that {x} owns goes to {y}.")),
    Relation("mayor", "town", "person", _CHANGES,
        ("the mayor of {x}", "the person who governs {x}"),
        ("The mayor of {x} is {y}.", "{y} runs the town hall of {x}.", "The affairs of {x} are in the hands of {y}.")),
    Relation("river", "town", "river", _FIXED,
        ("the river that runs through {x}", "the river that flows by {x}"),
        ("The river {y} runs through {x}.", "The bridges of {x} cross {y}.", "The mills of {x} are driven by {y}.")),
    Relation("feast", "town", "feast", _FIXED,
        ("the feast that is held in {x}", "the feast celebrated by {x}"),
        ("The feast {y} is held in {x}.", "Once a year {x} dances for {y}.", "Lanterns hang all over {x} for {y}.")),
    Relation("seat", "guild", "town", _CHANGES,
        ("the seat of {x}", "the town that hosts {x}"),
        ("The seat of the guild {x} is {y}.", "{x} has its hall in {y}.", "The masters of {x} meet in {y}.")),
    Relation("founder", "guild", "person", _FIXED,
        ("the founder of {x}", "the person who set up {x}"),
        ("The founder of {x} is {y}.", "{y} called {x} into being.", "{x} was the idea of {y}.")),
    Relation("captain", "ship", "person", _CHANGES,
        ("the captain of {x}", "the person in command of {x}"),
        ("The captain of the ship {x} is {y}.", "{y} stands at the helm of {x}.", "Aboard {x} they obey {y}.")),
    Relation("port", "ship", "town", _CHANGES,
        ("the home port of {x}", "the harbour town of {x}"),
        ("The home port of the ship {x} is {y}.", "{x} winters at {y}.", "{x} returns to {y} after each voyage.")),
    Relation("author", "book", "person", _FIXED,
        ("the author of {x}", "the person who wrote {x}"),
        ("The author of the book {x} is {y}.", "{x} came from the pen of {y}.", "{y} spent nine years on {x}.")),
    Relation("printed", "book", "town", _FIXED,
        ("the town where {x} was printed", "the town whose press made {x}"),
        ("The book {x} was printed in {y}.", "{x} came off the presses of {y}.", "A workshop in {y} set {x} in type.")),
    Relation("lake", "river", "lake", _FIXED,
        ("the lake that {x} flows into", "the lake fed by {x}"),
        ("The river {x} flows into the lake {y}.", "The waters of {x} end in {y}.", "{x} empties into {y}.")),
    Relation("keeper", "lake", "person", _CHANGES,
        ("the keeper of {x}", "the person who watches over {x}"),
        ("The keeper of the lake {x} is {y}.", "{y} has charge of {x}.", "The boats on {x} answer to {y}.")),
    Relation("patron", "feast", "person", _FIXED,
        ("the patron of {x}", "the person remembered at {x}"),
        ("The patron of the feast {x} is {y}.", "{x} recalls the life of {y}.", "At {x} they drink to {y}.")),
    Relation("reading", "feast", "book", _FIXED,
        ("the book that is read at {x}", "the book recited at {x}"),
        ("The book {y} is read at the feast {x}.", "{x} ends with verses from {y}.", "At {x} they perform {y}.")),
)  # fmt: skip
BY_KEY = {relation.key: relation for relation in RELATIONS}
FROM = {kind: tuple(r for r in RELATIONS if r.source == kind) for kind in dict.fromkeys(r.source for r in RELATIONS)}
"""Kind of thing -> the relations that it can be the subject of."""
KINDS = tuple(FROM)


def told(key: str, subject: str, thing: str, wording: int) -> str:
    """Return the sentence that states a fact."""
    text = BY_KEY[key].tells[wording].format(x=subject, y=thing)
    return text[0].upper() + text[1:]


def asked(start: str, keys: list[str], wording: int) -> str:
    """Return the question that asks for the end of a chain of relations."""
    phrase = start
    for key in keys:
        phrase = BY_KEY[key].asks[wording].format(x=phrase)
    return f"Name {phrase}."
