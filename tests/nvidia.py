"""Small checkpoints in Megatron-LM's format, and the settings of its reference run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from models import flat
from torch import Tensor

from megatron.checkpoint.checkpoint import Checkpoint
from megatron.interop.external import ExternalTensor, ExternalTensors, weights_only_state
from megatron.interop.nvidia.write import write_megatron
from megatron.model.bert import BertModel
from megatron.model.config import ModelConfig
from megatron.model.context import ModelContext
from megatron.model.gpt import GPTModel
from megatron.parallel.slices import whole
from megatron.tokenizer.config import TokenizerConfig

HEADS, WIDTH, VOCAB = 4, 8, 100
SHAPE = {
    "num_layers": 4,
    "hidden_size": HEADS * WIDTH,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 16,
}
NO_TOKENIZER = TokenizerConfig()
CONTEXT = ModelContext(vocab_size=VOCAB, padded_vocab_size=VOCAB)
# Flags of the reference run whose files are in ../shared/vectors/gpt-v2.5.
RUN = """
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64
    --global-batch-size 4 --micro-batch-size 2 --train-iters 6 --lr 1e-3 --min-lr 1e-5 --lr-decay-style cosine
    --lr-decay-iters 6 --lr-warmup-fraction 0.34 --weight-decay 0.01 --clip-grad 1.0 --adam-beta1 0.9
    --adam-beta2 0.95 --split 900,50,50 --no-bias-gelu-fusion --seed 1234 --attention-dropout 0
    --hidden-dropout 0 --eval-iters 1 --log-interval 1 --device cpu --no-mask-padded-vocab
""".split()


def run_data(shared: Path, cache: Path) -> list[object]:
    """Data flags of the reference run."""
    vectors, data = shared / "vectors" / "gpt-v2.5", shared / "data"
    flags = ["--data-path", vectors / "tiny60_text_document", "--data-cache-path", cache]
    flags += ["--vocab-file", data / "gpt2-tiny-vocab.json"]
    return [*flags, "--merge-file", data / "gpt2-tiny-merges.txt"]


def checkpoint_of(folder: Path, task: str = "GPT", **fields: Any) -> Checkpoint:
    """Build a checkpoint with random weights and an unpadded vocabulary."""
    config = ModelConfig(**{**SHAPE, **fields})
    if task == "GPT":
        model = GPTModel(config, CONTEXT)
    else:
        model = BertModel(config, CONTEXT, binary_head=task == "BERT")
    flat(model).initialize(3)
    generator = torch.Generator().manual_seed(3)
    values = {
        name: p.detach() + 0.1 * torch.rand(p.shape, generator=generator)
        for name, p in model.named_parameters()
    }
    sources = {name: ExternalTensor(tuple(x.shape), x.dtype, (lambda x=x: x,)) for name, x in values.items()}
    state = weights_only_state(task, config, NO_TOKENIZER, vocab_size=VOCAB, bf16=False)
    return Checkpoint(folder, state, {"model": ExternalTensors(folder, sources)})


def weights(checkpoint: Checkpoint, kind: str = "model") -> dict[str, Tensor]:
    """Read the tensors of a kind without the rows of vocabulary padding."""
    tensors = checkpoint.tensors[kind]
    found = {name: tensors.read(name, whole(*x["shape"])) for name, x in tensors.index.items()}
    rows = checkpoint.state["vocab_size"]
    cut = ("word_embeddings.weight", "output_layer.bias")
    return {name: x[:rows] if name.endswith(cut) else x for name, x in found.items()}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def written(tmp_path: Path, task: str = "GPT", tensor: int = 1, pipeline: int = 1, **fields: Any) -> Path:
    root = tmp_path / "megatron"
    sizes = {"tensor_parallel": tensor, "pipeline_parallel": pipeline}
    write_megatron(checkpoint_of(tmp_path, task, **fields), root, lambda size: None, **sizes)
    return root


def files(root: Path) -> list[Path]:
    return sorted(root.glob("*/*/model_optim_rng.pt"))


def edit(root: Path, change: Callable[[dict[str, Any]], object], *, first: bool = False) -> None:
    """Edit the content of each process's file, or of the first file only."""
    for path in files(root)[: 1 if first else None]:
        content = torch.load(path, weights_only=False)
        change(content)
        torch.save(content, path)


def optimizer_of(models: list[dict[str, Any]], half: bool) -> dict[str, Any]:
    """Build the state of Megatron-LM's Adam in its parameter order.

    The moments are 2 and 3 times the weights, and the fp32 master weights are 4 times the weights.
    """
    groups: list[list[Tensor]] = [[], []]
    for model in models:
        language_model = model["language_model"]
        in_order = [(k, v["weight"]) for k, v in language_model.get("embedding", {}).items()]
        in_order += [*language_model["encoder"].items(), *language_model.get("pooler", {}).items()]
        in_order += [(f"copy.{k}", v) for k, v in model.get("word_embeddings_for_head", {}).items()]
        for head in ("lm_head", "binary_head"):
            in_order += [(f"{head}.{k}", v) for k, v in model.get(head, {}).items()]
        for key, value in in_order:
            groups[key.endswith("bias") or "layernorm" in key].append(value.float())
    numbered = [x for group in groups for x in group]
    state = {i: {"exp_avg": 2 * x, "exp_avg_sq": 3 * x} for i, x in enumerate(numbered)}
    first = len(groups[0])
    inner = {
        "state": state,
        "param_groups": [
            {"step": 12, "params": list(range(first))},
            {"step": 12, "params": list(range(first, len(numbered)))},
        ],
    }
    if not half:
        return inner
    masters = [[4 * x for x in group] for group in groups]
    return {
        "optimizer": inner,
        "grad_scaler": {"scale": torch.tensor([2.0])},
        "fp32_from_fp16_params": masters,
    }
