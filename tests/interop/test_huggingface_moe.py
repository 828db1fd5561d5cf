"""Mixtures of experts of Hugging Face: gradients and auxiliary losses of transformers, and the form of their files."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import VOCAB, save_hf
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron.checkpoint.checkpoint import Checkpoint, model_config
from megatron.checkpoint.find import find_checkpoint
from megatron.checkpoint.tensor_file import TensorFile
from megatron.commands import convert_checkpoint
from megatron.errors import InputError, TrainingFault
from megatron.inference.conversion import fixed_tokens, largest_difference, our_logits, their_logits
from megatron.inference.load import load_weights
from megatron.interop.convert import parts_to_write, write_native
from megatron.interop.external import meta_model
from megatron.interop.huggingface import expressible
from megatron.interop.huggingface.expressible import with_scaled_experts, without_capacity
from megatron.interop.huggingface.read import open_huggingface
from megatron.interop.huggingface.write import write_huggingface
from megatron.model.config import ModelConfig
from megatron.model.gpt import GPTModel
from megatron.parallel.slices import GlobalSlice, whole

DEEPSEEK = ("deepseek_v2", "deepseek_v2 of groups", "deepseek_v3", "deepseek_v3 of yarn")
LOAD = ("aux_loss", "global_aux_loss")


def both_models(folder: Path, **fields: Any) -> tuple[Checkpoint, GPTModel, Any]:
    """The model in a folder, read by this program and by transformers."""
    transformers = pytest.importorskip("transformers")
    read = open_huggingface(folder)
    config = ModelConfig(**vars(model_config(read)) | fields)
    ours = meta_model("GPT", config, VOCAB)
    load_weights(read, ours, torch.float32)
    ours.requires_grad_()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    return read, ours, theirs.eval()


def assert_same_gradients(ours: GPTModel, theirs: Any, folder: Path) -> None:
    """Compare gradients by writing those of transformers as if they were weights."""
    for p in theirs.parameters():
        assert p.grad is not None
        p.data = p.grad
    theirs.save_pretrained(folder)
    expected = open_huggingface(folder).tensors["model"]
    named = dict(ours.named_parameters())
    assert named.keys() == expected.index.keys()
    for name, p in named.items():
        if name.endswith("router.expert_bias"):  # it has no gradient
            assert p.grad is None
            continue
        assert largest_difference([expected.read(name, whole(*p.shape))], [p.grad]) < 1e-5, name


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Mean loss of each token after the first."""
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def run_ours(model: GPTModel, tokens: Tensor, **arguments: Any) -> Tensor:
    return model(tokens, torch.arange(tokens.shape[1]).expand(tokens.shape), **arguments)


