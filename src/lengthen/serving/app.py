"""The web server of `lengthen serve`: OpenAI's completions, the model list, statistics, and a page to try it.

    POST /v1/completions    JSON, or server-sent events with "stream": true
    GET  /v1/models         the one model that there is
    GET  /stats             sequences, cache sizes and tokens so far
    GET  /                  page.html

Pages of other origins cannot use it: only JSON is accepted, for which a browser sends a CORS preflight that is never
allowed, and a request with another `Origin` is refused. On a loopback address only the host names of this machine are
answered, against DNS rebinding.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from socket import socket
from typing import Any
from urllib.parse import urlsplit

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import Request as WebRequest
    from starlette.responses import HTMLResponse, JSONResponse, Response
    from starlette.routing import Route
except ImportError as problem:
    raise ImportError(f"the server needs starlette and uvicorn: pip install starlette uvicorn ({problem})") from None

from lengthen.data.tokenizer import Tokenizer
from lengthen.serving.answer import Answer, Choice, Piece
from lengthen.serving.engine import Engine, FullError, Job, Told
from lengthen.serving.request import RefusedError, Request, checked, parsed

LOOPBACK = ("localhost", "127.0.0.1", "::1")
BODY = 1 << 20  # bytes of a request
PATIENCE = 3  # seconds that answers have to end in when the server stops
PAGE = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
}

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class GoneError(Exception):
    """The client has left."""


class Work:
    """A request that is being done: what the engine's thread tells of it, and whether the client is still there."""

    def __init__(self, request: Request, answer: Answer, tokenizer: Tokenizer) -> None:
        self.request, self.answer = request, answer
        self.loop, self.queue = asyncio.get_running_loop(), asyncio.Queue[Piece | RefusedError]()
        self.open = len(request.prompts) * request.n  # choices that have not ended
        self.jobs: list[Job] = []
        for number, prompt in enumerate(request.prompts):
            first = number * request.n
            choices = [Choice(first + i, request, tokenizer, request.echoes[number]) for i in range(request.n)]
            if request.max_tokens:
                self.jobs.append(self._job(prompt, choices, tokenizer))
            else:
                for choice in choices:
                    self.queue.put_nowait(choice.finish())

    def _job(self, prompt: list[int], choices: list[Choice], tokenizer: Tokenizer) -> Job:
        def put(item: Piece | RefusedError) -> None:
            with suppress(RuntimeError):  # the loop has ended, and nobody waits
                self.loop.call_soon_threadsafe(self.queue.put_nowait, item)

        def take(told: Told) -> bool:
            piece = choices[told.sample].take(told)
            if piece is not None:
                put(piece)
            return piece is not None and piece.ended is not None

        return Job(
            prompt,
            self.request.max_tokens,
            take,
            lambda problem: put(RefusedError(500, problem)),
            sampling=self.request.sampling,
            seed=self.request.seed,
            samples=self.request.n,
            stop=frozenset() if tokenizer.end_id is None else frozenset([tokenizer.end_id]),
            logprobs=self.request.logprobs,
        )

    async def pieces(self, receive: Receive) -> AsyncIterator[list[Piece]]:
        """Yield what there is as it comes, until all choices have ended; raise `GoneError` if the client leaves."""
        leaving = asyncio.ensure_future(receive())
        try:
            while self.open:
                coming = asyncio.ensure_future(self.queue.get())
                await asyncio.wait({leaving, coming}, return_when=asyncio.FIRST_COMPLETED)
                if leaving.done():
                    coming.cancel()
                    raise GoneError
                found = [coming.result()]
                while not self.queue.empty():
                    found.append(self.queue.get_nowait())
                pieces = []
                for one in found:
                    if isinstance(one, RefusedError):
                        raise one
                    self.answer.add(one)
                    self.open -= one.ended is not None
                    pieces.append(one)
                yield pieces
        finally:
            leaving.cancel()
            for job in self.jobs:
                job.gone = True


class Events(Response):
    """An answer as server-sent events."""

    media_type = "text/event-stream"

    def __init__(self, work: Work) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self.work = work

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Send it, as it comes."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})

        async def write(*events: dict[str, Any] | str, more: bool = True) -> None:
            lines = [f"data: {one if isinstance(one, str) else json.dumps(one)}\n\n" for one in events]
            await send({"type": "http.response.body", "body": "".join(lines).encode(), "more_body": more})

        answer, asked = self.work.answer, self.work.request
        pieces = self.work.pieces(receive)
        try:
            async for found in pieces:
                await write(*(answer.json([one], asked.continuous_usage) for one in found))
            await write(*([answer.json([], True)] if asked.usage else []), "[DONE]", more=False)
        except RefusedError as refused:
            await write(refused.body, more=False)
        except GoneError:
            pass
        finally:
            await pieces.aclose()  # type: ignore[attr-defined]


