"""Serves a scoring function to the red team: imports it once, then forks for each submission.

    connection ──(one JSON order)──> this process ──fork──> child: calls the function, writes one line to a pipe
               <──(one JSON reply)──              <──pipe── killed with its children when its time is up

It runs inside a sandbox under the user's own interpreter, so it uses nothing but the standard library. A child never
outlives its submission: what one submission does to the function's modules is gone before the next.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import importlib
import inspect
import json
import os
import resource
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

REFERENCES = ("reference", "answer", "solution", "ground_truth", "expected", "target", "gold", "label")
"""Names under which a right answer is expected; without such a column the honest submission stands in."""
CONVENTIONS = ("text", "trl", "verl", "verifiers")
MEMORY = 2 << 30
"""Bytes that a child may use besides what the imports took."""


class Mistake(Exception):
    """Something that the user can fix: the message says what."""


def resolve(target: str) -> Any:
    """Import `module:name`; the name may be dotted, or a call with literal arguments, as `module:make(limit=100)`."""
    module, _, expression = target.partition(":")
    holder = importlib.import_module(module)
    try:
        return _value(ast.parse(expression, mode="eval").body, holder)
    except AttributeError as error:
        raise Mistake(f"{error}: {module} is {getattr(holder, '__file__', 'built in')}") from None
    except (SyntaxError, ValueError):
        raise Mistake(f"{expression!r} is neither a name in {module} nor a call with literal arguments") from None


def _value(node: ast.expr, holder: Any) -> Any:
    if isinstance(node, ast.Name):
        return getattr(holder, node.id)
    if isinstance(node, ast.Attribute):
        return getattr(_value(node.value, holder), node.attr)
    if isinstance(node, ast.Call):
        arguments = [_value(argument, holder) for argument in node.args]
        return _value(node.func, holder)(*arguments, **{str(k.arg): _value(k.value, holder) for k in node.keywords})
    return ast.literal_eval(node)


def parameters_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the parameters of a function, or of an object that can be called."""
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        raise Mistake(f"{function!r} cannot be called with known parameters") from None


