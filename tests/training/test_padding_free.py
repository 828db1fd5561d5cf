"""--padding-free: samples of BERT end to end in one sequence train as padded ones do, in every layout."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from distributed import run_distributed
from models import CPU
from torch._dynamo.testing import CompileCounter
from twenty_steps import assert_same_steps, train_engine

import megatron.plugins  # noqa: F401 (registers schedules, layouts and operations)
from megatron.arguments import parse_run_config
from megatron.commands.preprocess_data import main as preprocess
from megatron.data.bert_dataset import BertBatch
from megatron.data.bert_samples import build_sample
from megatron.data.zigzag import Zigzag
from megatron.errors import InputError
from megatron.model.bert import BertModel
from megatron.model.context import ModelContext
from megatron.model.transformer import TransformerLayer
from megatron.ops.attention import attention
from megatron.ops.backend import Ops
from megatron.ops.cpu.document_attention import attention_by_document, make_document_mask
from megatron.ops.document_attention import BLOCK, attention_by_documents, make_block_mask
from megatron.parallel.mesh import Mesh, choose_device, init_mesh
from megatron.parallel.padding import length_multiple
from megatron.pretrain_bert import DEFAULTS, bert, build_datasets
from megatron.pretrain_gpt import GPT
from megatron.tokenizer import build_tokenizer
from megatron.tokenizer.null import NullTokenizer
from megatron.training.build import build_engine
from megatron.training.config import RunConfig
from megatron.variants.mock_data import MockBertDataset
from megatron.variants.padding_free import check_padding_free

LENGTH, MICROBATCHES, SIZE = 96, 4, 3
SAMPLES = MICROBATCHES * SIZE
# --adam-eps keeps rounding from choosing the sign of a step where a gradient is nearly 0.
FLAGS = f"""
    --mock-data --tokenizer-type NullTokenizer --vocab-size 59 --num-layers 4 --hidden-size 32
    --num-attention-heads 4 --seq-length {LENGTH} --micro-batch-size {SIZE} --global-batch-size {SAMPLES}
    --train-iters 20 --lr 2e-3 --device cpu --num-workers 0 --attention-dropout 0 --hidden-dropout 0 --adam-eps 1e-6
    --distributed-timeout-minutes 2
