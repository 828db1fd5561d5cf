"""Check a converted checkpoint: compare logits on fixed tokens with those of transformers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron.checkpoint.checkpoint import Checkpoint, model_config
from megatron.errors import TrainingFault
from megatron.interop.external import meta_model
from megatron.interop.huggingface.settings import read_settings
from megatron.model.config import ModelConfig
from megatron.model.transformer import TransformerLayer
from megatron.parallel.parameters import ShardedParameter, named_parameters
from megatron.tokenizer import Tokenizer

# Largest difference relative to the largest logit: the rounding of fp32 sums in a deep model.
TOLERANCE = 1e-4
BATCH, MAX_LENGTH = 2, 64
# Use neither the network nor code in the directory, which transformers would offer to run.
FROM_FOLDER = {"local_files_only": True, "trust_remote_code": False}
os.environ |= {"HF_HUB_OFFLINE": "1", "USE_HUB_KERNELS": "NO"}  # read when transformers is first imported
LINES = (
    "Hello world, it's 12345 tests!",
    "  two spaces\tand a tab",
    "Ünïcödé, 中文 and 🎉",
    "CamelCase [UPPER]",
    "\n\n   \t\u00a0x  \r\n",
    "0123456789 3.14 1,000,000 2²",
    "ﬁ ① e\u0301 I'LL don't",
    "Ελληνικά العربية हिन्दी ไทย 한국어 日本語",
)


def fixed_tokens(checkpoint: Checkpoint) -> tuple[Tensor, Tensor]:
    """Return tokens [b, s], the same at each call, and their token types for BERT."""
    length = min(MAX_LENGTH, model_config(checkpoint).max_position_embeddings)
    generator = torch.Generator().manual_seed(1234)
    tokens = torch.randint(checkpoint.state["vocab_size"], (BATCH, length), generator=generator)
    return tokens, (torch.arange(length) >= length // 2).long().expand(BATCH, length)


@torch.no_grad()
def our_logits(checkpoint: Checkpoint) -> list[Tensor]:
    """Return the logits of our model in fp32 on the CPU: [b, s, v], and [b, 2] of BERT's binary head if it has one."""
    tokens, types = fixed_tokens(checkpoint)
    task = checkpoint.state["task"]
    model = meta_model(task, model_config(checkpoint), checkpoint.state["vocab_size"])
    stream_weights(checkpoint, model)
    if task == "GPT":
        return [model(tokens, torch.arange(tokens.shape[1]).expand(tokens.shape))]
    return [x for x in model(tokens, torch.ones_like(tokens), types) if x is not None]


def stream_weights(checkpoint: Checkpoint, model: nn.Module) -> None:
    """Load the weights of a model on the meta device in fp32, those of a layer only while it runs."""
    weights, streamed = checkpoint.tensors["model"], set()

    def read(names: dict[str, ShardedParameter], prefix: str = "") -> dict[str, Tensor]:
        return {
            name: weights.read(p.tied or prefix + name, p.shard_spec).float() for name, p in names.items()
        }

    for path, layer in model.named_modules():
        if isinstance(layer, TransformerLayer):
            names = dict(named_parameters(layer))
            streamed |= {f"{path}.{name}" for name in names}

            def load(layer: nn.Module, _: object, names: dict = names, path: str = path) -> None:
                layer.load_state_dict(read(names, f"{path}."), assign=True)

            def unload(layer: nn.Module, *_: object) -> None:
                layer.to("meta")

            layer.register_forward_pre_hook(load)
            layer.register_forward_hook(unload)
    others = {name: p for name, p in named_parameters(model) if name not in streamed}
    model.load_state_dict(read(others), strict=False, assign=True)


