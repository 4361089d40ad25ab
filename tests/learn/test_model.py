"""Making, loading and exporting models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl.errors import RecipeError, UserError
from agentrl.learn import checkpoint
from agentrl.learn.export import export
from agentrl.learn.learner import Learner
from agentrl.learn.model import fast_dtype, load_model, precision, save_model, scratch_tokenizer
from agentrl.recipe import PretrainedModel, Recipe
from agentrl.types import TrainingSample

MakeLearner = Callable[..., Learner]
MakeSamples = Callable[..., list[TrainingSample]]
TEXTS = ["<|im_start|>user\nread the file notes.txt<|im_end|>\n", "the file is there"]
TOOLS = [{"type": "function", "function": {"name": "read", "parameters": {"properties": {"path": {}, "lines": {}}}}}]
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Go."},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "read", "arguments": {"path": "é"}}}],
    },
    {"role": "tool", "content": "x"},
    {"role": "assistant", "content": "Done."},
]


def test_the_scratch_template_speaks_chatml_with_tools() -> None:
    tokenizer = scratch_tokenizer(TEXTS, 300)
    assert tokenizer.apply_chat_template(CHAT, tools=TOOLS, tokenize=False) == (
        "<|im_start|>system\nBe brief.\ntools: read(path, lines)<|im_end|>\n"
        "<|im_start|>user\nGo.<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "read", "arguments": {"path": "é"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>tool\nx<|im_end|>\n"
        "<|im_start|>assistant\nDone.<|im_end|>\n"
    )


def test_the_scratch_template_only_ever_appends() -> None:
    tokenizer = scratch_tokenizer(TEXTS, 300)
    whole = tokenizer.apply_chat_template(CHAT, tools=TOOLS, tokenize=False)
    for n in range(1, len(CHAT)):
        generation = CHAT[n]["role"] == "assistant"
        part = tokenizer.apply_chat_template(CHAT[:n], tools=TOOLS, tokenize=False, add_generation_prompt=generation)
        assert whole.startswith(part)


@given(st.text())
def test_the_scratch_tokenizer_gives_back_every_text(text: str) -> None:
    tokenizer = _tokenizer()
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def _tokenizer(made: list[Any] = []) -> Any:  # noqa: B006 made once for all examples
    if not made:
        made.append(scratch_tokenizer(TEXTS, 300))
    return made[0]


def test_special_tokens_are_one_token_and_digits_stay_single() -> None:
    tokenizer = scratch_tokenizer(["12345 12345 12345"] * 9, 300)
    assert tokenizer.convert_ids_to_tokens(tokenizer("<|im_end|><tool_call>123")["input_ids"]) == [
        "<|im_end|>", "<tool_call>", "1", "2", "3",
    ]  # fmt: skip
    assert tokenizer.eos_token == "<|im_end|>"


def test_scratch_models_follow_from_their_seed(make_recipe: Callable[..., Recipe]) -> None:
    section = make_recipe().model
    torch.manual_seed(1)
    one, _ = load_model(section, texts=TEXTS, seed=3, device="cpu")
    torch.manual_seed(2)
    two, _ = load_model(section, texts=reversed(TEXTS), seed=3, device="cpu")
    other, _ = load_model(section, texts=TEXTS, seed=4, device="cpu")
    state = one.state_dict()
    assert all(torch.equal(state[n], t) for n, t in two.state_dict().items())
    assert not torch.equal(state["model.embed_tokens.weight"], other.state_dict()["model.embed_tokens.weight"])


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"vocabulary": 100}, "at least 261"),
        ({"width": 30, "heads": 4}, "even multiple"),
    ],
)
def test_scratch_models_that_cannot_be(make_recipe: Callable[..., Recipe], model: Any, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        load_model(make_recipe(model=model).model, device="cpu")


def test_a_folder_that_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"no config\.json"):
        load_model(PretrainedModel(path=tmp_path), device="cpu")
    with pytest.raises(RecipeError, match="there is no folder .*agentrl model get smollm2 --to"):
        load_model(PretrainedModel(path=tmp_path / "nowhere"), device="cpu")


def test_an_unusable_device(make_recipe: Callable[..., Recipe]) -> None:
    with pytest.raises(RecipeError, match="cannot be used here"):
        load_model(make_recipe().model, device="nonsense")


@pytest.fixture
def base(make_learner: MakeLearner, tmp_path: Path) -> Path:
    learner = make_learner()
    save_model(learner.model, learner.tokenizer, tmp_path / "base")
    return tmp_path / "base"


def lora_learner(base: Path) -> Learner:
    recipe = Recipe.model_validate(
        {
            "run": {"name": "lora"},
            "model": {"path": str(base), "dtype": "float32", "lora": {"rank": 4}},
            "envs": [{"name": "none"}],
            "learner": {"device": "cpu", "lr": 1e-2, "max_mismatch": 100.0},
            "algorithm": {"kl": "k3", "kl_coefficient": 0.1},
        }
    )
    return Learner(*load_model(recipe.model, device="cpu"), recipe)


def test_lora_trains_adapters_alone_and_publishes_merged_weights(base: Path, make_samples: MakeSamples) -> None:
    learner = lora_learner(base)
    assert all(".lora_" in name for name in learner.optimizer.parameters)
    plain = AutoModelForCausalLM.from_pretrained(base)
    before = {n: t.clone() for n, t in learner.weights().items()}
    assert before.keys() == dict(plain.named_parameters()).keys()
    assert all(torch.equal(t, before[n]) for n, t in plain.named_parameters())
    reports = [learner.step(learner.pack(make_samples(seed=s))) for s in range(2)]
    assert reports[1].reference_kl is not None and reports[1].reference_kl > 0
    plain.load_state_dict(learner.weights(), strict=False)
    ids = torch.arange(5, 25)[None]
    learner.model.eval()
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, learner.model(ids).logits, rtol=1e-4, atol=1e-5)
    frozen = dict(learner.model.get_base_model().named_parameters())["model.embed_tokens.weight"]
    assert torch.equal(frozen, before["model.embed_tokens.weight"])


def test_lora_resumes_and_exports_merged_or_apart(base: Path, make_samples: MakeSamples, tmp_path: Path) -> None:
    learner = lora_learner(base)
    learner.step(learner.pack(make_samples()))
    run = tmp_path / "run"
    found = checkpoint.load(checkpoint.save(run / "checkpoints", learner))
    again = Learner(*load_model(learner.recipe.model, folder=found.model, device="cpu"), learner.recipe)
    again.load_state_dict(found.learner)
    for one in (learner, again):
        one.step(one.pack(make_samples(seed=1)))
    assert all(torch.equal(t, again.weights()[n]) for n, t in learner.weights().items())

    merged = AutoModelForCausalLM.from_pretrained(export(run, tmp_path / "merged"))
    reloaded, _ = load_model(learner.recipe.model, folder=found.model, device="cpu")
    ids = torch.arange(5, 25)[None]
    reloaded.eval()
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, reloaded(ids).logits, rtol=1e-4, atol=1e-5)
    apart = export(run, tmp_path / "apart", merge=False)
    assert (apart / "adapter_model.safetensors").is_file()


def test_export_writes_a_folder_that_transformers_loads(
    make_learner: MakeLearner, make_samples: MakeSamples, tmp_path: Path
) -> None:
    learner = make_learner()
    learner.step(learner.pack(make_samples()))
    checkpoint.save(tmp_path / "run" / "checkpoints", learner)
    made = export(tmp_path / "run", tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(made)
    assert all(torch.equal(p, learner.weights()[n]) for n, p in model.named_parameters())
    tokenizer: Any = AutoTokenizer.from_pretrained(made)
    assert tokenizer.apply_chat_template(CHAT[:2], tokenize=False).startswith("<|im_start|>system\nBe brief.")
    with pytest.raises(UserError, match="exists already"):
        export(tmp_path / "run", made)
    with pytest.raises(UserError, match="no checkpoint of step 9; there are: 1"):
        export(tmp_path / "run", tmp_path / "other", step=9)
    with pytest.raises(UserError, match="no run folder"):
        export(tmp_path, tmp_path / "other")


def test_auto_takes_what_the_device_is_fast_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A GPU without bfloat16 and a processor that emulates it get float32; a stored model keeps its precision."""
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    for native, expected in ((True, torch.bfloat16), (False, torch.float32)):
        fast_dtype.cache_clear()
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, native=native: native)
        assert precision("auto", cuda) == expected
    times = {torch.float32: 1.0, torch.bfloat16: 0.5}
    monkeypatch.setattr("agentrl.learn.model.slow_bfloat16", lambda: False)
    monkeypatch.setattr("timeit.repeat", lambda work, **options: [times[work().dtype]])
    for ratio, expected in ((0.5, torch.bfloat16), (0.9, torch.float32)):
        fast_dtype.cache_clear()
        times[torch.bfloat16] = ratio
        assert precision("auto", cpu) == expected
    fast_dtype.cache_clear()
    monkeypatch.setattr("agentrl.learn.model.slow_bfloat16", lambda: True)
    assert precision("auto", cpu) == torch.float32
    fast_dtype.cache_clear()
    assert (precision("bfloat16", cpu), precision("float32", cuda)) == (torch.bfloat16, torch.float32)
    (tmp_path / "config.json").write_text('{"dtype": "bfloat16"}')
    assert precision("auto", cpu, tmp_path) == torch.bfloat16