@pytest.mark.parametrize("kind", ["mixtral", "olmoe", "qwen2_moe of dense layers", "qwen3_moe", *DEEPSEEK])
def test_gradients(tmp_path: Path, kind: str) -> None:
    read, ours, theirs = both_models(save_hf(tmp_path / "theirs", kind))
    tokens = fixed_tokens(read)[0]
    loss, expected = loss_of(run_ours(ours, tokens), tokens), loss_of(theirs(tokens).logits, tokens)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    loss.backward()
    expected.backward()
    assert_same_gradients(ours, theirs, tmp_path / "gradients")


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_auxiliary_loss(tmp_path: Path, kind: str) -> None:
    """In transformers it is larger by the experts of a token, and that of all layers together."""
    coefficient, topk = 0.25, 2
    folder = save_hf(
        tmp_path / "theirs",
        kind,
        num_hidden_layers=1,
        router_aux_loss_coef=coefficient,
        output_router_logits=True,
    )
    assert model_config(open_huggingface(folder)).moe_aux_loss_coeff == (coefficient,)
    read, ours, theirs = both_models(folder, moe_aux_loss_coeff=(coefficient * topk,))
    tokens = fixed_tokens(read)[0]
    theirs(tokens, labels=tokens).loss.backward()
    # Two sequences share the loss of the batch.
    loss_of(run_ours(ours, tokens, sequence_grad=1 / len(tokens)), tokens).backward()
    assert_same_gradients(ours, theirs, tmp_path / "gradients")


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe of dense layers"])
def test_experts_in_one_tensor(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files with the stacked tensors of transformers 5 hold the same model, and each value is read once."""
    transformers = pytest.importorskip("transformers")
    if int(transformers.__version__.split(".")[0]) < 5:
        pytest.skip("needs transformers 5")
    folder = save_hf(tmp_path / "separate", kind)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    theirs.save_pretrained(tmp_path / "stacked", save_original_format=False)
    stored = load_file(tmp_path / "stacked" / "model.safetensors")
    assert any(name.endswith("mlp.experts.gate_up_proj") for name in stored)
    separate, stacked = open_huggingface(folder), open_huggingface(tmp_path / "stacked")
    assert stacked.state == separate.state and stacked.notes == ()
    read = 0
    original = TensorFile.read_into

    def counted(file: TensorFile, target: Tensor, *rest: Any) -> None:
        nonlocal read
        read += target.numel()
        original(file, target, *rest)

    values = {
        name: separate.tensors["model"].read(name, whole(*tensor["shape"]))
        for name, tensor in separate.tensors["model"].index.items()
    }
    monkeypatch.setattr(TensorFile, "read_into", counted)
    for name, expected in values.items():
        assert stacked.tensors["model"].read(name, whole(*expected.shape)).equal(expected)
    assert read == sum(tensor.numel() for tensor in stored.values())


def test_impossible_stacks_are_refused(tmp_path: Path) -> None:
    """Also those without values, which would take no room in a file and any time."""
    folder = save_hf(tmp_path, "mixtral")
    stack = {"model.layers.0.mlp.experts.down_proj": torch.empty(10**9, 0, 64)}
    save_file(load_file(folder / "model.safetensors") | stack, folder / "model.safetensors")
    with pytest.raises(InputError, match=r"has the shape \(1000000000, 0, 64\), not that of stacked experts"):
        open_huggingface(folder)


def test_ranks_read_their_own_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank of expert parallelism reads the files' tensors of its experts only, and a part of each expert whole."""
    import megatron.interop.huggingface.read as reader

    read = open_huggingface(save_hf(tmp_path, "mixtral")).tensors["model"]
    name, (rows, h), seen = "decoder.layers.1.mlp.experts.weight1", (4 * 320, 64), []
    expected = read.read(name, whole(rows, h))
    original = reader._read

    def watched(files: dict, names: list[str], *rest: object) -> Tensor:
        seen.extend(names)
        return original(files, names, *rest)

    monkeypatch.setattr(reader, "_read", watched)
    read = open_huggingface(tmp_path).tensors["model"]
    ranges = ((640 + 80, 640 + 160), (640 + 240, 640 + 320))  # the second half of the features of expert 2
    found = read.read(name, GlobalSlice((rows, h), 0, ranges, expert_parallel=True))
    assert found.equal(torch.cat([expected[slice(*r)] for r in ranges]))
    prefix = "model.layers.1.block_sparse_moe.experts.2"
    assert seen == [f"{prefix}.w1.weight", f"{prefix}.w3.weight"]


def test_conversions_hold_one_expert(tmp_path: Path) -> None:
    """No part of a tensor in memory is larger than an expert, in both directions."""
    read = open_huggingface(save_hf(tmp_path / "theirs", "qwen3_moe"))
    parts, blocks = parts_to_write(read.tensors["model"])
    name = "decoder.layers.0.mlp.experts.weight2"
    mine = [key for key, (tensor, _) in blocks.items() if tensor == name]
    assert len(mine) == 6 and mine[1] == f"{name}[48:96,0:64]"
    assert max(part.nbytes for part in parts.values()) == 4 * 64 * (4 + 2 * 2) * 24  # projection of QKV
    write_native(read, tmp_path / "ours", lambda size: None)
    ours = find_checkpoint(str(tmp_path / "ours"), None)
    ours.verify()
    tensors, seen = ours.tensors["model"], []
    original = type(tensors).read
    type(tensors).read = lambda source, name, spec: seen.append((name, spec)) or original(source, name, spec)
    try:
        write_huggingface(ours, tmp_path / "written", lambda size: None)
    finally:
        type(tensors).read = original
    sizes = [torch.Size(spec.local_shape).numel() for _, spec in seen]
    assert max(sizes) == 64 * 192
    assert sum(sizes) == sum(torch.Size(tensor["shape"]).numel() for tensor in tensors.index.values())


def edited(folder: Path, **fields: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (
            "mixtral",
            {"router_jitter_noise": 0.1},
            "router_jitter_noise: 0.1 is not supported; only 0.0 or None is",
        ),
        ("mixtral", {"num_local_experts": 3}, "config.json contradicts the shapes of 2 tensor"),
        ("mixtral", {"num_local_experts": 5}, "lacks 6 tensor"),
        ("mixtral", {"num_local_experts": 10**4}, "config.json has 10000 experts, but there are 41 tensors"),
        ("mixtral", {"num_experts_per_tok": 1}, "--moe-router-topk: 1 makes the softmax over one expert 1"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv: 8.0 is not supported; only None is"),
        (
            "qwen2_moe",
            {"decoder_sparse_step": 0},
            "decoder_sparse_step: 0 is not a positive integer",
        ),
        ("qwen2_moe", {"mlp_only_layers": "all"}, "mlp_only_layers: all is not a list of layers"),
        ("qwen2_moe", {"mlp_only_layers": [0]}, "lacks 3 tensor.*layers.0.mlp.down_proj"),
        (
            "qwen3_moe",
            {"num_hidden_layers": 10**9},
            "num_hidden_layers: 1000000000 is not a number of layers",
        ),
        (
            "deepseek_v2 of groups",
            {"num_experts_per_tok": 6, "topk_group": 3},
            "topk_group: 3 with num_experts_per_tok 6 is not supported; a group counts by its best 1, so only 6 groups",
        ),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob: True is not supported; only False is"),
        ("deepseek_v2", {"topk_method": "x"}, "topk_method: 'x' is not supported; only 'greedy' and "),
        ("deepseek_v3", {"topk_group": 4}, "a group counts by its best 2, so only 2 groups are"),
        ("deepseek_v3", {"rms_norm_eps": 1e-5}, "rms_norm_eps: 1e-05 is not supported; only 1e-06 is"),
        ("deepseek_v3", {"n_shared_experts": None}, "n_shared_experts: None is not supported"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads: 2 is not supported"),
        ("deepseek_v3", {"num_hidden_layers": 2}, "has tensors that a supported deepseek_v3 lacks"),
    ],
)
def test_other_forms_are_refused(tmp_path: Path, kind: str, fields: dict, message: str) -> None:
    folder = edited(save_hf(tmp_path, kind), **fields)
    with pytest.raises(InputError, match=message):
        open_huggingface(folder)


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (
            "mixtral",
            {"moe_router_pre_softmax": True},
            "mixtral: --moe-router-pre-softmax is True here and False there",
        ),
        (
            "mixtral",
            {"moe_layer_freq": "[0,1]"},
            r"mixtral: --moe-layer-freq is \[0,1\] here and 1 there; --ffn-hidden-size is 256 here and 160 there",
        ),
        (
            "qwen3_moe",
            {"moe_router_score_function": "sigmoid", "moe_router_num_groups": 2, "moe_router_group_topk": 1},
            "qwen3_moe: --moe-router-score-function is sigmoid here and softmax there; --moe-router-num-groups is 2",
        ),
        (
            "qwen2_moe",
            {"moe_shared_expert_gate": False},
            "qwen2_moe: --moe-shared-expert-gate is False here and True there",
        ),
        (
            DEEPSEEK[0],
            {"moe_shared_expert_intermediate_size": None},
            "--moe-shared-expert-intermediate-size: none is not a multiple of --moe-ffn-hidden-size",
        ),
    ],
)
def test_models_without_a_family_are_refused(tmp_path: Path, kind: str, fields: dict, message: str) -> None:
    read = open_huggingface(save_hf(tmp_path / "theirs", kind))
    read.state["config"]["model"] |= {"ffn_hidden_size": 256} | fields
    with pytest.raises(InputError, match=message):
        write_huggingface(read, tmp_path / "written", lambda size: None)
    assert not (tmp_path / "written").exists()


