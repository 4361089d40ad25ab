"""Plays episodes whose context is compacted: one episode, several conversations, all of them trained.

    task ── turn ── turn ── (too long) ── request ── summary turn        segment 1
                                                        │
    task + summary + newest turns ── turn ── turn ── final answer        segment 2: the same sandbox

    `drop`       the next segment begins with the same history, its old results replaced by a fixed text
    `subagent`   turn ── delegate(task) ─────────────── result ── turn   segment 1, suspended meanwhile
                            └─ task ── turn ── turn ── last message ─┘   segment 2

Every turn of every kind counts for the episode's turns, tokens and time, so that nothing is gained by compacting. A
conversation has a token log of its own: each prompt that was sent is proved to be what its segment holds. The
environment sees the turns that act on it, and nothing of summaries and reports.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentrl.envs.episode import Episode
from agentrl.envs.play import Action, Played, Stop, drive
from agentrl.envs.tool_output import frame
from agentrl.envs.tools import CallError, Tool, tool, tools_of
from agentrl.errors import RecipeError
from agentrl.recipe import Compaction, DropCompaction, Recipe, SubagentCompaction, SummaryCompaction
from agentrl.rollout.conversation import Running
from agentrl.rollout.encoder import Span
from agentrl.rollout.render import Renderer
from agentrl.rollout.request import Budget, EnvRuntime, RolloutId
from agentrl.rollout.rollout import play_out, rollout
from agentrl.rollout.sampling import SamplingParams, TokenGenerator
from agentrl.rollout.scripted import ScriptedEngine
from agentrl.rollout.thinking import sample_turn, think_budget
from agentrl.rollout.token_log import TokenLog
from agentrl.rollout.turns import Call, Replay
from agentrl.types import (
    Completion,
    Conversation,
    ConversationKind,
    Message,
    Segment,
    Task,
    ToolCall,
    Trajectory,
    turns_in,
)
from agentrl.verifiers.base import Context

SHARE = 0.75
"""The share of the context above which a prompt is compacted, unless the recipe says otherwise."""
REQUEST = (
    "Your context is nearly full. Summarise your work: what you did, what you found out, and what is left to do. "
    "Only the task and this summary will remain. Call no tool now."
)
"""The user's message that asks for a summary."""
SUMMARISED = "Your summary of the work so far:\n{}\nContinue with the task."
"""The user's message that shows it again."""
NO_SUMMARY = "Your summary of the work so far is empty. Continue with the task."
LEFT_OUT = "[old result left out]"
"""What is shown in the place of an old tool result."""
TOO_LONG = "[result left out: too long]"
"""What is shown, when a summary is asked for, in the place of a newest result that does not fit."""
NO_REPORT = "error: the helper used up its turns, tokens or context and reported nothing"
EMPTY_REPORT = "error: the helper's last message is empty"
ONE_CALL = "delegate must be the only call of its turn; nothing was delegated"
REPORT_LIMIT = 8_000
"""Characters of a sub-agent's last message that the policy is shown."""


class _BuiltIn:
    @tool(output_limit=REPORT_LIMIT)
    def delegate(self, task: str) -> str:
        """Let a helper do a part of the work. It has your tools and an empty memory, and answers with one message.

        Args:
            task: what it must do, with everything it has to know
        """
        raise NotImplementedError("sub-agents are played by the rollout")


DELEGATE: Tool = tools_of(_BuiltIn)["delegate"]
"""The tool that a policy with sub-agents has beside those of the environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compacting:
    """A recipe's compaction in numbers of tokens."""

    section: Compaction
    threshold: int
    """Tokens of a next prompt above which it is compacted."""
    summary_tokens: int
    """Sampled tokens of one summary."""


