"""tools/convert_checkpoint.py: output, comparisons, errors, and files left behind."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hf_models import VOCAB, save_hf
from safetensors.torch import load_file, save_file

from megatron.checkpoint.find import find_checkpoint
from megatron.commands.convert_checkpoint import main
from megatron.errors import InputError, TrainingFault
from megatron.inference.config import InferenceConfig
from megatron.inference.load import load_gpt
from megatron.inference.text import end_tokens
from megatron.interop.huggingface import read
from megatron.interop.huggingface.families import FAMILIES
from megatron.model.gpt import GPTModel
from megatron.parallel.mesh import Mesh
from megatron.tokenizer.config import TokenizerConfig
from megatron.tokenizer.huggingface import HuggingFaceTokenizer
from megatron.tokenizer.train import train_bpe

CPU = torch.device("cpu")

TEXT = ["the cat sat on the mat, and the dog sat on the cat; 1234 times, don't it?"] * 4


def convert(source: str, target: str, load: Path | str, save: Path) -> None:
    main(["--from", source, "--to", target, "--load", str(load), "--save", str(save)])


def add_tokenizer(folder: Path, names: tuple[str, ...]) -> int:
    """Write files of a BPE into a folder and return its vocabulary size."""
    files = train_bpe(TEXT, 270)
    for name in names:
        (folder / name).write_text(files[name])
    return 270


def model_of(folder: Path) -> GPTModel:
    return load_gpt(InferenceConfig(load=str(folder)), TokenizerConfig(), Mesh(device=CPU))[0]


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_round_trip_with_a_tokenizer(tmp_path: Path, capsys, kind: str) -> None:
    theirs, ours, again = (tmp_path / name for name in ("theirs", "ours", "again"))
    save_hf(theirs, kind, vocab_size=300)
    names = {"gpt2": ("vocab.json", "merges.txt"), "llama": ("tokenizer.json", "tokenizer_config.json")}[kind]
    add_tokenizer(theirs, names)
    convert("huggingface", "native", theirs, ours)
    out = capsys.readouterr().out
    assert f"{theirs}: GPT, iteration 0" in out and "vocabulary of 270 ids" in out
    assert "note: 30 rows of padding beyond the vocabulary of 270 ids are dropped\n" in out
    assert "logits of the written checkpoint (read back by this program) are the same\n" in out
    assert re.search(rf"logits of transformers from {theirs} differ by [0-9.]+e-0[678] of the largest\n", out)
    assert re.search(r"token ids of [0-9]+ texts equal those of AutoTokenizer", out) and "warning" not in out
    model, tokenizer = load_gpt(InferenceConfig(load=str(ours)), TokenizerConfig(), Mesh(device=CPU))
    assert tokenizer.files[0].parent == ours / "iter_0000000" / "tokenizer"
    assert model.embedding.word_embeddings.weight.shape[0] == tokenizer.vocab_size == 270

    convert("native", "huggingface", ours, again)
    out = capsys.readouterr().out
    assert "note" not in out and f"written to {again}" in out
    import transformers

    loaded = transformers.AutoTokenizer.from_pretrained(again)
    assert loaded.encode(TEXT[0]) == tokenizer.tokenize(TEXT[0])
    model = transformers.AutoModelForCausalLM.from_pretrained(again)
    assert model.config.eos_token_id == loaded.eos_token_id == tokenizer.eod
    direct = model_of(again)
    for (name, a), b in zip(direct.named_parameters(), model_of(ours).parameters(), strict=True):
        assert a.equal(b), name


def test_the_ends_of_a_chat_model(tmp_path: Path) -> None:
    """Only generation_config.json lists the end of a turn. Checkpoints and exports keep it."""
    theirs, ours, again = (tmp_path / name for name in ("theirs", "ours", "again"))
    save_hf(theirs, "llama", vocab_size=300)
    add_tokenizer(theirs, ("tokenizer.json", "tokenizer_config.json"))
    path = theirs / "generation_config.json"
    path.write_text('{"eos_token_id": [7, 299999]}')
    convert("huggingface", "native", theirs, ours)
    _, tokenizer = load_gpt(InferenceConfig(load=str(ours)), TokenizerConfig(), Mesh(device=CPU))
    assert end_tokens(tokenizer) == {7, tokenizer.eod} and tokenizer.eod != 7
    convert("native", "huggingface", ours, again)
    import transformers

    assert transformers.GenerationConfig.from_pretrained(again).eos_token_id == [7, 299999]
    for content, ends in (('{"eos_token_id": 7}', {7}), ("{}", set()), ('{"eos_token_id": null}', set())):
        path.write_text(content)
        assert end_tokens(HuggingFaceTokenizer(str(theirs))) == {tokenizer.eod, *ends}
    path.write_text('{"eos_token_id": ["7"]}')
    with pytest.raises(InputError, match=r"generation_config.json: eos_token_id is not a token id or a list"):
        end_tokens(HuggingFaceTokenizer(str(theirs)))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (
            {"tokenizer_class": "Y", "auto_map": {"AutoTokenizer": ["evil.Y", None]}},
            "ValueError: .* custom code",
        ),
        ({"extra_special_tokens": 5}, "TypeError: "),
    ],
    ids=["code", "damaged"],
)
def test_a_tokenizer_that_transformers_cannot_load(
    tmp_path: Path, capsys, monkeypatch, settings: dict, why: str
) -> None:
    """The conversion succeeds with a note, and code in the folder is not run, even if the answer to a prompt is yes."""
    folder = save_hf(tmp_path / "theirs", "llama", vocab_size=300)
    add_tokenizer(folder, ("tokenizer.json",))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    convert("huggingface", "native", folder, tmp_path / "new")
    out = capsys.readouterr().out
    assert re.search(
        rf"\nwarning: token ids are not compared: AutoTokenizer of transformers cannot load the tokenizer in {folder} "
        rf"\({why}",
        out,
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "theirs"]


def test_an_architecture_that_transformers_lacks(tmp_path: Path, capsys, monkeypatch) -> None:
    folder = save_hf(tmp_path / "theirs", "gpt2")
    unknown = dataclasses.replace(FAMILIES["gpt2"], architectures=("GPT9LMHeadModel",))
    monkeypatch.setitem(FAMILIES, "gpt2", unknown)
    convert("huggingface", "native", folder, tmp_path / "new")
    out = capsys.readouterr().out
    assert re.search(
        r"\nwarning: nothing was compared with transformers: transformers \S+ has no GPT9LMHeadModel\n", out
    )
    assert "read back by this program" in out and "logits of transformers" not in out


def test_checkpoint_of_a_run(tmp_path: Path, pretrain: Callable[..., str], capsys) -> None:
    """A checkpoint with several files, optimizer state and a padded vocabulary."""
    flags = """
        --mock-data --tokenizer-type NullTokenizer --vocab-size 50 --num-layers 2 --hidden-size 16
        --num-attention-heads 2 --seq-length 8 --micro-batch-size 2 --train-iters 2 --lr 1e-2 --device cpu
        --eval-iters 0 --num-workers 0 --lr-warmup-iters 0
    """.split()
    pretrain(*flags, "--save", tmp_path / "run")
    convert("native", "huggingface", tmp_path / "run", tmp_path / "hf")
    assert "iteration 2" in capsys.readouterr().out
    assert load_file(tmp_path / "hf" / "model.safetensors")["transformer.wte.weight"].shape == (51, 16)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "run"]


@pytest.mark.parametrize(
    ("flags", "biases"),
    [
        ("", (True, True)),
        ("--add-qkv-bias", (True, True)),
        ("--disable-bias-linear --add-qkv-bias --add-attention-bias", (True, False)),
    ],
)
def test_llama_with_the_biases_of_other_flags(
    tmp_path: Path, pretrain: Callable[..., str], capsys, flags: str, biases: tuple[bool, bool]
) -> None:
    """Training makes the biases other than zero; the conversion compares logits with transformers."""
    base = """
        --mock-data --tokenizer-type NullTokenizer --vocab-size 50 --num-layers 1 --hidden-size 16
        --num-attention-heads 2 --seq-length 8 --micro-batch-size 2 --train-iters 3 --lr 1e-2 --device cpu
        --eval-iters 0 --num-workers 0 --lr-warmup-iters 0 --position-embedding-type rope --normalization RMSNorm
        --swiglu --hidden-dropout 0
    """.split()
    pretrain(*base, *flags.split(), "--save", tmp_path / "run")
    convert("native", "huggingface", tmp_path / "run", tmp_path / "hf")
    assert "logits of transformers from" in capsys.readouterr().out
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["model_type"], config["attention_bias"], config["mlp_bias"]) == ("llama", *biases)
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    assert all(
        tensor.any() for name, tensor in tensors.items() if name.endswith(".bias") and "k_proj" not in name
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--group-query-attention --num-query-groups 1", "--num-query-groups is 1 here and 2 there"),
        (
            "--position-embedding-type rope --disable-bias-linear",
            "gpt_neox: --disable-bias-linear is True here and False there",
        ),
        (
            "--position-embedding-type none",
            "--position-embedding-type is none here and learned_absolute there",
        ),
        (
            "--apply-residual-connection-post-layernorm",
            "--apply-residual-connection-post-layernorm is True here",
        ),
    ],
)
def test_models_that_hugging_face_lacks(tmp_path: Path, pretrain, flags: str, message: str) -> None:
    base = """
        --mock-data --tokenizer-type NullTokenizer --vocab-size 50 --num-layers 1 --hidden-size 16
        --num-attention-heads 2 --seq-length 8 --micro-batch-size 2 --train-iters 1 --lr 1e-2 --device cpu
        --eval-iters 0 --num-workers 0
    """.split()
    pretrain(*base, *flags.split(), "--save", tmp_path / "run")
    with pytest.raises(InputError, match=re.escape(message)):
        convert("native", "huggingface", tmp_path / "run", tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def edit_config(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def edit_tensors(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Replace or add tensors; None removes one."""
    path = folder / "model.safetensors"
    edited = load_file(path) | {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    save_file({name: tensor for name, tensor in edited.items() if tensor is not None}, path)


WRONG_SETTINGS = [
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx: True is not supported"),
    ("gpt2", {"activation_function": "relu"}, "activation_function: 'relu' is not supported; only 'gelu'"),
    ("gpt2", {"n_head": 5}, "config.json: --num-attention-heads: 5 does not divide --hidden-size 64"),
    ("gpt2", {"n_layer": "2"}, "config.json: --num-layers: '2' is not an integer"),
    ("gpt2", {"vocab_size": None}, "config.json: vocab_size: None is not a positive integer"),
    ("gpt2", {"model_type": "mamba"}, "model_type 'mamba' is not supported; use gpt2, llama, "),
    ("gpt2", {"model_type": None}, "config.json: has no 'model_type'"),
    ("gpt2", {"quantization_config": {"bits": 4}}, "quantization_config: {'bits': 4} is not supported"),
    ("llama", {"attention_bias": True}, "lacks 8 tensor(s): model.layers.0.self_attn.k_proj.bias, "),
    ("llama", {"attention_bias": 1}, "--add-attention-bias: 1 is not true or false"),
    ("llama", {"rope_parameters": {"rope_type": "longrope"}}, "rope_type: 'longrope' is not supported"),
    ("phi3", {"rope_parameters": {"rope_type": "yarn"}}, "rope_type: 'yarn' is not supported; only 'default' is"),
    ("phi3", {"partial_rotary_factor": 0.2, "rope_parameters": None}, "partial_rotary_factor: 0.2 gives an odd"),
    ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 2, "attention_factor": -1}},
        "--rope-scaling-attention-factor: -1.0 is too small"),
    ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 2, "truncate": "no"}},
        "truncate: 'no' is not supported; only True or False is"),
    ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 2, "beta_fast": 0.5}},
        "--rope-scaling-turns: 1.0 0.5: the first is larger than the second"),
    ("llama", {"rope_parameters": "fast"}, "config.json: is damaged ("),
    ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor: 0.5 is not supported"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported"),
    ("llama", {"num_key_value_heads": 4}, "config.json contradicts the shapes of 4 tensor(s): "
        "model.layers.0.self_attn.k_proj.weight (32, 64), not (64, 64)"),
    ("gpt2", {"vocab_size": 10**18}, "config.json describes a tensor of 1000000000000000000 x 64, but all "),
    ("gpt2", {"n_positions": 2**53}, "config.json describes a tensor of 9007199254740992 x 64, but all "),
    ("qwen3", {"head_dim": 2**52}, "config.json describes a tensor of 18014398509481984 x 64, but all tensors"),
    ("llama", {"num_attention_heads": 2**52}, "config.json describes a tensor of 72057594037927936 x 64, but all "),
    ("llama", {"num_hidden_layers": 3}, "lacks 9 tensor(s): model.layers.2.input_layernorm.weight, "),
    ("llama", {"num_hidden_layers": 1}, "has tensors that a supported llama lacks: 9 tensor(s): model.layers.1.in"),
    ("llama", {"rope_parameters": {"rope_type": "llama3"}}, "config.json: rope_type: 'llama3' lacks 'factor'"),
    ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": None}}, "rope_type: 'llama3' lacks 'factor'"),
    ("llama", {"rope_parameters": {"rope_theta": None}}, "config.json: rope_theta: null is not a number"),
    ("llama", {"rms_norm_eps": None}, "config.json: rms_norm_eps: null is not a number"),
    ("gpt2", {"initializer_range": None}, "config.json: initializer_range: null is not a number"),
    ("gpt2", {"tie_word_embeddings": "no"}, "config.json: tie_word_embeddings: 'no' is not true or false"),
    ("llama", {"tie_word_embeddings": None}, "config.json: tie_word_embeddings: None is not true or false"),
    ("qwen2", {"layer_types": ["sliding_attention"] * 2}, "sliding_window: None is not a positive integer; sliding"),
    ("qwen2", {"layer_types": ["linear_attention"] * 2}, "layer_types: 'linear_attention' is not supported"),
    ("bert", {"is_decoder": True}, "is_decoder: True is not supported"),
    ("gpt2", {"_attn_implementation": "org/kernel"}, "_attn_implementation: 'org/kernel' is not supported"),
    ("gpt2", {"attn_implementation": "org/kernel"}, "config.json: attn_implementation: 'org/kernel' is not supported"),
    ("gpt2", {"_experts_implementation": "org/kernel"}, "_experts_implementation is not supported; remove it"),
    ("llama", {"experts_implementation": "org/kernel"}, "experts_implementation: 'org/kernel' is not supported"),
    ("llama", {"num_labels": 10**9}, "config.json: num_labels: 1000000000 is not a number of labels up to 100,000"),
    ("llama", {"num_labels": "two"}, "config.json: num_labels: 'two' is not a number of labels up to 100,000"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "fields", "message"), WRONG_SETTINGS, ids=[repr(c[1])[:50] for c in WRONG_SETTINGS]
)
def test_unsupported_settings(tmp_path: Path, kind: str, fields: dict, message: str) -> None:
    folder = save_hf(tmp_path / "theirs", kind)
    edit_config(folder, **fields)
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        convert("huggingface", "native", folder, tmp_path / "new")
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


