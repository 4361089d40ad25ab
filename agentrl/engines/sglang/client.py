"""The HTTP client of one SGLang server: generation with token ids, and control calls."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import aiohttp

from agentrl.engines.base import Sampling
from agentrl.errors import EngineError
from agentrl.types import Finish

TURN_TIMEOUT_S = 3600.0
"""The longest that one turn may take to sample."""


STREAM_INTERVAL = 8
"""Tokens between two messages of a stream: each repeats all tokens before it, unless the server sends what is new."""


class ConnectionBroken(EngineError):
    """The connection to the server broke during a call."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A checked answer of `/generate`."""

    token_ids: list[int]
    logprobs: list[float]
    finish: Finish
    spans: list[tuple[str, int, int]]
    """(weight version, first token, last token + 1); empty when the server is too old to report it."""
    cached_tokens: int

    def versions(self, submitted: int, initial: int) -> list[int]:
        """Return the policy version of each token: `submitted` where the server says nothing, `initial` where it has
        only the name that it was started with."""
        versions = [submitted] * len(self.token_ids)
        for name, start, end in self.spans:
            number = int(name) if name.lstrip("-").isdigit() else initial
            versions[start:end] = [number] * (min(end, len(versions)) - start)
        return versions


class Client:
    """A client of one server, made inside a running event loop. `diagnose` explains a connection that broke."""

    def __init__(self, url: str, *, diagnose: Callable[[], str] = lambda: "") -> None:
        self.url = url.rstrip("/")
        self.load = 0
        """Requests under way."""
        self._diagnose = diagnose
        self._info: dict[str, Any] | None = None
        self._known: dict[str, bool] = {}
        self._interval = STREAM_INTERVAL
        # SGLang closes a connection after 5 idle seconds; ours closes first, so that no request meets a closing one.
        # aiohttp takes 0.3 ms of CPU per request with 256 connections open; httpx took 8 ms, its pool scans them all.
        self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0))

    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()

    async def call(
        self, path: str, body: Mapping[str, Any] | None, timeout_s: float = 120.0, *, method: str = "POST"
    ) -> dict[str, Any]:
        """Make one control call and return the JSON answer; raise EngineError with what the server said on failure."""
        status, text = await self._exchange(method, path, body, timeout_s)
        shown = text[:500].decode(errors="replace")
        try:
            content = json.loads(text)
        except ValueError:
            content = shown
        content = content if isinstance(content, dict) else {"message": content}
        if status >= 400 or content.get("success") is False:
            messages = (content.get(name) for name in ("message", "error_message", "error"))
            raise EngineError(f"SGLang at {self.url} refused {path} ({status}): {next(filter(None, messages), shown)}")
        return content

    async def info(self) -> dict[str, Any]:
        """Return the server's description of itself; asked once, since nothing that we read there changes."""
        if self._info is None:
            self._info = await self.call("/server_info", None, 60.0, method="GET")
        return self._info

    async def ranks(self) -> int:
        """Return over how many GPUs each tensor of the server is spread."""
        return int((await self.info()).get("tp_size") or 1)

    async def knows(self, path: str) -> bool:
        """Return whether the server has an endpoint; older ones lack some."""
        if path not in self._known:
            status, _ = await self._exchange("OPTIONS", path, None, 30.0)
            self._known[path] = status != 404
        return self._known[path]

    async def answers(self, timeout_s: float) -> bool:
        """Return whether the server says anything at all; it says so whatever it computes or waits for."""
        try:
            await self._exchange("OPTIONS", "/generate", None, timeout_s)
        except EngineError:
            return False
        return True

    async def _exchange(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        timeout_s: float,
        read: Callable[[aiohttp.ClientResponse], Awaitable[bytes]] = aiohttp.ClientResponse.read,
    ) -> tuple[int, bytes]:
        limit = aiohttp.ClientTimeout(total=timeout_s, connect=30.0)
        try:
            async with self._http.request(method, self.url + path, json=body, timeout=limit) as response:
                return response.status, await read(response)
        except TimeoutError as error:
            raise EngineError(f"SGLang at {self.url} did not answer {path} within {timeout_s:.0f} s") from error
        except aiohttp.ClientError as error:
            reason = f"the connection to SGLang at {self.url} broke during {path} ({type(error).__name__}: {error})"
            raise ConnectionBroken("\n".join(filter(None, [reason, self._diagnose()]))) from error

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, request_id: str, *, adapter: str | None = None
    ) -> Reply:
        """Continue `token_ids`. Cancelling this aborts the request on the server."""
        params: dict[str, Any] = {
            "max_new_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": not sampling.stop_token_ids,  # the server would stop at the model's own end token as well
            "no_stop_trim": True,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
        }
        if sampling.seed is not None:
            params["sampling_seed"] = sampling.seed & (1 << 63) - 1
        body: dict[str, Any] = {"input_ids": list(token_ids), "sampling_params": params, "rid": request_id}
        body |= {"return_logprob": True, "logprob_start_len": -1}
        if adapter is not None:
            body["lora_path"] = adapter
        stream: Stream | None = None
        if sampling.on_tokens is not None:
            stream = Stream(sampling.on_tokens, bool((await self.info()).get("incremental_streaming_output")))
            body["stream"] = True
            if self._interval:
                params["stream_interval"] = self._interval
        self.load += 1
        try:
            read = aiohttp.ClientResponse.read if stream is None else stream.read
            status, text = await self._exchange("POST", "/generate", body, TURN_TIMEOUT_S, read)
            if status == 400 and stream is not None and b"stream_interval" in text:  # an older server
                self._interval = 0
                del params["stream_interval"]
                status, text = await self._exchange("POST", "/generate", body, TURN_TIMEOUT_S, read)
        except asyncio.CancelledError:
            await asyncio.shield(asyncio.ensure_future(self._abort(request_id)))
            raise
        finally:
            self.load -= 1
        if status != 200:
            raise EngineError(f"SGLang at {self.url} answered {status}: {text[:500].decode(errors='replace')}")
        try:
            return _reply(json.loads(text) if stream is None else stream.whole(json.loads(text or b"null")))
        except ValueError as error:
            raise EngineError(f"SGLang sent a reply that is not JSON: {text[:300]!r}") from error

    async def _abort(self, request_id: str) -> None:
        with suppress(EngineError):  # a server that is gone has aborted it already
            await self._exchange("POST", "/abort_request", {"rid": request_id}, 10.0)

    async def abort_all(self) -> None:
        """Abort every request; each answers with the tokens it has."""
        await self._exchange("POST", "/abort_request", {"abort_all": True, "rid": ""}, 30.0)


