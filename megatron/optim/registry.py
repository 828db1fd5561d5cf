"""The optimizers that `--optimizer` chooses from."""

from __future__ import annotations

from megatron.optim.adam import Adam
from megatron.optim.lion import Lion
from megatron.optim.muon import Muon
from megatron.optim.sgd import SGD
from megatron.optim.spec import OptimizerSpec

OPTIMIZERS: dict[str, type[OptimizerSpec]] = {
    "adam": Adam,
    "sgd": SGD,
    "lion": Lion,
    "muon": Muon,
}
