"""Import and export of Hugging Face models: logits equal those of transformers, and tensors round-trip bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from distributed import run_distributed
from hf_models import KINDS, VOCAB, save_hf
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from megatron.arguments import parse_run_config
from megatron.checkpoint.checkpoint import Checkpoint, model_config
from megatron.checkpoint.find import find_checkpoint
from megatron.checkpoint.tokenizer import saved_tokenizer
from megatron.errors import InputError, TrainingFault
from megatron.inference.batching import Batcher, Request
from megatron.inference.config import InferenceConfig
from megatron.inference.conversion import fixed_tokens, largest_difference, our_logits, their_logits
from megatron.inference.driver import driver
from megatron.inference.load import load_weights
from megatron.inference.predictor import Predictor
from megatron.inference.sampling import SamplingConfig
from megatron.interop.convert import write_native
from megatron.interop.external import meta_model
from megatron.interop.huggingface.read import open_huggingface
from megatron.interop.huggingface.settings import read_settings
from megatron.interop.huggingface.write import write_huggingface
from megatron.model.gpt import GPTModel
from megatron.parallel.slices import whole
from megatron.plugins import run
from megatron.pretrain_bert import DEFAULTS as BERT_DEFAULTS
from megatron.pretrain_bert import bert
from megatron.pretrain_gpt import DEFAULTS, GPT
from megatron.tokenizer import Tokenizer, build_tokenizer
from megatron.tokenizer.config import TokenizerConfig

IDS = ["--tokenizer-type", "NullTokenizer", "--vocab-size", VOCAB - 1]
STEP = """
    --mock-data --micro-batch-size 2 --train-iters 1 --lr 1e-3 --device cpu --num-workers 0 --eval-iters 1
    --log-interval 1 --attention-dropout 0 --hidden-dropout 0
""".split()


def no_progress(size: int) -> None:
    """Progress callback that does nothing."""


def tensors_in(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


def native(checkpoint: Checkpoint, root: Path) -> Checkpoint:
    write_native(checkpoint, root, no_progress)
    return find_checkpoint(str(root), None)


@pytest.mark.parametrize("kind", KINDS)
def test_round_trip(tmp_path: Path, kind: str) -> None:
    """Convert to a native checkpoint and back, with the tensors in several files."""
    original = save_hf(tmp_path / "theirs", kind)
    read = open_huggingface(original)
    expected = their_logits(original, read)
    assert largest_difference(expected, our_logits(read)) < 1e-5
    ours = native(read, tmp_path / "ours")
    assert read.notes == () and ours.state["vocab_size"] == VOCAB

    written = tmp_path / "written"
    write_huggingface(ours, written, no_progress, 50_000)
    assert len(list(written.glob("model-*-of-*.safetensors"))) > 1
    before, after = tensors_in(original), tensors_in(written)
    assert before.keys() == after.keys()
    assert all(tensor.equal(after[name]) for name, tensor in before.items())
    assert largest_difference(expected, their_logits(written, read)) == 0
    again = open_huggingface(written)
    assert again.notes == () and again.state == read.state
    for name, tensor in read.tensors["model"].index.items():
        shard_spec = whole(*tensor["shape"])
        assert (
            again.tensors["model"].read(name, shard_spec).equal(read.tensors["model"].read(name, shard_spec))
        )


def test_one_layer_is_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison of a conversion needs less memory than the files."""
    read = open_huggingface(save_hf(tmp_path, "llama linear"))
    assert model_config(read).num_layers > 1
    forward, loaded = GPTModel.forward, []

    def count(*_: object) -> None:
        loaded.append(sum(not p.is_meta for p in layers.parameters()))

    def watched(model: GPTModel, *arguments: object) -> Tensor:
        nonlocal layers
        layers = model.decoder.layers
        for layer in layers.values():
            layer.register_forward_hook(count, prepend=True)
        return forward(model, *arguments)

    layers = nn.ModuleDict()
    monkeypatch.setattr(GPTModel, "forward", watched)
    our_logits(read)
    one = len(list(layers["0"].parameters()))
    assert loaded == [one] * model_config(read).num_layers
    assert all(p.is_meta for p in layers.parameters())


