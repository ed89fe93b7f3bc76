r"""Generate text from a model, streamed to the terminal.

  lengthen generate runs/tiny --prompt "def main("
  lengthen generate runs/tiny --prompt "import" --tokens 2000 --temperature 0.7 --top-p 0.9 --seed 3
  lengthen generate runs/tiny --stdin --stop "\n\n" < prompt.txt
  lengthen generate runs/tiny --interactive                      # each line is a prompt; Ctrl-D ends
  lengthen generate runs/tiny --samples 4 --prompt "class"
  lengthen generate runs/tiny --tokens 100000 --cache reach --mode certified --stats

Only new text is printed. Generation ends at the tokenizer's end token, after --tokens tokens, or before a --stop text,
which may be given several times and is not printed (\n and \t are a new line and a tab). Without a prompt the model
starts a new document: after the end token, if its tokenizer has one. Prompts must be UTF-8. Ctrl-C stops and keeps what
was printed. The same seed gives the same text.

--cache chooses which keys and values are kept (docs/generation.md): full, window (with --window or --block), or reach.
--stats prints how long the prompt took, tokens/s after it, the cache's size and its bound to stderr.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from lengthen.cli import flags
from lengthen.cli.progress import amount

if TYPE_CHECKING:
    from lengthen.attention import Mask
    from lengthen.attention.cache import Cache
    from lengthen.data.tokenizer import Tokenizer
    from lengthen.model import Transformer


@dataclass(frozen=True)
class Arguments:
    """Arguments of `lengthen generate`."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run's folder, one checkpoint's, or a model of Hugging Face: its folder, or OWNER/NAME."""
    prompt: str = ""  # text to continue; empty: start a document
    stdin: bool = False  # read the prompt from standard input, all of it
    interactive: bool = False  # read prompts from standard input, one per line
    tokens: int = 256  # new tokens at most
    temperature: float = 0.8  # 0: always the likeliest token
    top_k: int | None = None  # sample from this many of the likeliest tokens
    top_p: float | None = None  # nucleus: sample from the fewest tokens whose probabilities sum to this
    min_p: float | None = None  # sample from tokens with at least this fraction of the likeliest one's probability
    repetition_penalty: float = 1.0  # above 1: tokens that already occurred are less likely
    stop: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Text that ends generation, and is not printed; may be repeated."""
    seed: int = 0  # of the random numbers
    samples: int = 1  # texts; several are printed once all are finished
    cache: Literal["full", "window", "reach"] = "full"  # which keys and values are kept
    mode: Literal["exact", "certified"] = "exact"  # of reach: far keys go to host memory, or are dropped with a bound
    tolerance: float | None = None  # softmax mass of a row that may stay unread; none: half a unit in the last place
    window: int | None = None  # sliding window: tokens that each token sees, itself included; none: all
    block: int | None = None  # blockwise causal attention with blocks of this many tokens
    chunk: int = 512  # tokens of a prompt that are read at once
    stats: bool = False  # print the prompt's time, tokens/s, the cache's size and bound
    data: Path | None = None  # token shards with the tokenizer; none: those that the model was trained on
    checkpoint: Literal["last", "best"] = "last"  # which of a run's checkpoints
    device: str | None = None  # cpu or cuda; none: cuda where there is one
    positions: Annotated[dict[str, Any], tyro.conf.Suppress] = field(default_factory=dict)  # --positions.NAME


def parse(words: list[str]) -> Arguments:
    """Return the words, options of the position method among them."""
    return flags.parse_with_positions(Arguments, words, "generate", __doc__ or "")


def run(arguments: Arguments) -> int:
    """Generate from each prompt, as it is given."""
    if arguments.stdin + arguments.interactive + bool(arguments.prompt) > 1:
        raise ValueError("--prompt: expected one of --prompt, --stdin and --interactive, got more")
    model, tokenizer = opened(
        arguments.run, arguments.checkpoint, arguments.device, arguments.positions, arguments.data
    )
    status = 0
    for prompt in prompts(arguments):
        status = write(model, tokenizer, prompt, arguments)
    return 0 if arguments.interactive else status


def opened(
    run: Path, checkpoint: str, device: str | None, positions: dict[str, Any], data: Path | None
) -> tuple[Transformer, Tokenizer]:
    """Return the model and its tokenizer."""
    from lengthen.interop.subjects import open_model, tokenizer_of
    from lengthen.training.parallel import pick_device

    subject = open_model(run, checkpoint, pick_device(device), positions)
    tokenizer = tokenizer_of(subject, data)
    if tokenizer is None:
        raise ValueError(f"--data: expected a corpus with the tokenizer of {run}, which has none of its own, got none")
    return subject.model.eval(), tokenizer


def prompts(arguments: Arguments) -> Iterator[str]:
    """Yield what is to be continued."""
    if not (arguments.stdin or arguments.interactive):
        yield checked("--prompt", arguments.prompt.encode(errors="surrogateescape"))
    elif arguments.stdin:
        yield checked("--stdin", sys.stdin.buffer.read())
    else:
        while True:
            print("> ", end="", file=sys.stderr, flush=True)
            line = sys.stdin.buffer.readline()
            if not line:
                print(file=sys.stderr)
                return
            try:
                text = checked("--interactive", line).rstrip("\r\n")
            except ValueError as problem:
                print(problem, file=sys.stderr)
                continue
            yield text


def checked(name: str, given: bytes) -> str:
    """Return bytes as text, or refuse those that are none."""
    try:
        return given.decode()
    except UnicodeDecodeError as problem:
        found = given[problem.start]
        raise ValueError(f"{name}: expected UTF-8, got the byte 0x{found:02x} at {problem.start}") from None


def write(model: Transformer, tokenizer: Tokenizer, prompt: str, arguments: Arguments) -> int:
    """Continue one prompt; return 130 if it was stopped by Ctrl-C."""
    from lengthen.data.text import Text

    ids = tokenizer.encode(prompt)
    if not ids and tokenizer.end_id is None:
        raise ValueError("--prompt: expected some text, since the tokenizer has no end token to begin with, got none")
    stops = [unescaped(text) for text in arguments.stop]
    texts = [Text(tokenizer, stops) for _ in range(arguments.samples)]
    alone = arguments.samples == 1

    def until(one: int, tokens: list[int]) -> bool:
        texts[one].add(tokens[-1])
        return texts[one].ended

    same = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "samples", "chunk", "cache", "mode")
    try:
        steps = model.stream(
            [ids or [tokenizer.end_id or 0]],
            arguments.tokens,
            stop=[] if tokenizer.end_id is None else [tokenizer.end_id],
            until=until,
            mask=mask_of(arguments.window, arguments.block),
            tolerance=arguments.tolerance,
            **{name: getattr(arguments, name) for name in same},
        )
    except ValueError as problem:  # of the library, which calls it otherwise
        raise ValueError(str(problem).replace("max_new_tokens:", "--tokens:", 1)) from None
    speed, cache, status = Speed(), None, 0
    try:
        for step in steps:
            speed.count(len(step.tokens))
            cache = step.cache
            if alone:
                print(texts[0].take(), end="", flush=True)
    except KeyboardInterrupt:
        status = 130
    speed.stop()
    for number, text in enumerate(texts, 1):
        text.finish()
        if not alone:
            print(f"--- {number} of {len(texts)} ---")
        print(text.take(), flush=True)
    if status:
        print(f"stopped after {speed.tokens:,} tokens", file=sys.stderr)
    if arguments.stats:
        print(statistics(speed, cache), file=sys.stderr)
    return status


def mask_of(window: int | None, block: int | None) -> Mask | None:
    """Return what tokens see."""
    from lengthen.attention import Blockwise, Window

    if window is not None and block is not None:
        raise ValueError("--window: expected one of --window and --block, got both")
    if block is not None:
        return Blockwise(block)
    return None if window is None else Window(window)


class Speed:
    """How long the prompt took, and how fast tokens came after the first, which reading the prompt gives."""

    def __init__(self) -> None:
        self.tokens, self.later = 0, 0
        self.began = self.ended = time.monotonic()
        self.read: float | None = None  # when the prompt was read

    def count(self, tokens: int) -> None:
        """Count a step's tokens."""
        if self.read is None:
            self.read = time.monotonic()
        else:
            self.later += tokens
        self.tokens += tokens

    def stop(self) -> None:
        """Stop the clock."""
        self.ended = time.monotonic()

    def __str__(self) -> str:
        read = self.ended if self.read is None else self.read
        seconds = self.ended - read
        rate = f": {self.later / seconds:,.1f} tokens/s" if self.later and seconds else ""
        return f"prompt read in {read - self.began:.1f} s; {self.tokens:,} tokens in {seconds:.1f} s{rate}"


def statistics(speed: Speed, cache: Cache | None) -> str:
    """Return a line on speed and memory."""
    if cache is None:
        return str(speed)
    host = f", {amount(cache.host_nbytes)} in host memory" if cache.host_nbytes else ""
    return f"{speed}; cache {amount(cache.nbytes)}{host} for {cache.length:,} tokens, bound {cache.bound:.1e}"


def unescaped(text: str) -> str:
    r"""Return a stop text with \n, \t and \\ as what they stand for."""
    if not text:
        raise ValueError("--stop: expected some text, got none")
    parts = text.split("\\\\")
    return "\\".join(part.replace("\\n", "\n").replace("\\t", "\t") for part in parts)
