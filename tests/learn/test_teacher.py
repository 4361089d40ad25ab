"""On-policy distillation: advantages from a teacher's logprobs, by hand and against TRL's reverse KL; refusals."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp import web

from agentrl.curriculum.group_filter import GroupFilter
from agentrl.errors import EngineError, RecipeError
from agentrl.learn import teacher as teachers
from agentrl.learn.algorithms import resolve
from agentrl.learn.model import load_model, save_model
from agentrl.learn.objective import Tokens, token_losses
from agentrl.learn.teacher import ServedTeacher, distilled, folder_of, open_teacher, same_vocabulary
from agentrl.recipe import AlgorithmSection, GroupFilterSection, Recipe, TeacherSection
from agentrl.types import Group, Segment, TrainingSample

MakeRecipe = Callable[..., Recipe]
MakeSamples = Callable[..., list[TrainingSample]]


def one_sample() -> TrainingSample:
    """A prompt, two sampled tokens, an observation, a sampled token; the reward's advantage is 0.5."""
    sources = np.array([0, 2, 2, 1, 2], dtype=np.uint8)
    sampled = sources == 2
    segment = Segment(
        np.array([5, 6, 7, 8, 9]), np.where(sampled, [0, -1.0, -2.0, 0, -0.5], 0), np.where(sampled, 0, -1), sources
    )
    advantages = np.where(sampled, 0.5, 0).astype(np.float32)
    return TrainingSample(segment=segment, advantages=advantages, weight=1.0, group=0, trajectory=0)


def test_the_advantage_is_the_reward_plus_how_much_likelier_the_teacher_found_it() -> None:
    teacher = [np.array([-3.0, -0.25, -0.5], dtype=np.float32)]
    (mixed,) = distilled([one_sample()], teacher, 2.0, 1.0)
    # 0.5 + 2 · (log π_T − log π): −3 + 1 = −2, −.25 + 2 = 1.75, −.5 + .5 = 0.
    assert mixed.advantages.tolist() == [0, 0.5 - 4.0, 0.5 + 3.5, 0, 0.5]
    (alone,) = distilled([one_sample()], teacher, 1.0, 0.0)
    assert alone.advantages.tolist() == [0, -2.0, 1.75, 0, 0.0]