@pytest.mark.parametrize(
    "kind",
    [
        "llama linear",
        "llama yarn",
        "llama yarn of other turns",
        "llama yarn of an attention factor",
        "llama yarn of mscales",
        "llama yarn of one mscale",
        "mistral",
        "mistral of windows",
        "phi3",
        "qwen2 of windows",
        "olmo2",
        "opt",
        "gpt_neox",
        "gpt_neox in series",
        "bloom",
        "bloom of post norm",
        "gemma",
        "gemma2",
        "gemma3",
        "gpt_oss",
    ],
)
def test_gradients(tmp_path: Path, kind: str) -> None:
    """Gradients of a random function of the logits equal those of transformers."""
    transformers = pytest.importorskip("transformers")
    folder = save_hf(tmp_path, kind)
    read = open_huggingface(folder)
    config, family = model_config(read), read_settings(folder / "config.json").family
    ours = meta_model("GPT", config, VOCAB)
    load_weights(read, ours, torch.float32)
    theirs = getattr(transformers, family.architectures[0]).from_pretrained(folder)
    tokens, weight = fixed_tokens(read)[0], torch.randn(VOCAB, generator=torch.Generator().manual_seed(0))
    for p in ours.parameters():
        p.requires_grad_()
    (
        ours(tokens, torch.arange(tokens.shape[1]).expand(tokens.shape)).log_softmax(-1) @ weight
    ).sum().backward()
    (theirs(tokens).logits.log_softmax(-1) @ weight).sum().backward()
    expected = {name: p.grad for name, p in theirs.named_parameters()}
    if family.model_type == "gpt_neox":  # transformers renames it on loading
        expected["embed_out.weight"] = expected.pop("lm_head.weight")
    for name, p in ours.named_parameters():
        (names,), modules = family.tensors(name, config)
        for part, grad in zip(names, modules.split(p.grad, config), strict=True):
            if part.endswith("k_proj.bias") and config.position_embedding_type != "rope":
                assert (
                    max(expected.pop(part).abs().max(), grad.abs().max()) < 1e-5
                )  # 0: it cancels in the softmax
            else:
                assert largest_difference([expected.pop(part)], [grad]) < 1e-5, part
    assert not expected


@pytest.mark.parametrize(
    "kind",
    [
        "gemma3",
        "gpt_oss",
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in ("mistral of windows", "qwen2 of windows", "gemma2")
        ),
    ],
)
def test_generated_text_beyond_the_window(tmp_path: Path, kind: str) -> None:
    """Greedy continuations of up to 32 tokens with windows of 8, from a cache that holds no more than a window."""
    transformers = pytest.importorskip("transformers")
    folder = save_hf(tmp_path, kind)
    prompts = [[3, 1, 4], [1], [5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3]]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    theirs.generation_config.eos_token_id = None
    expected = [
        theirs.generate(torch.tensor([prompt]), do_sample=False, max_length=32)[0, len(prompt) :].tolist()
        for prompt in prompts
    ]

    def work(predictor: Predictor, tokenizer: Tokenizer) -> list[list[int]]:
        predictor.reserve(2, 32)
        assert predictor.cache is not None and predictor.cache.window_memory.shape[-2] == 8
        batcher = Batcher(predictor, tokenizer)
        greedy = SamplingConfig(out_seq_length=32, greedy=True)
        states = [batcher.add(Request(prompt=prompt, sampling=greedy)) for prompt in prompts]
        while batcher.waiting or batcher.running:
            batcher.step()
        return [state.new for state in states]

    ids = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=VOCAB - 1)
    found = driver(InferenceConfig(load=str(folder)), ids, work)
    for ours, other in zip(found, expected, strict=True):
        end = other.index(VOCAB - 1) if VOCAB - 1 in other else len(other)  # our end of document
        assert ours == other[:end]


def edit_config(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("mistral", {"sliding_window": 32}),
        ("phi3", {"sliding_window": 64}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 0}),
    ],
)
def test_windows_that_cover_the_context_have_no_effect(tmp_path: Path, kind: str, fields: dict) -> None:
    folder = save_hf(tmp_path, kind, **fields)
    read = open_huggingface(folder)
    assert read.notes == ()
    assert largest_difference(their_logits(folder, read), our_logits(read)) < 1e-5


def test_a_mistral_without_the_key_has_a_window(tmp_path: Path) -> None:
    """transformers takes 4096 for a missing sliding_window."""
    folder = save_hf(tmp_path, "mistral", max_position_embeddings=8192)
    config = json.loads((folder / "config.json").read_text())
    del config["sliding_window"]
    (folder / "config.json").write_text(json.dumps(config))
    assert model_config(open_huggingface(folder)).window_size == "4095,0"


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("mistral", {"sliding_window": 0}, "sliding_window: 0 is not a positive integer"),
        ("mistral", {"sliding_window": "4"}, "sliding_window: '4' is not a positive integer"),
        (
            "mistral",
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types: .* not supported for",
        ),
        (
            "qwen2",
            {"layer_types": ["full_attention"] * 3},
            "layer_types: .* not supported for qwen2 of 2 layers",
        ),
        (
            "qwen2",
            {"layer_types": ["chunked_attention"] * 2},
            "layer_types: 'chunked_attention' is not supported",
        ),
    ],
)
def test_impossible_windows(tmp_path: Path, kind: str, fields: dict, message: str) -> None:
    folder = save_hf(tmp_path, kind)
    edit_config(folder, **fields)
    with pytest.raises(InputError, match=message):
        open_huggingface(folder)