@pytest.mark.parametrize(
    "fields",
    [{"return_dict": False}, {"pad_token_id": 10**12}, {"to_dict": 5}, {"id2label": 5}],
    ids=lambda x: next(iter(x)),
)
def test_settings_that_transformers_cannot_use(tmp_path: Path, fields: dict) -> None:
    folder = save_hf(tmp_path / "theirs", "llama")
    edit_config(folder, **fields)
    with pytest.raises(
        TrainingFault, match=rf"^transformers cannot load {folder}: \w+Error: .*nothing was kept$"
    ):
        convert("huggingface", "native", folder, tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_transformers_uses_neither_the_hub_nor_its_kernels() -> None:
    program = (
        "import megatron.commands.convert_checkpoint, huggingface_hub.constants as hub; "
        "import transformers.integrations.hub_kernels as kernels; print(hub.HF_HUB_OFFLINE, kernels._kernels_enabled)"
    )
    env = os.environ | {"HF_HUB_OFFLINE": "0", "USE_HUB_KERNELS": "YES"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    assert done.stdout == "True False\n", done.stderr


def test_missing_and_unexpected_tensors_are_listed(tmp_path: Path) -> None:
    folder = save_hf(tmp_path / "theirs", "llama", num_hidden_layers=4)
    tensors = load_file(folder / "model.safetensors")
    edit_tensors(folder, **{name: None for name in tensors if "proj" in name})
    with pytest.raises(InputError, match=r"lacks 28 tensor\(s\): (model\S+proj\.weight, ){10}\.\.\.$"):
        convert("huggingface", "native", folder, tmp_path / "new")
    save_file(tensors, folder / "model.safetensors")
    edit_tensors(folder, score__weight=torch.ones(2, 64))
    with pytest.raises(
        InputError, match=r"has tensors that a supported llama lacks: 1 tensor\(s\): score\.weight$"
    ):
        convert("huggingface", "native", folder, tmp_path / "new")
    edit_tensors(folder, score__weight=None, model__norm__weight=torch.ones(64, dtype=torch.int32))
    with pytest.raises(InputError, match=r"has tensors of dtype I32; supported are F32, BF16, F16$"):
        convert("huggingface", "native", folder, tmp_path / "new")


def test_inconsistent_sharded_files(tmp_path: Path) -> None:
    folder = save_hf(tmp_path / "theirs", "gpt2")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys([*tensors, "transformer.x"], "a.safetensors")}))
    with pytest.raises(InputError, match=r"index\.json: 1 tensor\(s\): transformer\.x in none of the files"):
        convert("huggingface", "native", folder, tmp_path / "new")
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "../a.safetensors")}))
    with pytest.raises(InputError, match=r"index\.json: has no 'weight_map' of tensors to safetensors files"):
        convert("huggingface", "native", folder, tmp_path / "new")
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "b.safetensors")}))
    with pytest.raises(InputError, match=r"b\.safetensors: is missing"):
        convert("huggingface", "native", folder, tmp_path / "new")
    save_file(tensors, folder / "b.safetensors")
    index.write_text(
        json.dumps({"weight_map": {name: f"{'ab'[i % 2]}.safetensors" for i, name in enumerate(tensors)}})
    )
    with pytest.raises(InputError, match=r"b\.safetensors: \S+ is also in a\.safetensors"):
        convert("huggingface", "native", folder, tmp_path / "new")


