"""Multi-token prediction, against layers of transformers in double precision."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import CPU, config_of
from torch import Tensor

from megatron.checkpoint.manifest import read_manifest
from megatron.data.gpt_dataset import GPTBatch
from megatron.errors import InputError
from megatron.inference.config import InferenceConfig
from megatron.inference.load import load_gpt
from megatron.model.flops import flops_per_sample
from megatron.parallel.mesh import Mesh
from megatron.parallel.parameters import main_grad, named_parameters
from megatron.pretrain_bert import bert
from megatron.pretrain_gpt import GPT
from megatron.tokenizer.config import TokenizerConfig
from megatron.training.build import build_engine
from megatron.training.engine import Engine
from megatron.variants.multi_token_prediction import MTPModel, loss_masks, with_mtp

LLAMA = """
    --position-embedding-type rope --normalization RMSNorm --norm-epsilon 1e-6 --swiglu --disable-bias-linear
    --num-layers 2 --ffn-hidden-size 64 --attention-dropout 0 --hidden-dropout 0
"""
UNTIED = "--untie-embeddings-and-output-weights"
DEPTHS, FACTOR, BATCH, LENGTH, ROWS = 2, 0.3, 4, 16, 60


def mtp_engine(flags: str) -> Engine:
    """An engine with random weights."""
    config = config_of(f"{LLAMA} --mtp-num-layers {DEPTHS} --mtp-loss-scaling-factor {FACTOR} {flags}")
    task = with_mtp(config, GPT)
    engine = build_engine(config, task, Mesh(device=CPU), vocab_size=ROWS, padded_vocab_size=64)
    torch.manual_seed(0)
    for param in engine.buffer.flat_params:
        view = param.view(engine.buffer.params)
        view.normal_(std=0.3) if view.dim() > 1 else view.uniform_(0.5, 1.5)
        if param.shard_spec.num_valid_rows is not None:
            view[ROWS:] = 0
    return engine


def tokens_and_labels() -> tuple[Tensor, Tensor]:
    text = torch.randint(ROWS, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return text[:, :-1], text[:, 1:]


def microbatches(size: int, **fields: Tensor) -> Iterator[GPTBatch]:
    tokens, labels = tokens_and_labels()
    values = {
        "tokens": tokens,
        "labels": labels,
        "loss_mask": torch.ones(tokens.shape),
        "position_ids": torch.arange(LENGTH).expand(tokens.shape),
        **fields,
    }
    for begin in range(0, BATCH, size):
        yield GPTBatch(**{name: value[begin : begin + size] for name, value in values.items()})


def step(engine: Engine, size: int, **fields: Tensor) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of a global batch, and the gradients of all parameters by name."""
    engine.buffer.grads.zero_()
    batch = engine.next_global_batch(microbatches(size, **fields), BATCH // size, 0)
    losses = engine.forward_backward(batch).tolist()
    return losses, {p.tied or name: main_grad(p).clone() for name, p in named_parameters(engine.modules[0])}


class Theirs(torch.nn.Module):
    """Llama and the modules of multi-token prediction, of transformers' and torch's parts."""

    def __init__(self, weights: dict[str, Tensor], tied: bool) -> None:
        super().__init__()
        llama = pytest.importorskip("transformers.models.llama.modeling_llama")
        config = llama.LlamaConfig(
            vocab_size=ROWS,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            rms_norm_eps=1e-6,
            attn_implementation="eager",
            tie_word_embeddings=tied,
        )
        self.main = llama.LlamaForCausalLM(config)
        self.layers = torch.nn.ModuleList(llama.LlamaDecoderLayer(config, i) for i in range(DEPTHS))
        self.norms = torch.nn.ModuleDict(
            {
                f"{name}{i}": llama.LlamaRMSNorm(32, 1e-6)
                for name in ("enorm", "hnorm", "final_layernorm")
                for i in range(DEPTHS)
            }
        )
        self.projections = torch.nn.ModuleList(torch.nn.Linear(64, 32, bias=False) for _ in range(DEPTHS))
        self.double()
        for name, p in self.by_our_name(weights).items():
            whole = weights[name].double()
            for part, values in zip(p, whole.split([len(part) for part in p]), strict=True):
                part.data.copy_(values)

    def by_our_name(self, names: dict[str, Tensor]) -> dict[str, list[torch.nn.Parameter]]:
        """The parameters whose rows make up each of ours."""
        model, found = self.main.model, {}
        for name in names:
            module, _, _ = name.rpartition(".")
            if module == "embedding.word_embeddings":
                found[name] = [model.embed_tokens.weight]
            elif module == "output_layer":
                found[name] = [self.main.lm_head.weight]
            elif module == "decoder.final_layernorm":
                found[name] = [model.norm.weight]
            elif module.startswith("mtp.layers") and "transformer_layer" not in module:
                _, _, i, leaf = module.split(".")
                own = self.projections[int(i)] if leaf == "eh_proj" else self.norms[f"{leaf}{i}"]
                found[name] = [own.weight]
            else:
                _, _, i, *rest = module.replace(".transformer_layer", "").split(".")
                layer = (self.layers if module.startswith("mtp") else model.layers)[int(i)]
                found[name] = list(parts(layer, ".".join(rest)))
        return found

    def losses(self, tokens: Tensor, labels: Tensor) -> list[Tensor]:
        """Mean loss of each depth. Each works on the shorter sequence of positions that have a target."""
        model, length = self.main.model, tokens.shape[1]
        hidden = model(tokens).last_hidden_state
        means = [F.cross_entropy(self.main.lm_head(hidden).flatten(0, 1), labels.flatten())]
        for k in range(1, DEPTHS + 1):
            n, i = length - k, k - 1
            embedded = self.norms[f"enorm{i}"](model.embed_tokens(tokens[:, k:]))
            joined = torch.cat((embedded, self.norms[f"hnorm{i}"](hidden[:, :n])), dim=-1)
            x = self.projections[i](joined)
            rotary = model.rotary_emb(x, torch.arange(n).unsqueeze(0))
            future = torch.full((1, 1, n, n), -torch.inf, dtype=x.dtype).triu(1)
            x = self.layers[i](x, attention_mask=future, position_embeddings=rotary)
            hidden = self.norms[f"final_layernorm{i}"](x[0] if isinstance(x, tuple) else x)
            logits = self.main.lm_head(hidden)
            means.append(F.cross_entropy(logits.flatten(0, 1), labels[:, k:].flatten()))
        return means


def parts(layer: Any, module: str) -> Iterator[torch.nn.Parameter]:
    attention, mlp = layer.self_attn, layer.mlp
    modules = {
        "input_layernorm": (layer.input_layernorm,),
        "pre_mlp_layernorm": (layer.post_attention_layernorm,),
        "self_attention.linear_qkv": (attention.q_proj, attention.k_proj, attention.v_proj),
        "self_attention.linear_proj": (attention.o_proj,),
        "mlp.linear_fc1": (mlp.gate_proj, mlp.up_proj),
        "mlp.linear_fc2": (mlp.down_proj,),
    }
    return (part.weight for part in modules[module])


def ungrouped(name: str, tensor: Tensor) -> Tensor:
    """All queries, then all keys, then all values, in place of those of one head after the other."""
    if "linear_qkv" in name:
        return tensor.view(4, 3, 8, 32).transpose(0, 1).reshape(96, 32)
    return tensor[:ROWS] if name.startswith(("embedding", "output_layer")) else tensor


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize(
    "flags", [UNTIED, "", "--recompute-granularity full"], ids=["untied", "tied", "recomputed"]
)
def test_losses_and_gradients_as_transformers(flags: str, size: int) -> None:
    engine = mtp_engine(flags)
    weights = {name: p.detach() for name, p in named_parameters(engine.modules[0])}
    theirs = Theirs({name: ungrouped(name, p) for name, p in weights.items()}, tied=flags != UNTIED)
    expected = theirs.losses(*tokens_and_labels())
    (expected[0] + FACTOR / DEPTHS * sum(expected[1:])).backward()

    losses, grads = step(engine, size)
    assert losses == pytest.approx([loss.item() for loss in expected], rel=1e-5)
    for name, params in theirs.by_our_name(grads).items():
        found, wanted = ungrouped(name, grads[name]), torch.cat([p.grad for p in params])
        assert (found - wanted).norm() < 1e-5 * wanted.norm(), name
    assert sum(len(params) for params in theirs.by_our_name(grads).values()) == len(list(theirs.parameters()))


def test_documents_are_predicted_apart() -> None:
    """With --reset-attention-mask and --reset-position-ids the losses are those of the documents alone."""
    engine, cut = mtp_engine(UNTIED), 7
    model, (tokens, labels) = engine.modules[0], tokens_and_labels()
    assert isinstance(model, MTPModel)

    def sums(part: slice, ids: Tensor | None, positions: Tensor) -> Tensor:
        x = tokens[:, part]
        batch = GPTBatch(
            tokens=x,
            labels=labels[:, part],
            loss_mask=torch.ones(x.shape),
            position_ids=positions.expand(x.shape),
            document_ids=ids,
        )
        return engine.task.forward(model, batch, None, None)

    positions = torch.arange(LENGTH)
    ids = (positions >= cut).long().expand(BATCH, LENGTH)
    joint = sums(slice(None), ids, torch.cat((positions[:cut], positions[: LENGTH - cut])))
    first = sums(slice(cut), None, positions[:cut])
    second = sums(slice(cut, None), None, positions[: LENGTH - cut])
    torch.testing.assert_close(joint, first + second, rtol=1e-5, atol=0)


def test_masked_predictions() -> None:
    """Depth k has the mask of the input that comes k later, and none beyond the sequence."""
    (batch,) = microbatches(BATCH)
    mask = (batch.tokens % 5 > 0).float()
    masks = loss_masks(dataclasses.replace(batch, loss_mask=mask), 3)
    for k in range(4):
        for i in range(LENGTH):
            expected = mask[:, i + k] if i + k < LENGTH else torch.zeros(BATCH)
            assert masks[k, :, i].equal(expected)


def test_gradients_do_not_depend_on_microbatches() -> None:
    """With masked tokens, of which microbatches have different numbers, and experts with auxiliary losses."""
    mask = (tokens_and_labels()[0] % 5 > torch.arange(BATCH).unsqueeze(1)).float()
    engine = mtp_engine(f"""
        {UNTIED} --num-experts 4 --moe-layer-freq [0]+[1] --moe-router-load-balancing-type seq_aux_loss
        --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.01
    """)
    assert "mtp.layers.1.transformer_layer.mlp.router.weight" in dict(named_parameters(engine.modules[0]))
    losses, grads = step(engine, 4, loss_mask=mask)
    for size in (1, 2):
        other, others = step(engine, size, loss_mask=mask)
        assert other == pytest.approx(losses, rel=1e-6)
        for name, grad in grads.items():
            assert (others[name] - grad).norm() < 1e-5 * grad.norm(), name


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--mtp-num-layers 1",
            "--mtp-num-layers: 1 needs --position-embedding-type rope or none, not learned_absolute",
        ),
        (f"{LLAMA} --mtp-loss-scaling-factor 0.2", "--mtp-loss-scaling-factor: 0.2 needs --mtp-num-layers"),
        (
            f"{LLAMA} --mtp-num-layers 16",
            "--mtp-num-layers: 16 predicts no token within --seq-length 16; choose a smaller number",
        ),
        (
            f"{LLAMA} --mtp-num-layers 1 --embed-layernorm",
            "--mtp-num-layers: 1 and --embed-layernorm exclude each other; drop one",
        ),
    ],
)
def test_impossible_combinations(flags: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        with_mtp(config_of(flags), GPT)
    assert str(caught.value) == message


def test_a_loss_of_ones_own_is_not_replaced() -> None:
    own = dataclasses.replace(GPT, loss_names=("smoothed loss", "z loss"))
    with pytest.raises(
        InputError, match=r"^--mtp-num-layers: 1 is for GPT's loss, not smoothed loss and z loss; "
    ):
        with_mtp(config_of(f"{LLAMA} --mtp-num-layers 1"), own)


def test_bert_has_none() -> None:
    with pytest.raises(InputError, match=r"^--mtp-num-layers: 1 is for GPT, not BERT; leave it out$"):
        with_mtp(config_of(f"{LLAMA} --mtp-num-layers 1"), bert(binary_head=True))


def test_checkpoints_keep_it_and_generation_ignores_it(pretrain: Callable, tmp_path: Path) -> None:
    result = pretrain(
        *f"""{LLAMA} --mtp-num-layers 1 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --mock-data
        --tokenizer-type NullTokenizer --vocab-size 59 --micro-batch-size 2 --global-batch-size 2 --train-iters 1
        --eval-iters 1 --lr 1e-3 --num-workers 0 --device cpu --save {tmp_path}""".split()
    )
    assert result is not None
    names = set(read_manifest(next(tmp_path.glob("iter_*"))).tensors["model"])
    layer = "mtp.layers.0.transformer_layer"
    assert {name for name in names if name.startswith("mtp") and not name.startswith(layer)} == {
        f"mtp.layers.0.{name}.weight" for name in ("enorm", "hnorm", "eh_proj", "final_layernorm")
    }
    of_layer = {name.removeprefix(layer) for name in names if name.startswith(layer)}
    assert of_layer == {name.removeprefix("decoder.layers.0") for name in names if "decoder.layers.0" in name}
    tokenizer = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=59)
    model, _ = load_gpt(InferenceConfig(load=str(tmp_path)), tokenizer, Mesh(device=CPU))
    assert not any("mtp" in name for name, _ in model.named_parameters())
    assert model(torch.tensor([[1, 2]]), torch.arange(2).unsqueeze(0)).isfinite().all()


def test_flops() -> None:
    """A layer and a projection to the vocabulary for each depth, and the joining projection."""
    sizes = {"seq_length": 16, "padded_vocab_size": 64, "num_logits": 16}
    one, two, mtp = (
        flops_per_sample(config_of(f"{LLAMA} {flags}").model, **sizes)
        for flags in ("--num-layers 1", "--num-layers 2", "--num-layers 1 --mtp-num-layers 2")
    )
    depth = two - one + 3 * 2 * 16 * (2 * 32 * 32 + 32 * 64)
    assert mtp == one + 2 * depth
