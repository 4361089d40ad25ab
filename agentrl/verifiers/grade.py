"""The boundary around a verifier: whatever it does, the result is an outcome that training can use.

    verify ──ok──────────────────────────────────────────────> graded, the verdict's score
       │ AgentError ─────────────────────────────────────────> graded, 0
       │ Outage, BudgetSpent (no submission can cause them) ─> infra_error or verifier_error: no score
       │ anything else, or past the deadline
       └─> verify again, fresh sandboxes ──ok────────────────> graded, the verdict's score
              └─ broke again ─> probe (no submission in it)
                                   ├─ passes ────────────────> graded, 0, alarm: the submission breaks grading
                                   └─ fails ─────────────────> infra_error or verifier_error: no score

So an agent can never obtain a retry: the one retry happens here, and what breaks twice while the system works scores 0.
Deadlines do not run while the event loop stands still. Grading that was late while no processor was free, or while this
process itself was at work all the time, may only have waited: the retry then has a longer deadline.
"""

from __future__ import annotations

import math
from dataclasses import replace
from time import perf_counter

from agentrl.errors import AgentError, BudgetSpent, Fault, InfraError, Outage, VerifierError, fault_of
from agentrl.types import Grade, Outcome, Verdict
from agentrl.verifiers.base import Context, Submission, Verifier
from agentrl.verifiers.busy import ProcessorWatch, loop_timeout

PROBE_S = 30.0
"""How long the probe may take before the system counts as broken."""
BUSY_FACTOR = 4.0
"""How many times longer the deadline of the second attempt is if the first was late on a busy machine."""


async def grade(verifier: Verifier, submission: Submission, context: Context) -> tuple[Outcome, Verdict | None]:
    """Grade one submission. It never raises, except for cancellation; without a verdict (`None`) there is no score."""
    faults: list[Fault] = []
    start = perf_counter()
    deadline_s = context.deadline_s
    for _ in range(2):
        machine = ProcessorWatch()
        try:
            async with loop_timeout(deadline_s):
                verdict = checked(await verifier.verify(submission, context))
        except AgentError as error:
            return _zero(verifier, submission, fault_of(error, "verifier"), start, alarm=False)
        except (Outage, BudgetSpent) as error:
            return _ungraded(submission, fault_of(error, "verifier")), None
        except TimeoutError:
            faults.append(Fault("verifier", "verifier", f"grading took longer than {deadline_s:g} s"))
            deadline_s *= BUSY_FACTOR if machine.busy() else 1.0
        except Exception as error:
            faults.append(fault_of(error, "verifier", "verifier"))
        else:
            verdict = replace(verdict, cost_s=perf_counter() - start, verifier=verdict.verifier or _version(verifier))
            return Outcome(ending=submission.ending, grade="graded", score=verdict.score), verdict
    fault = await system_fault(verifier, context)
    if fault is None:
        return _zero(verifier, submission, faults[-1], start, alarm=True)
    return _ungraded(submission, fault), None


def checked(verdict: object) -> Verdict:
    """Return the verdict if every number in it is finite and its scores in range; otherwise raise VerifierError."""
    if type(verdict) is not Verdict:
        raise VerifierError(f"a verifier returned {type(verdict).__name__} instead of a Verdict")
    turns = {f"turn {i}": score for i, score in enumerate(verdict.turn_scores)}
    numbers = {"score": verdict.score, **verdict.breakdown, **turns}
    for name, number in numbers.items():
        if type(number) not in (int, float) or not math.isfinite(number):
            raise VerifierError(f"a verdict's {name} must be a finite number, got {number!r}")
    for name, number in {"score": verdict.score, **turns}.items():
        if not 0.0 <= number <= 1.0:
            raise VerifierError(f"a verdict's {name} must lie in [0, 1], got {number!r}")
    return verdict


async def system_fault(verifier: Verifier, context: Context) -> Fault | None:
    """Return what is wrong with the system, if anything."""
    try:
        async with loop_timeout(PROBE_S):
            await verifier.probe(context)
    except TimeoutError:
        return Fault("verifier", "infra", f"the verifier's probe took longer than {PROBE_S:g} s")
    except (VerifierError, InfraError) as error:
        return fault_of(error, "verifier")
    except Exception as error:
        return fault_of(error, "verifier", "infra")
    return None


def _ungraded(submission: Submission, fault: Fault) -> Outcome:
    kind: Grade = "infra_error" if fault.blame == "infra" else "verifier_error"
    return Outcome(ending=submission.ending, grade=kind, score=None, fault=fault)


def _zero(
    verifier: Verifier, submission: Submission, fault: Fault, start: float, *, alarm: bool
) -> tuple[Outcome, Verdict]:
    what = "alarm: the submission broke grading twice on fresh sandboxes" if alarm else "the submission broke grading"
    evidence = (f"{what} ({fault.cause.split(':')[0]})",)  # a message might hold an expected value; a type cannot
    verdict = Verdict(score=0.0, evidence=evidence, cost_s=perf_counter() - start, verifier=_version(verifier))
    return Outcome(ending=submission.ending, grade="graded", score=0.0, fault=fault, alarm=alarm), verdict


def _version(verifier: Verifier) -> str:
    try:
        return verifier.version
    except Exception as error:  # a version is a label: a fault in it must not cost a verdict
        return f"{type(verifier).__name__}-unversioned ({type(error).__name__})"
