"""Search: questions that their documents answer, by one way only, and an index that takes every query as words."""

import asyncio
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.envs import load
from agentrl.envs.play import Stage, play
from agentrl.envs.search import may_be_name
from agentrl.envs.search.corpus import _CLOSED, _OPEN, _STARTS, LEVELS, WORDS, problem, word
from agentrl.envs.search.index import Index
from agentrl.envs.search.relations import BY_KEY, RELATIONS, asked, told
from agentrl.types import SPLITS, Task, ToolCall, Verdict
from agentrl.verifiers.base import Context, Submission

Search: Any = load("search")
PAGES = [
    {"title": "Bobobon", "date": "1450-01-01", "facts": [("captain", "Bobobon", "Dadadan Fifin", 0)]},
    {"title": "Bobobon", "date": "1440-01-01", "facts": [("captain", "Bobobon", "Gugugun Hahan", 0)]},
    {
        "title": "Kikikin",
        "date": "1460-01-01",
        "facts": [("river", "Kikikin", "Lolon", 1), ("feast", "Kikikin", "Mo", 0)],
    },
]


def follow(task: Task, start: str, relations: list[str], *, newest: bool = True) -> str:
    """Where the documents lead, read without any knowledge of how they were made."""
    at = start
    for key in relations:
        facts = {(d["date"], y) for d in task.setup["documents"] for r, x, y, _ in d["facts"] if (r, x) == (key, at)}
        assert len({date for date, _ in facts}) == len(facts) > 0
        at = (max if newest else min)(facts)[1]
    return at


@pytest.mark.parametrize("level", Search.levels)
def test_the_documents_answer_the_question_and_no_page_tells_two_steps_of_it(level: int) -> None:
    environment = Search()
    for split in SPLITS:
        for index in range(10):
            drawn, task = problem(split, level, index), environment.task(split, level, index)
            assert len(drawn.relations) == LEVELS[level].hops and len(drawn.documents) == LEVELS[level].documents
            assert follow(task, drawn.chain[0], drawn.relations) == drawn.answer == task.secret["answer"]
            assert drawn.chain[0] in task.prompt and not any(name in task.prompt for name in drawn.chain[1:])
            last = [fact for document in drawn.documents for fact in document.facts if fact[0] == drawn.relations[-1]]
            assert len(last) >= (5 if level > 1 else 4)  # so that picking one of them is no way round the chain
            oldest = follow(task, drawn.chain[0], drawn.relations, newest=False)
            assert (oldest != drawn.answer) == (LEVELS[level].stale > 0)
            for document in task.setup["documents"]:
                text = " ".join([document["title"], *(told(*fact) for fact in document["facts"])])
                named = [at for at, name in enumerate(drawn.chain) if name in text]
                assert len(named) <= 2 and named == list(range(min(named, default=0), max(named, default=-1) + 1))


@pytest.mark.parametrize("level", Search.levels)
def test_a_search_for_each_name_finds_what_the_expert_then_opens(level: int) -> None:
    for index in range(10):
        task = Search().task("test", level, index)
        pages = Index(task.setup["documents"])
        for name, ids in task.secret["steps"]:
            assert set(ids) <= set(pages.search(name))
        pages.close()


def test_no_two_tasks_of_a_level_start_from_the_same_word() -> None:
    numbers = [_STARTS.number(split, index) for split in SPLITS for index in range(Search.size)]
    assert len(set(numbers)) == 3 * Search.size == 30_000
    assert len({word(number) for number in numbers}) == 30_000


def test_invented_words_are_no_words_of_the_sentences() -> None:
    invented = re.compile(f"({'|'.join(_OPEN)}){{2}}({'|'.join(_CLOSED)})")
    assert all(invented.fullmatch(word(number).lower()) for number in range(0, WORDS, 997))
    text = " ".join(part for r in RELATIONS for part in (*r.asks, *r.tells)).lower()
    assert [one for one in re.findall(r"[a-z]+", text) if invented.fullmatch(one)] == []


