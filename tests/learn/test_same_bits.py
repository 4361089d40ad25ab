"""Gradients are the same bits whatever else the machine does."""

import subprocess
import sys

import torch

from agentrl.learn.scorer import _rows


def test_gradients_do_not_depend_on_which_thread_is_first() -> None:
    """Sequences that share a prompt all send a gradient to its last token; threads must not add them up in a race."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        hidden = torch.randn(4000, 96, generator=torch.Generator().manual_seed(0), requires_grad=True)
        places = torch.randint(0, 40, (20_000,), generator=torch.Generator().manual_seed(1))
        back = torch.randn(20_000, 96, generator=torch.Generator().manual_seed(2))

        def gradient() -> torch.Tensor:
            (gradient,) = torch.autograd.grad(_rows(hidden, places), hidden, back)
            return gradient

        first = gradient()
        assert all(torch.equal(gradient(), first) for _ in range(20))
    finally:
        torch.set_num_threads(threads)
        for process in busy:
            process.kill()
            process.wait()