def test_dynamic_scaling_is_plain_within_the_context(tmp_path: Path) -> None:
    scaling = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    folder = save_hf(tmp_path, "llama", rope_parameters=scaling)
    read = open_huggingface(folder)
    assert "'dynamic' has no effect on sequences of up to 32 tokens" in read.notes[0]
    assert largest_difference(their_logits(folder, read), our_logits(read)) < 1e-5


@pytest.mark.parametrize("kind", ["llama", "llama linear", "llama yarn", "phi3"])
def test_exports_have_rope_of_old_and_new_transformers(tmp_path: Path, kind: str) -> None:
    """Each spelling alone describes the same model."""
    read = open_huggingface(save_hf(tmp_path / "theirs", kind))
    folder = tmp_path / "written"
    write_huggingface(native(read, tmp_path / "ours"), folder, no_progress)
    content = (folder / "config.json").read_text()
    expected = their_logits(folder, read)
    for left_out in (("rope_theta", "rope_scaling", "partial_rotary_factor"), ("rope_parameters",)):
        config = {key: value for key, value in json.loads(content).items() if key not in left_out}
        (folder / "config.json").write_text(json.dumps(config))
        assert model_config(open_huggingface(folder)) == model_config(read)
        assert largest_difference(expected, their_logits(folder, read)) == 0


AUTO_CLASSES = {
    "gpt2": "AutoModelForCausalLM",
    "llama": "AutoModelForCausalLM",
    "qwen2 of windows": "AutoModelForCausalLM",
    "qwen3": "AutoModelForCausalLM",
    "bert": "AutoModelForPreTraining",
    "bert of words": "AutoModelForMaskedLM",
}


@pytest.mark.parametrize("kind", AUTO_CLASSES)
def test_auto_classes_load_exported_models(tmp_path: Path, kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    read = open_huggingface(save_hf(tmp_path / "theirs", kind, torch.bfloat16))
    assert read.state["config"]["training"] == {"bf16": True}
    write_huggingface(native(read, tmp_path / "ours"), tmp_path / "written", no_progress)
    loader = getattr(transformers, AUTO_CLASSES[kind])
    model, report = loader.from_pretrained(tmp_path / "written", output_loading_info=True)
    assert model.dtype == torch.bfloat16
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    theirs = model.config.to_dict()
    ignored = {"transformers_version", "n_inner", "bos_token_id", "eos_token_id", "pad_token_id"}
    if not theirs.get("use_sliding_window"):
        ignored.add("max_window_layers")  # without an effect; an export has the number of layers
    for key, value in json.loads((tmp_path / "theirs" / "config.json").read_text()).items():
        if key not in ignored:
            assert theirs[key] == value, key


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (
            "opt",
            {"do_layer_norm_before": False},
            "do_layer_norm_before: False is not supported; only True is",
        ),
        ("llama", {"model_type": "gemma3"}, "model_type 'gemma3' is not supported: it has an image encoder"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar: 0 is not a positive number"),
        (
            "gemma3",
            {"_sliding_window_pattern": -1, "layer_types": None},
            "sliding_window_pattern: -1 is not a positive",
        ),
        ("gemma", {"hidden_act": "silu"}, "hidden_act: 'silu' is not supported; only "),
        ("bloom", {"n_inner": 96}, "n_inner: 96 is not supported; only None is"),
        ("opt", {"word_embed_proj_dim": 32}, "word_embed_proj_dim: 32 is not supported"),
    ],
)
def test_other_forms_of_a_family_are_refused(tmp_path: Path, kind: str, fields: dict, message: str) -> None:
    folder = save_hf(tmp_path, kind)
    edit_config(folder, **fields)
    with pytest.raises(InputError, match=message):
        open_huggingface(folder)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "gpt_neox", "bert"])
