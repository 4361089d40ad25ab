"""The boundary around a verifier: whatever it does, out comes an outcome that training can use.

    verify ──ok──────────────────────────────────────────────> graded, the verdict's score
       │ AgentError ─────────────────────────────────────────> graded, 0
       │ anything else, or past the deadline
       └─> verify again, fresh boxes ──ok────────────────────> graded, the verdict's score
              └─ broke again ─> probe (no submission in it)
                                   ├─ well ──────────────────> graded, 0, alarm: the submission breaks grading
                                   └─ broken ────────────────> infra_error or verifier_error: no score

So an agent can never buy a retry: the one retry happens here, and what breaks twice while the house is well is a 0. Who
was late on a machine without a free processor may only have waited in line: the retry then has a longer deadline.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from time import perf_counter

from agentrl.errors import AgentError, Fault, InfraError, VerifierError, fault_of
from agentrl.types import Grade, Outcome, Verdict
from agentrl.verifiers.base import Context, Submission, Verifier
from agentrl.verifiers.busy import Watch

PROBE_S = 30.0
"""How long the probe may take before the house counts as broken."""
PATIENCE = 4.0
"""How many times the deadline the second try has where the first was late on a busy machine."""


async def grade(verifier: Verifier, submission: Submission, context: Context) -> tuple[Outcome, Verdict | None]:
    """Grade one submission. Never raises, except for cancellation; `None` stands for no verdict, hence no score."""
    faults: list[Fault] = []
    began = perf_counter()
    deadline_s = context.deadline_s
    for _ in range(2):
        machine = Watch()
        try:
            async with asyncio.timeout(deadline_s):
                verdict = checked(await verifier.verify(submission, context))
        except AgentError as error:
            return _zero(verifier, submission, fault_of(error, "verifier"), began, alarm=False)
        except TimeoutError:
            faults.append(Fault("verifier", "verifier", f"grading took longer than {deadline_s:g} s"))
            deadline_s *= PATIENCE if machine.full() else 1.0
        except Exception as error:
            faults.append(fault_of(error, "verifier", "verifier"))
        else:
            verdict = replace(verdict, cost_s=perf_counter() - began, verifier=verdict.verifier or _version(verifier))
            return Outcome(ending=submission.ending, grade="graded", score=verdict.score), verdict
    trouble = await _trouble(verifier, context)
    if trouble is None:
        return _zero(verifier, submission, faults[-1], began, alarm=True)
    kind: Grade = "infra_error" if trouble.blame == "infra" else "verifier_error"
    return Outcome(ending=submission.ending, grade=kind, score=None, fault=trouble), None


def checked(verdict: object) -> Verdict:
    """The verdict, if every number in it is one; a VerifierError otherwise."""
    if type(verdict) is not Verdict:
        raise VerifierError(f"a verifier returned {type(verdict).__name__} instead of a Verdict")
    numbers = {
        "score": verdict.score,
        **verdict.breakdown,
        **{f"turn {i}": s for i, s in enumerate(verdict.turn_scores)},
    }
    for name, number in numbers.items():
        if type(number) not in (int, float) or not math.isfinite(number):
            raise VerifierError(f"a verdict's {name} must be a finite number, got {number!r}")
    if not 0.0 <= verdict.score <= 1.0:
        raise VerifierError(f"a verdict's score must lie in [0, 1], got {verdict.score!r}")
    return verdict


async def _trouble(verifier: Verifier, context: Context) -> Fault | None:
    """What is wrong with the house, if anything is."""
    try:
        async with asyncio.timeout(PROBE_S):
            await verifier.probe(context)
    except TimeoutError:
        return Fault("verifier", "infra", f"the verifier's probe took longer than {PROBE_S:g} s")
    except (VerifierError, InfraError) as error:
        return fault_of(error, "verifier")
    except Exception as error:
        return fault_of(error, "verifier", "infra")
    return None


def _zero(
    verifier: Verifier, submission: Submission, fault: Fault, began: float, *, alarm: bool
) -> tuple[Outcome, Verdict]:
    words = (
        "alarm: the submission broke grading twice on fresh boxes" if alarm else "the submission broke its own grading"
    )
    verdict = Verdict(
        score=0.0,
        evidence=(f"{words} ({fault.cause.split(':')[0]})",),  # a message might hold an expected value; a type cannot
        cost_s=perf_counter() - began,
        verifier=_version(verifier),
    )
    return Outcome(ending=submission.ending, grade="graded", score=0.0, fault=fault, alarm=alarm), verdict


def _version(verifier: Verifier) -> str:
    try:
        return verifier.version
    except Exception as error:  # a version is a label: trouble with it must not cost a verdict
        return f"{type(verifier).__name__}-unversioned ({type(error).__name__})"
