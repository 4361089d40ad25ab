"""Data sets from runs: filter, dedupe, decontaminate, pair and write what policies did, for training before RL."""

from agentrl.data.command import make
from agentrl.data.pairs import Pair, pairs
from agentrl.data.select import Item, Selection, collect
from agentrl.data.similar import Contamination, distinct
from agentrl.data.write import Form, record, write

__all__ = [
    "Contamination",
    "Form",
    "Item",
    "Pair",
    "Selection",
    "collect",
    "distinct",
    "make",
    "pairs",
    "record",
    "write",
]
