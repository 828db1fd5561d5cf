"""Load of the experts, entropy of the router, auxiliary losses and dropped tokens of mixtures of experts."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from megatron.model.moe.layer import MoELayer
from megatron.model.moe_config import MoEConfig
from megatron.model.transformer import TransformerLayer
from megatron.parallel.collectives import all_reduce_sum
from megatron.reports.config import ReportConfig
from megatron.reports.record import EXPERTS
from megatron.training.loop import Hook, Trainer
from megatron.training.report import Interval

MAX_LAYERS = 4  # named in a warning


class ExpertReport(Hook):
    """Add means over the layers to every report, and with --moe-per-layer-logging the values of each layer.

    The sums of a layer stay on the device until then. They are sums over all tokens of the interval, so that the values
    do not depend on the layout.

    Attributes:
        sums: [layers, columns] fp64, of the tokens of this process; rows of other layers are zero. The layers of
            multi-token prediction are the last.
        columns: by name in `Router.record`.
        dead: experts without a token in the last interval, by layer.
    """

    def during_run(self, trainer: Trainer) -> AbstractContextManager[object]:
        model = trainer.config.model
        if model.num_experts is not None:
            names = ("entropy", "sequences", "dropped", *auxiliary_names(model))
            self.columns: dict[str, Any] = {"load": slice(0, model.num_experts)}
            self.columns |= {name: model.num_experts + i for i, name in enumerate(names)}
            shape = model.num_all_layers, model.num_experts + len(names)
            self.sums = torch.zeros(shape, dtype=torch.float64, device=trainer.mesh.device)
            trainer.engine.sums.append(self.sums)
            self.dead: dict[int, list[int]] = {}
            modules = (module for chunk in trainer.engine.modules for module in chunk.modules())
            for module in modules:
                if isinstance(module, TransformerLayer) and isinstance(module.mlp, MoELayer):
                    module.mlp.router.record = functools.partial(self.add, module.layer)
        return nullcontext()

    def add(self, layer: int, values: dict[str, Any]) -> None:
        """Add sums over the tokens of a microbatch, in place, as a CUDA graph needs."""
        for name, value in values.items():
            self.sums[layer, self.columns[name]] += value

    def before_report(self, trainer: Trainer, interval: Interval) -> None:
        model, mesh = trainer.config.model, trainer.mesh
        if model.num_experts is None:
            return
        rows = all_reduce_sum(self.sums.clone(), mesh.dp_cp, mesh.tp, mesh.pp).tolist()
        self.sums.zero_()
        layers = [layer for layer, has_experts in enumerate(model.all_expert_layers) if has_experts]
        values = {
            layer: layer_values({name: rows[layer][at] for name, at in self.columns.items()}, model)
            for layer in layers
        }
        for name in values[layers[0]]:
            key = f"{EXPERTS}{name}"
            interval.values[key] = sum(of_layer[name] for of_layer in values.values()) / len(layers)
            if trainer.config.plugin(ReportConfig).moe_per_layer_logging:
                interval.values |= {f"{key} layer {layer}": values[layer][name] for layer in layers}
        dead = {
            layer: [e for e, n in enumerate(rows[layer][self.columns["load"]]) if not n] for layer in layers
        }
        if any(set(dead[layer]) - set(self.dead.get(layer, [])) for layer in layers):
            trainer.log(dead_experts(dead, model.num_experts, interval.iterations))
        self.dead = dead


def auxiliary_names(model: MoEConfig) -> list[str]:
    """Names of the auxiliary losses of a model, as its router computes them."""
    types = zip(model.moe_router_load_balancing_type, model.moe_aux_loss_coeff, strict=True)
    names = [name for name, coefficient in types if coefficient > 0]
    return names if model.moe_z_loss_coeff is None else ["z_loss", *names]


def layer_values(sums: dict[str, Any], model: MoEConfig) -> dict[str, float]:
    """Reported values of a layer from its sums over an interval.

    Entropy is in nats, a mean over tokens. Losses are means over sequences, without their coefficients.
    """
    load: Sequence[float] = sums["load"]
    copies = sum(load)
    values = {
        "load max/mean": max(load) * len(load) / copies,
        "idle experts share": load.count(0) / len(load),
        "router entropy": sums["entropy"] * model.moe_router_topk / copies,
    }
    if model.moe_expert_capacity_factor is not None:
        values["dropped share"] = sums["dropped"] / copies
    return values | {name: sums[name] / sums["sequences"] for name in auxiliary_names(model)}


def dead_experts(dead: dict[int, list[int]], experts: int, iterations: int) -> str:
    """A warning about experts without a token, by layer."""
    found = {layer: idle for layer, idle in dead.items() if idle}
    named = [f"layer {layer}: {len(idle)} of {experts}" for layer, idle in list(found.items())[:MAX_LAYERS]]
    if len(found) > MAX_LAYERS:
        named.append(f"and in {len(found) - MAX_LAYERS} more layers")
    return (
        f"warning: experts without a token in the last {iterations} iterations: {', '.join(named)}; if they stay so, "
        "raise --moe-aux-loss-coeff or --moe-router-bias-update-rate"
    )
