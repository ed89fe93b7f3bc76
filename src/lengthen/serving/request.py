"""A completion's request, checked: OpenAI's parameters, and `top_k` and `min_p` beside them.

What is refused has a status, the parameter's name and a message with what was expected and what came.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lengthen.checks import describe, flag, nearest, number, whole_number
from lengthen.data.tokenizer import Tokenizer
from lengthen.model.sampling import Sampling

MOST_LOGPROBS = 5
MOST_STOPS = 4
DEFAULTS: dict[str, Any] = {
    "model": None,
    "prompt": "",
    "max_tokens": 16,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": None,
    "min_p": None,
    "n": 1,
    "seed": None,
    "stop": None,
    "stream": False,
    "stream_options": None,
    "logprobs": None,
    "echo": False,
    "user": None,  # who asks: not looked at
}
# Parameters of OpenAI's that this server does not have, with the values that ask for nothing.
NOTHING: dict[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "frequency_penalty": (None, 0),
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0),
    "suffix": (None, ""),
}
STREAM_OPTIONS = ("include_usage", "continuous_usage_stats")


class RefusedError(Exception):
    """A request that is not done, in OpenAI's words."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, kind: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.kind = kind or ("invalid_request_error" if status < 500 else "server_error")

    @property
    def body(self) -> dict[str, Any]:
        """The error as JSON."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class Request:
    """What is asked for."""

    prompts: list[list[int]]
    echoes: list[str]  # what each answer begins with: the prompt's text, or nothing
    max_tokens: int
    sampling: Sampling
    n: int
    seed: int
    stops: list[str]
    stream: bool
    usage: bool  # at the end of a stream
    continuous_usage: bool  # with each piece of a stream
    logprobs: int | None


def parsed(body: bytes) -> dict[str, Any]:
    """Return a body as a JSON object."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as problem:
        raise RefusedError(400, f"body: expected JSON, got something else: {problem}") from None
    if not isinstance(found, dict):
        raise RefusedError(400, f"body: expected a JSON object, got {type(found).__name__}")
    return found


def checked(given: Mapping[str, Any], name: str, tokenizer: Tokenizer, vocabulary: int, sequences: int) -> Request:
    """Return the request, or refuse it.

    Args:
        given: the JSON object.
        name: of the model that there is.
        tokenizer: of the model.
        vocabulary: how many tokens the model has.
        sequences: how many an answer may have.
    """
    try:
        return _checked(given, name, tokenizer, vocabulary, sequences)
    except (ValueError, TypeError) as problem:  # of the package's own checks, which begin with the name
        param = str(problem).partition(":")[0].partition("[")[0].partition(".")[0]
        raise RefusedError(400, str(problem), param if param in DEFAULTS or param in NOTHING else None) from None


def _checked(given: Mapping[str, Any], name: str, tokenizer: Tokenizer, vocabulary: int, sequences: int) -> Request:
    for key, value in given.items():
        if key in NOTHING and not any(value == nothing for nothing in NOTHING[key]):
            raise ValueError(f"{key}: this server has no such parameter; expected none, got {describe(value)}")
        if key not in NOTHING and key not in DEFAULTS:
            raise RefusedError(400, f"{key}: expected a known parameter, got this one{nearest(key, DEFAULTS)}", key)
    told = {key: default if given.get(key) is None else given[key] for key, default in DEFAULTS.items()}
    if told["model"] not in (None, name):
        raise RefusedError(404, f"model: expected {name!r}, got {describe(told['model'])}", "model", "model_not_found")
    echo, stream, logprobs = flag("echo", told["echo"]), flag("stream", told["stream"]), told["logprobs"]
    if logprobs is not None:
        if whole_number("logprobs", logprobs, at_least=0) > MOST_LOGPROBS:
            raise ValueError(f"logprobs: expected at most {MOST_LOGPROBS}, got {logprobs}")
        if echo:
            raise ValueError("echo: expected no logprobs with it, since those of a prompt are not computed, got both")
    prompts = _prompts(told["prompt"], tokenizer, vocabulary)
    n = whole_number("n", told["n"], at_least=1)
    if n * len(prompts) > sequences:
        key = "n" if n > 1 else "prompt"
        raise ValueError(f"{key}: expected at most {sequences} answers at once, got {len(prompts)} prompts × {n}")
    options = _stream_options(told["stream_options"], stream)
    return Request(
        prompts=prompts,
        echoes=[tokenizer.decode(one) if echo else "" for one in prompts],
        max_tokens=whole_number("max_tokens", told["max_tokens"], at_least=0),
        sampling=_sampling(told),
        n=n,
        seed=secrets.randbits(32) if told["seed"] is None else whole_number("seed", told["seed"]),
        stops=_stops(told["stop"]),
        stream=stream,
        usage=options.get("include_usage", False),
        continuous_usage=options.get("continuous_usage_stats", False),
        logprobs=logprobs,
    )