@pytest.mark.slow
def test_lost_experts_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault of Megatron-LM's issue 5844: a conversion that leaves out the experts, and reports success."""
    theirs, native, written = tmp_path / "theirs", tmp_path / "native", tmp_path / "written"
    save_hf(theirs, "mixtral")
    words = f"--from huggingface --to native --load {theirs} --save {native}"
    convert_checkpoint.main(words.split())

    def without_outputs(checkpoint: Checkpoint, *arguments: Any) -> None:
        # A factor of the experts' weights in the files, which makes them zero but for rounding.
        settings = checkpoint.state["config"]["model"] | {"moe_router_topk_scaling_factor": 2.0**-100}
        state = checkpoint.state | {"config": {**checkpoint.state["config"], "model": settings}}
        write_huggingface(with_scaled_experts(dataclasses.replace(checkpoint, state=state)), *arguments)

    monkeypatch.setattr(convert_checkpoint, "write_huggingface", without_outputs)
    words = f"--from native --to huggingface --load {native} --save {written}"
    with pytest.raises(TrainingFault, match=r"logits of the written checkpoint .* differ"):
        convert_checkpoint.main(words.split())
    assert not written.exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_capacity_and_scaling_factor_are_not_part_of_an_export(tmp_path: Path, kind: str) -> None:
    read = open_huggingface(save_hf(tmp_path / "theirs", kind))
    read.state["config"]["model"]["moe_router_topk_scaling_factor"] = 3.0
    expected = our_logits(read)
    read.state["config"]["model"] |= {"moe_expert_capacity_factor": 0.5, "moe_token_drop_policy": "position"}
    changed = with_scaled_experts(without_capacity(read))
    write_huggingface(changed, tmp_path / "written", lambda size: None)
    written = open_huggingface(tmp_path / "written")
    assert largest_difference(expected, our_logits(written)) < 1e-6
    assert largest_difference(expected, their_logits(tmp_path / "written", written)) < 1e-5
    assert [note.split()[0] for note in changed.notes] == ["the", "--moe-router-topk-scaling-factor"]


