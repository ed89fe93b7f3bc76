r"""Serve a model on this machine: OpenAI's completions API, and a web page to try it.

  lengthen serve runs/tiny                                       # http://127.0.0.1:8000; Ctrl-C ends it
  lengthen serve runs/tiny --port 9000 --cache reach --mode certified --max-context 100000
  lengthen serve runs/tiny --max-sequences 8 --max-waiting 32    # fewer at once
  curl http://127.0.0.1:8000/v1/completions -H "content-type: application/json" \
       -d '{"prompt": "def main(", "max_tokens": 100, "temperature": 0.8, "stream": true}'

Concurrent requests are batched, and each gets the same result as alone. One over a limit is refused, with the limit
named. When a client disconnects, its request is cancelled. docs/generation.md has the parameters.

It listens on the loopback address unless --host names another. There is no authentication: anyone who can reach it can
use it. It needs starlette and uvicorn (pip install starlette uvicorn).
"""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from lengthen.cli import flags
from lengthen.cli.generate import mask_of, opened
from lengthen.cli.progress import amount

if TYPE_CHECKING:
    from lengthen.model import Transformer
    from lengthen.serving.engine import Limits

CONTEXT = 16_384  # tokens of a prompt and its continuation, unless told
FRACTION = 4  # of the memory beside the model, 1 in so many is for caches: storage doubles, and is copied to be joined


@dataclass(frozen=True)
class Arguments:
    """Arguments of `lengthen serve`."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]  # a run's folder, or one checkpoint's
    host: str = "127.0.0.1"  # the address to listen on
    port: int = 8000  # 0: any free one
    name: str | None = None  # of the model; none: the folder's
    max_context: int | None = None  # tokens of a prompt and its continuation; none: 16,384, or the model's limit
    max_sequences: int = 64  # sequences decoded at once
    max_waiting: int = 256  # prompts that may wait; more are refused
    max_body: int = 1 << 20  # largest request, in bytes
    cache: Literal["full", "window", "reach"] = "full"  # which keys and values are kept
    mode: Literal["exact", "certified"] = "exact"  # of reach: far keys go to host memory, or are dropped with a bound
    tolerance: float | None = None  # softmax mass of a row that may stay unread; none: half a unit in the last place
    window: int | None = None  # sliding window: tokens that each token sees, itself included; none: all
    block: int | None = None  # blockwise causal attention with blocks of this many tokens
    chunk: int = 512  # tokens of prompts that are read at once
    data: Path | None = None  # token shards with the tokenizer; none: those that the model was trained on
    checkpoint: Literal["last", "best"] = "last"  # which of a run's checkpoints
    device: str | None = None  # cpu or cuda; none: cuda where there is one
    positions: Annotated[dict[str, Any], tyro.conf.Suppress] = field(default_factory=dict)  # --positions.NAME


def parse(words: list[str]) -> Arguments:
    """Return the words, options of the position method among them."""
    return flags.parse_with_positions(Arguments, words, "serve", __doc__ or "")


def run(arguments: Arguments) -> int:
    """Serve until a signal comes."""
    from lengthen.checks import whole_number
    from lengthen.serving.app import LOOPBACK, Server, Service, application
    from lengthen.serving.engine import Engine

    for name in ("max_sequences", "max_waiting", "max_body", "chunk"):
        whole_number(f"--{name.replace('_', '-')}", getattr(arguments, name), at_least=1)
    with listening(arguments.host, arguments.port) as door:
        model, tokenizer = opened(
            arguments.run, arguments.checkpoint, arguments.device, arguments.positions, arguments.data
        )
        engine = Engine(
            model,
            limits_of(arguments, model),
            arguments.chunk,
            policy=arguments.cache,
            mode=arguments.mode,
            mask=mask_of(arguments.window, arguments.block),
            tolerance=arguments.tolerance,
        )
        name = arguments.name or arguments.run.resolve().name
        names = (*LOOPBACK, arguments.host) if is_loopback(arguments.host) else None
        app = application(Service(engine, tokenizer, name, arguments.max_body), names)
        if names is None:
            print(
                f"--host {arguments.host}: no authentication: anyone who can reach this address can use the model",
                file=sys.stderr,
            )
        host = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
        print(f"serving {name} at http://{host}:{door.getsockname()[1]}; Ctrl-C ends it", flush=True)
        Server(app, engine).run(sockets=[door])
    return 0


def listening(host: str, port: int) -> socket.socket:
    """Return a socket at an address, before anything is loaded."""
    if not 0 <= port < 1 << 16:
        raise ValueError(f"--port: expected 0 … 65535, got {port}")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=512)
    except OSError as problem:
        number = problem.errno or 0
        why = os.strerror(number) if number > 0 else problem.strerror  # negative: of a name that is not known
        raise OSError(f"--port: cannot listen at {host}:{port}: {why}") from None


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def limits_of(arguments: Arguments, model: Transformer) -> Limits:
    """Return how much may be asked for: what the flags say, and what memory holds."""
    from lengthen.checks import whole_number
    from lengthen.model.memory import available, cached_token
    from lengthen.serving.engine import Limits

    longest = model.config.longest
    usual = CONTEXT if longest is None else min(CONTEXT, longest + 1)
    context = usual if arguments.max_context is None else arguments.max_context
    whole_number("--max-context", context, at_least=2)
    if longest is not None and context > longest + 1:
        raise ValueError(
            f"--max-context: expected at most {longest + 1:,}, which the model has positions for, got {context:,}"
        )
    grows = arguments.cache == "full" or (arguments.cache == "reach" and arguments.mode == "exact")
    if not grows:
        return Limits(context, arguments.max_sequences, arguments.max_waiting)
    weights = sum(one.numel() * one.element_size() for one in model.parameters())
    there = available(model.embedding.weight.device)
    tokens = max(0, there - weights) // FRACTION // cached_token(model)
    if context > tokens:
        raise ValueError(
            f"--max-context: expected keys and values that fit into memory, got {context:,} tokens of "
            f"{amount(cached_token(model))} each, and there is room for {tokens:,}; --cache reach --mode certified "
            "does not grow"
        )
    return Limits(context, arguments.max_sequences, arguments.max_waiting, tokens)