def test_older_files(tmp_path: Path, kind: str) -> None:
    """Files without the prefix of the model with heads, with buffers, copies of tied embeddings, and older settings."""
    folder = save_hf(tmp_path, kind)
    read = open_huggingface(folder)
    expected, tensors = our_logits(read), load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    if kind == "gpt2":
        tensors = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 32, 32, dtype=torch.uint8)
        tensors["h.0.attn.masked_bias"] = torch.tensor(-1e4)
        tensors["lm_head.weight"] = tensors["wte.weight"].clone()
        del config["tie_word_embeddings"]
    elif kind == "llama":
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
        del config["rope_parameters"], config["head_dim"]
        config |= {"rope_theta": 10000, "rope_scaling": None}
    elif kind == "gpt_neox":
        del config["rope_parameters"]
        config |= {"rotary_pct": 0.25, "rotary_emb_base": 10000}
    else:
        tensors["bert.embeddings.position_ids"] = torch.arange(32).unsqueeze(0)
        tensors["cls.predictions.decoder.bias"] = tensors["cls.predictions.bias"].clone()
        tensors["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"].clone()
        config |= {"position_embedding_type": "absolute", "architectures": ["MegatronBertModel"]}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    found = open_huggingface(folder)
    assert found.notes == () and found.state == read.state
    assert largest_difference(expected, our_logits(found)) == 0
    assert largest_difference(expected, their_logits(folder, found)) < 1e-5
    if kind == "gpt2":
        tensors["lm_head.weight"] += 1
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(InputError, match=r"lm_head\.weight and wte\.weight differ"):
            open_huggingface(folder)


@pytest.mark.parametrize("dtypes", [("F16",), ("BF16", "F32")], ids=" and ".join)
def test_other_dtypes_become_fp32(tmp_path: Path, dtypes: tuple[str, ...]) -> None:
    folder = save_hf(tmp_path, "llama", torch.float16)
    if "BF16" in dtypes:
        tensors = load_file(folder / "model.safetensors")
        widened = {k: v.float() if "norm" in k else v.bfloat16() for k, v in tensors.items()}
        save_file(widened, folder / "model.safetensors")
    found = open_huggingface(folder)
    assert found.notes == (f"tensors of dtype {', '.join(dtypes)} are converted to F32",)
    name = "decoder.layers.1.mlp.linear_fc2.weight"
    assert found.tensors["model"].index[name]["dtype"] == "float32"
    expected = load_file(folder / "model.safetensors")["model.layers.1.mlp.down_proj.weight"]
    assert found.tensors["model"].read(name, whole(64, 160)).equal(expected.float())


def train(folder: str, load: str, flags: str) -> None:
    """Train one step on this process, which may be one of several."""
    words = [*STEP, *map(str, IDS), "--load", load, "--finetune", "--use-checkpoint-args", *flags.split()]
    words += ["--metrics-path", f"{folder}/metrics.jsonl"]
    assert run(parse_run_config(words, description="", defaults=DEFAULTS), GPT) == 0


GROUPED = ("qwen2", "llama linear", "llama yarn", "mistral", "phi3", "olmo2")
GROUPED += ("mistral of windows", "qwen2 of windows")
SLOW_LAYOUTS = (*GROUPED[:-1], "opt", "gpt_neox", "gpt_neox in series", "bloom", "gemma")
SLOW_LAYOUTS += ("gemma2", "gemma3", "gpt_oss", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe")


@pytest.mark.parametrize(
    "kind",
    [
        GROUPED[-1],
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in SLOW_LAYOUTS),
    ],
)
def test_layouts_read_the_same_model(tmp_path: Path, kind: str) -> None:
    """Losses of a step and after it, with one process and with four that hold shards of layers and heads."""
    folder = save_hf(tmp_path / "theirs", kind, **({"num_key_value_heads": 1} if kind in GROUPED else {}))
    records = []
    for processes, flags in (
        (1, ""),
        (
            4,
            "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --make-vocab-size-divisible-by 30",
        ),
    ):
        root = tmp_path / str(processes)
        root.mkdir()
        run_distributed(train, processes, str(root), str(folder), f"{flags} --global-batch-size 2")
        records.append([json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()])
    assert len(records[0]) == len(records[1]) == 3
    for one, four in zip(*records, strict=True):
        for key in one.keys() & {"lm loss", "lm loss validation", "grad norm"}:
            assert four[key] == pytest.approx(one[key], rel=1e-5)


def test_each_tensor_is_read_once(tmp_path: Path, monkeypatch, pretrain: Callable[..., str]) -> None:
    """The parameters and their master weights share one read."""
    import megatron.interop.huggingface.read as reader

    folder, seen, original = save_hf(tmp_path, "llama", torch.bfloat16), [], reader._read

    def read(files: dict, theirs: list[str], *rest: object) -> Tensor:
        seen.extend(theirs)
        return original(files, theirs, *rest)

    monkeypatch.setattr(reader, "_read", read)
    pretrain(*STEP, *IDS, "--load", folder, "--finetune", "--use-checkpoint-args", "--bf16")
    assert sorted(seen) == sorted(tensors_in(folder))


