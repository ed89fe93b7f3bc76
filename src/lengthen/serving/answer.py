"""Turn tokens into the chunks of a response: text once it is final, logprobs, and the finish reason.

A chunk is the text not sent yet. A response without streaming is the chunks of each choice joined, with the same text.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from lengthen.data.text import UNFINISHED, Text
from lengthen.data.tokenizer import Tokenizer
from lengthen.serving.engine import Told
from lengthen.serving.request import Request


@dataclass
class Piece:
    """A part of one choice."""

    index: int
    text: str
    tokens: list[Scored] = field(default_factory=list)
    ended: str | None = None
    count: int = 0  # tokens that were generated since the piece before

    def json(self, logprobs: bool) -> dict[str, Any]:
        """Return it as OpenAI has it."""
        found = {
            "tokens": [one.text for one in self.tokens],
            "token_logprobs": [one.logprob for one in self.tokens],
            "top_logprobs": [one.top for one in self.tokens],
            "text_offset": [one.offset for one in self.tokens],
        }
        return {
            "index": self.index,
            "text": self.text,
            "logprobs": found if logprobs else None,
            "finish_reason": self.ended,
        }


@dataclass(frozen=True)
class Scored:
    """A token with its log-probability, and where in the text it begins."""

    text: str
    logprob: float
    top: dict[str, float]
    offset: int


class Choice:
    """One sequence of an answer, as its tokens come."""

    def __init__(self, index: int, request: Request, tokenizer: Tokenizer, echo: str) -> None:
        self.index, self.tokenizer, self.scored = index, tokenizer, request.logprobs is not None
        self.text = Text(tokenizer, request.stops)
        self.echo, self.sent, self.waiting = echo, 0, 0  # characters that were sent; tokens that were not
        self.tokens: list[Scored] = []  # whose text was not sent yet

    def take(self, told: Told) -> Piece | None:
        """Take a step's token; return what can be sent now, if there is something."""
        text = self.text
        if told.token is not None:
            self.waiting += 1
            if self.scored:
                offset = self.sent + len(text.ready) + len(text.held)
                top = {self.name(token): score for token, score in told.top}
                self.tokens.append(Scored(self.name(told.token), told.logprob, top, offset))
            text.add(told.token)
        cut = text.ended  # by a stop text, which its tokens are not sent of
        if told.ended:
            text.finish()
        return self._piece("stop" if cut else told.ended, cut)

    def finish(self) -> Piece:
        """Return the whole of a choice that has no token."""
        return Piece(self.index, self.echo, ended="length")

    def _piece(self, ended: str | None, cut: bool) -> Piece | None:
        found, self.echo = self.echo + self.text.take(), ""
        if not found and not ended:
            return None
        self.sent += len(found)
        sure = [one for one in self.tokens if one.offset < self.sent or (ended and not cut)]
        self.tokens = self.tokens[len(sure) :]
        piece = Piece(self.index, found, sure, ended, self.waiting)
        self.waiting = 0
        return piece

    def name(self, token: int) -> str:
        """Return a token as text; one that is a part of a character, or unknown to the tokenizer, by its number."""
        text = self.tokenizer.decode([token]) if token < self.tokenizer.vocab_size else UNFINISHED
        return f"token:{token}" if UNFINISHED in text else text


@dataclass
class Answer:
    """The pieces of all choices, and how many tokens there were."""

    id: str
    model: str
    request: Request
    created: int = field(default_factory=lambda: int(time.time()))
    completion_tokens: int = 0
    whole: dict[int, Piece] = field(default_factory=dict)

    def usage(self) -> dict[str, int]:
        """Return the tokens of the prompts and of the answers so far."""
        prompt = sum(map(len, self.request.prompts))
        done = self.completion_tokens
        return {"prompt_tokens": prompt, "completion_tokens": done, "total_tokens": prompt + done}

    def add(self, piece: Piece) -> None:
        """Take a piece into the whole."""
        self.completion_tokens += piece.count
        if self.request.stream:
            return
        there = self.whole.setdefault(piece.index, Piece(piece.index, ""))
        there.text, there.ended = there.text + piece.text, piece.ended
        there.tokens += piece.tokens

    def json(self, choices: list[Piece], usage: bool) -> dict[str, Any]:
        """Return an answer, or a part of one."""
        scored = self.request.logprobs is not None
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": [one.json(scored) for one in choices],
            "usage": self.usage() if usage else None,
        }
