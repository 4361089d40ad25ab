"""`JudgeVerifier`: asks the judge engine about a rubric twice, in both orders, and averages."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from agentrl.errors import VerifierError
from agentrl.types import Task, Verdict
from agentrl.verifiers.base import Context, Judge, Submission, Verifier
from agentrl.verifiers.busy import off_the_clock
from agentrl.verifiers.compose import UNJUDGED
from agentrl.verifiers.values import Malformed

from .calibration import Calibration, Gold, calibration
from .prompt import Criterion, Form, Rubric

UNREADABLE = "the judge gave no readable reply"
PROBE = Gold(problem="What is 2 + 3?", text="The sum is 5: five in words.", passes=True, reference="The sum is 5.")
"""What a judge is asked where the verifier has no labelled submissions of its own."""
_measured: WeakKeyDictionary[Judge, dict[str, asyncio.Task[Calibration]]] = WeakKeyDictionary()
"""Each judge is calibrated once per verifier, however many submissions wait for it."""


@dataclass(frozen=True, slots=True)
class _Opinion:
    """The result of one question."""

    score: float
    points: dict[str, float]
    remark: str = ""


class JudgeVerifier(Verifier):
    """A model's opinion on the final message: limited in size, framed, asked twice, only from a calibrated judge."""

    asks_judge = True

    def __init__(
        self,
        rubric: Sequence[Criterion] | Form | Callable[[bytes], Form],
        *,
        gold: Sequence[Gold],
        measured_elsewhere: bool = False,
        min_agreement: float = 0.8,
        reference: Callable[[Task], str] | None = None,
        view: Callable[[Submission], str] | None = None,
        max_characters: int = 20_000,
        min_letters: int = 8,
        max_tokens: int = 512,
    ) -> None:
        """
        Args:
            rubric: the criteria, with weights; or another form of question: `Versus`, `Scalar`, or what
                returns the form of a group by its secret.
            gold: submissions that people have graded, of both kinds.
            measured_elsewhere: whether the judge is measured through whole episodes instead; `gold` may then be empty.
            min_agreement: below this balanced agreement with `gold` nothing is scored.
            reference: the reference solution of a task, which the judge is shown.
            view: the text of a submission that is judged; by default its final message.
            max_characters: a longer submission fails unread.
            min_letters: a submission with fewer letters and digits fails unread: bare symbols can sway a judge.
            max_tokens: length of the judge's reply.
        """
        if gold or not measured_elsewhere:
            calibration(gold, [0.0] * len(gold))  # checks that both kinds are present
        self.rubric = Rubric(tuple(rubric)) if isinstance(rubric, Sequence) else rubric
        self.gold, self.min_agreement = tuple(gold), min_agreement
        self.reference, self.view = reference, view
        self.max_characters, self.min_letters, self.max_tokens = max_characters, min_letters, max_tokens

    async def probe(self, context: Context) -> None:
        """Check that the judge agrees with the gold labels, and that it answers a question about one right now."""
        await self._calibrated(_judge(context))
        await self._check_readable(_judge(context), self.form(context.secret))

    async def calibrate(self, judge: Judge) -> dict[str, float]:
        """Measure the judge on the gold labels; raise VerifierError if it agrees with too few."""
        measured = await self._calibrated(judge)
        if measured is None:
            return {}
        return {
            "sensitivity": measured.sensitivity,
            "specificity": measured.specificity,
            "count": measured.count,
            "required": self.min_agreement,
        }

    def form(self, group: bytes) -> Form:
        """Return what is asked about the submissions of a group."""
        return self.rubric(group) if callable(self.rubric) else self.rubric

    async def verify(self, submission: Submission, context: Context) -> Verdict:
        judge, form = _judge(context), self.form(context.secret)
        measured = await self._calibrated(judge)
        text = self.view(submission) if self.view else submission.answer
        reference = self.reference(submission.task) if self.reference else None
        opinions = await self._opinions(form, judge, submission.task.prompt, reference, text, context.secret)
        if any(o.remark == UNREADABLE for o in opinions):
            await self._check_readable(judge, form)  # a judge that has lost its mind fails nobody
        score = math.fsum(o.score for o in opinions) / len(opinions)
        points = {name: math.fsum(o.points.get(name, 0.0) for o in opinions) / len(opinions) for name in form.names}
        spread = max(o.score for o in opinions) - min(o.score for o in opinions)
        lines = [o.remark for o in opinions if o.remark]
        if spread > 0.5:
            lines.append("the judge contradicts itself when the order is reversed")
        agreement, figures = "", {**form.figures, "order_spread": spread}
        if measured is not None:
            agreement = f"; balanced agreement {measured.balanced:.2f} on {measured.count} gold labels"
            figures["agreement"] = measured.balanced
        lines.append(f"judge prompt {form.hash}{agreement}")
        if any(o.remark for o in opinions):
            figures[UNJUDGED] = 1.0
        return Verdict(
            score=score,
            breakdown={**points, **figures},
            evidence=tuple(lines),
            trust="judged",
            verifier=self.version,
        )

    async def _opinions(
        self, form: Form, judge: Judge, problem: str, reference: str | None, text: str, secret: bytes
    ) -> list[_Opinion]:
        if len(text) > self.max_characters:
            return [_Opinion(0.0, {}, f"longer than {self.max_characters} characters: not read")]
        if sum(char.isalnum() for char in text) < self.min_letters:
            return [_Opinion(0.0, {}, "no content to judge")]
        return [await self._ask(form, judge, problem, reference, text, secret, swapped) for swapped in form.orders]

    async def _ask(
        self, form: Form, judge: Judge, problem: str, reference: str | None, text: str, secret: bytes, swapped: bool
    ) -> _Opinion:
        """Ask one question. If the reply cannot be read, ask once more, then count it as 0."""
        for attempt in range(2):
            digest = hmac.new(secret, f"judge {swapped} {attempt} {text}".encode("utf-8", "replace"), hashlib.sha256)
            question = form.messages(problem, reference, text, digest.hexdigest()[:32], swapped=swapped)
            seed = int.from_bytes(digest.digest()[:7], "big")
            reply = await judge.ask(question, seed=seed, max_tokens=self.max_tokens)
            try:
                points = form.read(reply, swapped=swapped)
            except Malformed:
                continue
            if points is None:
                return _Opinion(0.0, {}, "the submission tries to instruct the judge")
            return _Opinion(form.score(points), points)
        return _Opinion(0.0, {}, UNREADABLE)

    async def _check_readable(self, judge: Judge, form: Form) -> None:
        """Raise VerifierError if the judge cannot even answer a question about a gold submission right now."""
        item = self.gold[0] if self.gold else PROBE
        opinion = await self._ask(form, judge, item.problem, item.reference, item.text, b"probe", False)
        if opinion.remark == UNREADABLE:
            raise VerifierError("the judge gives no readable reply, not even to a gold submission")

    async def _calibrated(self, judge: Judge) -> Calibration | None:
        """Return the judge's calibration, measured when first needed; raise VerifierError if it is too low."""
        if not self.gold:
            return None
        known = _measured.setdefault(judge, {})
        task = known.get(self.version)
        if task is None or (not task.done() and task.get_loop() is not asyncio.get_running_loop()):
            task = known[self.version] = asyncio.ensure_future(self._calibrate(judge))
        try:
            with off_the_clock():
                measured = await asyncio.shield(task)
        except BaseException:
            if task.done():
                known.pop(self.version, None)
            raise
        if measured.balanced < self.min_agreement:
            raise VerifierError(
                f"the judge agrees with the gold labels at {measured.balanced:.2f} (balanced), below the required "
                f"{self.min_agreement:.2f}: nothing is scored; use a better judge or a clearer rubric"
            )
        return measured

    async def _calibrate(self, judge: Judge) -> Calibration:
        scores, form = [], self.form(b"calibration")
        for item in self.gold:
            opinions = await self._opinions(form, judge, item.problem, item.reference, item.text, b"calibration")
            scores.append(math.fsum(o.score for o in opinions) / len(opinions))
        return calibration(self.gold, scores)


def _judge(context: Context) -> Judge:
    if context.judge is None:
        raise VerifierError(
            "JudgeVerifier needs a judge, and the context holds none; name one in the recipe's section judge"
        )
    return context.judge
