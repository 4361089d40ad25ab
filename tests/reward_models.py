"""Small real reward models for tests: random features, and a head that was fitted to tell good texts from bad."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from agentrl.learn.model import scratch_tokenizer

LABEL = 4.0
"""The output that the head is fitted to for good texts; minus as much for bad ones."""


def write(
    folder: Path, problems: Sequence[str], good: Sequence[str], bad: Sequence[str], *, context: int = 512
) -> Path:
    """Write a reward model that prefers the good texts to the bad ones as answers to the problems."""
    import transformers

    hub: Any = transformers
    tokenizer = scratch_tokenizer([*problems, *good, *bad], 400)
    torch.manual_seed(0)
    config = hub.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=context,
        num_labels=1,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = hub.LlamaForSequenceClassification(config).eval()
    features, labels = [], []
    for texts, label in ((good, LABEL), (bad, -LABEL)):
        for problem in problems:
            for text in texts:
                entries = [{"role": "user", "content": problem}, {"role": "assistant", "content": text}]
                ids = tokenizer.apply_chat_template(entries, return_tensors="pt", return_dict=True)["input_ids"]
                with torch.inference_mode():
                    features.append(model.model(ids).last_hidden_state[0, -1])
                labels.append(label)
    matrix, wanted = torch.stack(features).double(), torch.tensor(labels).double()
    ridge = 1e-6 * torch.eye(matrix.shape[1], dtype=torch.float64)
    head = torch.linalg.solve(matrix.T @ matrix + ridge, matrix.T @ wanted)
    with torch.no_grad():
        model.score.weight.copy_(head.float()[None])
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
