"""Lifecycle of the server: queue, disconnects, timeouts, signals and several processes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from distributed import run_distributed
from hf_models import save_hf
from serving import (
    HTTP,
    LENGTH,
    PROMPTS,
    TOKENIZER,
    complete,
    events,
    expected_texts,
    httpx,
    load,
    load_slow,
    serving,
    wait_until,
    words,
)

from megatron.errors import InputError
from megatron.inference.config import InferenceConfig
from megatron.inference.driver import driver
from megatron.inference.predictor import Predictor
from megatron.inference.server import run as run_module
from megatron.inference.server.app import _EventStream
from megatron.inference.server.config import KEY_VARIABLE, ServerConfig
from megatron.inference.server.protocol import LimitedProtocol
from megatron.inference.server.run import listen, serve
from megatron.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_hf(tmp_path_factory.mktemp("hf") / "model", "gpt2", n_positions=LENGTH)


@pytest.fixture
def slow(folder: Path) -> tuple[Predictor, Tokenizer]:
    return load_slow(folder)


def test_beam_search_runs_alone(slow) -> None:
    """Beam search waits for running texts, and later texts wait for beam search."""
    with serving(*slow) as (url, engine):
        answers: list[int] = []
        ask = [
            lambda: complete(url, prompt="1", max_tokens=30, temperature=0),
            lambda: HTTP.put(f"{url}/api", json={"prompts": ["1"], "tokens_to_generate": 5, "beam_width": 4}),
            lambda: complete(url, prompt="1", max_tokens=2),
        ]
        threads = []
        for number, send in enumerate(ask, start=1):

            def note(number: int = number, send: Callable = send) -> None:
                assert send().status_code == 200
                answers.append(number)

            threads.append(threading.Thread(target=note))
            threads[-1].start()
            wait_until(lambda number=number: engine.in_flight >= number)
        for thread in threads:
            thread.join()
        assert answers == [1, 2, 3]


def test_full_queue(slow) -> None:
    with serving(*slow, max_batch_size=1, max_queue=1) as (url, engine):
        body = {"prompt": ["1", "2"], "max_tokens": 60, "temperature": 0, "stream": True}
        with HTTP.stream("POST", f"{url}/v1/completions", json=body) as response:
            assert response.status_code == 200
            refused = complete(url, prompt="3")
            assert refused.status_code == 429 and int(refused.headers["Retry-After"]) > 0
            assert refused.json()["error"]["type"] == "rate_limit_error"
            metrics = HTTP.get(f"{url}/metrics").text
            assert "\nmegatron_running 1\n" in metrics and "\nmegatron_queue_length 1\n" in metrics
        wait_until(lambda: engine.in_flight == 0)
        assert complete(url, prompt="3", max_tokens=1).status_code == 200


def test_request_timeout(slow) -> None:
    """The error is a status if nothing was sent yet, otherwise an event of the stream."""
    with serving(*slow, max_batch_size=1, request_timeout=0.4) as (url, engine):
        late = complete(url, prompt="1", max_tokens=60, temperature=0)
        assert late.status_code == 504 and "longer than 0.4 seconds" in late.json()["error"]["message"]
        stream = complete(url, prompt="1", max_tokens=60, temperature=0, stream=True)
        *parts, last = [line for line in stream.text.split("\n\n") if line]
        assert stream.status_code == 200 and parts
        assert "longer than 0.4 seconds" in json.loads(last.removeprefix("data: "))["error"]["message"]
        wait_until(lambda: engine.running == 0)
        assert engine.in_flight == 0


@pytest.mark.parametrize("kind", ["stream", "whole", "beams"])
def test_disconnected_client_frees_its_rows(slow, kind: str) -> None:
    with serving(*slow, max_batch_size=4) as (url, engine):
        body = {
            "prompt": ["1", "2", "3", "4", "5"],
            "max_tokens": 60,
            "temperature": 0,
            "stream": kind == "stream",
        }
        if kind == "beams":
            body = {"prompts": ["1"], "tokens_to_generate": 60, "beam_width": 4}
            request = httpx.Request("PUT", f"{url}/api", json=body)
        else:
            request = httpx.Request("POST", f"{url}/v1/completions", json=body)
        with httpx.Client(timeout=0.3) as client, pytest.raises(httpx.ReadTimeout):
            if kind == "stream":
                # Keep reading, so that the server does not block on sending.
                for _ in client.send(request, stream=True).iter_bytes():
                    if engine.running == 4:
                        raise httpx.ReadTimeout("enough")
            client.send(request)
        begin = time.monotonic()
        wait_until(lambda: engine.in_flight == engine.running == 0)
        assert complete(url, prompt="1", max_tokens=1).status_code == 200
        assert time.monotonic() - begin < 1, "the texts would have taken two seconds"
        wait_until(lambda: ',status="499"} 1' in HTTP.get(f"{url}/metrics").text or kind == "stream")


def test_events_are_not_written_to_a_client_that_hung_up(caplog: pytest.LogCaptureFixture) -> None:
    import uvicorn

    written = []

    async def stream_to_a_client_that_hangs_up() -> None:
        client = socket.socket()

        async def waiting_events() -> AsyncIterator[str]:
            for i in range(1000):
                if i == 5:
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
                    client.close()
                written.append(i)
                yield f"data: {i}\n\n"

        async def app(scope: dict, receive: Callable, send: Callable) -> None:
            try:
                await _EventStream(waiting_events(), SimpleNamespace(cancel=lambda: None))(
                    scope, receive, send
                )
            finally:
                server.should_exit = True

        settings = uvicorn.Config(app, http=LimitedProtocol, lifespan="off", ws="none", log_config=None)
        server = uvicorn.Server(settings)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            client.connect(listener.getsockname())
            client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await server.serve([listener])

    asyncio.run(asyncio.wait_for(stream_to_a_client_that_hangs_up(), 60))
    assert 5 < len(written) < 100 and "send() raised" not in caplog.text


def test_sources_of_the_api_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "key"
    file.write_text("from a file\n")
    assert ServerConfig().api_key() is None
    assert ServerConfig(api_key_file=str(file)).api_key() == "from a file"
    monkeypatch.setenv(KEY_VARIABLE, "from outside")
    assert ServerConfig().api_key() == "from outside"
    with pytest.raises(InputError, match="leave out one of the two"):
        ServerConfig(api_key_file=str(file)).api_key()
    monkeypatch.delenv(KEY_VARIABLE)
    file.write_text("\n")
    for path, message in ((file, "is empty"), (tmp_path / "absent", "cannot be read")):
        with pytest.raises(InputError, match=f"--api-key-file: .* {message}"):
            ServerConfig(api_key_file=str(path)).api_key()


def test_openai_client_on_a_stream_timeout(slow) -> None:
    openai = pytest.importorskip("openai")
    with serving(*slow, request_timeout=0.3) as (url, _):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        stream = client.completions.create(
            model="tiny", prompt="1", max_tokens=60, temperature=0, stream=True
        )
        with pytest.raises(openai.APIError, match=r"longer than 0\.3 seconds"):
            list(stream)


def first_response(url: str, **body: object) -> httpx.Response:
    """Response of a server that may not listen yet."""
    while True:
        try:
            return complete(url, **body)
        except httpx.ConnectError:
            time.sleep(0.01)


@contextmanager
def client_thread(config: ServerConfig, ask: Callable[[str], None]) -> Iterator[socket.socket]:
    """Context with a socket for a server, while another thread calls `ask` with the server's address."""
    listener = listen(config)
    thread = threading.Thread(target=ask, args=(f"http://127.0.0.1:{listener.getsockname()[1]}",))
    thread.start()
    try:
        yield listener
    finally:
        thread.join()