def test_paraphrases_share_only_small_words_with_what_they_ask_for() -> None:
    small = {"the", "of", "that", "to", "from", "in", "at", "by", "person", "who", "town", "it", "is"}
    for relation in RELATIONS:
        asks = set(re.findall(r"\w+", relation.asks[1].replace("{x}", "").lower()))
        for sentence in relation.tells[1:]:
            shared = asks & set(re.findall(r"\w+", re.sub(r"{.}", "", sentence).lower())) - small
            assert shared == set(), relation.key


def test_wording() -> None:
    assert asked("the ship Oda", ["captain", "home"], 0) == "Name the town where the captain of the ship Oda lives."
    assert asked("Oda Ral", ["trade", "seat"], 1) == "Name the town that hosts the guild that employs Oda Ral."
    assert told("captain", "Oda", "Ral Tin", 2) == "Aboard Oda they obey Ral Tin."
    assert {r.source for r in RELATIONS} >= {r.target for r in RELATIONS} and len(BY_KEY) == len(RELATIONS)


def test_tools_show_what_there_is_and_say_what_is_wrong(where: Stage) -> None:
    task = Task(id="x", split="train", level=1, prompt="?", setup={"documents": PAGES}, secret={"answer": "Mo"})
    calls = [
        ToolCall(name="search", arguments={"query": "BOBOBON!"}),
        ToolCall(name="search", arguments={"query": "who is the captain of Gugugun"}),
        ToolCall(name="search", arguments={"query": "nowhere"}),
        ToolCall(name="search", arguments={"query": '"* () -'}),
        ToolCall(name="open", arguments={"id": 3}),
        ToolCall(name="open", arguments={"id": 4}),
        ToolCall(name="open", arguments={"id": 0}),
    ]
    played = asyncio.run(play(Search(), task, [*calls, "Mo"], where))
    assert [m.content for m in played.messages if m.role == "tool"] == [
        "<out>id 1: Bobobon (1450-01-01)\nid 2: Bobobon (1440-01-01)</out>",
        "<out>id 2: Bobobon (1440-01-01)\nid 1: Bobobon (1450-01-01)\nid 3: Kikikin (1460-01-01)</out>",
        "<out>nothing found; search for a name of the question or of a document</out>",
        "<out>error: the query holds no word to search for</out>",
        "<out>Kikikin (1460-01-01)\nThe bridges of Kikikin cross Lolon. The feast Mo is held in Kikikin.</out>",
        "<out>error: there is no document 4; search gives the ids of those there are</out>",
        "error: open: id: Input should be greater than or equal to 1",
    ]
    assert played.score == 1.0


@pytest.mark.parametrize(
    "query",
    ['Bobobon" OR "Kikikin', "Bobobon NOT captain", "title:Bobobon", "NEAR(Bobobon Gugugun, 1)", "^Bobobon", "Bobobon*",
     "'; DROP TABLE pages; --Bobobon", "{title}: Bobobon", "Bobobon\0 AND", "-Bobobon +nothing"],
)  # fmt: skip
def test_nothing_in_a_query_is_syntax(query: str) -> None:
    pages = Index(PAGES)
    assert set(pages.search(query)) >= {1, 2}
    assert pages.text(1) == "Bobobon (1450-01-01)\nThe captain of the ship Bobobon is Dadadan Fifin."
    pages.close()


@settings(max_examples=60)
@given(st.text(max_size=60))
def test_any_text_finds_pages_or_is_refused_in_words(query: str) -> None:
    pages = Index(PAGES)
    try:
        assert set(pages.search(query)) <= {1, 2, 3} and pages.search(query) == pages.search(query)
    except ValueError as error:
        assert str(error) == "the query holds no word to search for"
    finally:
        pages.close()


def score(answer: str) -> float:
    task = Task(id="x", split="train", level=1, prompt="", secret={"answer": "Upper Kolarin"})
    nothing: Any = None
    submission = Submission(task=task, answer=answer)
    verdict: Verdict = asyncio.run(Search.verifier.verify(submission, Context(secret=b"", boxes=nothing)))
    return verdict.score


@pytest.mark.parametrize("answer", ["Upper Kolarin", "upper kolarin", " Upper Kolarin.\n", "UPPER KOLARIN"])
def test_right_answers(answer: str) -> None:
    assert score(answer) == 1.0