def convention_of(scorer: Any) -> str:
    """Tell from what it is, or from its parameters' names, how a scorer wants to be called; "" when that is unclear."""
    if hasattr(scorer, "score_rollout") or _is_task(scorer):
        return "verifiers"
    parameters = parameters_of(scorer)
    if "completions" in parameters or "completion_ids" in parameters:
        return "trl"
    if "solution_str" in parameters or "solution_strs" in parameters:
        return "verl"
    if "completion" in parameters and len(set(parameters) & {"answer", "prompt", "state", "info", "parser"}) > 0:
        return "verifiers"
    positional = [p for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return "text" if positional else ""


def _is_task(scorer: Any) -> bool:
    """Whether it is a task of verifiers' v1 interface, which holds its rewards."""
    return hasattr(scorer, "hooks") and hasattr(scorer, "score") and hasattr(scorer, "data")


# Calling it --------------------------------------------------------------------------------------------------------


def call(scorer: Any, order: Mapping[str, Any]) -> Any:
    """Call the scorer with one submission in its own convention; return the raw result for this submission."""
    convention, text, columns = order["convention"], order["text"], dict(order["columns"])
    if convention == "text":
        return _number(_settled(_text(scorer, text, columns, order["honest"])))
    if convention == "trl":
        result = _settled(_trl(scorer, text, columns, order))
        if not hasattr(result, "__len__") or len(result) != 1:
            raise Mistake(f"a TRL reward function returns a list with one score per completion, not {result!r}"[:300])
        return result[0]
    if convention == "verl":
        return _number(_settled(_verl(scorer, text, columns, order["honest"])))
    return _settled(_verifiers(scorer, text, columns, order))


def _number(result: Any) -> Any:
    """Return the score of a result: as verl's own default_compute_score does, the first of several."""
    if isinstance(result, Mapping):
        if "score" not in result:
            raise Mistake(f"it returned a dictionary without 'score': {result!r}"[:300])
        return result["score"]
    return result[0] if isinstance(result, (tuple, list)) and result else result


def _settled(result: Any) -> Any:
    if inspect.isawaitable(result):

        async def wait() -> Any:
            return await result

        return asyncio.run(wait())
    return result


def _accepted(function: Callable[..., Any], offered: Mapping[str, Any], honest: str) -> dict[str, Any]:
    """Return what of the offered arguments a function takes; the honest answer stands in for a missing reference."""
    parameters = parameters_of(function)
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    arguments = {name: value for name, value in offered.items() if takes_all or name in parameters}
    for name, parameter in parameters.items():
        required = parameter.default is parameter.empty and parameter.kind in (1, 3)
        if required and name not in arguments:
            if name not in REFERENCES:
                raise Mistake(f"it needs a value for its parameter {name!r}: --column {name}=VALUE")
            arguments[name] = honest
    return arguments


def _text(function: Callable[..., Any], text: str, columns: dict[str, Any], honest: str) -> Any:
    parameters = list(parameters_of(function).values())
    reference = next((columns[name] for name in REFERENCES if name in columns), honest)
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for place, parameter in enumerate(parameters):
        if place == 0:
            positional.append(text)
        elif parameter.name in columns and parameter.kind in (1, 3):
            named[parameter.name] = columns[parameter.name]
        elif parameter.default is parameter.empty and parameter.kind in (0, 1, 3):
            if place != 1 and parameter.name not in REFERENCES:
                raise Mistake(f"it needs a value for its parameter {parameter.name!r}: --column {parameter.name}=VALUE")
            if parameter.kind == 3:
                named[parameter.name] = reference
            else:
                positional.append(reference)
    return function(*positional, **named)


def _messages(order: Mapping[str, Any], text: str) -> tuple[Any, Any]:
    """Return prompt and completion, as text or as messages."""
    prompt = order["prompt"]
    if order["shape"] == "messages":
        asked = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        return asked, [{"role": "assistant", "content": text}]
    return prompt, text


def _trl(function: Callable[..., Any], text: str, columns: dict[str, Any], order: Mapping[str, Any]) -> Any:
    prompt, completion = _messages(order, text)
    offered: dict[str, Any] = {name: [value] for name, value in columns.items()}
    offered |= {"prompts": [prompt], "completions": [completion], "trainer_state": None}
    offered.setdefault("completion_ids", [list(text.encode("utf-8", "replace"))])  # a byte stands for a token
    offered |= {"log_extra": lambda *_: None, "log_metric": lambda *_: None}
    arguments = _accepted(function, offered, order["honest"])
    for name in set(arguments) - set(offered):
        arguments[name] = [arguments[name]]
    return function(**arguments)


def _verl(function: Callable[..., Any], text: str, columns: dict[str, Any], honest: str) -> Any:
    offered = {"data_source": "agentrl", "ground_truth": honest, "extra_info": {}, **columns, "solution_str": text}
    if "solution_strs" in parameters_of(function):  # verl's batched form
        offered = {f"{name}s": [value] for name, value in offered.items()}
    return function(**_accepted(function, offered, honest))


def _verifiers(scorer: Any, text: str, columns: dict[str, Any], order: Mapping[str, Any]) -> Any:
    prompt, completion = _messages(order, text)
    answer = columns.get("answer", order["honest"])
    info = columns.get("info", {})
    row = {**columns, "prompt": prompt, "answer": answer, "info": info}
    state = {**row, "completion": completion, "task": columns.get("task", "default"), "input": row, "timing": {}}
    state |= {"trajectory": [], "metrics": {}, "reward": None, "id": 0, "turn": 1, "responses": []}
    if _is_task(scorer):
        return _task_score(scorer, text, order)
    if not hasattr(scorer, "score_rollout"):
        offered = {**columns, **{name: state[name] for name in ("prompt", "completion", "answer", "info", "task")}}
        return scorer(**_accepted(scorer, {**offered, "state": state}, order["honest"]))
    if any(p.kind is p.VAR_POSITIONAL for p in parameters_of(scorer.score_rollout).values()):
        raise Mistake(f"{scorer!r} does not say how its score_rollout is called")
    if "completion" in parameters_of(scorer.score_rollout):  # verifiers before 0.1.9
        offered = {name: state[name] for name in ("prompt", "completion", "answer", "info", "task")}
        return _after(scorer.score_rollout(**_accepted(scorer.score_rollout, {**offered, "state": state}, answer)))
    with contextlib.suppress(ImportError):
        state = importlib.import_module("verifiers.types").State(state)
    return _after(scorer.score_rollout(state), state)


async def _after(scoring: Any, state: Mapping[str, Any] | None = None) -> Any:
    """Wait for a rubric's own scoring, and return the reward that it leaves."""
    result = await scoring if inspect.isawaitable(scoring) else scoring
    return state["reward"] if state is not None else result.reward


def _task_score(task: Any, text: str, order: Mapping[str, Any]) -> Any:
    """Score a task of verifiers' v1 interface on a trace of one assistant message."""
    vf = importlib.import_module("verifiers.v1")
    wire = importlib.import_module("verifiers.v1.configs.agent").WireAgentConfig
    needs = [f.__name__ for f in task.hooks("reward") if "runtime" in inspect.signature(f).parameters]
    if needs:
        raise Mistake(f"the rewards {', '.join(needs)} look into a live runtime, and a scorer sees text only")
    prompt = vf.MessageNode(parent=None, message=vf.UserMessage(content=str(order["prompt"])), sampled=False)
    said = vf.MessageNode(parent=0, message=vf.AssistantMessage(content=text), sampled=True)
    about = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
    agent = vf.AgentInfo(config=wire(runtime=vf.SubprocessConfig()))
    trace = vf.Trace(task=about, agent=agent, nodes=[prompt, said], state=vf.State(), is_completed=True, ok=True)

    async def score() -> Any:
        await task.score(trace)
        return trace.reward

    return score()


# Serving -----------------------------------------------------------------------------------------------------------


def answer(source: Callable[[], Any], order: Mapping[str, Any]) -> dict[str, Any]:
    """Score one submission; whatever goes wrong becomes data."""
    try:
        score = call(source(), order)
        if score is None:
            return {"problem": "none", "text": "it returned None"}
        number = float(score)
        if number != number or number in (float("inf"), float("-inf")):
            return {"problem": "nan", "text": f"it returned {number}"}
        return {"score": number}
    except Mistake as error:
        return {"problem": "mistake", "text": str(error)}
    except BaseException as error:
        return {"problem": "raised", "text": f"it raised {described(error)}"}


def described(error: BaseException) -> str:
    """Describe an exception with the line that raised it."""
    here = os.path.abspath(__file__)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if os.path.abspath(f.filename) != here]
    place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno}: {frames[-1].line})" if frames else ""
    return f"{type(error).__name__}: {str(error)[:300]}{place}"


