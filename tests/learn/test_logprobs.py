"""The chunked head against the naive one: same values, same gradients."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.learn import logprobs
from agentrl.learn.logprobs import chunk_rows, head


def naive(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    logits = hidden @ weight.t()
    logp = (logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature).log_softmax(-1)
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1), logp.topk(3).values.mean(-1)


def make(dtype: torch.dtype, rows: int = 50) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, 24, generator=random, dtype=torch.float64).to(dtype).requires_grad_()
    weight = (torch.randn(301, 24, generator=random, dtype=torch.float64) * 0.3).to(dtype).requires_grad_()
    targets = torch.randint(0, 301, (rows,), generator=random)
    return hidden, weight, targets, torch.randn(3, rows, generator=random, dtype=torch.float64)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5), (torch.bfloat16, 2e-2)]
)
@pytest.mark.parametrize("chunk", [7, 50, 1000])
def test_same_as_the_naive_head(dtype: torch.dtype, tolerance: float, chunk: int) -> None:
    hidden, weight, targets, upstream = make(dtype)
    found = head(hidden, weight, targets, temperature=0.7, candidates=3, chunk=chunk)
    assert found.candidates is not None and found.likeliest is not None
    ours = (found.logprobs, found.entropy, found.candidates)
    theirs = naive(hidden, weight, targets, 0.7)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5 if dtype != torch.float64 else 1e-12, atol=2e-5)
    assert torch.equal(found.likeliest, (hidden @ weight.t()).argmax(-1) == targets)
    scale = [torch.autograd.grad(sum((u.to(v.dtype) * v).sum() for u, v in zip(upstream, values, strict=True)),
                                 (hidden, weight)) for values in (ours, theirs)]  # fmt: skip
    for a, b in zip(*scale, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * float(b.abs().max()))


def test_gradcheck() -> None:
    hidden, full, targets, _ = make(torch.float64, rows=6)
    weight = full.detach()[:20].clone().requires_grad_()

    def outputs(h: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        found = head(h, w, targets % 20, temperature=1.3, chunk=4)
        return found.logprobs, found.entropy

    assert torch.autograd.gradcheck(outputs, (hidden, weight))


def test_a_frozen_head_and_a_float32_head() -> None:
    hidden, weight, targets, _ = make(torch.bfloat16)
    frozen = weight.detach()
    found = head(hidden, frozen, targets, float32=True, chunk=16)
    exact = naive(hidden.detach().float(), frozen.float(), targets, 1.0)[0]
    torch.testing.assert_close(found.logprobs, exact, rtol=1e-5, atol=1e-5)
    rounded = head(hidden.detach(), frozen, targets, chunk=16).logprobs
    assert float((rounded - exact).abs().max()) > 1e-4  # the option changes something
    (gradient,) = torch.autograd.grad(found.logprobs.sum(), hidden)
    assert gradient.dtype == torch.bfloat16


def test_no_rows_at_all() -> None:
    hidden, weight, _, _ = make(torch.float32)
    found = head(hidden[:0], weight, torch.zeros(0, dtype=torch.long))
    assert found.logprobs.tolist() == []


def test_a_second_backward_pass_finds_the_same() -> None:
    """The first one puts gradients where the kept logits were; the second computes the logits again."""
    hidden, weight, targets, _ = make(torch.float32)
    loss = head(hidden, weight, targets, chunk=16).logprobs.sum()
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(loss, (hidden, weight))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_only_the_last_chunk_is_kept_and_only_for_learning(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, targets, _ = make(torch.float32)
    made: list[int] = []
    plain = logprobs._logits

    def counted(hidden: Tensor, *rest: Any) -> Tensor:
        made.append(len(hidden))
        return plain(hidden, *rest)

    monkeypatch.setattr(logprobs, "_logits", counted)
    found = head(hidden, weight, targets, chunk=16).logprobs.sum()
    assert made == [2, 16, 16, 16]
    torch.autograd.grad(found, hidden)
    assert made == [2, 16, 16, 16, 16, 16, 2]
    with torch.no_grad():
        assert head(hidden, weight, targets, chunk=16).logprobs.grad_fn is None


def test_chunks_stay_within_their_share_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = 139 * 2**30
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=memory))
    assert chunk_rows(152_000, torch.device("cuda"), 2) == 8_704
    memory = 24 * 2**30
    assert chunk_rows(152_000, torch.device("cuda"), 2) == 2_560
    assert chunk_rows(152_000, torch.device("cpu")) == 128
    assert chunk_rows(1_024, torch.device("cpu")) == 8_192


def test_more_chunks_are_not_compiled_for_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled once for one chunk, the head's functions serve any number of chunks: views of a buffer would be tied to
    its size. (On a GPU the second compilation took 12 s in the middle of a run.)"""
    from torch._dynamo.testing import CompileCounter

    counters = {function: CompileCounter() for function in (logprobs._statistics, logprobs._logit_gradient)}
    compiled = {f: torch.compile(f, dynamic=True, backend=counter) for f, counter in counters.items()}
    monkeypatch.setattr(logprobs, "_compiled", lambda function, device: compiled[function])
    for rows in (20, 23, 17, 50, 31):
        hidden, weight, targets, upstream = make(torch.float32, rows)
        found = head(hidden, weight, targets, chunk=24)
        expected = naive(hidden, weight, targets, 1.0)[0]
        ours = torch.autograd.grad((found.logprobs * upstream[0]).sum(), [hidden, weight])
        theirs = torch.autograd.grad((expected * upstream[0]).sum(), [hidden, weight])
        torch.testing.assert_close(found.logprobs, expected, rtol=2e-5, atol=2e-5)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert [counter.frame_count for counter in counters.values()] == [1, 1]
