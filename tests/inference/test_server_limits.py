"""The server under clients that ask for too much, are too slow, or come from another site."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hf_models import save_hf
from serving import HTTP, LENGTH, complete, expected_texts, httpx, load, load_slow, serving, wait_until, words

from megatron.inference.predictor import Predictor
from megatron.inference.server import protocol
from megatron.inference.server.completions import CompletionRequest
from megatron.inference.server.engine import ServingEngine
from megatron.inference.token_text import TokenText
from megatron.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_hf(tmp_path_factory.mktemp("hf") / "model", "gpt2", n_positions=LENGTH)


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[tuple[str, ServingEngine]]:
    with serving(*load(folder)) as (url, engine):
        yield url, engine


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [[1]] * 20_000, "n": 128}),
        ("/v1/completions", {"prompt": ["1"] * 300}),
        ("/api", {"prompts": ["1"] * 128}),
    ],
)
def test_too_many_texts_are_refused_before_any_work(folder: Path, path: str, body: dict) -> None:
    predictor, tokenizer = load(folder)
    tokenizer.tokenize_batch = lambda texts: pytest.fail("was tokenized")
    with serving(predictor, tokenizer, max_queue=100) as (url, engine):
        request = HTTP.post if path != "/api" else HTTP.put
        response = request(f"{url}{path}", json=body)
        assert response.status_code == 400
        assert f"the server takes at most {engine.capacity} at once" in response.json()["error"]["message"]
        assert engine.in_flight == 0


def test_a_large_body_is_checked_beside_the_event_loop(served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other clients are answered while a request with very many prompts is checked, which is then refused."""
    url, engine = served
    check, begun, release = CompletionRequest.model_validate_json, threading.Event(), threading.Event()

    def slow(text: str) -> CompletionRequest:
        if len(text) > 100_000:
            begun.set()
            assert release.wait(60)
        return check(text)

    monkeypatch.setattr(CompletionRequest, "model_validate_json", slow)
    answers = []
    large = threading.Thread(target=lambda: answers.append(complete(url, prompt=["1"] * 800_000)))
    large.start()
    assert begun.wait(60)
    assert HTTP.get(f"{url}/health").status_code == 200
    assert complete(url, prompt="1", max_tokens=1).status_code == 200
    assert not answers
    release.set()
    large.join()
    assert answers[0].status_code == 400 and engine.in_flight == 0
    assert "asks for 800000 texts" in answers[0].json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "1", "max_tokens": 2, "logprobs": 1}),
        ("/v1/completions", {"prompt": "1 2", "max_tokens": 2, "logprobs": 1, "echo": True, "stream": True}),
        ("/api", {"prompts": ["1"], "tokens_to_generate": 2}),
        ("/api", {"prompts": ["1"], "tokens_to_generate": 2, "beam_width": 2}),
    ],
)
def test_answers_are_formatted_beside_the_event_loop(
    served, monkeypatch: pytest.MonkeyPatch, path: str, body: dict
) -> None:
    url, engine = served
    begun, release = threading.Event(), threading.Event()

    def slow(self: TokenText, token: int) -> str:
        begun.set()
        assert release.wait(60)
        return ""

    monkeypatch.setattr(TokenText, "add", slow)
    answers = []
    request = HTTP.post if path != "/api" else HTTP.put
    asking = threading.Thread(target=lambda: answers.append(request(f"{url}{path}", json=body)))
    asking.start()
    assert begun.wait(60)
    assert HTTP.get(f"{url}/health").status_code == 200
    assert not answers
    release.set()
    asking.join()
    assert answers[0].status_code == 200 and engine.in_flight == 0


def test_a_slow_tokenizer_harms_only_its_request(folder: Path) -> None:
    """Other requests are answered, the request times out, and the server stops within its grace period."""
    predictor, tokenizer = load(folder)
    tokenize, release = tokenizer.tokenize_batch, threading.Event()

    def slow(texts: list[str]) -> list[list[int]]:
        if texts == ["9 9"]:
            release.wait(60)
        return tokenize(texts)

    tokenizer.tokenize_batch = slow
    with serving(predictor, tokenizer, request_timeout=1.0) as (url, engine):
        answers = []
        late = threading.Thread(target=lambda: answers.append(complete(url, prompt="9 9")))
        late.start()
        wait_until(lambda: engine.in_flight == 1)
        assert complete(url, prompt="1", max_tokens=2).status_code == 200
        late.join()
        assert answers[0].status_code == 504 and engine.in_flight == 0
        blocked = threading.Thread(target=lambda: answers.append(complete(url, prompt="9 9")))
        blocked.start()
        wait_until(lambda: engine.in_flight == 1)
        begin = time.monotonic()
    assert time.monotonic() - begin < 6  # 3 seconds for responses to be sent
    release.set()
    blocked.join()
    assert answers[1].status_code >= 500


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "localhost:8000"}, 200),
        ({"Host": "[::1]"}, 200),
        ({"Host": "evil.example:8000"}, 403),
        ({"Host": "127.0.0.1.evil.example"}, 403),
        ({"Host": "[::1"}, 400),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "localhost:1", "Origin": "http://localhost:1"}, 200),
        ({"Host": "localhost:1", "Origin": "http://localhost:2"}, 403),
    ],
)
def test_pages_of_other_sites_are_refused(served, headers: dict[str, str], status: int) -> None:
    url, _ = served
    for path in ("/", "/health", "/v1/models"):
        assert HTTP.get(url + path, headers=headers).status_code == status
    body = {"prompt": "1", "max_tokens": 1}
    assert HTTP.post(f"{url}/v1/completions", json=body, headers=headers).status_code == status


