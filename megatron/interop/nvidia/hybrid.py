"""Models of Megatron-LM's HybridModel that are a GPT: their layers are attention and MLP in turn.

Attention and MLP are layers of their own there: layers 2i and 2i + 1 are layer i of the GPT. The last norm is called
`final_norm`. --hybrid-layer-pattern has a symbol for each layer, and "|" between pipeline stages.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from megatron.errors import InputError
from megatron.interop.nvidia.chunks import STACK
from megatron.interop.unpickle import Record, shown_value

FINAL_NORM = "decoder.final_norm."
# The second name is older.
PATTERN_FLAGS = ("hybrid_layer_pattern", "hybrid_override_pattern")
# Last parts of --spec that build each layer as GPT has it; the second name is older.
SPECS = ("hybrid_stack_spec", "mamba_stack_spec")
# HybridModel ignores this flag, and GPT does not.
NOT_READ = ("use_rope_scaling",)
UNSUPPORTED = {
    "M": "Mamba",
    "E": "mixture of experts",
    "G": "gated delta net",
    "D": "sparse attention",
    "+": "multi-latent attention",
    "/": "multi-token prediction",
}


def is_hybrid(args: Record) -> bool:
    """True if the flags of a run are those of a HybridModel."""
    return any(args.get(name) for name in PATTERN_FLAGS)


def gpt_flags(path: Path, args: Record) -> Record:
    """The flags of the GPT that a HybridModel is.

    Args:
        path: the file that holds `args`, for messages.

    Raises:
        InputError: the model is no GPT.
    """
    for name in PATTERN_FLAGS:
        pattern = args.get(name)
        layers = pattern.replace("|", "") if pattern else "*-"
        if not re.fullmatch(r"(\*-)+", layers):
            others = [f"{kind} ({symbol})" for symbol, kind in UNSUPPORTED.items() if symbol in layers]
            what = f"has {', '.join(others)}" if others else "does not alternate"
            raise InputError(
                f"{path}: was trained with --{name.replace('_', '-')} {shown_value(pattern)}, which {what}; only a "
                "pattern of attention and MLP in turn (*-*-...) is supported"
            )
    state = {name: value for name, value in args.state.items() if name not in PATTERN_FLAGS}
    if isinstance(state.get("num_layers"), int):
        state["num_layers"] //= 2
    spec = state.get("spec")
    if isinstance(spec, (list, tuple)) and spec and spec[-1] in SPECS:
        del state["spec"]
    return dataclasses.replace(args, state=state)


def gpt_name(name: str) -> str:
    """The name in a GPT of a tensor of a HybridModel."""
    found = re.match(rf"{re.escape(STACK)}([0-9]{{1,6}})\.", name)
    if found:
        return f"{STACK}{int(found[1]) // 2}.{name[found.end() :]}"
    return name.replace(FINAL_NORM, "decoder.final_layernorm.")
