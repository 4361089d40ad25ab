"""The loop, on one screen: draw, roll out, verify, learn, publish, again.

    open ─ build ─ [warm start] ─ evaluate ─┬─ round ─ observe ─ advantages ─ pack ─ step ─ publish ─ log ─┐
                                            └── checkpoint, evaluate now and then <────────────────────────┘
What follows a round's arrival is one piece: a signal waits until it is done, so that a checkpoint always stands
between two steps.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack, ExitStack

from agentrl import assembly, metrics, stages
from agentrl.alarms import alarms
from agentrl.curriculum import group_filter
from agentrl.curriculum import sampler as curriculum
from agentrl.engines import build
from agentrl.errors import UserError
from agentrl.evaluation import fingerprint
from agentrl.recipe import Recipe
from agentrl.report.terminal import Progress
from agentrl.report.trackers import TensorBoard
from agentrl.rollout import scheduler, store
from agentrl.rollout.rollout import EnvRuntime, uninterrupted
from agentrl.runfolder import RunFolder, open_run
from agentrl.types import Round

NO_MEMORY = (
    "the GPU has no memory left: lower learner.micro_tokens or rollout.engine.memory_fraction, or set "
    "learner.checkpointing: true; then go on with --resume"
)


def run(recipe: Recipe, *, resume: bool = False) -> int:
    """Train as the recipe says. 0: done; 3: stopped early (signal or max_hours) with a checkpoint to resume from."""
    with ExitStack() as stack:
        folder = stack.enter_context(open_run(recipe, resume=resume))
        worlds = stack.enter_context(assembly.worlds(recipe))
        progress = stack.enter_context(Progress(recipe.run.steps))
        try:
            return asyncio.run(Trainer(recipe, folder, worlds, progress).main())
        except Exception as error:
            if type(error).__name__ == "OutOfMemoryError":  # torch's, which is not imported here
                raise UserError(f"{NO_MEMORY} ({str(error).splitlines()[0]})") from error
            raise


class Trainer:
    """One run: owns the parts, in the order in which the data goes through them."""

    def __init__(self, recipe: Recipe, folder: RunFolder, worlds: Mapping[str, EnvRuntime], progress: Progress) -> None:
        self.recipe, self.folder, self.worlds, self.progress = recipe, folder, worlds, progress
        self.began = time.monotonic()
        self.last = self.began
        """When the last step ended."""
        self.stopping = ""
        self.trained: set[str] = set()
        """Fingerprints of the tasks that were trained on, to be held against the held-out ones."""

    async def main(self) -> int:
        """Run to the end, or to the first signal; what was learnt by then is in a checkpoint."""
        task = asyncio.ensure_future(self._train())
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop, task, signal.Signals(number).name)
        try:
            return await task
        except asyncio.CancelledError:
            self.progress.say(f"stopped by {self.stopping}; go on with --resume")
            return 3
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    def _stop(self, task: asyncio.Future[int], reason: str) -> None:
        if not self.stopping:
            self.progress.say(f"{reason}: stopping")
        self.stopping = reason
        task.cancel()

    async def _train(self) -> int:
        from agentrl.learn.weights import Publisher

        recipe, folder = self.recipe, self.folder
        async with AsyncExitStack() as stack:
            self.policy, self.learner, found = stages.begin(recipe, folder, self.worlds, self.progress.say)
            self.metrics = metrics.Metrics(folder.metrics, resume_step=found.step if found else -1)
            stack.callback(self.metrics.close)
            if board := TensorBoard.open(folder.path / "tensorboard", self.metrics.rows):
                stack.callback(board.close)
                self.metrics.readers.append(board.add)
            turns = not recipe.asynchronous.enabled
            self.engine = build.make(
                recipe.rollout.engine,
                self.policy.model,
                model_path=self.policy.folder,
                folder=folder.path,
                max_context=self.policy.context,
                deterministic=recipe.run.deterministic,
                share=turns,
                adapters=True,
                version=found.learner["version"] if found else 0,
                say=self.progress.say,
            )
            stack.push_async_callback(self.engine.close)
            self.demonstrations = await stages.bring_up(self, fresh=found is None)
            shared = turns and recipe.rollout.engine.type == "transformers"
            self.publisher = Publisher(
                self.engine, lambda: self.learner.weights(), adapter=lambda: self.learner.adapter(), shared=shared
            )
            self.evaluation = stages.Evaluator(recipe, folder, self.worlds, self.policy, self.engine, self.metrics)
            self.sampler = curriculum.make(recipe.curriculum, assembly.sources(recipe, self.worlds), recipe.run.seed)
            self.gate = group_filter.make(recipe.gates, recipe.rollout.max_tokens)
            self.trajectories = store.Store(folder.trajectories, disk_bytes=int(recipe.run.disk_gb * 2**30 * 0.5))
            stack.push_async_callback(self.trajectories.close)
            self.scheduler = scheduler.make(
                recipe,
                engine=self.engine,
                renderer=self.policy.renderer,
                worlds=self.worlds,
                gate=self.gate,
                key=folder.key,
                context=self.policy.context,
                sink=self.trajectories,
            )
            if found:
                stages.restore(self, found)
            await self.publisher.publish(self.learner.version)  # a server that was running may hold anything
            if not found:
                await stages.warm_start(self)
                stages.save(self)
            await stages.warmed(self)
            try:
                await self._loop()
            except asyncio.CancelledError:
                stages.save(self)
                raise
            stages.save(self)
            if self.stopping:
                return 3
            await stages.finish(self)
            return 0

    async def _loop(self) -> None:
        recipe, steps = self.recipe, self.recipe.run.steps
        if self.learner.steps >= steps:
            if steps:
                self.progress.say(f"all {steps} steps are done; raise run.steps to train on")
            return
        await self._evaluate()
        rounds = self.scheduler.rounds(self.sampler)
        self.last = time.monotonic()
        try:
            async for round_ in rounds:
                await uninterrupted(self._learn(round_))
                step = self.learner.steps
                await self._evaluate()
                if recipe.checkpoint.every and step % recipe.checkpoint.every == 0:
                    stages.save(self)
                if step >= steps or self._out_of_time():
                    return
        finally:
            await rounds.aclose()

    async def _evaluate(self) -> None:
        """A point of the curve where one is due; after a resume, the one that was lost."""
        step, section = self.learner.steps, self.recipe.eval
        if section is None or not section.every or step % section.every or not 0 < step < self.recipe.run.steps:
            return
        if not any(self.evaluation.done(step, stage) for stage in ("rl", "end")):
            self.progress.show(await self.evaluation(step))
            self.last = time.monotonic()

    async def _learn(self, round_: Round) -> None:
        """One step: from a round of groups to new weights in the engine and a row in the metrics."""
        began, version = time.monotonic(), self.learner.version
        groups = sorted((*round_.kept, *round_.dropped), key=lambda group: group.number)
        self.sampler.observe(groups)
        self.trained |= {fingerprint(group.task) for group in round_.kept}
        batch = self.learner.pack(stages.samples(round_, self.recipe, self.gate, self.learner.steps))
        report = await stages.learn(self, batch)
        learnt = time.monotonic()
        await self.scheduler.update(lambda: self.publisher.publish(report.version))
        row = metrics.step_row(round_, report.metrics(), version) | self.sampler.metrics() | stages.traffic(self)
        now = time.monotonic()
        row |= {"learn_s": learnt - began, "sync_s": now - learnt, "seconds": now - self.last}
        row["tokens_per_s"] = row["sampled_tokens"] / row["seconds"]
        self.last = now
        self.progress.show(self.metrics.log("step", self.learner.steps, row))
        for name, text in alarms(self.metrics.of("step"), self.metrics.of("eval")).items():
            if name not in {said["name"] for said in self.metrics.of("alarm")}:
                self.progress.show(self.metrics.log("alarm", self.learner.steps, {"name": name, "text": text}))

    def _out_of_time(self) -> bool:
        hours = self.recipe.run.max_hours
        if hours is None or time.monotonic() - self.began < hours * 3600:
            return False
        self.stopping = "max_hours"
        self.progress.say(f"max_hours ({hours:g}) are over; go on with --resume")
        return True