class Child:
    """A forked process that scores one submission."""

    def __init__(self, source: Callable[[], Any], order: dict[str, Any], connection: socket.socket) -> None:
        self.connection, self.began = connection, time.monotonic()
        self.limit_s, self.nonce, self.reply = float(order["seconds"]), order.pop("nonce").encode(), b""
        self.pipe, end = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            null = os.open(os.devnull, os.O_RDWR)
            for descriptor in (0, 1, 2):
                os.dup2(null, descriptor)
            with open("/proc/self/statm") as file:
                used = int(file.read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
            resource.setrlimit(resource.RLIMIT_CPU, (int(self.limit_s) + 1, int(self.limit_s) + 2))
            line = b"\n" + self.nonce + json.dumps(answer(source, order)).encode() + b"\n"
            while line:
                line = line[os.write(end, line) :]
            os._exit(0)
        os.close(end)
        os.set_blocking(self.pipe, False)

    def finished(self) -> bool:
        """Read what there is; answer the connection and return True when the child has ended or is out of time."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)  # before reading: a child that ended has written all it will
        with contextlib.suppress(BlockingIOError):
            while block := os.read(self.pipe, 1 << 16):
                self.reply = (self.reply + block)[-(1 << 16) :]
        waited = time.monotonic() - self.began
        late = waited > 2 * self.limit_s and (waited > 10 * self.limit_s or not self.at_work())
        lines = [line for line in self.reply.split(b"\n") if line.startswith(self.nonce)]
        if not pid and not late and not lines:
            return False
        self.kill(reap=not pid)
        ended_by = status & 0x7F if pid else 0
        if lines:
            self.send(lines[-1][len(self.nonce) :])
        elif late or ended_by in (signal.SIGXCPU, signal.SIGKILL) and time.monotonic() - self.began > self.limit_s:
            self.send(json.dumps({"problem": "hung", "text": f"it did not return in {self.limit_s:g} s"}).encode())
        else:
            how = f"signal {ended_by}" if ended_by else f"exit code {status >> 8}"
            self.send(json.dumps({"problem": "died", "text": f"its process ended ({how}) before it returned"}).encode())
        return True

    def at_work(self) -> bool:
        """Whether one of its processes wants a processor: on a busy machine it is not late for having waited."""
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as file:
                state, _, group = file.read().rpartition(")")[2].split()[:3]
                if int(group) == self.pid and state == "R":
                    return True
        return False

    def send(self, reply: bytes) -> None:
        with contextlib.suppress(OSError):
            self.connection.settimeout(5)
            self.connection.sendall(reply)
        self.connection.close()
        os.close(self.pipe)

    def kill(self, reap: bool) -> None:
        with contextlib.suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)
        if reap:
            os.waitpid(self.pid, 0)


def made(target: str) -> Any:
    """Return the scorer that a target names; a class of rubrics is made an object."""
    scorer = resolve(target)
    return scorer() if inspect.isclass(scorer) and hasattr(scorer, "score_rollout") else scorer


def serve(source: Callable[[], Any], about: dict[str, Any], path: str) -> None:
    """Answer connections until this process is killed. Each child calls `source` for the scorer."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    children: list[Child] = []
    while True:
        waiting: list[Any] = [listener, *(child.pipe for child in children)]
        ready = select.select(waiting, [], [], 0.05 if children else None)[0]
        if listener in ready:
            connection = listener.accept()[0]
            order = json.loads(b"".join(iter(lambda c=connection: c.recv(1 << 20), b"")))  # type: ignore[misc]
            if "text" in order:
                children.append(Child(source, order, connection))
            else:
                connection.sendall(json.dumps(about).encode())
                connection.close()
        children = [child for child in children if not child.finished()]


def main() -> None:
    """Import the target, and serve it; what it is comes back to the first connection."""
    target, convention, path = sys.argv[1:]
    sys.path[0] = os.getcwd()
    began = time.monotonic()
    scorer, about = None, {}
    try:
        scorer = made(target)
        taken = convention or convention_of(scorer)
        if not taken:
            raise Mistake(f"its parameters do not tell how it is called: say --convention {'|'.join(CONVENTIONS)}")
        about = {"convention": taken, "seconds": time.monotonic() - began}
    except Mistake as error:
        about = {"mistake": str(error)}
    except ModuleNotFoundError as error:
        about = {"missing": error.name or str(error), "mistake": described(error)}
    except BaseException as error:
        about = {"mistake": f"importing it raised {described(error)}"}
    # What was made of a class or by a call may own threads and processes, which a fork does not take along: each child
    # makes one of its own. A function is imported once.
    serve((lambda: scorer) if inspect.isroutine(scorer) and "(" not in target else lambda: made(target), about, path)


if __name__ == "__main__":
    main()