def test_paths_without_a_model(tmp_path: Path) -> None:
    archive = tmp_path / "model.zip"
    zipfile.ZipFile(archive, "w").close()
    (tmp_path / "empty").mkdir()
    hub = "meta-llama/Llama-3.1-8B"
    for source, target in (("huggingface", "native"), ("native", "huggingface")):
        with pytest.raises(InputError, match=f"^--load: {archive} is a file; unpack it if it is an archive"):
            convert(source, target, archive, tmp_path / "new")
        with pytest.raises(InputError, match=f"^--load: {hub} is not a folder; models on the Hugging"):
            convert(source, target, hub, tmp_path / "new")
    with pytest.raises(InputError, match=r"^--load: \S+ holds no config\.json$"):
        convert("huggingface", "native", tmp_path / "empty", tmp_path / "new")
    with pytest.raises(
        InputError, match=r"^--load: \S+ holds no checkpoint .* no Megatron-LM or Hugging Face checkpoint"
    ):
        convert("native", "huggingface", tmp_path / "empty", tmp_path / "new")


def test_pickles_are_not_read(tmp_path: Path) -> None:
    folder = save_hf(tmp_path / "theirs", "gpt2")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(
        InputError, match=r"a pickle, which can run code and is not read; convert it .*save_pretrained"
    ):
        convert("huggingface", "native", folder, tmp_path / "new")


