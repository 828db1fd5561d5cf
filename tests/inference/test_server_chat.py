"""POST /v1/chat/completions, chat templates, empty prompts, and two models on one server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from distributed import run_distributed
from hf_models import VOCAB, save_hf
from serving import HTTP, LENGTH, TOKENIZER, complete, events, expected_texts, load, serving, words

from megatron.errors import InputError
from megatron.inference.config import InferenceConfig
from megatron.inference.driver import drive_all
from megatron.inference.predictor import Predictor
from megatron.inference.server.chat_template import PLAIN, chat_template
from megatron.inference.server.config import ServerConfig
from megatron.inference.server.engine import ServingEngine
from megatron.inference.server.errors import ApiError
from megatron.tokenizer import Tokenizer
from megatron.tokenizer.config import TokenizerConfig
from megatron.tokenizer.gpt2 import GPT2BPETokenizer
from megatron.tokenizer.huggingface import HuggingFaceTokenizer
from megatron.tokenizer.train import train_bpe

EOD = VOCAB - 1
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Who sat?"},
    {"role": "assistant", "content": "The cat."},
    {"role": "user", "content": "Where?"},
]
CHATML = (
    "{% for message in messages %}\n"
    "    {%- if loop.first and message['role'] != 'system' %}{{ '<|im_start|>system\\nHi.<|im_end|>\\n' }}{% endif %}\n"
    "{{ bos_token }}<|im_start|>{{ message['role'] }}\n{{ message['content'] | trim }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> GPT2BPETokenizer:
    folder = tmp_path_factory.mktemp("bpe")
    files = train_bpe(["the cat sat on the mat and the dog ran to the User and the Assistant " * 20], 288)
    for name in ("vocab.json", "merges.txt"):
        (folder / name).write_text(files[name], encoding="utf-8")
    return GPT2BPETokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))


def write_tokenizer(folder: Path, bpe: GPT2BPETokenizer, **settings: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(bpe.to_json(), encoding="utf-8")
    tokens = {"eos_token": "<|endoftext|>", "bos_token": {"__type": "AddedToken", "content": "<|endoftext|>"}}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **tokens, **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def bpe_model(
    tmp_path_factory: pytest.TempPathFactory, bpe: GPT2BPETokenizer
) -> tuple[Predictor, Tokenizer, Tokenizer]:
    """A model with its tokenizer without and with a chat template."""
    root = tmp_path_factory.mktemp("model")
    folder = save_hf(root / "hf", "gpt2", vocab_size=bpe.vocab_size, n_positions=256)
    plain = write_tokenizer(root / "plain", bpe)
    predictor, tokenizer = load(
        folder, TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(plain))
    )
    chatml = HuggingFaceTokenizer(str(write_tokenizer(root / "chatml", bpe, chat_template=CHATML)))
    return predictor, tokenizer, chatml


@pytest.fixture(scope="module")
def plain(bpe_model) -> Iterator[tuple[str, ServingEngine]]:
    with serving(*bpe_model[:2]) as (url, engine):
        yield url, engine


def chat(url: str, **body: object):
    return HTTP.post(f"{url}/v1/chat/completions", json={"messages": MESSAGES, **body}, timeout=30)


PLAIN_TEXT = "System: Be brief.\n\nUser: Who sat?\n\nAssistant: The cat.\n\nUser: Where?\n\nAssistant:"


def test_the_type_of_an_error_follows_its_status() -> None:
    """OpenAI's names."""
    found = {
        status: ApiError(status, "").body()["error"]["type"] for status in (400, 401, 404, 429, 500, 503)
    }
    names = ["invalid_request", "authentication", "not_found", "rate_limit", "server", "server"]
    assert found == dict(zip(found, (f"{name}_error" for name in names), strict=True))


def test_plain_template() -> None:
    assert PLAIN.render(MESSAGES) == PLAIN_TEXT
    with pytest.raises(ApiError, match="the role 'tool' is none of system, user, assistant"):
        PLAIN.render([{"role": "tool", "content": ""}])