@pytest.mark.slow
def test_a_part_of_the_scaling_factor_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the factor was left out of the experts' biases."""
    read = open_huggingface(save_hf(tmp_path / "theirs", "gpt_oss"))
    read.state["config"]["model"]["moe_router_topk_scaling_factor"] = 3.0
    write_native(read, tmp_path / "native", lambda size: None)
    monkeypatch.setattr(expressible, "OUTPUTS", (".experts.weight2",))
    words = f"--from native --to huggingface --load {tmp_path / 'native'} --save {tmp_path / 'written'}"
    with pytest.raises(TrainingFault, match=r"logits of the written checkpoint .* differ"):
        convert_checkpoint.main(words.split())


def test_a_deepseek_as_published(tmp_path: Path) -> None:
    """Weights in bf16 but the bias of the experts in fp32, and a layer for multi-token prediction."""
    folder = save_hf(tmp_path / "theirs", "deepseek_v3", torch.bfloat16)
    tensors = load_file(folder / "model.safetensors")
    bias = "model.layers.2.mlp.gate.e_score_correction_bias"
    tensors[bias] = torch.randn(8)
    extra = {
        "model.layers.3.eh_proj.weight": torch.randn(64, 128),
        "model.layers.3.enorm.weight": torch.ones(64),
    }
    save_file(tensors | extra, folder / "model.safetensors")
    edited(folder, num_nextn_predict_layers=1, seq_aux=True, aux_loss_alpha=0.001)
    read = open_huggingface(folder)
    assert read.notes == ("2 tensors of layer 3, for multi-token prediction, are not read",)
    assert read.state["config"]["training"] == {"bf16": True}
    config = model_config(read)
    assert config.moe_router_load_balancing_type == ("seq_aux_loss",) and config.moe_aux_loss_coeff == (
        0.001,
    )
    write_native(read, tmp_path / "ours", lambda size: None)
    write_huggingface(find_checkpoint(str(tmp_path / "ours"), None), tmp_path / "written", lambda size: None)
    written = load_file(tmp_path / "written" / "model.safetensors")
    assert written.keys() == tensors.keys() and written[bias].equal(tensors[bias])
    kept = ("e_score_correction_bias",)
    assert all(
        x.equal(tensors[n]) and x.dtype == tensors[n].dtype
        for n, x in written.items()
        if not n.endswith(kept)
    )
    config = json.loads((tmp_path / "written" / "config.json").read_text())
    assert config["torch_dtype"] == "bfloat16" and config["aux_loss_alpha"] == 0.001


def test_flags_of_training_do_not_matter(tmp_path: Path) -> None:
    """Exports lack the load of the last batch, and are those of a model trained without dropped tokens."""
    read = open_huggingface(save_hf(tmp_path / "theirs", "mixtral"))
    trained = {
        "moe_router_load_balancing_type": LOAD,
        "moe_aux_loss_coeff": (0.5, 0.25),
        "moe_expert_capacity_factor": 1.5,
        "moe_layer_freq": "[1]*2",
        "ffn_hidden_size": 256,  # of no layer
    }
    read.state["config"]["model"] |= trained
    write_huggingface(read, tmp_path / "written", lambda size: None)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "written"))
    assert before.keys() == after.keys() and all(x.equal(after[name]) for name, x in before.items())
    assert json.loads((tmp_path / "written" / "config.json").read_text())["router_aux_loss_coef"] == 0.5


def test_a_mixtral_without_the_key_has_its_own_base(tmp_path: Path) -> None:
    folder = save_hf(tmp_path, "mixtral")
    config = json.loads((folder / "config.json").read_text())
    for key in ("rope_parameters", "rope_theta"):
        config.pop(key, None)
    (folder / "config.json").write_text(json.dumps(config))
    assert model_config(open_huggingface(folder)).rotary_base == 1e6