def test_a_key_replaces_the_check_of_the_host(folder: Path) -> None:
    """A proxy on this machine may pass the name under which it is known."""
    with serving(*load(folder), key="secret") as (url, _):
        headers = {"Host": "models.example", "Authorization": "Bearer secret"}
        assert HTTP.get(f"{url}/v1/models", headers=headers).status_code == 200


def test_responses_keep_their_type(served) -> None:
    url, _ = served
    for path in ("/", "/health", "/nothing"):
        assert HTTP.get(url + path).headers["x-content-type-options"] == "nosniff"


def test_errors_have_nvidias_message(served) -> None:
    url, _ = served
    error = HTTP.put(f"{url}/api", json={"prompts": []}).json()
    assert error["message"] == error["error"]["message"]


def connect(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_an_incomplete_head_times_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.3)
    with serving(*load(folder)) as (url, _):
        for sent in (b"", b"GET /health HTT", b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: "):
            with connect(url) as connection:
                connection.sendall(sent)
                assert is_closed(connection)
        # The second request on a connection has the same time.
        with connect(url) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /")
            answer = b""
            while data := connection.recv(4096):
                answer += data
            assert answer.startswith(b"HTTP/1.1 200") and answer.count(b"HTTP/1.1") == 1
        # A request whose generation takes longer is not cut off.
    predictor, tokenizer = load_slow(folder)
    with serving(predictor, tokenizer) as (url, _):
        assert complete(url, prompt="1", max_tokens=30).status_code == 200


def test_connections_are_limited(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "max_connections", lambda: 4)
    with serving(*load(folder)) as (url, _):
        held = [connect(url) for _ in range(4)]
        time.sleep(0.2)
        more = [connect(url) for _ in range(20)]
        assert all(map(is_closed, more))
        for connection in (*held, *more):
            connection.close()
        time.sleep(0.2)
        with httpx.Client() as client:
            assert client.get(f"{url}/health").status_code == 200


@pytest.fixture
def faulty(folder: Path) -> tuple[Predictor, Tokenizer]:
    """A model that computes NaN, in its cache too, for sequences with the token 7."""
    predictor, tokenizer = load(folder)
    forward = predictor.forward

    def faulty_forward(
        first: int, starts: list[int], tokens: list[list[int]], **options: bool
    ) -> torch.Tensor:
        logits = forward(first, starts, tokens, **options).clone()
        for i, row in enumerate(tokens):
            if 7 in row:
                logits[slice(None) if options.get("all_positions") else i] = torch.nan
                predictor.cache.memory[:, :, first + i] = torch.nan
        return logits

    predictor.forward = faulty_forward
    return predictor, tokenizer


@pytest.mark.parametrize("fields", [{}, {"echo": True, "logprobs": 1}, {"stream": True}])
def test_logits_that_are_not_finite_end_one_request(faulty, fields: dict) -> None:
    good = [[3, 1, 4], [1, 5], [9, 2, 6]]
    expected = expected_texts(faulty, good, out_seq_length=20, greedy=True)
    with serving(*faulty, max_batch_size=4) as (url, engine):
        answers: dict[int, httpx.Response] = {}

        def ask(number: int, prompt: list[int], **body: object) -> None:
            answers[number] = complete(url, prompt=words(prompt), max_tokens=20, temperature=0, **body)

        for _ in range(2):  # the second time in rows that held NaN
            threads = [threading.Thread(target=ask, args=(9, [7]), kwargs=fields)]
            threads += [threading.Thread(target=ask, args=(i, prompt)) for i, prompt in enumerate(good)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert answers[9].status_code == 500 and "not finite" in answers[9].text
            assert [answers[i].json()["choices"][0]["text"] for i in range(3)] == expected
        wait_until(lambda: engine.in_flight == 0)
        beams = HTTP.put(f"{url}/api", json={"prompts": ["7"], "tokens_to_generate": 5, "beam_width": 2})
        assert beams.status_code == 500 and "not finite" in beams.json()["message"]
        assert complete(url, prompt="1", max_tokens=1).status_code == 200


def test_the_error_of_a_stream_is_an_event(faulty) -> None:
    """A stream that has begun ends with an error event."""
    predictor, tokenizer = faulty
    forward, calls = predictor.forward, []

    def fail_later(first: int, starts: list[int], tokens: list[list[int]], **options: bool) -> torch.Tensor:
        calls.append(tokens)
        logits = forward(first, starts, tokens, **options)
        return logits * torch.nan if len(calls) == 5 else logits

    predictor.forward = fail_later
    with serving(predictor, tokenizer) as (url, engine):
        stream = complete(url, prompt="1", max_tokens=30, temperature=0, stream=True)
        last = [line for line in stream.text.split("\n\n") if line][-1]
        assert stream.status_code == 200
        assert "not finite" in json.loads(last.removeprefix("data: "))["error"]["message"]
        assert complete(url, prompt="1", max_tokens=1).status_code == 200
        assert engine.in_flight == 0