class Service:
    """The routes of one model."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, name: str, body: int = BODY) -> None:
        self.engine, self.tokenizer, self.name, self.body = engine, tokenizer, name, body

    async def completions(self, request: WebRequest) -> Response:
        """Answer a prompt, or several."""
        given = parsed(await self._body(request))
        limits, vocabulary = self.engine.limits, self.engine.model.config.vocabulary
        asked = await asyncio.to_thread(checked, given, self.name, self.tokenizer, vocabulary, limits.sequences)
        work = Work(asked, Answer(f"cmpl-{secrets.token_hex(12)}", self.name, asked), self.tokenizer)
        try:
            self.engine.submit(work.jobs)
        except FullError as full:
            raise RefusedError(429, str(full), code="rate_limit_exceeded", kind="rate_limit_error") from None
        except ValueError as problem:
            raise RefusedError(400, str(problem), str(problem).partition(":")[0]) from None
        except RuntimeError as problem:
            raise RefusedError(503, str(problem)) from None
        if asked.stream:
            return Events(work)
        try:
            async for _ in work.pieces(request.receive):
                pass
        except GoneError:
            return Response(status_code=499)  # nobody reads it
        whole = [piece for _, piece in sorted(work.answer.whole.items())]
        return JSONResponse(work.answer.json(whole, True))

    async def _body(self, request: WebRequest) -> bytes:
        """Return a request's body, of the size and type that are taken."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise RefusedError(415, f"content-type: expected application/json, got {kind or 'none'}")
        found = bytearray()
        async for part in request.stream():
            found += part
            if len(found) > self.body:
                raise RefusedError(
                    413, f"body: expected at most {self.body:,} bytes, got more", code="request_too_large"
                )
        return bytes(found)

    async def models(self, request: WebRequest) -> Response:
        """List the model."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def one_model(self, request: WebRequest) -> Response:
        """Return the model, by its name."""
        asked = request.path_params["name"]
        if asked != self.name:
            raise RefusedError(404, f"model: expected {self.name!r}, got {asked!r}", "model", "model_not_found")
        return JSONResponse(self._model())

    def _model(self) -> dict[str, Any]:
        return {"id": self.name, "object": "model", "created": 0, "owned_by": "lengthen"}

    async def stats(self, request: WebRequest) -> Response:
        """Return what the engine holds."""
        policy = {key: self.engine.options.get(key) for key in ("policy", "mode")}
        limits = asdict(self.engine.limits)
        return JSONResponse({"model": self.name, **policy, **asdict(self.engine.stats), "limits": limits})

    async def page(self, request: WebRequest) -> Response:
        """Return the page."""
        return HTMLResponse(Path(__file__).with_name("page.html").read_text(encoding="utf-8"), headers=PAGE)


class Guard:
    """Refuses requests under another name than this machine's, and those that pages of other sites send."""

    def __init__(self, app: Any, names: tuple[str, ...] | None) -> None:
        self.app, self.names = app, names

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] == "http":
            headers = {key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]}
            refused = self._refused(headers.get("host", ""), headers.get("origin"))
            if refused is not None:
                await JSONResponse(refused.body, refused.status)(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _refused(self, host: str, origin: str | None) -> RefusedError | None:
        try:
            name, page = urlsplit(f"//{host}").hostname, None if origin is None else urlsplit(origin).netloc
        except ValueError:
            return RefusedError(400, "host: expected a name, got something else")
        if self.names is not None and name not in self.names:
            return RefusedError(403, f"host: expected {' or '.join(dict.fromkeys(self.names))}, got {host!r}")
        if page is not None and page != host:
            return RefusedError(403, f"origin: expected a page of this server or none, got {origin!r}")
        return None


def application(service: Service, names: tuple[str, ...] | None = LOOPBACK) -> Any:
    """Return the ASGI application; it answers under these names alone, or with None under any."""

    def refuse(request: WebRequest, problem: Exception) -> Response:
        if isinstance(problem, HTTPException):
            problem = RefusedError(problem.status_code, f"{request.method} {request.url.path}: {problem.detail}")
        elif not isinstance(problem, RefusedError):
            problem = RefusedError(500, f"{type(problem).__name__}: {problem}")
        return JSONResponse(problem.body, problem.status)

    routes = [
        Route("/v1/completions", service.completions, methods=["POST"]),
        Route("/v1/models", service.models),
        Route("/v1/models/{name:path}", service.one_model),
        Route("/stats", service.stats),
        Route("/", service.page),
    ]
    handlers = {RefusedError: refuse, HTTPException: refuse, Exception: refuse}
    return Guard(Starlette(routes=routes, exception_handlers=handlers), names)


class Server(uvicorn.Server):
    """A server whose engine ends with it: answers that are not finished fail at once, and nobody waits for them."""

    def __init__(self, app: Any, engine: Engine) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                lifespan="off",
                access_log=False,
                log_level="critical",
                server_header=False,
                timeout_graceful_shutdown=PATIENCE,
            )
        )
        self.engine = engine

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        """Close the engine, then the connections."""
        await asyncio.to_thread(self.engine.close)
        await super().shutdown(sockets)
