"""Start from the weights of a pretrained BERT."""

from __future__ import annotations

from collections.abc import Iterable

from megatron.checkpoint.checkpoint import Checkpoint
from megatron.checkpoint.load import check_known, read_weights
from megatron.optim.buffer import ParamBuffer
from megatron.parallel.collectives import gather_texts

# Prefixes of the names of weights that a classifier has and the checkpoint may lack. They start at random.
NEW = ("classification_head.", "pooler.", "embedding.tokentype_embeddings.")
# Prefixes of the names of weights that the checkpoint has and a classifier lacks.
DROPPED = ("lm_head.", "output_layer.", "binary_head.")


def load_pretrained(checkpoint: Checkpoint, buffer: ParamBuffer) -> str:
    """Fill the weights that a BERT's checkpoint has, and leave the others. Collective.

    Returns:
        A line on the modules whose weights are not used, and those whose weights keep their values.

    Raises:
        InputError: as in `load_into`, for all weights but those of `NEW` and `DROPPED`.
    """
    weights = checkpoint.tensors["model"]
    here = {entry.name for entry in buffer.flat_params}
    unused = {name for name in weights.index if name.startswith(DROPPED)}
    kept = {name for name in here if name.startswith(NEW) and name not in weights.index}
    check_known(weights, here | unused, buffer.mesh)
    read_weights(buffer, weights, "", kept)
    kept_anywhere = " ".join(gather_texts(" ".join(kept), buffer.mesh.world)).split()
    return (
        f"weights of {checkpoint.folder}: not used: {_modules(unused)}; "
        f"initialized at random: {_modules(kept_anywhere)}"
    )


def _modules(names: Iterable[str]) -> str:
    """The modules that have these weights, in words."""
    return ", ".join(sorted({name.rpartition(".")[0] for name in names})) or "none"
