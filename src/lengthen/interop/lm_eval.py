"""Models in EleutherAI's lm-evaluation-harness, under the name `lengthen`.

    lengthen-lm-eval run --model lengthen --model_args path=runs/small,max_length=2048 --tasks piqa
    lm_eval.simple_evaluate(model=LengthenLM("runs/small"), tasks=["piqa"])           from Python

The harness knows only its own models by name, so its command is started from here (`python -m lengthen.interop.lm_eval`
too), which adds this one; all its options stand. Nothing but what the tasks themselves load comes from the network.

Requests are batched by length. Sequences are padded on the right, which a decoder's tokens do not see. A context that
does not fit into `max_length`, the training length unless another is given, loses its beginning, as in the harness'
own models.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lengthen.checks import whole_number
from lengthen.interop.subjects import open_model, special_token, tokenizer_of
from lengthen.model import IGNORED
from lengthen.model.score import BATCH_TOKENS, logits_at, losses, precision_named
from lengthen.training.parallel import pick_device

try:
    import lm_eval.models  # noqa: F401 (the harness registers its own only as long as it knows no other)
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as problem:
    raise ImportError(f"lm_eval is needed: pip install lm-eval ({problem})") from None

NEW_TOKENS = 256  # that are generated at most, where a task does not say
OPTIONS = "positions."  # of the position method, among the arguments

Pair = tuple[list[int], list[int]]  # the context's tokens, and the continuation's


@register_model("lengthen")
class LengthenLM(TemplateLM):
    """A run's model, or one of Hugging Face, as the harness asks it.

    Args:
        path: a run's folder, one checkpoint's, or a model of Hugging Face.
        data: the corpus that has the tokenizer; None: the model's own, or the one that it was trained on.
        checkpoint: "last" or "best", of a run.
        max_length: tokens that are read at once, at most; None: the training length.
        max_gen_toks: tokens that are generated, at most, where a task does not say.
        batch_size: rows in a pass, at most; "auto" or None: as many as make 16,384 tokens, 131,072 on a GPU.
        device: None: cuda where there is one.
        precision: "auto", "float32" or "bfloat16", as for `lengthen eval`.
        max_batch_size: is not used; the harness passes it.
        options: `positions.NAME`, options of the position method over those that the model was trained with.
    """

    def __init__(
        self,
        path: str,
        data: str | None = None,
        checkpoint: str = "last",
        max_length: int | None = None,
        max_gen_toks: int = NEW_TOKENS,
        batch_size: int | str | None = None,
        device: str | None = None,
        precision: str = "auto",
        max_batch_size: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        unknown = [name for name in options if not name.startswith(OPTIONS)]
        if unknown:
            raise ValueError(f"model_args: expected path, data, …, or {OPTIONS}NAME, got {unknown[0]!r}")
        changed = {name.removeprefix(OPTIONS): value for name, value in options.items()}
        self._device = pick_device(device)
        subject = open_model(path, checkpoint, self._device, changed)
        self.model = subject.model
        if self.model.config.kind != "decoder":
            raise ValueError(f"path: expected a decoder, got an {self.model.config.kind} in {path}")
        tokenizer = tokenizer_of(subject, None if data is None else Path(data))
        if tokenizer is None:
            raise ValueError(f"data: expected a corpus with the tokenizer of {path}, which has none, got none")
        self.tokenizer, self._tokenizer_name = tokenizer, subject.checkpoint.state.tokenizer or str(data)
        begin = special_token(subject.tokenizer, "bos_token") if subject.tokenizer and data is None else None
        self._begin_id = None if begin is None else tokenizer.id_of(begin)
        self.max_length = whole_number("max_length", max_length or self.model.config.train_length, at_least=1)
        longest = self.model.config.longest
        if longest is not None and self.max_length > longest:
            raise ValueError(
                f"max_length: expected at most the {longest} positions that were learned, got {max_length}"
            )
        self.max_gen_toks = whole_number("max_gen_toks", max_gen_toks, at_least=1)
        rows = None if batch_size in (None, "auto") else whole_number("batch_size", int(batch_size or 1), at_least=1)
        self.batch_size = rows
        self.precision = precision_named(precision, self._device)

    @property
    def eot_token_id(self) -> int:
        """The end token."""
        if self.tokenizer.end_id is None:
            raise ValueError("path: expected a tokenizer with an end token, to begin a text with, got one without")
        return int(self.tokenizer.end_id)

    @property
    def prefix_token_id(self) -> int:
        """What an empty context is replaced by, as by the harness' own models: the beginning's token, or the end's."""
        return self.eot_token_id if self._begin_id is None else self._begin_id

    @property
    def tokenizer_name(self) -> str:
        """What tells this tokenizer from others."""
        return self._tokenizer_name

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return the ids of a text; no special token is ever added."""
        return list(self.tokenizer.encode(string))

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        found: dict[int, tuple[float, bool]] = {}
        pairs = [(context, continuation) for _, context, continuation in requests]
        for chosen, ids, targets in self._batches(pairs):
            where = targets != IGNORED
            logits = logits_at(self.model, ids, where, precision=self.precision).float().log_softmax(dim=-1)
            asked = targets[where].to(logits.device)
            likelihood = logits.gather(1, asked[:, None])[:, 0].double()
            same = logits.argmax(dim=-1) == asked
            row = where.nonzero()[:, 0].to(logits.device)
            for place, number in enumerate(chosen):
                found[number] = (float(likelihood[row == place].sum()), bool(same[row == place].all()))
                if requests[number][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[number][0], found[number])
        return [found[number] for number in range(len(requests))]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each whole text, in windows of at most `max_length` tokens."""
        windows: list[Pair] = []
        owners: list[int] = []
        for number, (text,) in enumerate(request.args for request in requests):
            rolled = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, 1)
            some = [make_disjoint_window(pair) for pair in rolled]
            windows += some
            owners += [number] * len(some)
        totals = [0.0] * len(requests)
        for chosen, ids, targets in self._batches(windows):
            sums = losses(self.model, ids, targets, precision=self.precision).sum(dim=1).tolist()
            for number, total in zip(chosen, sums, strict=True):
                totals[owners[number]] -= total
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _batches(self, pairs: Sequence[Pair]) -> Iterator[tuple[list[int], Tensor, Tensor]]:
        """Yield numbers of pairs, their ids and targets, the longest first; targets are the continuations' tokens."""
        for context, continuation in pairs:
            if not 1 <= len(continuation) <= self.max_length or not context:
                raise ValueError(
                    f"max_length: expected a context, and continuations of 1 to {self.max_length} tokens, got "
                    f"{len(context)} and {len(continuation)}"
                )
        order = sorted(range(len(pairs)), key=lambda number: -sum(map(len, pairs[number])))
        while order:
            longest = min(self.max_length, sum(map(len, pairs[order[0]])) - 1)
            rows = max(1, BATCH_TOKENS.get(self._device.type, 1) // longest)
            part = min(rows, self.batch_size or rows)
            chosen, order = order[:part], order[part:]
            ids = torch.zeros(len(chosen), longest, dtype=torch.long)
            targets = torch.full_like(ids, IGNORED)
            for row, (context, continuation) in enumerate(pairs[number] for number in chosen):
                whole = torch.tensor((context + continuation)[-self.max_length - 1 :])
                ids[row, : len(whole) - 1] = whole[:-1]
                targets[row, len(whole) - 1 - len(continuation) : len(whole) - 1] = whole[-len(continuation) :]
            yield chosen, ids, targets

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Return what is written after each context, up to a stop string, the end token or `max_gen_toks`."""
        asked: dict[str, list[int]] = {}
        for number, (_, how) in enumerate(request.args for request in requests):
            asked.setdefault(json.dumps(how, sort_keys=True, default=str), []).append(number)
        found: dict[int, str] = {}
        for numbers in asked.values():
            how = requests[numbers[0]].args[1]
            numbers = sorted(numbers, key=lambda number: -len(requests[number].args[0]))
            rows = self.batch_size or max(1, BATCH_TOKENS.get(self._device.type, 1) // self.max_length)
            for start in range(0, len(numbers), rows):
                here = numbers[start : start + rows]
                texts = self._generate([requests[number].args[0] for number in here], how, here)
                found |= dict(zip(here, texts, strict=True))
        for number, request in enumerate(requests):
            self.cache_hook.add_partial("generate_until", request.args, found[number])
        return [found[number] for number in range(len(requests))]

    def _generate(self, contexts: list[str], how: dict[str, Any], seeds: list[int]) -> list[str]:
        given = how.get("until") or []
        stops = [stop for stop in ([given] if isinstance(given, str) else given) if stop]
        new = int(how.get("max_gen_toks", how.get("max_new_tokens", self.max_gen_toks)))
        if new >= self.max_length:
            raise ValueError(f"max_gen_toks: expected less than max_length, {self.max_length}, got {new}")
        prompts = [self.tok_encode(text)[new - self.max_length :] or [self.prefix_token_id] for text in contexts]
        names = ("top_k", "top_p", "min_p", "repetition_penalty")
        options = {name: how[name] for name in names if how.get(name) is not None}
        temperature = float(how.get("temperature", 1.0)) if how.get("do_sample") else 0.0

        def ended(number: int, tokens: list[int]) -> bool:
            text = self.tokenizer.decode(tokens)
            return any(stop in text for stop in stops)

        end = [] if self.tokenizer.end_id is None else [self.tokenizer.end_id]
        made = self.model.eval().generate(
            prompts, new, temperature=temperature, seed=seeds, stop=end, until=ended if stops else None, **options
        )
        return [_cut(self.tokenizer.decode(tokens), stops) for tokens in made.tokens]


def _cut(text: str, stops: list[str]) -> str:
    """Return a text up to the first of the stop strings."""
    return text[: min((text.index(stop) for stop in stops if stop in text), default=len(text))]


def main() -> None:
    """Start the harness' command, with this model among those that it knows."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