@pytest.mark.parametrize(
    "answer",
    ["", ".", "Kolarin", "Lower Kolarin", "the Upper Kolarin", "Upper Kolarin or Lower Kolarin", "UpperKolarin",
     "Upper Kolarin\nLower Kolarin", "Answer: Upper Kolarin", "Upper Kolarin..", "Upper  Kolarin", "not Upper Kolarin",
     "Upper Kolarin, Upper Kolarin", "Upper \u212aolarin", "Upper\u00a0Kolarin", "Upper Kolari\u200bn",
     "Upper \u041aolarin"],
)  # fmt: skip
def test_wrong_answers(answer: str) -> None:
    assert score(answer) == 0.0


@pytest.mark.parametrize("level", Search.levels)
def test_the_expert_and_other_right_ways_pass(level: int, where: Stage) -> None:
    environment = Search()
    for index in range(2):
        task = environment.task("heldout", level, index)
        for actions in (environment.expert(task), *environment.alternatives(task)):
            assert asyncio.run(play(Search(), task, actions, where)).score == 1.0
        others = {y for d in task.setup["documents"] for _, _, y, _ in d["facts"]} - {task.secret["answer"]}
        for wrong in sorted(others)[:3]:
            assert asyncio.run(play(Search(), task, [wrong], where)).score == 0.0


def test_answers_before_any_document_was_opened_and_answers_that_are_no_name_are_sent_back(where: Stage) -> None:
    task = Task(id="x", split="train", level=1, prompt="?", setup={"documents": PAGES}, secret={"answer": "Mo"})
    told = (
        "No document was opened yet. Call search with a name of the question, open what it finds, then call answer "
        "with the name alone."
    )
    look = ToolCall(name="search", arguments={"query": "Kikikin"})
    reads, missing = (ToolCall(name="open", arguments={"id": id}) for id in (3, 4))

    def ends(*actions: ToolCall | str) -> tuple[list[str], float | None, str]:
        played = asyncio.run(play(Search(), task, actions, where))
        users = [m.content for m in played.messages[2:] if m.role == "user"]
        return users, played.score, played.outcome.ending

    assert ends("Lolon", look, reads, "Mo") == ([told], 1.0, "done")
    assert ends(look, missing, "Lolon", reads, "Mo", "Lolon") == ([told], 1.0, "done")
    assert ends("Mo", "Mo", "Mo", "Lolon", "Mo") == ([told] * 3, 0.0, "done")
    assert ends(reads, "Lolon", "Mo") == ([], 0.0, "done")
    alone = "Call answer with the name alone, without any other word."
    assert ends(reads, "The lord is Mo.", "", "Mo") == ([alone, alone], 1.0, "done")
    assert ends("It is Mo.", reads, "It is Mo.", "Mo?", "It is Mo.") == ([told, alone, alone], 0.0, "done")


def test_an_answer_that_is_given_with_the_tool_counts_and_is_sent_back_in_the_same_way(where: Stage) -> None:
    task = Task(id="x", split="train", level=1, prompt="?", setup={"documents": PAGES}, secret={"answer": "Mo"})
    right, words = (ToolCall(name="answer", arguments={"name": name}) for name in ("Mo", "The lord is Mo."))
    reads = ToolCall(name="open", arguments={"id": 3})
    played = asyncio.run(play(Search(), task, [right, reads, words, right], where))
    told = [m.content for m in played.messages if m.role == "tool" and m.name == "answer"]
    assert [text.split(".")[0] for text in told] == [
        "No document was opened yet", "Call answer with the name alone, without any other word",
    ]  # fmt: skip
    assert (played.score, played.outcome.ending) == (1.0, "done")


@given(st.integers(0, 9_999), st.sampled_from(sorted(LEVELS)), st.sampled_from(["", "."]))
def test_every_right_answer_has_the_shape_of_a_name(index: int, level: int, end: str) -> None:
    assert may_be_name(Search().task("heldout", level, index % 500).secret["answer"] + end)


def test_one_search_and_one_document_answer_a_question_of_level_1() -> None:
    for index in range(50):
        task = Search().task("heldout", 1, index)
        asks, reads, ends = Search().expert(task)
        pages = Index(task.setup["documents"])
        assert pages.search(asks.arguments["query"])[0] == reads.arguments["id"]
        assert ends == ToolCall(name="answer", arguments={"name": task.secret["answer"]})
        pages.close()
