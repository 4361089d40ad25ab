"""Recipes: what is right loads, what is wrong is explained, and nothing ever ends in a traceback."""

import string
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl import recipe as recipes
from agentrl.catalogue import CHECKOUT
from agentrl.cli import main
from agentrl.errors import RecipeError
from agentrl.recipe import schema

GOOD: dict[str, Any] = {"run": {"name": "r"}, "model": {"path": "m"}, "envs": [{"name": "files"}]}


def write(tmp_path: Path, data: Any) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(data if isinstance(data, str) else yaml.safe_dump(data))
    return path


def mistakes(data: dict[str, Any]) -> list[str]:
    with pytest.raises(RecipeError) as error:
        recipes.build(data)
    return [line.strip() for line in str(error.value).splitlines()[1:]]


def test_defaults_fill_a_small_recipe(tmp_path: Path) -> None:
    recipe = recipes.load(write(tmp_path, GOOD))
    assert recipe.rollout.engine.type == "transformers"
    assert recipe.curriculum.type == "learnability"
    assert recipe.algorithm.type == "dapo"
    assert recipe.asynchronous.enabled is False


def test_a_dumped_recipe_loads_to_the_same_recipe(tmp_path: Path) -> None:
    recipe = recipes.load(write(tmp_path, GOOD))
    assert recipes.load(write(tmp_path, recipes.dump(recipe))) == recipe


def test_an_unknown_key_names_the_nearest_one() -> None:
    assert mistakes(GOOD | {"run": {"name": "r", "sede": 1}})[0].startswith(
        "run.sede: unknown key; did you mean 'seed'?"
    )


def test_an_unknown_key_below_a_union_is_named_without_the_tag() -> None:
    wrong = GOOD | {"rollout": {"engine": {"type": "sglang", "lauch": True}}}
    assert mistakes(wrong)[0].startswith("rollout.engine.lauch: unknown key; did you mean 'launch'?")


def test_servers_that_are_named_are_attached_to() -> None:
    urls = {"type": "sglang", "urls": ["http://127.0.0.1:30000"]}
    engine = recipes.build(GOOD | {"rollout": {"engine": urls}}).rollout.engine
    assert isinstance(engine, recipes.SglangEngine) and engine.launch is False
    assert mistakes(GOOD | {"rollout": {"engine": urls | {"launch": True}}})[0].endswith("keep one of the two")
    assert mistakes(GOOD | {"rollout": {"engine": urls | {"servers": 2}}})[0].endswith("keep one of the two")
    again = recipes.build(GOOD | {"rollout": {"engine": engine.model_dump()}}).rollout.engine  # as a run folder has it
    assert again == engine


def test_a_wrong_kind_lists_the_kinds() -> None:
    assert mistakes(GOOD | {"curriculum": {"type": "learnabilty"}}) == [
        "curriculum.type: found 'learnabilty' (text); did you mean 'learnability'? "
        "(allowed: learnability, uniform, levels, staged, pools)"
    ]


def test_a_wrong_value_shows_what_was_found_and_what_is_allowed() -> None:
    assert mistakes(GOOD | {"learner": {"lr": "fast"}}) == [
        "learner.lr: found 'fast' (text); input should be a valid number, unable to parse string as a number"
    ]


def test_a_missing_key_is_named() -> None:
    assert mistakes({"run": {"name": "r"}, "model": {"path": "m"}}) == ["envs: missing; this key is required"]


def test_the_group_filter_has_two_spellings(tmp_path: Path) -> None:
    for name in ("group_filter", "gates"):
        path = write(tmp_path, GOOD | {name: {"probe": 0.5}})
        assert recipes.load(path).group_filter.probe == 0.5
        for key in ("group_filter", "gates"):
            loaded = recipes.load(path, [f"{key}.overlong=fail"]).group_filter
            assert (loaded.probe, loaded.overlong) == (0.5, "fail")
    assert mistakes(GOOD | {"gates": {}, "group_filter": {}}) == [
        "`gates` and `group_filter` are the same section; keep `group_filter`"
    ]
    assert mistakes(GOOD | {"gates": {"prob": 1}})[0].startswith("group_filter.prob: unknown key")
    with pytest.raises(RecipeError, match="are the same section"):
        recipes.load(write(tmp_path, GOOD | {"gates": {}, "group_filter": {}}))


def test_every_key_is_documented() -> None:
    models = schema.models()
    fields = {f"{model.__name__}.{name}": field for model in models for name, field in model.model_fields.items()}
    assert len(fields) > 150
    assert [name for name, field in fields.items() if not (field.description or "").endswith(".")] == []
    assert [model.__name__ for model in models if not model.__doc__] == []


