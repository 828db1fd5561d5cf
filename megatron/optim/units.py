"""Units of a model: modules whose gradients are reduced, and whose parameters are gathered, at the same time.

With ZeRO-2 and ZeRO-3 (arXiv 1910.02054) a rank keeps only its shard of each unit's gradients, and of its parameters.
The whole exists while the unit is used.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor, nn

from megatron.model.language_model import LanguageModel
from megatron.model.transformer import TransformerLayer
from megatron.parallel.parameters import named_parameters


@dataclasses.dataclass(frozen=True)
class Unit:
    """A unit of a model chunk.

    Attributes:
        modules: those whose forward needs the unit's parameters, without the modules within them.
        kind: "layer", a transformer layer; "embedding", whose parameters backward does not need; "ends", all other
            modules of the chunk, in use from its forward to the end of its backward.
    """

    modules: list[nn.Module]
    kind: str


def places(chunks: list[nn.Module]) -> dict[Tensor, tuple[int, int]]:
    """Indices of the chunk and of the unit in it that each parameter belongs to."""
    found: dict[Tensor, tuple[int, int]] = {}
    for chunk, model in enumerate(chunks):
        for index, unit in enumerate(units_of(model)):
            found |= {p: (chunk, index) for module in unit.modules for p in module.parameters()}
    return found


def units_of(model: nn.Module) -> list[Unit]:
    """Units of a model chunk, in the order in which forward first needs them.

    The embedding belongs to the ends if the output layer or multi-token prediction uses its table too.
    """
    alone: dict[nn.Module, str] = {m: "layer" for m in model.modules() if isinstance(m, TransformerLayer)}
    if isinstance(model, LanguageModel) and model.embedding is not None:
        config = model.config
        if config.untie_embeddings_and_output_weights and not config.mtp_num_layers:
            alone[model.embedding] = "embedding"
    owners = {module: owner for owner in alone for module in owner.modules()}
    units: dict[nn.Module | None, Unit] = {}
    for module in model.modules():
        owner = owners.get(module)
        if next(named_parameters(module, recurse=False), None) is None:
            continue
        if owner is None:
            units.setdefault(None, Unit([], "ends")).modules.append(module)
        elif owner not in units:
            units[owner] = Unit([owner], alone[owner])
    return list(units.values())
