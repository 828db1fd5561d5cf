"""BERT, against transformers' MegatronBert and the original BERT."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from models import flat
from torch import Tensor

from megatron.arguments import parse_run_config
from megatron.checkpoint.checkpoint import model_config
from megatron.inference.load import load_weights
from megatron.interop.nvidia.read import open_megatron
from megatron.model.bert import BertClassifier, BertModel
from megatron.model.config import ModelConfig
from megatron.model.context import ModelContext
from megatron.parallel.random import DropoutKey
from megatron.pretrain_bert import DEFAULTS, bert, build_datasets
from megatron.tokenizer import build_tokenizer

HEADS, WIDTH, LENGTH, VOCAB = 4, 16, 32, 300
SHAPE = {"num_layers": 3, "hidden_size": HEADS * WIDTH, "num_attention_heads": HEADS}
CONTEXT = ModelContext(vocab_size=VOCAB, padded_vocab_size=VOCAB)

HEAD_NAMES = {
    "bert.embeddings.word_embeddings.": "embedding.word_embeddings.",
    "bert.embeddings.position_embeddings.": "embedding.position_embeddings.",
    "bert.embeddings.token_type_embeddings.": "embedding.tokentype_embeddings.",
    "bert.pooler.": "pooler.",
    "cls.predictions.transform.dense.": "lm_head.dense.",
    "cls.predictions.transform.LayerNorm.": "lm_head.layer_norm.",
    "cls.predictions.bias": "output_layer.bias",
    "cls.seq_relationship.": "binary_head.",
    "bert.encoder.layer.": "encoder.layers.",
    ".attention.self.query.": ".self_attention.linear_qkv.",
    ".attention.output.dense.": ".self_attention.linear_proj.",
    ".intermediate.dense.": ".mlp.linear_fc1.",
    ".output.dense.": ".mlp.linear_fc2.",
}
MEGATRON_NAMES = {
    ".attention.ln.": ".input_layernorm.",
    ".ln.": ".pre_mlp_layernorm.",
    "bert.encoder.ln.": "encoder.final_layernorm.",
}


def original_names(layers: int) -> dict[str, str]:
    """Names of the layer norms: those of the original follow a block, and those here precede the next."""
    names = {"bert.embeddings.LayerNorm.": "encoder.layers.0.input_layernorm."}
    for i in range(layers):
        names[f"encoder.layer.{i}.attention.output.LayerNorm."] = f"encoder.layer.{i}.pre_mlp_layernorm."
        following = (
            f"encoder.layers.{i + 1}.input_layernorm." if i + 1 < layers else "encoder.final_layernorm."
        )
        names[f"bert.encoder.layer.{i}.output.LayerNorm."] = following
    return names


def from_hf(state: dict[str, Tensor], names: dict[str, str]) -> dict[str, Tensor]:
    result = {}
    for name, tensor in state.items():
        if ".key." in name or ".value." in name or ".decoder." in name or name.endswith("position_ids"):
            continue  # merged with the query, tied, or constant
        if ".query." in name:
            parts = (tensor, *(state[name.replace("query", x)] for x in ("key", "value")))
            tensor = torch.cat([x.view(HEADS, WIDTH, *x.shape[1:]) for x in parts], dim=1).flatten(0, 1)
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        result[name] = tensor
    return result


def model(binary_head: bool = True, context: ModelContext = CONTEXT, **fields: object) -> BertModel:
    config = ModelConfig(
        **SHAPE,
        max_position_embeddings=LENGTH,
        bias_gelu_fusion=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        **fields,
    )
    return BertModel(config, context, binary_head=binary_head)


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    return ((ours - theirs).norm() / theirs.norm()).item()


def positions_of(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Positions [b, p] of the true elements of each row, padded with 0, and weights that are 0 for padding."""
    rows = [row.nonzero().flatten() for row in chosen]
    positions = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    weights = torch.nn.utils.rnn.pad_sequence([torch.ones(len(row)) for row in rows], batch_first=True)
    return positions, weights