def test_the_schema_takes_what_the_loader_takes() -> None:
    checker = pytest.importorskip("jsonschema").Draft202012Validator(schema.schema())
    for path in sorted((CHECKOUT / "recipes").glob("*.yaml")):
        assert path.read_text().startswith("# yaml-language-server: $schema=./schema.json\n")
        checker.validate(yaml.safe_load(path.read_text()))
        checker.validate(yaml.safe_load(recipes.dump(recipes.load(path))))
    accepted: list[dict[str, Any]] = [
        {"gates": {}},
        {"async": {}},
        {"asynchronous": {}},
        {"eval": None},
        {"learner": {}},
    ]
    refused: list[dict[str, Any]] = [{"gats": {}}, {"learner": {"lr": "a"}}, {"curriculum": {"type": "a"}}, {"run": {}}]
    assert [checker.is_valid(GOOD | section) for section in accepted] == [True] * 5
    assert [checker.is_valid(GOOD | section) for section in refused] == [False] * 4


def test_the_schema_says_what_a_key_means_and_allows() -> None:
    document = schema.schema()
    assert document["$defs"]["GroupFilterSection"]["properties"]["overlong_buffer"] == {
        "default": 256,
        "description": "`overlong: shape` begins this many tokens before `rollout.max_tokens`.",
        "maximum": 1_000_000_000,
        "minimum": 1,
        "type": "integer",
    }
    assert document["$defs"]["LearnerSection"]["properties"]["schedule"]["enum"] == ["constant", "linear", "cosine"]
    assert document["properties"]["gates"]["description"] == "Another spelling of `group_filter`."
    assert document["$defs"]["EvalSection"]["properties"]["k"]["default"] == [1]


def test_overrides_reach_sections_lists_and_new_keys(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    recipe = recipes.load(path, ["learner.lr=1e-5", "envs.0.levels=[1, 2]", "algorithm.type=grpo"])
    assert (recipe.learner.lr, recipe.envs[0].levels, recipe.algorithm.type) == (1e-5, [1, 2], "grpo")


@pytest.mark.parametrize(
    "override", ["learner.lr", "=1", "envs.5.name=x", "run.name.x=1", "learner..lr=1", "run.seed=[1"]
)
def test_a_wrong_override_is_explained(tmp_path: Path, override: str) -> None:
    with pytest.raises(RecipeError):
        recipes.load(write(tmp_path, GOOD), [override])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("run: {name: a}\nrun: {name: b}\n", "key 'run' appears twice (first on line 1)"),
        ("a: &x [1]\nb: *x\n", "aliases (*x) are not allowed"),
        ("a: [" * 40, "nested more than 32 levels"),
        ("a: b: c\n", "line 1: not valid YAML"),
        ("- 1\n", "a recipe is a mapping of sections"),
        ("", "a recipe is a mapping of sections"),
        ("1: 2\n", "a key must be a word"),
        ("a: !!python/object/apply:os.system [ls]\n", "not valid YAML"),
        ("a: " + "9" * 5000, "cannot be read"),
    ],
)
def test_yaml_surprises_are_errors_with_a_place(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(RecipeError) as error:
        recipes.load(write(tmp_path, text))
    assert said in str(error.value)


def test_files_that_are_no_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    latin = tmp_path / "latin.yaml"
    latin.write_bytes("run: {name: é}".encode("latin-1"))
    huge = tmp_path / "huge.yaml"
    huge.write_bytes(b"a" * (1 << 20) + b"a")
    for path, said in [
        (latin, "not UTF-8"),
        (huge, "larger than 1 MiB"),
        (tmp_path, "is a folder"),
        (tmp_path / "none.yaml", "No such file"),
    ]:
        with pytest.raises(SystemExit) as exit_:
            main(["train", str(path)])
        assert exit_.value.code == 2
        assert said in capsys.readouterr().err


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.just("9" * 400)
values = st.recursive(
    scalars,
    lambda v: st.lists(v, max_size=4) | st.dictionaries(st.text(string.ascii_lowercase, max_size=8), v, max_size=4),
)
sections = st.sampled_from([*recipes.Recipe.model_fields, "async", "gates", "nonsense"])


@settings(max_examples=200)
@given(st.dictionaries(sections, values, max_size=6))
def test_fuzzed_mappings_are_recipes_or_recipe_errors(data: dict[str, Any]) -> None:
    try:
        recipes.build(GOOD | data)
    except RecipeError as error:
        assert "mistake" in str(error)


@settings(max_examples=200)
@given(st.binary(max_size=300) | st.text(alphabet="ab:{}[]&*!|>-#\n \"'%@`,?", max_size=200).map(str.encode))
def test_fuzzed_files_are_recipes_or_recipe_errors(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.yaml"
    path.write_bytes(raw)
    with pytest.raises(RecipeError):
        recipes.load(path)


def test_the_recipe_of_an_earlier_run_is_read() -> None:
    """It names the one objective that is left; the other one is refused."""
    assert recipes.build({**GOOD, "curriculum": {"type": "learnability", "objective": "variance"}}) == recipes.build(
        GOOD
    )
    assert "unknown key" in mistakes({**GOOD, "curriculum": {"type": "learnability", "objective": "band"}})[0]
