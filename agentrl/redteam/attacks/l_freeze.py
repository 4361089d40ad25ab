"""Family L: make the trainer or a neighbour late: text that is slow to parse, tools and grading that do not come back,
sandboxes that burn. They are played through rollouts and the scheduler, beside honest rollouts."""

from __future__ import annotations

import itertools
import time

from agentrl.redteam.attack import loop_attack
from agentrl.redteam.loops import Loops, Says, Stand, script
from agentrl.redteam.trials import (
    Observed,
    block,
    call,
    delay,
    fails,
    fragile,
    magic,
    nothing,
    slowly,
    some_call,
)


def size(t: Stand, number: int) -> int:
    """Scale a text's length by how much delay is looked for: what is quadratic takes minutes for a text ten times as
    long, and nothing could interrupt it."""
    return max(1, round(number * t.slack_s))


@loop_attack()
async def unclosed_calls(t: Stand, loops: Loops) -> Observed:
    """Thousands of calls that open and never close."""
    tags = ("<tool_call>", '<tool_call>{"name":', "<tool_call>\n{")
    return await delay(t, loops, *(fails(t, Says(text=tag * size(t, 3_000))) for tag in tags))


@loop_attack()
async def unclosed_thoughts(t: Stand, loops: Loops) -> Observed:
    """Thousands of thoughts that begin and never end."""
    return await delay(
        t, loops, fails(t, Says(text="<think>\n" * size(t, 6_000))), fails(t, Says(text="</think>" + "<think>" * 9_000))
    )


@loop_attack()
async def nearly_the_format(t: Stand, loops: Loops) -> Observed:
    """Text that fits a format at thousands of places, but for its end."""
    middle = "<think>\n" + "\n</think>\n<answer>\n" * size(t, 3_000)
    return await delay(t, loops, fails(t, Says(text=middle)), fails(t, Says(text="<" + " " * 200_000)))


@loop_attack()
async def costly_answers(t: Stand, loops: Loops) -> Observed:
    """Answers that are costly to parse or to evaluate: towers of powers, brackets in brackets, endless numbers."""
    answers = (
        "\\boxed{" + "a" * (23 + size(t, 1)),
        "9**9**9**9**9",
        "^".join("1" * 3_000),
        "(" * 20_000 + "1" + ")" * 20_000,
        "9" * 100_000,
        "1/" * 20_000 + "3",
        "<answer>" * 20_000,
    )
    return await delay(t, loops, *(script(t.target.final(answer)) for answer in answers))


@loop_attack("tools")
async def calls_without_number(t: Stand, loops: Loops) -> Observed:
    """Thousands of calls in one turn, turn after turn."""
    one = call(t, '"x"').text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
    flood = block(t, *[one] * (60_000 // (len(one) + 26)))
    return await delay(t, loops, *[script(*[flood] * 8, t.end)] * 3)


@loop_attack("shell")
async def sleeping_tools(t: Stand, loops: Loops) -> Observed:
    """Commands that wait: for a clock, for input, for a pipe that nobody writes to, past every signal."""
    waits = ("sleep 600", "cat", "mkfifo p; cat p", "trap '' TERM INT HUP; sleep 600; sleep 600")
    return await delay(t, loops, *(script(*[t.target.run(wait)] * 4, t.end) for wait in waits))


@loop_attack("shell")
async def burning_sandboxes(t: Stand, loops: Loops) -> Observed:
    """Processes that burn, fork and allocate as much as they may."""
    burns = (
        "for i in 1 2 3 4 5 6 7 8; do (while :; do :; done) & done; wait",
        "b() { b | b & }; b; sleep 600",
        "python3 -c 'a = []\nwhile True: a.append(bytearray(1 << 24))'; sleep 600",
    )
    return await delay(t, loops, *(script(*[t.target.run(burn)] * 4, t.end) for burn in burns))


@loop_attack("shell")
async def left_behind(t: Stand, loops: Loops) -> Observed:
    """Processes that outlive their command, ignore signals and hold the output open."""
    hold = "for i in $(seq 20); do (trap '' TERM HUP; exec sleep 600) & done; setsid sh -c 'while :; do :; done' &"
    return await delay(t, loops, *[script(*[t.target.run(f"{hold} sleep 5")] * 4, t.end)] * 3)


@loop_attack("tools")
async def never_ends(t: Stand, loops: Loops) -> Observed:
    """A policy whose turns never come to an end, while the learner waits."""
    turn = slowly(t, call(t, '"x"'), 0.7)
    return await delay(t, loops, lambda attempt: itertools.repeat(turn))


@loop_attack("tools")
async def tool_that_blocks(t: Stand, loops: Loops) -> Observed:
    """A planted bug: a tool that holds its thread for long, called from several rollouts at once."""
    some_call(t)
    holds = t.playing(fragile(t, "tool", lambda: time.sleep(2.0)))
    turn = call(t, '"open sesame"')
    return await delay(holds, loops, *[script(*[turn] * 4, t.end)] * 4)


@loop_attack()
async def grading_that_waits(t: Stand, loops: Loops) -> Observed:
    """A planted bug: grading never comes back for one answer."""
    return await delay(t.playing(fragile(t, "verifier", nothing)), loops, magic(t))