@pytest.mark.parametrize("stream", [False, True])
def test_chat_equals_completion_of_the_rendered_text(plain, stream: bool) -> None:
    url, _ = plain
    expected = complete(url, prompt=PLAIN_TEXT, max_tokens=12, temperature=0).json()
    answer = chat(url, max_tokens=12, temperature=0, stream=stream)
    text = expected["choices"][0]["text"].split("\nUser:")[0].lstrip()
    if not stream:
        body = answer.json()
        (choice,) = body["choices"]
        assert choice["message"] == {"role": "assistant", "content": text, "refusal": None}
        assert body["object"] == "chat.completion" and body["id"].startswith("chatcmpl-")
        assert choice["logprobs"] is None and choice["finish_reason"] in ("length", "stop")
        assert body["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"]
        return
    parts = events(answer)
    deltas = [part["choices"][0]["delta"] for part in parts]
    assert deltas[0]["role"] == "assistant" and all("role" not in delta for delta in deltas[1:])
    assert "".join(delta.get("content", "") for delta in deltas) == text
    assert {part["object"] for part in parts} == {"chat.completion.chunk"}


def test_stops_of_the_plain_template_come_with_those_of_the_request(plain) -> None:
    body = chat(plain[0], max_tokens=3, stop=[f"stop {i}" for i in range(16)])
    assert body.status_code == 200, body.text


def test_template_of_the_tokenizer(bpe_model) -> None:
    """The text is that of transformers, and the response that of its tokens."""
    transformers = pytest.importorskip("transformers")
    predictor, _, tokenizer = bpe_model
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tokenizer.files[0].parent)
    for messages in (MESSAGES, MESSAGES[1:]):
        text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert chat_template(tokenizer).render(messages) == text
    with serving(predictor, tokenizer) as (url, _):
        text = chat_template(tokenizer).render(MESSAGES)
        expected = complete(url, prompt=text, max_tokens=8, temperature=0).json()["choices"][0]["text"]
        (choice,) = chat(url, max_tokens=8, temperature=0).json()["choices"]
        assert choice["message"]["content"] == expected


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{% generation %}{% set x = m.content %}{{ x }} {% endgeneration %}{{ x }}{% endfor %}",
        "{% if tools is not none %}tools{% else %}none{% endif %} {{ documents is none }} {{ tools is defined }}",
        "{{ {'b': 'é<', 'a': [1, 2]} | tojson(sort_keys=True, separators=(',', ':')) }}{{ ['é'] | tojson(true) }}",
    ],
)
def test_templates_are_rendered_as_by_transformers(
    tmp_path: Path, bpe: GPT2BPETokenizer, source: str
) -> None:
    transformers = pytest.importorskip("transformers")
    folder = write_tokenizer(tmp_path, bpe, chat_template=source)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    expected = theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert chat_template(HuggingFaceTokenizer(str(folder))).render(MESSAGES) == expected


def test_a_too_long_conversation_is_an_error_of_its_messages(plain) -> None:
    answer = chat(plain[0], messages=[{"role": "user", "content": "User " * 300}])
    error = answer.json()["error"]
    assert answer.status_code == 400 and "leaves no room in the context of 256" in error["message"]
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")


