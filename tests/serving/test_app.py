"""The server under OpenAI's own client and under plain requests: answers, streams, limits, and who may ask."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any

import openai
import pytest
from running import Running, Start, made, waited

from lengthen import Transformer
from lengthen.data.tokenizer import Tokenizer
from lengthen.serving.engine import Stats

ENDLESS: dict[str, Any] = {"max_tokens": 40_000, "temperature": 0}  # greedy, this model does not come to an end
PROMPTS = ["the sea", "naïve — 漢字", "a", "x" * 60]


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[openai.OpenAI]:
    with client_of(running) as client:
        yield client


def client_of(running: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{running.port}/v1", api_key="none", max_retries=0)


def alone(model: Transformer, prompt: str | list[int], tokens: int, **options: Any) -> list[str]:
    """Return what the model continues a prompt with, without a server."""
    ids = list(prompt.encode()) if isinstance(prompt, str) else prompt
    found = model.generate([ids], tokens, stop=[256], **options).tokens
    return [Tokenizer().decode(one) for one in found]


def test_answers_are_what_the_model_gives_alone(client: openai.OpenAI, model: Transformer) -> None:
    for prompt in PROMPTS:
        found = client.completions.create(model="tiny", prompt=prompt, max_tokens=30, temperature=0)
        assert found.choices[0].text == alone(model, prompt, 30)[0]
        assert found.object == "text_completion"
        assert found.model == "tiny"
        assert found.usage is not None
        assert found.usage.prompt_tokens == len(prompt.encode())
        assert found.usage.total_tokens == found.usage.prompt_tokens + found.usage.completion_tokens
    drawn = client.completions.create(
        model="tiny", prompt=PROMPTS, max_tokens=12, temperature=0.8, top_p=0.9, seed=7, n=2
    )
    expected = [alone(model, one, 12, temperature=0.8, top_p=0.9, seed=7, samples=2) for one in PROMPTS]
    assert [one.text for one in drawn.choices] == [text for texts in expected for text in texts]
    assert [one.index for one in drawn.choices] == list(range(8))
    assert {one.finish_reason for one in drawn.choices} <= {"stop", "length"}


def test_prompts_may_be_tokens(client: openai.OpenAI, model: Transformer) -> None:
    one = client.completions.create(model="tiny", prompt=[5, 6, 7], max_tokens=9, temperature=0)
    assert one.choices[0].text == alone(model, [5, 6, 7], 9)[0]
    two = client.completions.create(model="tiny", prompt=[[5, 6, 7], [8]], max_tokens=9, temperature=0)
    assert [choice.text for choice in two.choices] == [alone(model, ids, 9)[0] for ids in ([5, 6, 7], [8])]
    empty = client.completions.create(model="tiny", prompt=["", "x" * 90], max_tokens=9, temperature=0)
    assert [choice.text for choice in empty.choices] == [alone(model, ids, 9)[0] for ids in ([256], "x" * 90)]


def test_a_stream_is_the_answer_in_pieces(client: openai.OpenAI, model: Transformer) -> None:
    options: dict[str, Any] = {
        "model": "tiny",
        "prompt": PROMPTS[:2],
        "max_tokens": 40,
        "seed": 3,
        "n": 2,
        "logprobs": 2,
    }
    whole = client.completions.create(**options)
    stream = list(client.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert len(stream) > 40
    texts, tokens, ended = [""] * 4, [[] for _ in range(4)], [None] * 4  # type: ignore[var-annotated]
    for chunk in stream[:-1]:
        assert chunk.usage is None
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        tokens[choice.index] += choice.logprobs.tokens
        ended[choice.index] = choice.finish_reason or ended[choice.index]
    assert texts == [choice.text for choice in whole.choices]
    assert tokens == [choice.logprobs.tokens for choice in whole.choices]
    assert ended == [choice.finish_reason for choice in whole.choices]
    assert stream[-1].choices == []
    assert stream[-1].usage == whole.usage


def test_half_characters_are_held_back(running: Running, model: Transformer) -> None:
    """A model of bytes with random weights writes hardly anything but bytes that are no text."""
    text = ""
    for _, chunk in streamed(running, prompt="é", max_tokens=120, temperature=1.5, seed=1):
        text += chunk["choices"][0]["text"]
    (expected,) = alone(model, "é", 120, temperature=1.5, seed=1)
    assert text == expected
    assert "\ufffd" in expected


def streamed(running: Running, **body: Any) -> list[tuple[str, Any]]:
    status, said, headers = running.call("POST", "/v1/completions", {"stream": True, **body})
    assert status == 200
    assert headers["content-type"].startswith("text/event-stream")
    events = said.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [(one, json.loads(one.removeprefix("data: "))) for one in events[:-2]]


def test_a_stop_text_ends_it_wherever_tokens_end(running: Running) -> None:
    options: dict[str, Any] = {"prompt": "the", "max_tokens": 60, "temperature": 0.9, "seed": 2}
    plain = running.complete(**options)["choices"][0]
    assert plain["finish_reason"] == "length"
    stop = plain["text"][25:29]
    assert len(stop.encode()) >= 4  # it is several tokens long
    for stops in (stop, ["never", stop]):
        found = running.complete(**options, stop=stops, logprobs=1)
        (choice,) = found["choices"]
        assert choice["text"] == plain["text"][: plain["text"].index(stop)]
        assert choice["finish_reason"] == "stop"
        assert all(offset < len(choice["text"]) for offset in choice["logprobs"]["text_offset"])
        assert 0 < found["usage"]["completion_tokens"] < 60
        pieces = [chunk["choices"][0]["text"] for _, chunk in streamed(running, **options, stop=stops)]
        assert "".join(pieces) == choice["text"]


def test_logprobs_stand_beside_their_tokens(running: Running) -> None:
    found = running.complete(prompt="the", max_tokens=50, temperature=0, logprobs=5)["choices"][0]
    said = found["logprobs"]
    sizes = {len(said[key]) for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
    assert sizes == {50}
    assert said["text_offset"] == sorted(said["text_offset"])
    for token, score, top, offset in zip(*(said[key] for key in said), strict=True):
        assert score == max(top.values())  # greedy
        assert len(top) == 5
        assert token in top
        assert token.startswith("token:") or found["text"][offset:].startswith(token)
    assert running.complete(prompt="the", max_tokens=2, logprobs=0)["choices"][0]["logprobs"]["top_logprobs"] == [
        {},
        {},
    ]
    assert running.complete(prompt="the", max_tokens=2)["choices"][0]["logprobs"] is None


def test_echo_and_no_tokens(running: Running, model: Transformer) -> None:
    found = running.complete(prompt="naïve", max_tokens=5, temperature=0, echo=True)["choices"][0]
    assert found["text"] == "naïve" + alone(model, "naïve", 5)[0]
    none = running.complete(prompt=["ab", "c"], max_tokens=0, echo=True)
    assert [one["text"] for one in none["choices"]] == ["ab", "c"]
    assert none["usage"] == {"prompt_tokens": 3, "completion_tokens": 0, "total_tokens": 3}
    assert [one["finish_reason"] for one in none["choices"]] == ["length"] * 2
    pieces = [chunk["choices"][0]["text"] for _, chunk in streamed(running, prompt="ab", max_tokens=3, echo=True)]
    assert pieces[0].startswith("ab")


def test_without_a_seed_answers_differ(running: Running) -> None:
    found = {running.complete(prompt="the", max_tokens=20)["choices"][0]["text"] for _ in range(3)}
    assert len(found) == 3


def test_two_hundred_at_once_get_what_they_would_get_alone(start: Start) -> None:
    model = made(tied=False)  # greedy, it writes less of the same
    running = start(model)
    draw = random.Random(0)
    asked = []
    for number in range(200):
        prompt = [draw.randrange(256) for _ in range(draw.randrange(1, 60))]
        drawn = {"temperature": 1.1, "top_p": 0.9, "seed": number} if number % 2 else {"temperature": 0.0}
        asked.append((prompt, draw.randrange(1, 16), drawn))

    async def everything() -> list[str]:
        base = f"http://127.0.0.1:{running.port}/v1"
        async with openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0, timeout=60) as client:

            async def one(number: int, prompt: list[int], tokens: int, options: dict[str, Any]) -> str:
                options = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, **options}
                if number % 5:
                    return (await client.completions.create(**options)).choices[0].text
                stream = await client.completions.create(**options, stream=True)
                return "".join([chunk.choices[0].text async for chunk in stream])

            return list(await asyncio.gather(*(one(number, *rest) for number, rest in enumerate(asked))))

    found = asyncio.run(everything())
    assert found == [alone(model, prompt, tokens, **options)[0] for prompt, tokens, options in asked]
    assert waited(lambda: free(running))


def free(running: Running) -> bool:
    """Whether the engine holds nothing."""
    engine = running.engine
    held = Stats(tokens=engine.stats.tokens)
    return not engine.batches and not engine.waiting and engine.stats == held


@pytest.mark.parametrize("stream", [True, False])
def test_clients_that_leave_free_their_room(start: Start, model: Transformer, stream: bool) -> None:
    running = start(model, context=50_000)
    body = json.dumps({"prompt": "a", "stream": stream, "n": 4, **ENDLESS}).encode()
    connections = []
    for _ in range(6):
        connection = HTTPConnection("127.0.0.1", running.port, timeout=30)
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        connections.append(connection)
    assert waited(lambda: running.engine.stats.sequences >= 20)
    if stream:
        with connections[0].getresponse() as answer:
            assert answer.read(20).startswith(b"data: ")
    for connection in connections:
        connection.close()
    assert waited(lambda: free(running))
    assert running.engine.stats.tokens < 24 * 40_000 / 10  # they were not decoded to their ends
    assert running.call("GET", "/stats")[1]["cache_bytes"] == 0


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"prompt": "a", "max_tokens": 400}, "max_tokens", "at most 400 together, got 1 + 400"),
        ({"prompt": "a" * 500}, "max_tokens", "at most 400 together, got 500 + 16"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens", "expected at least 0, got -1"),
        ({"prompt": "a", "max_tokens": True}, "max_tokens", "expected a whole number"),
        ({"prompt": "a", "temperature": -1}, "temperature", "expected at least 0"),
        ({"prompt": "a", "temperature": "hot"}, "temperature", "expected a number"),
        ({"prompt": "a", "top_p": 2}, "top_p", "expected a fraction from 0 to 1"),
        ({"prompt": "a", "top_k": 0}, "top_k", "expected at least 1"),
        ({"prompt": "a", "n": 33}, "n", "expected at most 32 answers at once"),
        ({"prompt": ["a"] * 33}, "prompt", "expected at most 32 answers at once"),
        ({"prompt": [1, 258]}, "prompt", "expected tokens 0 … 257, got 258"),
        ({"prompt": [[1], []]}, "prompt", "prompt[1]: expected at least one token"),
        ({"prompt": []}, "prompt", "prompt: expected at least one token"),
        ({"prompt": [1, "a"]}, "prompt", "expected a text, a list of texts"),
        ({"prompt": {}}, "prompt", "expected a text, a list of texts"),
        ({"prompt": "\ud800"}, "prompt", "got half a character at 0"),
        ({"prompt": "a", "stop": ""}, "stop", "none of them empty"),
        ({"prompt": "a", "stop": ["a"] * 5}, "stop", "at most 4 texts"),
        ({"prompt": "a", "logprobs": 6}, "logprobs", "at most 5"),
        ({"prompt": "a", "logprobs": 1, "echo": True}, "echo", "expected no logprobs with it"),
        ({"prompt": "a", "stream": 1}, "stream", "expected True or False"),
        ({"prompt": "a", "stream_options": {}}, "stream_options", "expected stream: true with it"),
        ({"prompt": "a", "seed": 0.5}, "seed", "expected a whole number"),
        ({"prompt": "a", "suffix": "b"}, "suffix", "this server has no such parameter"),
        ({"prompt": "a", "best_of": 3}, "best_of", "this server has no such parameter"),
        ({"prompt": "a", "temprature": 1}, "temprature", "did you mean 'temperature'?"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_by_name(running: Running, body: dict[str, Any], param: str, said: str) -> None:
    status, found, _ = running.call("POST", "/v1/completions", body)
    assert status == 400
    assert found["error"]["param"] == param
    assert found["error"]["type"] == "invalid_request_error"
    assert said in found["error"]["message"]


@pytest.mark.parametrize(
    ("body", "headers", "status", "said"),
    [
        (b"{", {}, 400, "body: expected JSON"),
        (b"[1]", {}, 400, "body: expected a JSON object, got list"),
        (b"\xff\xfe", {}, 400, "body: expected JSON"),
        (b'{"seed": ' + b"9" * 5000 + b"}", {}, 400, "body: expected JSON"),
        (b"[" * 60_000, {}, 400, "body: expected JSON"),
        (b'{"temperature": 1e999}', {}, 400, "temperature: expected a finite number"),
        (b" " * 70_000, {}, 413, "body: expected at most 65,536 bytes, got more"),
        (b"{}", {"content-type": "text/plain"}, 415, "content-type: expected application/json, got text/plain"),
        (b"{}", {"host": "evil.example"}, 403, "host: expected localhost or"),
        (b"{}", {"origin": "http://evil.example"}, 403, "origin: expected a page of this server"),
        (b"{}", {"origin": "null"}, 403, "origin: expected a page of this server"),
        (b'{"model": "huge"}', {}, 404, "model: expected 'tiny', got 'huge'"),
    ],
)
def test_bodies_and_senders_that_are_refused(
    running: Running, body: bytes, headers: dict[str, str], status: int, said: str
) -> None:
    found, error, _ = running.call("POST", "/v1/completions", body, headers)
    assert found == status
    assert said in error["error"]["message"]
    assert waited(lambda: free(running))


def test_other_paths(running: Running, client: openai.OpenAI) -> None:
    assert [one.id for one in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "lengthen"
    with pytest.raises(openai.NotFoundError, match="model: expected 'tiny'"):
        client.models.retrieve("huge")
    for method, path, status in (("GET", "/nowhere", 404), ("GET", "/v1/completions", 405)):
        found, error, _ = running.call(method, path)
        assert found == status
        assert path in error["error"]["message"]
    status, stats, headers = running.call("GET", "/stats")
    assert (status, stats["limits"]["context"], stats["model"]) == (200, 400, "tiny")
    assert "access-control-allow-origin" not in headers
    status, page, headers = running.call("GET", "/")
    assert status == 200
    assert "default-src 'none'" in headers["content-security-policy"]
    assert page.count("http") == page.count("http://www.w3.org/2000/svg")  # it asks no other host for anything


def test_too_many_are_told_to_come_back(start: Start, model: Transformer) -> None:
    running = start(model, sequences=2, waiting=2, context=50_000)
    with client_of(running) as client:
        options: dict[str, Any] = {"model": "tiny", "prompt": "a", "n": 2, "stream": True, **ENDLESS}
        streams = [client.completions.create(**options)]
        assert waited(lambda: running.engine.stats.sequences == 2)
        streams += [client.completions.create(**options) for _ in range(2)]
        with pytest.raises(openai.RateLimitError, match="2 prompts wait, and 2 may") as refused:
            client.completions.create(model="tiny", prompt="a")
        assert refused.value.code == "rate_limit_exceeded"
        for stream in streams:
            stream.close()
        assert waited(lambda: free(running))
        assert client.completions.create(model="tiny", prompt="a", max_tokens=3).choices[0].text


def test_a_failure_in_the_middle_is_told(start: Start, model: Transformer) -> None:
    running = start(model, context=50_000)
    with client_of(running) as client:
        stream = client.completions.create(model="tiny", prompt="a", stream=True, **ENDLESS)
        next(iter(stream))
        running.engine.close()
        with pytest.raises(openai.APIError, match="the server stops"):
            list(stream)
        with pytest.raises(openai.InternalServerError, match="the engine is closed"):
            client.completions.create(model="tiny", prompt="a")


def test_a_client_that_sends_half_a_request_leaves_nothing(running: Running) -> None:
    with socket.create_connection(("127.0.0.1", running.port)) as half:
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n")
        half.sendall(b"content-length: 1000\r\n\r\n{")
    assert running.complete(prompt="a", max_tokens=1)["choices"]
    assert waited(lambda: free(running))
