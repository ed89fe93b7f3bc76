"""Tokens into text as they come, for whoever prints or sends them while more are generated."""

from __future__ import annotations

from collections.abc import Sequence

from lengthen.data.tokenizer import Tokenizer

UNFINISHED = "\ufffd"  # what the first bytes of a character decode to
CONTEXT = 16  # tokens that are decoded again with the next one: some tokenizers join them by what stands before


class Text:
    """Tokens into text as they come: no half characters, and nothing that may be the beginning of a stop text."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self.tokenizer, self.stops, self.ended = tokenizer, stops, False
        self.ids: list[int] = []  # those that are still decoded with the next
        self.decoded = 0  # characters of their text that were passed on
        self.held = ""  # text that may belong to a stop text
        self.ready = ""  # text to pass on

    def add(self, token: int) -> None:
        """Take the next token."""
        if self.ended or token >= self.tokenizer.vocab_size:  # a model may have more than its tokenizer
            return
        self.ids.append(token)
        text = self.tokenizer.decode(self.ids)
        whole = text.removesuffix(UNFINISHED)  # the next token may complete it
        self._pass_on(whole[self.decoded :])
        self.decoded = max(self.decoded, len(whole))
        if len(self.ids) > 2 * CONTEXT and whole == text:
            self.ids = self.ids[-CONTEXT:]
            self.decoded = len(self.tokenizer.decode(self.ids))

    def _pass_on(self, text: str) -> None:
        self.held += text
        found = [at for at in (self.held.find(stop) for stop in self.stops) if at >= 0]
        if found:
            self.ready, self.held, self.ended = self.ready + self.held[: min(found)], "", True
            return
        sizes = (size for stop in self.stops for size in range(1, len(stop)) if self.held.endswith(stop[:size]))
        cut = len(self.held) - max(sizes, default=0)
        self.ready, self.held = self.ready + self.held[:cut], self.held[cut:]

    def finish(self) -> None:
        """Pass on what was held back: nothing will complete it."""
        if not self.ended:
            self._pass_on(self.tokenizer.decode(self.ids)[self.decoded :])
            self.ready, self.held, self.ended = self.ready + self.held, "", True

    def take(self) -> str:
        """Return the text that can be passed on and was not yet."""
        text, self.ready = self.ready, ""
        return text