def test_template_files(tmp_path: Path, bpe: GPT2BPETokenizer) -> None:
    """A list of templates has a default; a file takes precedence; templates reach nothing but their arguments."""
    named = [
        {"name": "tool_use", "template": "no"},
        {"name": "default", "template": "{{ messages | length }}"},
    ]
    folder = write_tokenizer(tmp_path / "list", bpe, chat_template=named)
    assert chat_template(HuggingFaceTokenizer(str(folder))).render(MESSAGES) == "4"
    (folder / "chat_template.jinja").write_text("{{ messages[0] | tojson }}{{ eos_token }}")
    rendered = '{"role": "system", "content": "Be brief."}<|endoftext|>'
    assert chat_template(HuggingFaceTokenizer(str(folder))).render(MESSAGES) == rendered
    for source, message in (
        ("{{ raise_exception('roles must\nalternate') }}", "the chat template fails: roles must alternate"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
    ):
        (folder / "chat_template.jinja").write_text(source)
        with pytest.raises(ApiError, match=message):
            chat_template(HuggingFaceTokenizer(str(folder))).render(MESSAGES)
    (folder / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(InputError, match=r"chat_template.jinja: the chat template is not valid Jinja2"):
        chat_template(HuggingFaceTokenizer(str(folder)))
    (folder / "chat_template.jinja").unlink()
    write_tokenizer(folder, bpe, chat_template=5)
    with pytest.raises(InputError, match="chat_template is not a string"):
        chat_template(HuggingFaceTokenizer(str(folder)))
    write_tokenizer(folder, bpe, chat_template=named[:1])
    with pytest.raises(InputError, match="chat_template has no template named 'default'"):
        chat_template(HuggingFaceTokenizer(str(folder)))
    assert chat_template(bpe) is PLAIN


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"messages": []}, "messages", "messages"),
        ({"messages": [{"content": "1"}]}, "messages.0.role", "messages.0.role is required"),
        ({"messages": [{"role": "tool", "content": "1"}]}, "messages", "the role 'tool' is none of"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.0.content",
            "must be a string, or a list of parts of type text",
        ),
        ({"top_logprobs": 2}, "top_logprobs", "top_logprobs needs logprobs"),
        ({"max_tokens": 1, "max_completion_tokens": 1}, "max_completion_tokens", "and not both"),
        ({"stream_options": {}}, "stream_options", "stream_options needs stream"),
        ({"tools": []}, "tools", "tools is not a field of this request"),
        ({"presence_penalty": 1}, "presence_penalty", "repetition_penalty is"),
    ],
)
def test_invalid_chats(plain, body: dict, param: str, message: str) -> None:
    response = chat(plain[0], **body)
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == param and message in error["message"]
    assert plain[1].in_flight == 0


def test_openai_client(plain) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{plain[0]}/v1", api_key="none", max_retries=0)
    body = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_completion_tokens": 10}
    whole = client.chat.completions.create(**body, logprobs=True, top_logprobs=3)
    text, entries = whole.choices[0].message.content, whole.choices[0].logprobs.content
    same = complete(plain[0], prompt=PLAIN_TEXT, max_tokens=10, temperature=0, logprobs=3).json()["choices"][
        0
    ]
    assert [entry.token for entry in entries] == same["logprobs"]["tokens"]
    assert [entry.logprob for entry in entries] == same["logprobs"]["token_logprobs"]
    assert all(bytes(entry.bytes).decode() == entry.token for entry in entries if entry.bytes)
    assert len(entries) == whole.usage.completion_tokens
    assert all(len(entry.top_logprobs) == 3 for entry in entries)
    assert entries[0].top_logprobs[0].logprob >= entries[0].logprob
    sampled = {**body, "temperature": 5, "logprobs": True}
    for number in (0, 2):  # the sampled token is rarely among so few
        answer = client.chat.completions.create(**sampled, top_logprobs=number or openai.NOT_GIVEN, seed=1)
        found = [len(entry.top_logprobs) for entry in answer.choices[0].logprobs.content]
        assert set(found) == {number}
    parts = [
        {"role": "user", "content": [{"type": "text", "text": "Who "}, {"type": "text", "text": "sat?"}]}
    ]
    joined = [{"role": "user", "content": "Who sat?"}]
    answers = [client.chat.completions.create(**body | {"messages": m}) for m in (parts, joined)]
    assert answers[0].choices == answers[1].choices
    stream = client.chat.completions.create(**body, n=2, stream=True, stream_options={"include_usage": True})
    *chunks, last = list(stream)
    texts = ["", ""]
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [text, text] and last.usage.completion_tokens == 2 * len(entries)
    # Without a length an answer may fill the context.
    long = client.chat.completions.create(**body | {"max_completion_tokens": None, "temperature": 1}, seed=1)
    assert long.usage.total_tokens == 256 or long.choices[0].finish_reason == "stop"