@pytest.mark.parametrize("post_norm", [False, True], ids=["MegatronBert", "the original"])
def test_equals_transformers(post_norm: bool) -> None:
    """Compare logits of both heads, losses and all gradients."""
    transformers = pytest.importorskip("transformers")
    shape = {"num_hidden_layers": 3, "hidden_size": HEADS * WIDTH, "num_attention_heads": HEADS}
    shape |= {"intermediate_size": 4 * HEADS * WIDTH, "max_position_embeddings": LENGTH, "vocab_size": VOCAB}
    shape |= {"layer_norm_eps": 1e-5, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    kind = "Bert" if post_norm else "MegatronBert"
    config = getattr(transformers, f"{kind}Config")(**shape, hidden_act="gelu", attn_implementation="eager")
    hf = getattr(transformers, f"{kind}ForPreTraining")(config)
    torch.manual_seed(0)
    for p in hf.parameters():
        p.data.normal_(std=0.2)
    names = (original_names(3) if post_norm else MEGATRON_NAMES) | HEAD_NAMES
    if not post_norm:  # ".ln." is also part of longer names
        names = dict(sorted(names.items(), key=lambda item: -len(item[0])))
    ours = model(apply_residual_connection_post_layernorm=post_norm)
    flat(ours).initialize(1)
    ours.load_state_dict(from_hf(hf.state_dict(), names))

    tokens, labels = torch.randint(VOCAB, (2, 3, LENGTH))
    lengths = torch.tensor([LENGTH, 20, 7])
    mask = (torch.arange(LENGTH) < lengths.unsqueeze(1)).long()
    types = (torch.arange(LENGTH) >= 5).long() * mask
    order = torch.tensor([0, 1, 1])
    logits, order_logits = ours(tokens, mask, types)
    theirs = hf(tokens, attention_mask=mask, token_type_ids=types)
    assert relative_error(logits[mask.bool()], theirs.prediction_logits[mask.bool()]) < 1e-4
    assert relative_error(order_logits, theirs.seq_relationship_logits) < 1e-4

    chosen = mask.bool() & (torch.rand(3, LENGTH) < 0.3)
    positions, weights = positions_of(chosen)
    losses, order_logits = ours(
        tokens, mask, types, positions_bp=positions, labels_bp=labels.gather(1, positions)
    )
    loss = (losses * weights).sum() / weights.sum() + torch.nn.functional.cross_entropy(order_logits, order)
    loss.backward()
    expected = hf(
        tokens,
        attention_mask=mask,
        token_type_ids=types,
        labels=labels.masked_fill(~chosen, -100),
        next_sentence_label=order,
    ).loss
    expected.backward()
    assert abs(loss.item() / expected.item() - 1) < 1e-5
    for name, grad in from_hf({name: p.grad for name, p in hf.named_parameters()}, names).items():
        if "linear_qkv.bias" in name:  # the bias of keys cancels in the softmax
            continue
        assert relative_error(ours.get_parameter(name).grad, grad) < 1e-4, name


def test_heads_at_selected_positions() -> None:
    ours = model()
    flat(ours).initialize(1)
    tokens = torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    ones, types = torch.ones_like(tokens), torch.zeros_like(tokens)
    positions = torch.tensor([[3, 9, 0], [31, 0, 0]])
    everywhere, order = ours(tokens, ones, types, labels_bp=tokens)
    selected, same_order = ours(
        tokens, ones, types, positions_bp=positions, labels_bp=tokens.gather(1, positions)
    )
    torch.testing.assert_close(selected, everywhere.gather(1, positions))
    torch.testing.assert_close(same_order, order)


def test_padding_does_not_change_outputs() -> None:
    ours = model(context=dataclasses.replace(CONTEXT, padded_vocab_size=VOCAB + 20))
    flat(ours).initialize(1)
    tokens = torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(LENGTH) < 20).long().expand(2, LENGTH)
    types = torch.zeros_like(tokens)
    logits, order = ours(tokens, mask, types)
    short, short_order = ours(tokens[:, :20], mask[:, :20], types[:, :20])
    assert logits.shape == (2, LENGTH, VOCAB)  # without the padding of the vocabulary
    torch.testing.assert_close(logits[:, :20], short)
    torch.testing.assert_close(order, short_order)