"""
SHAPE = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --micro-batch-size 1 --train-iters 1 --lr 1"
DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"
TP, PP, C2 = (f"--{name}-parallel-size 2" for name in ("tensor-model", "pipeline-model", "context"))
ZERO = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
CHUNKS = "--num-layers-per-virtual-pipeline-stage 1"
LAYOUTS = {
    "T2": (2, TP),
    "T2+SP": (2, f"{TP} --sequence-parallel"),
    "P2": (2, PP),
    "P2V2": (2, f"{PP} {CHUNKS}"),
    "P2 zb-h1": (2, f"{PP} --pipeline-schedule zb-h1"),
    "D2": (2, ""),
    "D2+ZeRO": (2, ZERO),
    "T2P2+SP+ZeRO recomputed": (4, f"{TP} {PP} --sequence-parallel {ZERO} --recompute-granularity full"),
    "T2D2 recomputed attention": (4, f"{TP} {ZERO} --recompute-granularity selective"),
    "C2": (2, C2),
    "C2 all-gather": (2, f"{C2} --cp-comm-type all_gather"),
    "C2 all-to-all": (2, f"{C2} --cp-comm-type a2a"),
    "T2C2+SP": (4, f"{TP} {C2} --sequence-parallel"),
    "C2P2": (4, f"{C2} {PP}"),
}
# With dropout; tensor parallelism and sequence parallelism draw other masks.
DROPOUT_LAYOUTS = {name: LAYOUTS[name] for name in ("P2", "D2+ZeRO", "C2", "C2 all-to-all", "C2P2")}


def config_of(flags: str) -> RunConfig:
    return parse_run_config(f"{FLAGS} {flags}".split(), description="", defaults=DEFAULTS)


def batches(config: RunConfig, step: int) -> list[BertBatch]:
    """Microbatches of samples of 5 tokens to `LENGTH`."""
    dataset = MockBertDataset(
        1, config.data, vocab_size=60, seed=(1,), length_multiple=length_multiple(config.parallel)
    )
    rng, samples = np.random.RandomState(step), []
    for _ in range(SAMPLES):
        words = rng.randint(2, LENGTH - 2)
        first = rng.randint(1, words)
        text = rng.randint(4, 60, size=words)
        samples.append(build_sample(text, [first, words - first], LENGTH - 3, dataset.rules, rng))
    return [dataset.collate(samples[i : i + SIZE]) for i in range(0, SAMPLES, SIZE)]


def train(flags: str) -> dict[str, Any]:
    config = config_of(flags)
    with init_mesh(config.parallel, CPU) as mesh:
        return train_on(mesh, config)


def train_on(mesh: Mesh, config: RunConfig) -> dict[str, Any]:
    task = bert(binary_head=config.data.bert_binary_head)
    engine = build_engine(config, task, mesh, vocab_size=60, padded_vocab_size=64)
    engine.buffer.initialize(1)
    return train_engine(engine, mesh, functools.partial(batches, config), SAMPLES)


@functools.cache
def one_process(flags: str = "") -> dict[str, Any]:
    return train_on(Mesh(device=CPU), config_of(flags))


@pytest.mark.parametrize(
    "flags",
    [
        "",
        pytest.param("--position-embedding-type rope", marks=pytest.mark.slow),
        pytest.param("--bert-no-binary-head", marks=pytest.mark.slow),
    ],
)
def test_twenty_steps_are_those_of_padded_samples(flags: str) -> None:
    packed = one_process(f"--padding-free {flags}")
    assert packed["losses"].shape[1] == (1 if "no-binary" in flags else 2)
    assert_same_steps([packed], one_process(flags))


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_twenty_steps_in_each_layout_are_those_of_padded_samples(layout: str) -> None:
    processes, flags = LAYOUTS[layout]
    assert_same_steps(run_distributed(train, processes, f"--padding-free {flags}"), one_process())


@pytest.mark.slow
@pytest.mark.parametrize("layout", DROPOUT_LAYOUTS)
def test_dropout_is_the_same_in_each_layout(layout: str) -> None:
    processes, flags = DROPOUT_LAYOUTS[layout]
    ranks = run_distributed(train, processes, f"--padding-free {DROPOUT} {flags}")
    assert_same_steps(ranks, one_process(f"--padding-free {DROPOUT}"))


@pytest.mark.slow
def test_bf16() -> None:
    """The loss is as near to that of fp32 as with padding."""
    fp32, padded, packed = (one_process(f)["losses"] for f in ("", "--bf16", "--padding-free --bf16"))
    assert np.abs(packed - fp32).max() < 2 * np.abs(padded - fp32).max() < 0.05


def test_hidden_states_and_gradients_in_fp64() -> None:
    """Those of each sample's tokens, with attention by document and by a dense mask."""
    by_document = Ops(
        attention=functools.partial(attention_by_document, attention), make_mask=make_document_mask
    )
    found = []
    for flags, ops in (("", Ops()), ("--padding-free", Ops()), ("--padding-free", by_document)):
        config = config_of(flags)
        context = ModelContext(vocab_size=60, padded_vocab_size=64, ops=ops)
        model = BertModel(config.model, context, binary_head=True)
        generator = torch.Generator().manual_seed(1)
        for p in model.parameters():
            p.data = torch.randn(p.shape, dtype=torch.float64, generator=generator) * 0.2
        batch = batches(config, 0)[0]
        hidden_sbh = model.encode(
            batch.tokens,
            batch.padding_mask,
            batch.tokentype_ids,
            None,
            None,
            position_ids_bs=batch.position_ids,
            document_ids_bs=batch.document_ids,
        )
        is_token = batch.document_ids < SIZE if batch.padding_mask is None else batch.padding_mask > 0
        hidden_th = hidden_sbh.transpose(0, 1)[is_token]
        (hidden_th * torch.randn(hidden_th.shape, generator=generator)).sum().backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        found.append({"hidden states": hidden_th.detach()} | grads)
    assert len(found[0]) == 1 + 3 + 4 * 12 + 2
    for others in found[1:]:
        for name, expected in found[0].items():
            # Gradients of embeddings are summed in fp32.
            tolerance = 1e-6 if name.startswith("embedding") else 1e-13
            assert (others[name] - expected).norm() < tolerance * expected.norm(), name