def test_empty_prompts(tmp_path: Path) -> None:
    """They begin a document: the model continues the end of the one before."""
    model = load(save_hf(tmp_path / "model", "gpt2", n_positions=LENGTH))
    (expected,) = expected_texts(load(tmp_path / "model"), [[EOD]], out_seq_length=5, greedy=True)
    with serving(*model) as (url, _):
        for prompt in ("", [[]]):
            answer = complete(url, prompt=prompt, max_tokens=5, temperature=0, echo=True, logprobs=0).json()
            (choice,) = answer["choices"]
            assert choice["text"] == expected and "".join(choice["logprobs"]["tokens"]) == expected
            assert answer["usage"]["prompt_tokens"] == 1
        body = {"prompts": ["", "1"], "tokens_to_generate": 5, "top_k": 1}
        assert HTTP.put(f"{url}/api", json=body).json()["text"][0] == expected


def test_empty_prompt_without_end_of_document_token(plain, bpe_model, tmp_path: Path, bpe) -> None:
    folder = write_tokenizer(tmp_path, bpe, eos_token=None)
    with serving(bpe_model[0], HuggingFaceTokenizer(str(folder))) as (url, _):
        answer = complete(url, prompt="")
        assert answer.status_code == 400
        assert "prompt: is empty, and HuggingFaceTokenizer" in answer.json()["error"]["message"]


def test_two_models(tmp_path: Path) -> None:
    folders = [
        save_hf(tmp_path / name, "gpt2", n_positions=LENGTH, n_head=heads)
        for name, heads in (("a", 4), ("b", 2))
    ]
    expected = [expected_texts(load(f), [[3, 1, 4]], out_seq_length=8, greedy=True)[0] for f in folders]
    assert expected[0] != expected[1]
    with serving(*load(folders[0]), other=load(folders[1])) as (url, _):
        assert [card["id"] for card in HTTP.get(f"{url}/v1/models").json()["data"]] == ["tiny", "other"]
        assert HTTP.get(f"{url}/v1/models/other").json()["id"] == "other"
        for model, text in ((None, expected[0]), ("tiny", expected[0]), ("other", expected[1])):
            answer = complete(url, prompt=words([3, 1, 4]), max_tokens=8, temperature=0, model=model).json()
            assert answer["choices"][0]["text"] == text and answer["model"] == (model or "tiny")
        answer = complete(url, prompt="1", model="third")
        assert answer.status_code == 404
        assert "there is no model 'third'; there are 'tiny' and 'other'" in answer.json()["error"]["message"]


def test_names_of_two_models() -> None:
    load = InferenceConfig(load="/runs/a/checkpoints")

    def names(**flags: object) -> list[str]:
        return list(ServerConfig(**flags).models(load))

    assert names() == ["checkpoints"]
    assert names(compare="/runs/b/checkpoints") == ["a/checkpoints", "b/checkpoints"]
    assert names(compare="/runs/b/old") == ["checkpoints", "old"]
    assert names(compare="/runs/b/old", served_model_name="mine") == ["mine", "old"]
    assert names(compare_ckpt_step=100) == ["checkpoints-newest", "checkpoints-100"]
    other = ServerConfig(compare_ckpt_step=100).models(load)["checkpoints-100"]
    assert other.load == load.load and other.ckpt_step == 100
    with pytest.raises(InputError, match="--compare: is the checkpoint of --load"):
        names(compare=load.load)
    with pytest.raises(InputError, match="--served-model-name: old is the name of --compare"):
        names(compare="/runs/b/old", served_model_name="old")


def generate_with_both(folders: list[str]) -> list[str] | None:
    def work(models: list[tuple[Predictor, Tokenizer]]) -> list[str]:
        return [expected_texts(model, [[3, 1, 4]], out_seq_length=8, greedy=True)[0] for model in models]

    configs = [InferenceConfig(load=folder, tensor_model_parallel_size=2) for folder in folders]
    return drive_all(configs, TOKENIZER, work)


def test_two_models_on_two_processes(tmp_path: Path) -> None:
    folders = [
        save_hf(tmp_path / name, "gpt2", n_positions=LENGTH, n_head=heads)
        for name, heads in (("a", 4), ("b", 2))
    ]
    expected = [expected_texts(load(f), [[3, 1, 4]], out_seq_length=8, greedy=True)[0] for f in folders]
    found, none = run_distributed(generate_with_both, 2, [str(folder) for folder in folders])
    assert found == expected and none is None