def compaction_of(recipe: Recipe, context: int) -> Compacting | None:
    """Return how a recipe compacts conversations in so many tokens of context; None where it does not."""
    section = recipe.rollout.compaction
    if section is None:
        return None
    if isinstance(section, SubagentCompaction):
        return Compacting(section=section, threshold=context, summary_tokens=0)
    threshold = section.tokens or int(SHARE * context)
    if threshold >= context:
        raise RecipeError(f"rollout.compaction.tokens: {threshold} is not below the context, which is {context} tokens")
    own = section.max_tokens if isinstance(section, SummaryCompaction) else None
    return Compacting(section=section, threshold=threshold, summary_tokens=own or max(1, (context - threshold) // 2))


async def compacted_rollout(
    compacting: Compacting | None,
    engine: TokenGenerator,
    renderer: Renderer,
    runtime: EnvRuntime,
    task: Task,
    *,
    rollout_id: RolloutId,
    budget: Budget,
    sampling: SamplingParams | None = None,
) -> Trajectory:
    """Play one task to its end as `rollout` does, in several conversations where its context gets too long."""
    if compacting is None:
        return await rollout(engine, renderer, runtime, task, rollout_id=rollout_id, budget=budget, sampling=sampling)
    chosen = sampling or SamplingParams()

    def attempt(earlier: Sequence[Call]) -> CompactedTurns:
        source = Replay(engine, earlier) if earlier else engine
        turns = CompactedTurns(source, renderer, task, rollout_id, budget, chosen, compacting, states=runtime.states)
        turns.script = engine if isinstance(engine, ScriptedEngine) else None
        return turns

    return await play_out(attempt, runtime, task, rollout_id=rollout_id, budget=budget)


class CompactedTurns:
    """The policy of one attempt at an episode: asks the engine for each turn, and keeps conversations short."""

    def __init__(
        self,
        engine: TokenGenerator,
        renderer: Renderer,
        task: Task,
        rollout_id: RolloutId,
        budget: Budget,
        sampling: SamplingParams,
        compacting: Compacting,
        *,
        states: bool = False,
    ) -> None:
        self.engine, self.renderer, self.task = engine, renderer, task
        self.rollout_id, self.budget, self.sampling, self.compacting = rollout_id, budget, sampling, compacting
        self._section, self._think = compacting.section, think_budget(budget.think_tokens, renderer)
        self._states: list[str] | None = [] if states else None
        self.script: ScriptedEngine | None = None
        """What plays in the policy's place; it is told when a summary is asked for."""
        self._begun: list[Running] = []
        """All conversations, in the order in which they began."""
        self._current: list[Running] = []
        """The one that is being led, last; before it the one that waits for it."""
        self._turn = 0
        self._turns = 0
        """Turns that the episode may have."""
        self._calls: list[tuple[TokenLog, int, int, Completion]] = []
        """Each answer of the engine, with the log, the segment and the length of its prompt."""

    # What it leaves behind -------------------------------------------------------------------------------------

    @property
    def acted(self) -> bool:
        """Return whether the engine has sampled anything."""
        return bool(self._calls)

    def recorded(self) -> list[Call]:
        """Return the engine's calls so far, for a replay."""
        for running in self._begun:
            running.log.end_segment()
        return [
            (tuple(log.segments[segment].token_ids[:length].tolist()), completion)
            for log, segment, length, completion in self._calls
        ]

    def tokens(self) -> dict[str, Any]:
        """Return the tokens as the engine saw them, and the conversations that they tell."""
        segments: list[Segment] = []
        conversations: list[Conversation] = []
        for running in self._begun:
            parts = [part for part in running.log.finished() if part.loss_mask.any() or running is self._begun[0]]
            if parts:  # else nothing came of it
                segments += parts
                conversations.append(
                    Conversation(kind=running.kind, opening=running.opening, messages=tuple(running.messages))
                )
        left = {"segments": tuple(segments), "conversations": tuple(conversations)}
        return left if self._states is None else {**left, "states": tuple(self._states[: turns_in(segments)])}

    # The episode -----------------------------------------------------------------------------------------------

    async def play(self, episode: Episode, context: Context) -> Played:
        """Play the episode within the budget."""
        self._turns = self.budget.turns or episode.environment.max_turns
        return await drive(
            episode,
            self,
            context,
            turns=self._turns,
            tool_seconds=self.budget.tool_seconds,
            wall_seconds=self.budget.wall_seconds,
        )

    async def __call__(self, episode: Episode) -> Action | Stop:
        """Show the policy what came of its last turn, and sample until a turn acts on the environment."""
        episode.stage = "environment"
        if not self._current:
            own = {DELEGATE.name: DELEGATE} if isinstance(self._section, SubagentCompaction) else {}
            self._begin("task", list(episode.transcript), {**episode.tools, **own})
        elif episode.step is not None:
            self._current[-1].see([observation.message() for observation in episode.step.observations])
        while True:
            if self._turn >= self._turns:
                return Stop("max_turns")
            now = self._current[-1]
            if now.call is not None and self._spent(now):
                self._report(now, None)
                continue
            span, fresh = now.following(self.renderer)
            if now.turns and now.length(span, fresh) > self.compacting.threshold:
                ended = await self._compact(episode, now)
                if ended is not None:
                    return ended
                if now is not self._current[-1]:
                    continue
            action = await self._act(episode, now, span, fresh)
            if action is not None:
                return action

    async def _act(self, episode: Episode, now: Running, span: Span, fresh: bool) -> Action | Stop | None:
        """Sample a turn; None where it does not act on the environment."""
        room = self._room(now, span, fresh)
        if room < 1:
            if now.call is not None:
                self._report(now, None)
                return None
            if not self._turn:
                now.append(span, fresh)
            return Stop("max_tokens")
        now.append(span, fresh)
        if self._states is not None:
            self._states.append(await episode.timed("state", episode.state()))
        completion, message = await self._sample(episode, now, room, now.tools)
        if completion.finish != "stop":
            # Cut off by a budget: its calls may be half written, so none of them is carried out.
            if now.call is not None:
                self._report(now, None)
                return None
            episode.transcript.append(message)
            return Stop("max_tokens")
        if now.call is not None and not message.tool_calls:
            self._report(now, message.content)
            return None
        return self._delegated(episode, message) if now.tools.get(DELEGATE.name) is DELEGATE else message

    def _room(self, now: Running, span: Span, fresh: bool) -> int:
        """Return how many tokens the next turn may have."""
        budget = self.budget
        room = min(budget.tokens - self._sampled(), budget.turn_tokens or budget.tokens)
        if now.call is not None and isinstance(self._section, SubagentCompaction):
            own = self._section.max_tokens or budget.tokens
            room = min(room, own - now.log.sampled_tokens)
        return min(room, budget.context - now.length(span, fresh))

    def _task(self) -> list[Message]:
        """Return the messages that the episode began with."""
        return self._begun[0].messages[: self._begun[0].opening]

    def _sampled(self) -> int:
        return sum(running.log.sampled_tokens for running in self._begun)

    async def _sample(
        self, episode: Episode, now: Running, room: int, tools: dict[str, Tool]
    ) -> tuple[Completion, Message]:
        """Sample the next turn of a conversation, and read it."""
        episode.stage = "engine"
        log = now.log
        work = sample_turn(
            self.engine,
            log,
            room,
            think=self._think,
            params=self.sampling,
            stop_token_ids=self.renderer.stop_token_ids,
            seed=lambda part: self.rollout_id.sampling(self.task, self._turn, part),
            name=f"{self.rollout_id.group}-{self.rollout_id.index}-{self._turn}",
            retries=self.budget.retries,
            note=lambda prompt, new: self._calls.append((log, len(log.segments), len(prompt), new)),
        )
        completion = await episode.timed("engine", work)
        episode.stage = "environment"
        self._turn += 1
        message = self.renderer.parse(completion.token_ids, tools)
        now.said(message, completion, self.renderer.aside(message))
        return completion, message

    def _begin(
        self,
        kind: ConversationKind,
        messages: list[Message],
        tools: dict[str, Tool],
        call: ToolCall | None = None,
    ) -> None:
        """Begin a conversation: a sub-agent's beside the one that waits for it, any other in the place of the last."""
        if call is None:
            self._current.clear()
        running = Running(kind=kind, messages=messages, opening=len(messages), tools=tools, call=call)
        self._current.append(running)
        self._begun.append(running)

    # Sub-agents ------------------------------------------------------------------------------------------------

    def _delegated(self, episode: Episode, message: Message) -> Message | None:
        """Begin the conversation that a turn asks for, and return None; else the turn, with wrong calls refused."""
        calls = message.tool_calls
        if not any(call.name == DELEGATE.name for call in calls):
            return message
        errors: list[str | None] = [ONE_CALL if len(calls) > 1 else call.error for call in calls]
        if len(calls) == 1 and calls[0].error is None:
            try:
                told = str(DELEGATE.validate(calls[0].arguments)["task"])
            except CallError as error:
                errors = [str(error)]
            else:
                opening = [episode.transcript[0], Message(role="user", content=told)]
                self._begin("subagent", opening, dict(episode.tools), calls[0])
                return None
        refused = [
            replace(call, error=call.error or error) if call.name == DELEGATE.name else call
            for call, error in zip(calls, errors, strict=True)
        ]
        return replace(message, tool_calls=tuple(refused))

    def _spent(self, now: Running) -> bool:
        """Return whether a sub-agent has had all its turns."""
        return isinstance(self._section, SubagentCompaction) and now.turns >= self._section.max_turns

    def _report(self, now: Running, text: str | None) -> None:
        """End a sub-agent's conversation and show its report to the one that waits; None where it made none."""
        assert now.call is not None
        self._current.pop()
        words = NO_REPORT if text is None else frame(text, REPORT_LIMIT)[0] if text.strip() else EMPTY_REPORT
        self._current[-1].see([Message(role="tool", content=words, tool_call_id=now.call.id, name=DELEGATE.name)])

    # Shorter histories -----------------------------------------------------------------------------------------

    async def _compact(self, episode: Episode, now: Running) -> Stop | None:
        """Begin a shorter conversation where there is one."""
        if isinstance(self._section, DropCompaction):
            self._drop(now, self._section.keep)
        elif isinstance(self._section, SummaryCompaction) and self._turn + 1 < self._turns:  # the last turn acts
            return await self._summarise(episode, now, self._section.keep)
        return None

    def _length(self, messages: Sequence[Message], now: Running) -> int:
        """Return the tokens of a prompt with other messages than a conversation's own."""
        return len(self.renderer.prompt(tuple(messages), now.schemas).token_ids)

    def _drop(self, now: Running, keep: int) -> None:
        """Leave out old results, the oldest first, until the prompt is half of what it may be."""
        results = [place for place, message in enumerate(now.messages) if message.role == "tool"]
        old = [p for p in results[: max(0, len(results) - keep)] if len(now.messages[p].content) > len(LEFT_OUT)]
        if not old:
            return

        def without(count: int) -> list[Message]:
            shown = list(now.messages)
            for place in old[:count]:
                shown[place] = replace(shown[place], content=LEFT_OUT)
            return shown

        fewest, most = 1, len(old)
        while fewest < most:
            middle = (fewest + most) // 2
            if self._length(without(middle), now) <= self.compacting.threshold // 2:
                most = middle
            else:
                fewest = middle + 1
        self._begin("drop", without(fewest), now.tools)

    async def _summarise(self, episode: Episode, now: Running, keep: int) -> Stop | None:
        """Have the policy summarise its work, and begin again with the task and the summary."""
        rounds = now.rounds(len(self._task()) + (now.kind == "summary"))
        request, answers = Message(role="user", content=REQUEST), list(now.unseen)
        now.see([request])
        span, fresh = now.following(self.renderer)
        if answers and self.budget.context - now.length(span, fresh) < self.compacting.summary_tokens:
            short = [replace(m, content=TOO_LONG) if len(m.content) > len(TOO_LONG) else m for m in answers]
            now.messages[-1 - len(answers) :] = now.unseen = [*short, request]
            span, fresh = now.following(self.renderer)
        room = min(self._room(now, span, fresh), self.compacting.summary_tokens)
        if room < 1:
            del now.messages[-1:]
            return Stop("max_tokens")
        now.append(span, fresh)
        if self.script is not None:
            self.script.summarising = True
        _, message = await self._sample(episode, now, room, {})
        if self.script is not None:
            self.script.summarising = False
        self._begin("summary", self._shortened(now, message.content.strip(), rounds, keep), now.tools)
        return None

    def _shortened(self, now: Running, summary: str, rounds: list[list[Message]], keep: int) -> list[Message]:
        """Return what a conversation begins with after a summary: as many kept turns as fit, then as much of it."""
        kept, limit = min(keep, len(rounds)), len(summary)
        threshold, middle = self.compacting.threshold, (self.compacting.threshold + self.budget.context) // 2
        while True:
            shown = SUMMARISED.format(frame(summary, limit)[0]) if summary else NO_SUMMARY
            newest = [message for turn in rounds[len(rounds) - kept :] for message in turn]
            messages = [*self._task(), Message(role="user", content=shown), *newest]
            if self._length(messages, now) <= (threshold if kept else middle) or not (kept or limit):
                return messages
            kept, limit = kept // 2, limit if kept else limit // 2