def test_collated() -> None:
    """Each sample's tokens, types, positions, predictions and first token; padding only at the end."""
    config = config_of("--padding-free --tensor-model-parallel-size 2 --sequence-parallel")
    padded, packed = batches(config_of(""), 3)[0], batches(config, 3)[0]
    lengths = padded.padding_mask.sum(1).tolist()
    assert packed.tokens.shape == (1, -(-sum(lengths) // 8) * 8) and packed.padding_mask is None
    assert packed.first_tokens.tolist() == [[0, lengths[0], lengths[0] + lengths[1]]]
    begin = 0
    for i, length in enumerate(lengths):
        here = slice(begin, begin + length)
        for name in ("tokens", "tokentype_ids"):
            assert torch.equal(getattr(packed, name)[0, here], getattr(padded, name)[i, :length])
        assert packed.position_ids[0, here].tolist() == list(range(length))
        assert set(packed.document_ids[0, here].tolist()) == {i}
        is_here = (packed.positions[0] >= begin) & (packed.positions[0] < begin + length)
        predicted = padded.loss_mask[i] > 0
        assert torch.equal(packed.positions[0, is_here] - begin, padded.positions[i, predicted])
        assert torch.equal(packed.labels[0, is_here], padded.labels[i, predicted])
        begin += length
    assert set(packed.document_ids[0, begin:].tolist()) <= {SIZE} and not packed.tokens[0, begin:].any()
    assert torch.equal(packed.is_random, padded.is_random) and packed.loss_mask.all()
    # FLOPs count attention within samples, and what is projected.
    work = packed.work(packed.labels.shape[1])
    assert sum(length * n for (length, _), n in work.items()) == packed.seq_length
    assert sum(logits * n for (_, logits), n in work.items()) == padded.loss_mask.sum()
    assert all(
        work[length, 0] == lengths.count(length) for length in lengths if length != packed.seq_length - begin
    )


def test_a_batch_without_samples_has_no_loss() -> None:
    config = config_of("--padding-free")
    dataset = MockBertDataset(1, config.data, vocab_size=60, seed=(1,))
    batch = dataset.collate([])
    assert batch.tokens.shape == (1, 8)
    task = bert(binary_head=True)
    engine = build_engine(config, task, Mesh(device=CPU), vocab_size=60, padded_vocab_size=64)
    engine.buffer.initialize(1)
    assert engine.measure([batch], task.losses) == ([0.0, 0.0], [0.0, 0.0])


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_divide_predictions_and_first_tokens_by_position(size: int) -> None:
    dataset = MockBertDataset(
        9, config_of("--padding-free").data, vocab_size=50, seed=(1, 0), length_multiple=16
    )
    batch = dataset.collate([dataset[i] for i in range(8)])
    zigzag = Zigzag.of(batch.seq_length, size, documents=True)
    index = torch.arange(batch.seq_length)
    predictions, pairs = [], torch.zeros(8)
    for rank in range(size):
        part, where = batch.divide(rank, size), zigzag.shard(index, 0, rank)
        assert torch.equal(part.position_ids[0], batch.position_ids[0, where])
        here = part.loss_mask[0] > 0
        predictions += zip(
            where[part.positions[0, here]].tolist(), part.labels[0, here].tolist(), strict=True
        )
        first = part.pair_mask > 0
        assert torch.equal(where[part.first_tokens[0, first]], batch.first_tokens[0, first])
        pairs += part.pair_mask
    assert sorted(predictions) == list(
        zip(batch.positions[0].tolist(), batch.labels[0].tolist(), strict=True)
    )
    assert pairs.tolist() == [1.0] * 8


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--attention-dropout 0.1", "^--padding-free: on a GPU, .*no --attention-dropout"),
        ("--ops-backend plain", "^--padding-free: .* needs compiled layers on a GPU"),
        ("--no-torch-compile", "^--padding-free: .* needs compiled layers on a GPU"),
        ("--context-parallel-size 2", "^--padding-free: with --context-parallel-size"),
    ],
)
def test_refused_on_a_gpu(flags: str, message: str) -> None:
    config = config_of(f"--padding-free {flags}")
    check_padding_free(config)
    training = dataclasses.replace(config.training, device="cuda")
    with pytest.raises(InputError, match=message):
        check_padding_free(dataclasses.replace(config, training=training))


def test_for_bert_only() -> None:
    config = config_of("--padding-free")
    with pytest.raises(InputError, match=r"^--padding-free: applies to BERT, not to GPT"):
        GPT.build_datasets(config, NullTokenizer(59), (1, 0, 0))