@torch.no_grad()
def their_logits(folder: Path, checkpoint: Checkpoint) -> list[Tensor]:
    """Return the same logits of the model that transformers loads from a directory, without vocabulary padding.

    Args:
        checkpoint: determines the tokens.

    Raises:
        ImportError: transformers is not installed, or has no such model.
        TrainingFault: transformers fails on the files, or other layers have a window there.
    """
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    tokens, types = fixed_tokens(checkpoint)
    task, vocab_size = checkpoint.state["task"], checkpoint.state["vocab_size"]
    architecture = read_settings(folder / "config.json").family.architecture(task)
    if not hasattr(transformers, architecture):
        raise ImportError(f"transformers {transformers.__version__} has no {architecture}")
    dtypes = {tensor["dtype"] for tensor in checkpoint.tensors["model"].index.values()}
    dtype = torch.bfloat16 if dtypes == {"bfloat16"} else torch.float32
    inputs = {"input_ids": tokens} if task == "GPT" else {"input_ids": tokens, "token_type_ids": types}
    try:
        model = getattr(transformers, architecture).from_pretrained(
            folder, attn_implementation="eager", torch_dtype=dtype, **FROM_FOLDER
        )
        run_in_fp32(model.eval(), dtype)
        out = model(**inputs)
    except ImportError:
        raise
    except Exception as error:  # unsuitable files raise exceptions of any type
        raise TrainingFault(
            f"transformers cannot load {folder}: {summary(error)}; nothing was kept"
        ) from None
    check_windows(folder, model_config(checkpoint), model.config)
    if task == "BERT":
        return [out.prediction_logits[..., :vocab_size], out.seq_relationship_logits]
    return [out.logits[..., :vocab_size]]


def check_windows(folder: Path, ours: ModelConfig, theirs: Any) -> None:
    """Raise `TrainingFault` unless the same layers have a window in transformers. Logits only show short windows."""
    kinds = getattr(theirs, "layer_types", None)
    if kinds is None:  # families whose layers are alike, and older versions of transformers
        return
    window, longest = getattr(theirs, "sliding_window", None) or 0, ours.max_position_embeddings
    expected = [w if w is not None and w + 1 < longest else None for w in ours.windows]
    found = [window - 1 if 0 < window < longest and kind == "sliding_attention" else None for kind in kinds]
    if found != expected:
        raise TrainingFault(
            f"transformers reads the windows {found} of layers from {folder}, not {expected}; nothing was kept"
        )


def run_in_fp32(model: nn.Module, dtype: torch.dtype) -> None:
    """Let a model of transformers compute in fp32. Layers, the children of lists, stay in `dtype` until they run."""
    layers = [layer for module in model.modules() if isinstance(module, nn.ModuleList) for layer in module]
    in_layers = {child for layer in layers for child in layer.modules()}
    for module in set(model.modules()) - in_layers:
        for p in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            p.data = p.data.float() if p.is_floating_point() else p.data

    def widen(layer: nn.Module, _: object) -> None:
        layer.float()

    def narrow(layer: nn.Module, *_: object) -> None:
        layer.to(dtype)

    for layer in layers:
        layer.register_forward_pre_hook(widen)
        layer.register_forward_hook(narrow)


def compare_tokenizers(folder: Path, tokenizer: Tokenizer) -> str:
    """Compare the ids of `AutoTokenizer` of a directory with those of our tokenizer. Returns the result in one line.

    Raises:
        ImportError: transformers is not installed.
    """
    from transformers import AutoTokenizer

    # Unsuitable files raise exceptions of any type.
    try:
        theirs = AutoTokenizer.from_pretrained(folder, **FROM_FOLDER)
        special = [f"a{theirs.decode([i])}b" for i in dict.fromkeys(tokenizer.special_ids.values())]
        ids = {text: theirs.encode(text, add_special_tokens=False) for text in (*LINES, *special)}
    except Exception as error:
        return (
            f"warning: token ids are not compared: AutoTokenizer of transformers cannot load the tokenizer in {folder} "
            f"({summary(error)})"
        )
    other = [text for text, expected in ids.items() if expected != tokenizer.tokenize(text)]
    if not other:
        return f"token ids of {len(ids)} texts equal those of AutoTokenizer of transformers"
    if set(other) <= set(special):
        return (
            f"token ids of {len(LINES)} texts equal those of AutoTokenizer of transformers, but special tokens "
            f"written in a text, such as {other[0][1:-1]!r}, are ordinary text for {tokenizer.name}"
        )
    return (
        f"warning: AutoTokenizer of transformers gives other ids than {tokenizer.name} for {len(other)} of {len(ids)} "
        f"texts, such as {other[0]!r}"
    )


def summary(error: Exception) -> str:
    """The type of an exception and the beginning of its message, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def largest_difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """Return the largest difference relative to the largest logit of the same tensor."""
    pairs = zip(ours, theirs, strict=True)
    return max(((a - b).abs().max() / a.abs().max()).item() for a, b in pairs)