def serve_until_signal(
    number: int,
    predictor: Predictor,
    tokenizer: Tokenizer,
    answers: list[httpx.Response],
    max_tokens: int = 8,
) -> None:
    """Serve one text, and another during which the signal `number` arrives."""

    def ask(url: str) -> None:
        body = {"prompt": words(PROMPTS[2]), "temperature": 0}
        answers.append(first_response(url, **body, max_tokens=8))
        body |= {"max_tokens": max_tokens, "stream": True}
        with HTTP.stream("POST", f"{url}/v1/completions", json=body) as response:
            os.kill(os.getpid(), number)
            response.read()
        answers.append(response)

    config = ServerConfig(port=0, max_batch_size=4)
    with client_thread(config, ask) as listener:
        serve(config, listener, {"tiny": (predictor, tokenizer)})


def streamed(response: httpx.Response) -> str:
    return "".join(event["choices"][0]["text"] for event in events(response))


def test_sigterm_completes_running_texts(folder: Path, slow) -> None:
    answers: list[httpx.Response] = []
    serve_until_signal(signal.SIGTERM, *slow, answers)
    (expected,) = expected_texts(load(folder), PROMPTS[2:3], out_seq_length=8, greedy=True)
    assert answers[0].json()["choices"][0]["text"] == streamed(answers[1]) == expected


def test_ctrl_c_stops_long_texts(slow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "GRACE_SECONDS", 0.2)
    answers: list[httpx.Response] = []
    with pytest.raises(KeyboardInterrupt):
        serve_until_signal(signal.SIGINT, *slow, answers, max_tokens=50)
    last = [line for line in answers[1].text.split("\n\n") if line][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["message"] == "the server is stopping"


def tensor_parallel(folder: str) -> list[str] | None:
    def work(predictor: Predictor, tokenizer: Tokenizer) -> list[str]:
        answers: list[httpx.Response] = []
        serve_until_signal(signal.SIGTERM, predictor, tokenizer, answers)
        return [answers[0].json()["choices"][0]["text"], streamed(answers[1])]

    return driver(InferenceConfig(load=folder, tensor_model_parallel_size=2), TOKENIZER, work)


def test_two_processes_serve_the_same_texts(folder: Path) -> None:
    expected = expected_texts(load(folder), PROMPTS[2:3], out_seq_length=8, greedy=True)
    assert run_distributed(tensor_parallel, 2, str(folder)) == [expected * 2, None]


def test_server_error_is_reported(folder: Path) -> None:
    predictor, tokenizer = load(folder)
    answers: list[httpx.Response] = []

    def fail(*arguments: object, **options: object) -> torch.Tensor:
        raise RuntimeError("the machine burns")

    predictor.forward = fail
    config = ServerConfig(port=0, max_batch_size=1)
    client = client_thread(config, lambda url: answers.append(first_response(url, prompt="1")))
    with pytest.raises(RuntimeError, match="the machine burns"), client as listener:
        serve(config, listener, {"tiny": (predictor, tokenizer)})
    assert answers[0].status_code == 503


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"host": "192.0.2.1"}, "--host: 192.0.2.1 is not an address of this machine"),
        ({"host": "a.b.invalid"}, "--host: a.b.invalid is not an address of this machine"),
    ],
)
def test_invalid_addresses(flags: dict, message: str) -> None:
    with pytest.raises(InputError, match=f"^{re.escape(message)}"):
        listen(ServerConfig(port=0, **flags))