class Stream:
    """Reads the messages of a streamed reply and tells of its tokens; `whole` is what a plain reply would have been."""

    def __init__(self, on_tokens: Callable[[Sequence[int]], None], incremental: bool) -> None:
        """`incremental`: each message holds only what is new."""
        self._on_tokens, self._incremental = on_tokens, incremental
        self._ids: list[int] = []
        self._pairs: list[Any] = []

    async def read(self, response: aiohttp.ClientResponse) -> bytes:
        """Return the last message, or the whole body of a reply that is no stream."""
        if response.status != 200 or response.content_type != "text/event-stream":
            return await response.read()
        rest = last = b""
        async for part in response.content.iter_any():
            *lines, rest = (rest + part).split(b"\n")
            messages = [line[6:] for line in lines if line.startswith(b"data: ") and line != b"data: [DONE]"]
            if not messages:
                continue
            last = messages[-1]
            for message in messages if self._incremental else messages[-1:]:
                self._hear(message)
        return last

    def _hear(self, message: bytes) -> None:
        start = message.find(b'"output_ids":[')  # in a string of the message its quotes would be escaped
        if start < 0:
            return
        if self._incremental:
            content = json.loads(message)
            self._ids += content["output_ids"]
            self._pairs += content["meta_info"].get("output_token_logprobs") or []
        else:
            self._ids = json.loads(message[start + 13 : message.index(b"]", start) + 1])
        if self._ids:
            self._on_tokens(self._ids)

    def whole(self, content: Any) -> dict[str, Any]:
        """Return the last message as a plain reply says it; raise EngineError where the stream ended otherwise."""
        error = content.get("error") if isinstance(content, dict) else {"message": "a stream without messages"}
        reason = {} if error else (content.get("meta_info") or {}).get("finish_reason") or {}
        if reason.get("type") == "abort" and (reason.get("status_code") or 0) >= 400:
            error = reason
        if error:
            raise EngineError(
                f"SGLang answered: {str(error.get('message') if isinstance(error, dict) else error)[:500]}"
            )
        if not reason:
            raise ConnectionBroken("SGLang ended a stream before the turn was over")
        if self._incremental:
            content["output_ids"], content["meta_info"]["output_token_logprobs"] = self._ids, self._pairs
        return content  # type: ignore[no-any-return]


def after(tokens: Sequence[int], tell: Callable[[Sequence[int]], None]) -> Callable[[Sequence[int]], None]:
    """Return what tells of tokens that continue those of an aborted request."""
    before = tuple(tokens)
    return lambda new: tell([*before, *new])


def _reply(content: dict[str, Any]) -> Reply:
    try:
        meta = content["meta_info"]
        pairs = meta.get("output_token_logprobs") or []
        kind = (meta.get("finish_reason") or {}).get("type", "abort")
        spans = [(str(s["version"]), int(s["start"]), int(s["end"])) for s in meta.get("weight_versions") or []]
        reply = Reply(
            token_ids=[int(pair[1]) for pair in pairs],
            logprobs=[min(float(pair[0]), 0.0) for pair in pairs],
            finish=kind if kind in ("stop", "length") else "abort",
            spans=spans,
            cached_tokens=int(meta.get("cached_tokens") or 0),
        )
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise EngineError(f"SGLang sent a reply that cannot be read ({error!r}): {str(content)[:300]}") from error
    ids = content.get("output_ids")
    if ids is not None and len(ids) != len(reply.token_ids):
        raise EngineError(f"SGLang sent {len(ids)} tokens with {len(reply.token_ids)} logprobs")
    return reply