@pytest.mark.skipif(not os.environ.get("AGENTRL_FULL"), reason="imports TRL's trainers; set AGENTRL_FULL")
def test_its_gradient_is_that_of_trls_reverse_kl() -> None:
    """GKD with β = 1 minimises KL(student ‖ teacher) over the whole vocabulary. The expectation of our loss over the
    student's own tokens, each with its advantage, has the same gradient."""
    pytest.importorskip("trl")
    from trl.experimental import gkd

    torch.manual_seed(0)
    logits = torch.randn(1, 1, 11, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(1, 1, 11, dtype=torch.float64)
    trainer: Any = gkd.GKDTrainer
    theirs = trainer.generalized_jsd_loss(logits, teacher, beta=1.0, reduction="batchmean")
    (expected,) = torch.autograd.grad(theirs, logits)

    every = logits[0, 0].log_softmax(-1)  # each token of the vocabulary, sampled as often as it is likely
    fixed, count = every.detach(), len(every)
    tokens = Tokens(
        logprobs=every,
        entropy=torch.zeros(count),
        old_logprobs=fixed,
        engine_logprobs=fixed,
        advantages=teacher[0, 0].log_softmax(-1) - fixed,
        sequence=torch.arange(count),
        sequences=count,
    )
    losses = token_losses(resolve(AlgorithmSection(type="grpo")), tokens).loss
    (ours,) = torch.autograd.grad((losses * fixed.exp()).sum(), logits)
    torch.testing.assert_close(ours, expected)


@pytest.fixture
def folder(make_recipe: MakeRecipe, tmp_path: Path) -> Path:
    """A small model as a transformers folder."""
    model, tokenizer = load_model(make_recipe().model, device="cpu", seed=3)
    save_model(model, tokenizer, tmp_path / "teacher")
    return tmp_path / "teacher"


def test_a_local_teacher_gives_the_models_own_logprobs(
    make_recipe: MakeRecipe, make_samples: MakeSamples, folder: Path
) -> None:
    """Scored packed, at the policy's temperature, as the model scores each sequence by itself."""
    recipe = make_recipe(
        teacher={"path": str(folder), "device": "cpu", "reward_weight": 0.0},
        rollout={"temperature": 0.7},
        learner={"device": "cpu", "micro_tokens": 100},
    )
    model, tokenizer = load_model(recipe.model, folder=folder, device="cpu")
    samples = make_samples(6)
    opened = asyncio.run(open_teacher(recipe, tokenizer, 256))
    assert opened is not None
    taught = asyncio.run(opened.credit(samples))
    gaps = []
    for sample, after in zip(samples, taught, strict=True):
        ids = torch.from_numpy(sample.segment.token_ids.astype(np.int64))
        with torch.no_grad():
            logprobs = (model(ids[None]).logits[0, :-1] / 0.7).log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        mask = sample.segment.loss_mask
        gap = logprobs.numpy()[mask[1:]] - sample.segment.logprobs[mask]
        np.testing.assert_allclose(after.advantages[mask], gap, atol=1e-4)
        assert not after.advantages[~mask].any()
        gaps.append(gap)
    assert opened.figures["learn/teacher_kl"] == pytest.approx(-np.concatenate(gaps).mean(), abs=1e-5)


def test_a_teacher_of_another_vocabulary_or_too_short_is_refused(make_recipe: MakeRecipe, folder: Path) -> None:
    recipe = make_recipe(teacher={"path": str(folder), "device": "cpu"})
    _, tokenizer = load_model(recipe.model, folder=folder, device="cpu")

    class Other:
        def get_vocab(self) -> dict[str, int]:
            vocabulary: dict[str, int] = tokenizer.get_vocab()
            return vocabulary | {"!": vocabulary["?"], "?": vocabulary["!"]}

    same_vocabulary(tokenizer, tokenizer)
    with pytest.raises(RecipeError, match=r"another one than the policy's .*2 differ, for example '!' is"):
        asyncio.run(open_teacher(recipe, Other(), 256))
    with pytest.raises(RecipeError, match=r"at most 256 tokens.*rollout.max_context: 256"):
        asyncio.run(open_teacher(recipe, tokenizer, 257))


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("")
    with pytest.raises(RecipeError, match="has no checkpoint yet"):
        folder_of(TeacherSection(path=tmp_path))
    with pytest.raises(RecipeError, match="neither a transformers folder nor a run"):
        folder_of(TeacherSection(path=tmp_path / "nothing" / "here" / "at" / "all"))
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    with pytest.raises(RecipeError, match="agentrl model export"):
        folder_of(TeacherSection(path=tmp_path / "adapter"))


def test_every_group_is_kept_where_a_teacher_judges_it(make_group: Callable[..., Group]) -> None:
    group = make_group([0.0, 0.0])
    plain = GroupFilter(GroupFilterSection(), 100)
    taught = GroupFilter(GroupFilterSection(), 100, taught=True)
    assert [(f.judge(group).keep, f.informative([group])) for f in (plain, taught)] == [
        (False, [False]),
        (True, [True]),
    ]


def test_a_dead_teacher_stops_the_run_with_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two servers is gone: the other scores. Then it goes too: a clear error, after as many attempts as said."""
    monkeypatch.setattr(teachers, "BACKOFF_S", 0.001)
    asked: list[dict[str, Any]] = []

    async def answer(request: web.Request) -> web.Response:
        body = await request.json()
        asked.append(body)
        start = body["logprob_start_len"]
        pairs = [[None if not i else -i / 8, token, None] for i, token in enumerate(body["input_ids"])][start:]
        return web.json_response({"text": "", "meta_info": {"input_token_logprobs": pairs}})

    async def main() -> None:
        app = web.Application()
        app.router.add_post("/generate", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        gone = "http://127.0.0.1:9"
        served = ServedTeacher(TeacherSection(path=Path("x"), urls=[gone, url], retries=2), 10)
        try:
            with pytest.raises(EngineError, match=r"teacher.urls: http://127.0.0.1:9 cannot score tokens"):
                await served.probe()
            assert [scored.tolist() for scored in await served.score([one_sample()])] == [[-0.125, -0.25, -0.5]]
            await runner.cleanup()
            with pytest.raises(EngineError, match=r"5 tokens in 3 attempts.*resume with --resume"):
                await served.score([one_sample()])
        finally:
            await served.close()

    asyncio.run(main())
    assert [(body["input_ids"], body["logprob_start_len"]) for body in asked] == [([5, 6, 7, 8, 9], 0)]
