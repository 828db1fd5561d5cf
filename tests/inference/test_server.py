"""HTTP API of the server: texts equal the batcher's, and each invalid request gets one clear error."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hf_models import VOCAB, save_hf
from serving import (
    HTTP,
    LENGTH,
    PROMPTS,
    complete,
    events,
    expected_texts,
    httpx,
    load,
    serving,
    wait_until,
    words,
)

from megatron.inference.beam import BeamConfig, beam_search
from megatron.inference.predictor import Predictor
from megatron.inference.server.engine import ServingEngine
from megatron.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_hf(tmp_path_factory.mktemp("hf") / "model", "gpt2", n_positions=LENGTH)


@pytest.fixture(scope="module")
def model(folder: Path) -> tuple[Predictor, Tokenizer]:
    return load(folder)


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[tuple[str, ServingEngine]]:
    """Server shared by the tests. Its model is not the one of the fixture `model`, with which tests may compute."""
    with serving(*load(folder), max_queue=200, max_body_bytes=20_000) as (url, engine):
        yield url, engine


def test_texts_equal_the_batcher(served, model) -> None:
    """Many concurrent requests, whole and streamed, greedy and sampled."""
    url, engine = served
    greedy = expected_texts(model, PROMPTS, out_seq_length=20, greedy=True)
    sampled = expected_texts(model, PROMPTS, out_seq_length=20, temperature=0.8, top_k=30, top_p=0.9, seed=5)
    settings = {"temperature": 0.8, "top_k": 30, "top_p": 0.9, "seed": 5}

    async def ask_all() -> list[httpx.Response]:
        async with httpx.AsyncClient(timeout=30) as client:
            bodies = [
                {"prompt": prompt, "max_tokens": 20, "stream": stream, **fields}
                for fields in ({"temperature": 0}, settings)
                for stream in (False, True)
                for prompt in map(words, PROMPTS)
            ]
            posts = [client.post(f"{url}/v1/completions", json=body) for body in bodies]
            return await asyncio.gather(*posts)

    texts = []
    for response in asyncio.run(ask_all()):
        assert response.status_code == 200, response.text
        if response.headers["content-type"].startswith("text/event-stream"):
            texts.append("".join(event["choices"][0]["text"] for event in events(response)))
        else:
            texts.append(response.json()["choices"][0]["text"])
    assert texts == [*greedy, *greedy, *sampled, *sampled]
    assert engine.in_flight == engine.running == 0


def test_prompt_formats(served, model) -> None:
    expected = expected_texts(model, PROMPTS[:2], out_seq_length=5, greedy=True)
    for prompt in (list(map(words, PROMPTS[:2])), PROMPTS[:2]):
        answer = complete(served[0], prompt=prompt, max_tokens=5, temperature=0).json()
        assert [choice["text"] for choice in answer["choices"]] == expected
        assert [choice["index"] for choice in answer["choices"]] == [0, 1]
        assert answer["usage"] == {"prompt_tokens": 4, "completion_tokens": 10, "total_tokens": 14}
    (choice,) = complete(served[0], prompt=PROMPTS[0], max_tokens=5, temperature=0).json()["choices"]
    assert choice["text"] == expected[0] and choice["finish_reason"] == "length"


def test_several_completions_and_their_seeds(served) -> None:
    body = {"prompt": "3 1 4", "n": 3, "max_tokens": 8}
    first, again = (complete(served[0], **body, seed=2**32 - 1).json()["choices"] for _ in range(2))
    assert first == again and len({choice["text"] for choice in first}) == 3
    alone = complete(served[0], **{**body, "n": 1}, seed=0).json()["choices"]
    assert alone[0]["text"] == first[1]["text"]
    without = [complete(served[0], **{**body, "n": 1}).json()["choices"][0]["text"] for _ in range(3)]
    assert len(set(without)) == 3


def test_tiny_temperature_and_top_p_are_greedy(served, model) -> None:
    """Values too small for fp32 select the most probable token and do not stop the server."""
    (expected,) = expected_texts(model, PROMPTS[:1], out_seq_length=8, greedy=True)
    for fields in ({"temperature": 1e-300}, {"temperature": 1e-6}, {"top_p": 5e-324}):
        answer = complete(served[0], prompt=words(PROMPTS[0]), max_tokens=8, **fields).json()
        assert answer["choices"][0]["text"] == expected
    body = {"prompts": [words(PROMPTS[0])], "tokens_to_generate": 8, "top_p": 5e-324}
    assert HTTP.put(f"{served[0]}/api", json=body).json()["text"] == [words(PROMPTS[0]) + expected]


def test_stop_strings(served, model) -> None:
    (whole,) = expected_texts(model, PROMPTS[2:3], out_seq_length=20, greedy=True)
    stop = f" {whole.split()[4]} "
    answer = complete(
        served[0], prompt=words(PROMPTS[2]), max_tokens=20, temperature=0, stop=[stop, "x"]
    ).json()
    assert answer["choices"][0]["text"] == whole.split(stop)[0]
    assert answer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_equal_transformers(served, folder: Path, stream: bool) -> None:
    """Log probabilities of the prompt, the completion and the alternatives."""
    import transformers

    body = {"prompt": words(PROMPTS[2]), "max_tokens": 6, "temperature": 0, "logprobs": 2, "echo": True}
    response = complete(served[0], **body, stream=stream)
    if stream:
        parts = [event["choices"][0] for event in events(response)]
        text = "".join(part["text"] for part in parts)
        returned = {
            name: [entry for part in parts for entry in part["logprobs"][name]]
            for name in parts[0]["logprobs"]
        }
    else:
        (choice,) = response.json()["choices"]
        text, returned = choice["text"], choice["logprobs"]
    tokens = list(map(int, text.split()))
    assert tokens[:7] == PROMPTS[2] and len(tokens) == 13
    assert "".join(returned["tokens"]) == text
    assert returned["text_offset"] == [len(words(tokens[:i])) for i in range(len(tokens))]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        logprobs = theirs(torch.tensor([tokens])).logits[0].log_softmax(-1)
    assert returned["token_logprobs"][0] is None and returned["top_logprobs"][0] is None
    own = [logprobs[i, token].item() for i, token in enumerate(tokens[1:])]
    assert returned["token_logprobs"][1:] == pytest.approx(own, abs=1e-4)
    for row, found, name, logprob in zip(
        logprobs,
        returned["top_logprobs"][1:],
        returned["tokens"][1:],
        returned["token_logprobs"][1:],
        strict=False,
    ):
        best = row.topk(2)
        top = {
            f" {token}": value
            for token, value in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        }
        assert found == pytest.approx({name: logprob, **top}, abs=1e-4)


def test_prompt_logprobs_without_completion(served) -> None:
    body = {"prompt": [PROMPTS[2], PROMPTS[1]], "logprobs": 0, "echo": True, "temperature": 0}
    more, none = (complete(served[0], **body, max_tokens=count).json() for count in (1, 0))
    assert [choice["text"] for choice in none["choices"]] == [words(PROMPTS[2]), "1"]
    assert none["usage"]["completion_tokens"] == 0
    scores = [choice["logprobs"]["token_logprobs"] for choice in none["choices"]]
    assert scores == [choice["logprobs"]["token_logprobs"][:-1] for choice in more["choices"]]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("answer", [VOCAB - 1, 5])
def test_scores_as_lm_evaluation_harness_takes_them(folder: Path, stream: bool, answer: int) -> None:
    """Its local-completions sums token_logprobs[context:-1], so the generated token must be listed even if the text
    ends with it."""
    predictor, tokenizer = load(folder)
    forward = predictor.forward

    def predict(*inputs: object, **options: bool) -> torch.Tensor:
        logits = forward(*inputs, **options).clone()
        logits[-1, answer] = 100.0
        return logits

    predictor.forward = predict
    prompt = PROMPTS[2]
    with serving(predictor, tokenizer) as (url, _):
        body = {"prompt": [prompt], "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True, "seed": 1}
        response = complete(url, **body, stream=stream)
        (choice,) = (events(response)[-1] if stream else response.json())["choices"]
    found = choice["logprobs"]
    assert choice["text"] == words(prompt) + ("" if answer == VOCAB - 1 else " 5")
    assert found["tokens"] == [*words(prompt).replace(" ", "| ").split("|"), f" {answer}"]
    assert found["text_offset"][-1] == len(words(prompt))
    logprobs = forward(0, [0], [prompt], all_positions=True).log_softmax(-1)
    own = [logprobs[i, token].item() for i, token in enumerate(prompt[1:])]
    assert found["token_logprobs"][1:-1] == pytest.approx(own, abs=1e-4)
    assert found["token_logprobs"][-1] == pytest.approx(0, abs=1e-4)


def test_stream_reports_usage(served) -> None:
    body = {"prompt": ["1", "2 3"], "max_tokens": 3, "stream": True, "temperature": 0}
    *parts, last = events(complete(served[0], **body, stream_options={"include_usage": True}))
    assert last["choices"] == [] and last["usage"]["total_tokens"] == 9
    assert all(part["usage"] is None and part["id"] == last["id"] for part in parts)
    reasons = [part["choices"][0]["finish_reason"] for part in parts]
    assert reasons.count("length") == 2 and reasons.count(None) == len(parts) - 2


@pytest.mark.parametrize(
    ("body", "status", "param", "message"),
    [
        ({}, 400, "prompt", "prompt is required"),
        (
            {"prompt": words([1] * LENGTH)},
            400,
            "prompt",
            "the prompt has 64 tokens and leaves no room in the context of 64",
        ),
        (
            {"prompt": [[1], [1] * 70]},
            400,
            "prompt",
            "the prompt has 70 tokens and leaves no room in the context of 64",
        ),
        ({"prompt": []}, 400, "prompt", "prompt must be a string, a list of strings"),
        ({"prompt": [True]}, 400, "prompt", "must be a string, a list of strings"),
        ({"prompt": "1 x"}, 400, None, "'x' is not a token id"),
        ({"prompt": [1, VOCAB]}, 400, "prompt", "100 is not a token id; give 0 to 99"),
        ({"prompt": [-1]}, 400, "prompt", "-1 is not a token id"),
        (
            {"prompt": "1", "temperature": -1},
            400,
            "temperature",
            "must be greater than or equal to 0, not -1",
        ),
        ({"prompt": "1", "top_p": 0}, 400, "top_p", "must be greater than 0"),
        ({"prompt": "1", "max_tokens": "5"}, 400, "max_tokens", "max_tokens must be an integer, not '5'"),
        ({"prompt": "1", "max_tokens": -1}, 400, "max_tokens", "must be greater than or equal to 0"),
        ({"prompt": "1", "logprobs": 21}, 400, "logprobs", "must be less than or equal to 20"),
        ({"prompt": "1", "stop": ["a", ""]}, 400, "stop", "none empty"),
        ({"prompt": "1", "seed": -1}, 400, "seed", "not -1"),
        ({"prompt": "1", "best_of": 2}, 400, "best_of", "is not supported; it must equal n"),
        ({"prompt": "1", "suffix": "2"}, 400, "suffix", "suffix: '2' is not supported; leave it out"),
        ({"prompt": "1", "presence_penalty": 0.5}, 400, "presence_penalty", "repetition_penalty is"),
        ({"prompt": "1", "logit_bias": {"5": 1}}, 400, "logit_bias", "is not supported"),
        ({"prompt": "1", "stream_options": {}}, 400, "stream_options", "needs stream"),
        ({"prompt": "1", "maxtokens": 5}, 400, "maxtokens", "maxtokens is not a field of this request"),
        ({"prompt": "1", "model": "gpt-4"}, 404, "model", "there is no model 'gpt-4'; the model is 'tiny'"),
        ({"prompt": "1", "n": 128, "stream": True, "max_tokens": 1}, 200, None, ""),
        (
            {"prompt": ["1", "2"], "n": 128},
            400,
            None,
            "the request asks for 256 texts, and the server takes at most 204",
        ),
        ({"prompt": "1 " * 10_000}, 413, None, "larger than the 20000 bytes"),
        ([1], 400, None, "the body is not a JSON object"),
    ],
)
def test_invalid_completions(served, body, status: int, param: str | None, message: str) -> None:
    response = HTTP.post(f"{served[0]}/v1/completions", json=body, timeout=30)
    assert response.status_code == status, response.text
    if status != 200:
        error = response.json()["error"]
        assert error["param"] == param and message in error["message"] and "\n" not in error["message"]
        assert (error["code"] == "context_length_exceeded") == ("leaves no room" in message)
        assert error["type"] == {404: "not_found_error"}.get(status, "invalid_request_error")
    assert served[1].in_flight == 0


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "message"),
    [
        ("GET", "/nothing", b"", 404, "there is no /nothing"),
        ("GET", "/v1/models/other", b"", 404, "there is no model 'other'"),
        ("GET", "/v1/completions", b"", 405, "GET is not allowed for /v1/completions"),
        ("POST", "/api", b"{}", 405, "POST is not allowed for /api"),
        ("POST", "/v1/completions", b'{"prompt": "\xff"}', 400, "the body is not UTF-8 text (byte 12)"),
        ("POST", "/v1/completions", b'{"prompt": "\\ud800"}', 400, "the body is not JSON"),
        ("POST", "/v1/completions", b'{"prompt": "1"', 400, "the body is not JSON: EOF"),
        ("POST", "/v1/completions", b'{"prompt": "1", "temperature": NaN}', 400, "temperature"),
        ("POST", "/v1/completions", b"[" * 9000, 400, "the body is not JSON"),
        ("POST", "/v1/completions", b"", 400, "the body is not JSON"),
    ],
)
def test_invalid_requests(served, method: str, path: str, content: bytes, status: int, message: str) -> None:
    headers = {"Content-Type": "application/json"}
    response = HTTP.request(method, f"{served[0]}{path}", content=content, headers=headers)
    assert response.status_code == status and message in response.json()["error"]["message"]


def test_content_type_must_be_json(served) -> None:
    """Otherwise any web page open in a browser could send requests."""
    response = HTTP.post(f"{served[0]}/v1/completions", content=b'{"prompt": "1"}')
    assert (
        response.status_code == 415
        and "Content-Type: application/json" in response.json()["error"]["message"]
    )


def test_endless_chunked_body_is_rejected(served) -> None:
    def endless() -> Iterator[bytes]:
        while True:
            yield b" " * 5000

    headers = {"Content-Type": "application/json"}
    with pytest.raises((httpx.HTTPStatusError, httpx.TransportError)):  # the server stops reading
        HTTP.post(f"{served[0]}/v1/completions", content=endless(), headers=headers).raise_for_status()


def test_nvidia_api(served, model) -> None:
    predictor, _ = model
    expected = expected_texts(model, PROMPTS[:2], out_seq_length=6, top_k=1)
    body = {"prompts": list(map(words, PROMPTS[:2])), "tokens_to_generate": 6, "top_k": 1, "logprobs": True}
    answer = HTTP.put(f"{served[0]}/api", json=body).json()
    assert answer["text"] == [words(row) + text for row, text in zip(PROMPTS, expected, strict=False)]
    assert ["".join(segments) for segments in answer["segments"]] == answer["text"]
    for prompt, segments, logprobs in zip(
        body["prompts"], answer["segments"], answer["logprobs"], strict=True
    ):
        assert len(logprobs) == len(segments) - 1
        ours = complete(served[0], prompt=prompt, max_tokens=6, temperature=0, logprobs=0, echo=True).json()
        theirs = ours["choices"][0]["logprobs"]["token_logprobs"][1:]
        assert logprobs == pytest.approx(theirs, abs=1e-5)

    with_bos = HTTP.put(f"{served[0]}/api", json={**body, "add_BOS": True, "logprobs": False}).json()
    assert with_bos["logprobs"] is None and with_bos["segments"][0][0] == str(VOCAB - 1)

    body = {"prompts": ["3 1"], "tokens_to_generate": 9, "beam_width": 3, "stop_token": 5}
    answer = HTTP.put(f"{served[0]}/api", json=body).json()
    beams = beam_search(predictor, [3, 1], BeamConfig(beam_width=3), length=9, ends={5})
    assert answer["text"] == [words([3, 1, *beam.tokens]) for beam in beams]
    assert answer["scores"] == [beam.score for beam in beams]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompts": []}, "prompts"),
        ({"prompts": "1"}, "prompts"),
        ({"prompts": ["1"] * 129}, "prompts"),
        ({"temperature": 0}, "temperature"),
        ({"temperature": -1.5}, "temperature"),
        ({"top_k": 1001}, "top_k"),
        ({"top_p_decay": 0.5}, "top_p_decay is not supported"),
        ({"beam_width": 2, "stop_token": VOCAB}, "stop_token: 100 is not a token id; give 0 to 99"),
        ({"stop_token": 5}, "stop_token needs beam_width"),
        ({"beam_width": 5}, "beam_width: 5 is too large; the server has --max-batch-size 4"),
        ({"beam_width": 2, "prompts": ["1", "2"]}, "prompts: beam search takes one prompt, not 2"),
        ({"beam_width": 2, "tokens_to_generate": 0}, "beam search needs at least 1"),
        (
            {"beam_width": 2, "prompts": [words([1] * 70)]},
            "the prompt has 70 tokens and leaves no room in the context of 64",
        ),
        ({"length": 5}, "length is not a field"),
    ],
)
def test_invalid_nvidia_requests(served, fields: dict, message: str) -> None:
    response = HTTP.put(f"{served[0]}/api", json={"prompts": ["1"], **fields})
    error = response.json()["error"]
    assert response.status_code == 400 and message in error["message"]
    assert "leaves no room" not in message or error["param"] == "prompts"


def test_api_key(model) -> None:
    with serving(*model, key="schlüssel") as (url, _):
        for path in ("/", "/health"):
            assert HTTP.get(f"{url}{path}").status_code == 200
        for path in ("/metrics", "/v1/models", "/v1/models/tiny", "/nothing"):
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": b"Bearer \xff"}):
                refused = HTTP.get(f"{url}{path}", headers=headers)
                assert refused.status_code == 401
                assert refused.json()["error"]["code"] == "invalid_api_key"
        given = {"Authorization": "Bearer schlüssel".encode()}
        assert HTTP.get(f"{url}/v1/models", headers=given).status_code == 200
        assert HTTP.post(f"{url}/v1/completions", json={"prompt": "1"}).status_code == 401
        assert HTTP.post(f"{url}/v1/completions", json={"prompt": "1"}, headers=given).status_code == 200


def test_metrics(model) -> None:
    with serving(*model) as (url, _):
        complete(url, prompt="1 2 3", max_tokens=4, temperature=0)
        complete(url, prompt="1", temperature=-1)
        HTTP.get(f"{url}/nothing/at/all")
        HTTP.put(f"{url}/api", json={"prompts": ["1 2"], "tokens_to_generate": 5, "beam_width": 1})
        page = HTTP.get(f"{url}/metrics")
    assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
    for line in page.text.splitlines():
        assert re.fullmatch(r'# (HELP|TYPE) \w+ .+|\w+(\{(\w+="[^"]*",?)+\})? [-+\d.e]+', line), line
    values = dict(line.rsplit(" ", 1) for line in page.text.splitlines() if line[0] != "#")
    assert values['megatron_requests_total{path="/v1/completions",status="200"}'] == "1"
    assert values['megatron_requests_total{path="/v1/completions",status="400"}'] == "1"
    assert values['megatron_requests_total{path="other",status="404"}'] == "1"
    assert values["megatron_prompt_tokens_total"] == "5" and values["megatron_generated_tokens_total"] == "9"
    assert values['megatron_time_to_first_token_seconds_bucket{le="+Inf"}'] == "2"
    assert values["megatron_seconds_per_token_count"] == "4"


def test_openai_client(served, model) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{served[0]}/v1", api_key="none", max_retries=0)
    assert [entry.id for entry in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    (expected,) = expected_texts(model, PROMPTS[2:3], out_seq_length=12, greedy=True)
    body = {"model": "tiny", "prompt": words(PROMPTS[2]), "max_tokens": 12, "temperature": 0}
    whole = client.completions.create(**body, logprobs=3, extra_body={"repetition_penalty": 1.0})
    assert whole.choices[0].text == expected and whole.usage.completion_tokens == 12
    assert "".join(whole.choices[0].logprobs.tokens) == expected
    stream = client.completions.create(**body, stream=True, stream_options={"include_usage": True})
    *parts, last = list(stream)
    assert "".join(part.choices[0].text for part in parts) == expected
    assert parts[-1].choices[0].finish_reason == "length" and last.usage.total_tokens == 19
    with client.completions.create(**body | {"max_tokens": 50}, stream=True) as stream:
        next(iter(stream))
    wait_until(lambda: served[1].in_flight == 0)
    with pytest.raises(openai.BadRequestError, match="temperature") as error:
        client.completions.create(**body | {"temperature": -1})
    assert error.value.param == "temperature"
    with pytest.raises(openai.NotFoundError, match="there is no model"):
        client.completions.create(**body | {"model": "davinci"})