def _sampling(told: Mapping[str, Any]) -> Sampling:
    number("temperature", told["temperature"], at_least=0)
    top_p = number("top_p", told["top_p"], at_least=0)
    return Sampling(
        temperature=told["temperature"],
        top_k=told["top_k"],
        top_p=None if top_p == 1 else top_p,
        min_p=told["min_p"],
    )


def _prompts(given: Any, tokenizer: Tokenizer, vocabulary: int) -> list[list[int]]:
    """Return the tokens of each prompt: a text, texts, tokens, or lists of tokens."""
    expected = "prompt: expected a text, a list of texts, a list of tokens or a list of such lists"
    single = isinstance(given, str) or (isinstance(given, list) and all(_whole(one) for one in given))
    prompts = [given] if single else given
    if not isinstance(prompts, list):
        raise TypeError(f"{expected}, got {describe(given)}")
    found = []
    for at, one in enumerate(prompts):
        name = "prompt" if single else f"prompt[{at}]"
        if isinstance(one, str):
            found.append(_tokens(name, one, tokenizer))
        elif isinstance(one, list) and all(_whole(token) for token in one):
            if not one:
                raise ValueError(f"{name}: expected at least one token, got none")
            wrong = [token for token in one if not 0 <= token < vocabulary]
            if wrong:
                raise ValueError(f"{name}: expected tokens 0 … {vocabulary - 1}, got {wrong[0]}")
            found.append(one)
        else:
            raise TypeError(f"{expected}, got an item of type {type(one).__name__}")
    return found


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _tokens(name: str, text: str, tokenizer: Tokenizer) -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError as problem:  # JSON can hold half a surrogate pair
        raise ValueError(f"{name}: expected Unicode text, got half a character at {problem.start}") from None
    tokens = tokenizer.encode(text)
    if tokens:
        return tokens
    if tokenizer.end_id is None:
        raise ValueError(f"{name}: expected some text, since the tokenizer has no end token to begin with, got none")
    return [tokenizer.end_id]


def _stops(given: Any) -> list[str]:
    stops = [given] if isinstance(given, str) else given or []
    if not isinstance(stops, list) or not all(isinstance(one, str) and one for one in stops):
        raise TypeError(f"stop: expected a text, or a list of texts, none of them empty, got {describe(given)}")
    if len(stops) > MOST_STOPS:
        raise ValueError(f"stop: expected at most {MOST_STOPS} texts, got {len(stops)}")
    return stops


def _stream_options(given: Any, stream: bool) -> dict[str, bool]:
    if given is None:
        return {}
    if not stream:
        raise ValueError("stream_options: expected stream: true with it, got none")
    if not isinstance(given, dict):
        raise TypeError(f"stream_options: expected an object, got {describe(given)}")
    for key, value in given.items():
        if key not in STREAM_OPTIONS:
            raise ValueError(f"stream_options: expected {' or '.join(STREAM_OPTIONS)}, got {key!r}")
        flag(f"stream_options.{key}", value)
    return given