def test_without_the_binary_head() -> None:
    ours = model(binary_head=False)
    names = {name.split(".")[0] for name, _ in ours.named_parameters()}
    assert names == {"embedding", "encoder", "lm_head", "output_layer"}
    assert ours.embedding.tokentype_embeddings is None


def test_classifier_dropout() -> None:
    """Dropout on the pooled output, as in the code of arXiv 1810.04805 and in Megatron-LM."""
    config = ModelConfig(**SHAPE, max_position_embeddings=LENGTH, hidden_dropout=0.25)
    ours = BertClassifier(config, CONTEXT, scores=3)
    flat(ours).initialize(1)
    seen = []
    ours.pooler.register_forward_hook(lambda *call: seen.append(call[2]))
    ours.classification_head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    tokens = torch.randint(VOCAB, (16, LENGTH), generator=torch.Generator().manual_seed(0))
    for key in (DropoutKey(1, 0), DropoutKey(1, 16), None):
        ours(tokens, None, torch.zeros_like(tokens), dropout_key=key)
    (pooled, first), (_, second), (whole, same) = zip(seen[::2], seen[1::2], strict=True)
    torch.testing.assert_close(first, (pooled / 0.75).masked_fill(first == 0, 0))
    assert 0.2 < (first == 0).float().mean() < 0.3
    assert not torch.equal(first == 0, second == 0)
    assert torch.equal(whole, same)


def test_rope_scaling_changes_positions() -> None:
    def logits(**fields: object) -> Tensor:
        ours = model(position_embedding_type="rope", **fields)
        flat(ours).initialize(1)
        tokens = torch.arange(LENGTH).unsqueeze(0)
        return ours(tokens, None, torch.zeros_like(tokens))[0]

    plain, scaled = logits(), logits(use_rope_scaling=True, rope_scaling_factor=8.0)
    assert not torch.equal(plain, scaled)
    assert torch.equal(plain, logits(use_rope_scaling=True, rope_scaling_factor=1.0))


def test_equals_megatron_v25(shared: Path, tmp_path: Path) -> None:
    """Losses that NVIDIA's own code printed for its weights on the same batch of masked sentences."""
    vectors = shared / "vectors" / "bert-v2.5"
    flags = f"""
        --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128
        --micro-batch-size 4 --train-iters 6 --lr 1e-3 --split 900,50,50 --no-bias-gelu-fusion
        --data-path {vectors / "bert60_text_sentence"} --vocab-file {shared / "data" / "bert-base-uncased-vocab.txt"}
        --data-cache-path {tmp_path}
    """
    config = parse_run_config(flags.split(), description="", defaults=DEFAULTS)
    tokenizer = build_tokenizer(config.tokenizer)
    valid = build_datasets(config, tokenizer, (24, 4, 4))["validation"]
    batch = valid.collate([valid[i] for i in range(4)])
    checkpoint = open_megatron(vectors / "after6_tp1", config.tokenizer)
    context = ModelContext(vocab_size=tokenizer.vocab_size, padded_vocab_size=30592)
    ours = BertModel(model_config(checkpoint), context, binary_head=True)
    load_weights(checkpoint, ours, torch.float32)
    task = bert(binary_head=True)
    means = task.forward(ours, batch, None, None) / task.loss_denominators(batch)
    assert [f"{x:.6E}" for x in means.tolist()] == ["1.019016E+01", "6.757880E-01"]
