"""From a recipe's section to an engine, and from a command to an environment."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from agentrl import recipe
from agentrl.assembly import Run
from agentrl.engines import build
from agentrl.engines.sglang import install
from agentrl.engines.sglang.engine import SglangEngine
from agentrl.engines.transformers.engine import TransformersEngine
from agentrl.errors import RecipeError, UserError


def test_the_embedded_engine_is_exact_on_the_cpu(model: Any) -> None:
    made = build.make(recipe.TransformersEngine(max_batch=5), model, max_context=300, version=7)
    assert isinstance(made, TransformersEngine)
    assert (made.version, made.context, made._batch.size) == (7, 300, 5)
    assert made._batch.batch_shapes is not None


def test_launched_servers_get_the_recipes_flags_last_and_share_the_memory(model: Any, tmp_path: Path) -> None:
    flags = ["--dtype", "bfloat16"]
    section = recipe.SglangEngine(
        type="sglang", device="cpu", python=Path("/x/python"), servers=2, flags=flags, memory_fraction=0.5
    )
    made = build.make(section, model, model_path=tmp_path / "m", folder=tmp_path / "run", max_context=100)
    assert isinstance(made, SglangEngine)
    first, second = made.servers
    command = first.command(4000)
    assert command[:5] == ["/x/python", "-m", "sglang.launch_server", "--model-path", str(tmp_path / "m")]
    assert command[command.index("--mem-fraction-static") + 1] == "0.25"
    assert command[-2:] == flags
    assert second.command(4000) == command
    assert first.log == tmp_path / "run" / "engine" / "sglang.log"
    assert second.log == tmp_path / "run" / "engine" / "sglang-2.log"
    assert Path(first.environment()["PYTHONPATH"], "sgl_kernel", "__init__.py").is_file()


def test_a_model_without_a_folder_is_written_for_the_server(model: Any, tmp_path: Path) -> None:
    section = recipe.SglangEngine(type="sglang", device="cpu")
    made = build.make(section, model, folder=tmp_path)
    assert isinstance(made, SglangEngine)
    assert made.servers[0].flags == ("--dtype", "float32", "--skip-tokenizer-init")
    assert (made.servers[0].model / "model.safetensors").is_file()


def test_sections_that_cannot_work_are_refused(model: Any, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"rollout\.engine\.urls must name at least one server"):
        build.make(recipe.SglangEngine(type="sglang", launch=False), model)
    with pytest.raises(RecipeError, match="transformers on the CPU"):
        build.make(recipe.SglangEngine(type="sglang", device="cpu"), model, folder=tmp_path, deterministic=True)


def test_a_finished_environment_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTRL_CACHE", str(tmp_path))
    monkeypatch.delenv("AGENTRL_SGLANG_PYTHON", raising=False)
    interpreter = tmp_path / "engines" / "sglang-cpu" / "bin" / "python"
    assert install.python(cpu=True) == interpreter
    interpreter.parent.mkdir(parents=True)
    interpreter.touch()
    (tmp_path / "engines" / "sglang-cpu" / ".agentrl").write_text(f"sglang {install.VERSION} cpu\n")
    said: list[str] = []
    assert install.sglang(cpu=True, say=said.append) == interpreter
    assert said == [f"SGLang {install.VERSION} is installed already: {interpreter}"]
    monkeypatch.setenv("AGENTRL_SGLANG_PYTHON", "/y/python")
    assert install.python(cpu=True) == Path("/y/python")


def test_an_installation_that_fails_says_what_failed() -> None:
    with pytest.raises(UserError, match=r"(?s)failed with exit code 3:\nno such package"):
        install._run([sys.executable, "-c", "import sys; print('no such package'); sys.exit(3)"])


def test_uv_installs_where_it_is_at_hand_and_pip_where_it_is_not_or_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, uv, python = tmp_path / "log", tmp_path / "uv", tmp_path / "python"

    def asked() -> list[str]:
        log.write_text("")
        install._install(python, "torch==1")
        return [line.split()[0] for line in log.read_text().splitlines()]

    for program in (uv, python):
        program.write_text(f'#!/bin/sh\necho {program.name} "$@" >> {log}\nexit 0\n')
        program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert asked() == ["uv"]
    assert log.read_text() == f"uv pip install --quiet --python {python} torch==1\n"
    uv.write_text(uv.read_text().replace("exit 0", "exit 2"))
    assert asked() == ["uv", "python"]
    uv.unlink()
    assert asked() == ["python"]
    assert log.read_text().split()[1:4] == ["-m", "pip", "install"] and log.read_text().endswith("torch==1\n")


def test_a_server_for_adapters_holds_the_base_model(model: Any, lora: Any, tmp_path: Path) -> None:
    section = recipe.SglangEngine(type="sglang", device="cpu")
    made = build.make(section, lora, folder=tmp_path, adapters=True)
    assert isinstance(made, SglangEngine)
    flags = list(made.servers[0].flags)
    assert flags[flags.index("--max-lora-rank") + 1] == "8" and "--enable-lora" in flags
    held = load_file(made.servers[0].model / "model.safetensors")
    assert all(torch.equal(held[name], p.cpu()) for name, p in model.named_parameters())
    merged = build.make(section, lora, folder=tmp_path / "merged")  # an evaluation publishes nothing
    assert isinstance(merged, SglangEngine)
    assert "--enable-lora" not in merged.servers[0].flags
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(load_file(merged.servers[0].model / "model.safetensors")[name], held[name])


def test_memory_is_only_given_back_where_learner_and_server_take_turns(model: Any, tmp_path: Path) -> None:
    section = recipe.SglangEngine(type="sglang", release_memory=True)
    with pytest.raises(RecipeError, match=r"needs async\.enabled: false"):
        build.make(section, model, folder=tmp_path, share=False)
    made = build.make(section, model, folder=tmp_path)
    assert isinstance(made, SglangEngine)
    assert "--enable-memory-saver" in made.servers[0].flags


@pytest.mark.parametrize("release", [True, False])
def test_the_learners_step_is_alone_on_the_gpu(release: bool) -> None:
    """Paused before, resumed after, also when the step fails."""
    said: list[str] = []

    class Engine:
        async def pause(self) -> None:
            said.append("pause")

        async def resume(self) -> None:
            said.append("resume")

    class Learner:
        def step(self, batch: Any) -> Any:
            said.append("step")
            if batch is None:
                raise ValueError("no batch")
            return batch

        def release(self) -> None:
            said.append("release")

    section = recipe.SglangEngine(type="sglang", release_memory=release)
    held = SimpleNamespace(rollout=SimpleNamespace(engine=section))
    run: Any = SimpleNamespace(recipe=held, engine=Engine(), learner=Learner())
    assert asyncio.run(Run.learn(run, "batch")) == "batch"  # type: ignore[arg-type, comparison-overlap]
    with pytest.raises(ValueError, match="no batch"):
        asyncio.run(Run.learn(run, None))  # type: ignore[arg-type]
    assert said == (["pause", "step", "release", "resume"] if release else ["step"]) * 2