def test_wrong_format_and_folder(tmp_path: Path) -> None:
    folder = save_hf(tmp_path / "theirs", "gpt2")
    with pytest.raises(InputError, match="is a Hugging Face model; give --from huggingface"):
        convert("native", "huggingface", folder, tmp_path / "new")
    with pytest.raises(InputError, match="--to: native is also the format of --from"):
        convert("native", "native", folder, tmp_path / "new")
    for source, target in (("huggingface", "native"), ("native", "huggingface")):
        with pytest.raises(InputError, match=rf"^--save: {folder} is not empty"):
            convert(source, target, folder, folder)


def test_a_conversion_with_different_logits_is_not_kept(tmp_path: Path, monkeypatch) -> None:
    folder = save_hf(tmp_path / "theirs", "gpt2")
    import megatron.commands.convert_checkpoint as tool

    right = tool.their_logits
    monkeypatch.setattr(tool, "their_logits", lambda *a: [1.001 * x for x in right(*a)])
    with pytest.raises(TrainingFault, match=rf"^logits of transformers from {folder} differ from those of "):
        convert("huggingface", "native", folder, tmp_path / "new")
    monkeypatch.setattr(tool, "their_logits", lambda *a: [torch.nan * x for x in right(*a)])
    with pytest.raises(TrainingFault):
        convert("huggingface", "native", folder, tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


@pytest.mark.parametrize("target", ["native", "huggingface", "megatron"])
def test_a_link_to_an_empty_folder(tmp_path: Path, monkeypatch, target: str) -> None:
    import megatron.commands.convert_checkpoint as tool

    source, folder = "huggingface", save_hf(tmp_path / "theirs", "gpt2")
    if target == "huggingface":
        convert("huggingface", "native", folder, tmp_path / "native")
        source, folder = "native", tmp_path / "native"
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    convert(source, target, folder, tmp_path / "link")
    assert (tmp_path / "link").readlink() == Path("empty") and any((tmp_path / "empty").iterdir())
    (tmp_path / "other").symlink_to("new")
    monkeypatch.setattr(tool, "TOLERANCE", -1)
    with pytest.raises(TrainingFault, match="nothing was kept"):
        convert(source, target, folder, tmp_path / "other")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("at", ["_read", "our_logits"])
def test_sigterm_leaves_nothing(tmp_path: Path, monkeypatch, at: str) -> None:
    """The signal arrives while tensors are written, or before the written checkpoint is compared."""
    import megatron.commands.convert_checkpoint as tool

    folder = save_hf(tmp_path / "theirs", "gpt2")
    where = tool if at == "our_logits" else read
    monkeypatch.setattr(where, at, lambda *a: os.kill(os.getpid(), signal.SIGTERM))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with pytest.raises(SystemExit, match="143"):
        convert("huggingface", "native", folder, tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_a_truncated_file_leaves_nothing(tmp_path: Path) -> None:
    folder = save_hf(tmp_path / "theirs", "gpt2")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(InputError, match=r"model\.safetensors: cannot be read"):
        convert("huggingface", "native", folder, tmp_path / "new")
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    with pytest.raises(InputError, match=r"model\.safetensors: is a Git LFS pointer"):
        convert("huggingface", "native", folder, tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_hf(tmp_path / "theirs", "gpt2")
    words = ["--from", "huggingface", "--to", "native", "--load", str(folder)]
    words += ["--save", str(tmp_path / "new")]
    main(words)
    assert capsys.readouterr().out.splitlines()[-1] == f"written to {tmp_path / 'new'}"
    assert find_checkpoint(str(tmp_path / "new"), None).state["vocab_size"] == VOCAB
    with pytest.raises(InputError) as refused:
        main(words)
    assert str(refused.value) == (
        f"--save: {tmp_path / 'new'} is not empty; give an empty or a new folder, or remove what a killed "
        "conversion left there"
    )