@pytest.mark.slow
def test_the_figures_of_the_documentation(shared: Path, tmp_path: Path) -> None:
    """The share of the computed tokens that is not padding, for 4,096 samples of WikiText-2's articles."""
    text = (shared / "data/wt2-train.txt").read_text(encoding="utf-8")
    for mark in "-,.":
        text = text.replace(f" @{mark}@ ", mark)
    articles = [x for x in re.split(r"(?m)^(?= = [^=].*[^=] = $)", text) if x.strip()]
    (tmp_path / "articles.jsonl").write_text("".join(json.dumps({"text": x}) + "\n" for x in articles))
    vocab = f"--tokenizer-type BertWordPieceLowerCase --vocab-file {shared}/data/bert-base-uncased-vocab.txt"
    files = f"--input {tmp_path}/articles.jsonl --output-prefix {tmp_path}/wt2 --split-sentences --workers 1"
    preprocess(f"{files} {vocab}".split())
    page = (Path(__file__).parents[2] / "docs" / "bert.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| (\d+) \| (\d+\.\d\d)% \| (\d+\.\d\d)% \|$", page, re.M)
    assert len(rows) == 3
    for length, size, *shares in rows:
        for flags, share in zip(("", "--padding-free"), shares, strict=True):
            words = f"{vocab} --data-path {tmp_path}/wt2_text_sentence --split 1,0,0 --seq-length {length} {flags}"
            config = parse_run_config(f"{SHAPE} {words}".split(), description="", defaults=DEFAULTS)
            samples = build_datasets(config, build_tokenizer(config.tokenizer), (4096, 0, 0))["train"]
            useful = computed = 0
            for i in range(0, 4096, int(size)):
                microbatch = [samples[j] for j in range(i, i + int(size))]
                useful += sum(int(sample["padding_mask"].sum()) for sample in microbatch)
                computed += samples.collate(microbatch).tokens.numel()
            assert abs(100 * useful / computed - float(share)) < 0.006


@pytest.mark.slow
@torch.no_grad()  # FlexAttention has no gradient on a CPU
def test_compiled_layers_take_lengths_that_change() -> None:
    """Torch captures layers with blocks of FlexAttention at most 4 times: one length, others, one or more blocks."""
    counter = CompileCounter()
    compute = torch.compile(TransformerLayer.compute, backend=counter, dynamic=None)
    config = config_of("--padding-free")
    ops = Ops(
        run=lambda _, *inputs: compute(*inputs), attention=attention_by_documents, make_mask=make_block_mask
    )
    contexts = (ModelContext(vocab_size=60, padded_vocab_size=64, ops=x) for x in (ops, Ops()))
    models = [BertModel(config.model, context, binary_head=False) for context in contexts]
    generator = torch.Generator().manual_seed(1)
    for p in models[0].parameters():
        p.data = torch.randn(p.shape, generator=generator) * 0.2
    models[1].load_state_dict(models[0].state_dict())
    lengths = set()
    for batch in (x for step in range(5) for x in batches(config, step)):
        found, expected = (
            model.encode(
                batch.tokens,
                None,
                batch.tokentype_ids,
                None,
                None,
                position_ids_bs=batch.position_ids,
                document_ids_bs=batch.document_ids,
            )
            for model in models
        )
        assert (found - expected).norm() < 1e-6 * expected.norm()
        lengths.add(batch.seq_length)
    assert len(lengths) > 8 and min(lengths) < BLOCK < max(lengths) and counter.frame_count <= 4


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "tolerance"), [("", 1e-3), ("--bf16", 2e-2)])
def test_losses_on_a_gpu_are_those_of_padded_samples(precision: str, tolerance: float) -> None:
    losses = []
    for flags in ("", "--padding-free"):
        config = config_of(f"--device cuda {precision} {flags}")
        with init_mesh(config.parallel, choose_device(config.training.device)) as mesh:
            engine = build_engine(config, bert(binary_head=True), mesh, vocab_size=60, padded_vocab_size=64)
            engine.buffer.initialize(1)
            steps = [
                engine.train_step(
                    iter(batches(config, step)),
                    num_microbatches=MICROBATCHES,
                    consumed_samples=step * SAMPLES,
                    lr=2e-3,
                    weight_decay=0.1,
                )[0].tolist()
                for step in range(10)
            ]
        losses.append(np.array(steps))
    np.testing.assert_allclose(losses[1], losses[0], rtol=tolerance)