def test_bert_without_rows_for_bos_and_eos(tmp_path: Path) -> None:
    """Megatron-LM adds both to vocab.txt; a model from elsewhere has embedding rows for the lines of vocab.txt only."""
    folder = save_hf(tmp_path / "theirs", "bert")
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(chr(ord("!") + i) for i in range(VOCAB - 5))]
    (folder / "vocab.txt").write_text("\n".join(pieces) + "\n")
    ours = native(open_huggingface(folder), tmp_path / "ours")
    assert ours.state["vocab_size"] == build_tokenizer(saved_tokenizer(ours)).vocab_size == VOCAB
    for load in (folder, tmp_path / "ours"):
        words = [*STEP, "--load", str(load), "--finetune", "--use-checkpoint-args", "--seq-length", "16"]
        words += ["--save", str(tmp_path / f"run of {load.name}")]
        config = parse_run_config(words, description="", defaults=BERT_DEFAULTS)
        assert run(config, bert(binary_head=True)) == 0
        write_huggingface(
            find_checkpoint(config.checkpoint.save, None), tmp_path / f"{load.name}-hf", no_progress
        )
        assert open_huggingface(tmp_path / f"{load.name}-hf").state["vocab_size"] == VOCAB
    write_huggingface(ours, tmp_path / "written", no_progress)
    before, after = tensors_in(folder), tensors_in(tmp_path / "written")
    assert before.keys() == after.keys()
    assert all(tensor.equal(after[name]) for name, tensor in before.items())
    (folder / "vocab.txt").write_text("\n".join([*pieces, "one more"]) + "\n")
    with pytest.raises(InputError, match="its tokenizer has 101 ids, more than the 100 rows "):
        open_huggingface(folder)


def test_training_from_a_huggingface_model(tmp_path: Path, pretrain: Callable[..., str]) -> None:
    folder = save_hf(tmp_path / "theirs", "gpt2")
    words = [*STEP, *IDS, "--load", folder, "--use-checkpoint-args"]
    out = pretrain(*words, "--finetune", "--seq-length", 16, "--save", tmp_path / "run")
    assert "  1/" in out
    saved = find_checkpoint(str(tmp_path / "run"), None)
    assert saved.state["config"]["data"]["seq_length"] == 16
    assert model_config(saved).max_position_embeddings == 32
    for loaded in (folder, native(open_huggingface(folder), tmp_path / "native").folder.parent):
        for flags in ((), ("--no-load-optim",)):
            with pytest.raises(
                InputError, match=r"holds a model without the state of a run .* add --finetune"
            ):
                pretrain(*STEP, *IDS, "--load", loaded, "--use-checkpoint-args", *flags)
    assert "validation loss " in pretrain(*words, "--skip-train", "--eval-iters", 1)
    shape = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32".split()
    assert "  loss " in pretrain(*STEP, *IDS, "--load", folder, "--finetune", *shape)
    with pytest.raises(InputError, match=r"holds another model: --num-layers \(checkpoint: 2, given: 3\)"):
        pretrain(*STEP, *IDS, "--load", folder, "--finetune", *shape, "--num-layers", 3)


def test_windows_longer_than_the_compared_tokens_are_checked(tmp_path: Path) -> None:
    """Windows of 100 tokens in other layers change no logits of 64 tokens."""
    fields = {"max_position_embeddings": 256, "sliding_window": 100}
    folder = save_hf(tmp_path, "qwen2_moe of windows", **fields)
    read = open_huggingface(folder)
    assert model_config(read).windows == [99, None, None, None]
    their_logits(folder, read)
    edit_config(folder, layer_types=["full_attention", "sliding_attention"] * 2)
    with pytest.raises(TrainingFault, match=r"windows \[None, 99, None, 99\] of layers .*, not \[99, None"):
        their_logits(folder, read)


def test_a_single_file_comes_before_an_index(tmp_path: Path) -> None:
    """As in transformers: the index is left of an older save."""
    folder = save_hf(tmp_path, "llama")
    expected = open_huggingface(folder).tensors["model"].index
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"lost": "model-1.safetensors"}}')
    read = open_huggingface(folder)
    assert read.tensors["model"].index == expected
    assert largest_difference(their_logits(folder, read), our_logits(read)) < 1e-5


def test_periodic_windows_are_a_number(tmp_path: Path) -> None:
    config = model_config(open_huggingface(save_hf(tmp_path, "gemma2")))
    assert config.window_attn_skip_freq == "2" and config.windows[0] is not None
