"""Flags of mixtures of experts."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable

from megatron.errors import InputError
from megatron.flags import Config, either, flag, flag_name

# Auxiliary losses by the tokens over which the load of the experts is taken.
BALANCING_TYPES = ("none", "aux_loss", "seq_aux_loss", "global_aux_loss")
# Flags of `MoEConfig` that change how a layer is computed, but not its result.
COMPUTATION = (
    "moe_grouped_gemm",
    "moe_layer_recompute",
    "moe_pad_expert_input_to_capacity",
    "moe_shared_expert_overlap",
    "moe_token_dispatcher_type",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig(Config):
    """Shape of the layers whose MLP is a mixture of experts, and how tokens find their experts."""

    num_experts: int | None = flag(None, "experts of each mixture (default: dense MLPs)", low=2, high=2**14)
    moe_layer_freq: str = flag(
        "1",
        "which layers have experts: N for every Nth from the first on, or a pattern of 0 and 1 for each layer such as "
        "'[0]*1+[1]*26'",
    )
    moe_ffn_hidden_size: int | None = flag(None, "size of each expert (default: --ffn-hidden-size)", low=1)
    moe_shared_expert_intermediate_size: int | None = flag(
        None, "hidden size of an MLP that every token passes besides its experts (default: none)", low=1
    )
    moe_shared_expert_gate: bool = flag(False, "sigmoid gate of the shared expert, as in Qwen2-MoE")
    moe_router_topk: int = flag(2, "experts of each token", low=1)
    moe_router_score_function: str = flag(
        "softmax", "scores of the experts from the router's logits", choices=("softmax", "sigmoid")
    )
    moe_router_pre_softmax: bool = flag(
        False, "softmax over all experts, before the top-k, instead of over the chosen ones"
    )
    moe_router_num_groups: int | None = flag(None, "groups of experts, for --moe-router-group-topk", low=1)
    moe_router_group_topk: int | None = flag(None, "groups that a token's experts are chosen from", low=1)
    moe_router_topk_scaling_factor: float | None = flag(None, "factor of a token's expert weights", above=0)
    add_expert_bias: bool = flag(False, "biases of experts and router, as in gpt-oss")
    moe_router_dtype: str = flag("fp32", "precision of the router", choices=("fp32", "fp64"))
    moe_router_load_balancing_type: tuple[str, ...] = flag(
        ("aux_loss",),
        "auxiliary losses: with the load of a microbatch of a replica, of each sequence, or of the last global batch",
        choices=BALANCING_TYPES,
        nargs="+",
        metavar="TYPE",
    )
    moe_aux_loss_coeff: tuple[float, ...] = flag(
        (0.0,), "factor of each auxiliary loss", low=0, nargs="+", metavar="COEFF"
    )
    moe_z_loss_coeff: float | None = flag(
        None, "factor of the loss that keeps the router's logits small (arXiv 2202.08906)", above=0
    )
    moe_router_enable_expert_bias: bool = flag(
        False, "balance the experts by a bias of their scores that only the choice sees (arXiv 2408.15664)"
    )
    moe_router_bias_update_rate: float = flag(1e-3, "change of the expert bias in each step", low=0)
    moe_expert_capacity_factor: float | None = flag(
        None,
        "an expert's capacity in a sequence, over its mean load there; further tokens are dropped (default: none is)",
        above=0,
    )
    moe_token_drop_policy: str = flag(
        "probs",
        "tokens to drop: those with the smallest weights, or the last ones",
        choices=("probs", "position"),
    )
    moe_pad_expert_input_to_capacity: bool = flag(False, "pad each expert's input, so that shapes are known")
    moe_grouped_gemm: bool = flag(False, "all experts of a rank in one grouped product, not one by one")
    moe_token_dispatcher_type: str = flag(
        "alltoall",
        "how tokens reach experts on other ranks: sent to their experts' ranks, or all of them to all ranks",
        choices=("alltoall", "allgather"),
    )
    moe_shared_expert_overlap: bool = flag(
        False, "compute the shared expert while tokens are on their way to experts of other ranks"
    )
    moe_layer_recompute: bool = flag(False, "recompute the experts' activations in backward")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_experts is None:
            for field in dataclasses.fields(MoEConfig):
                if getattr(self, field.name) != field.default:
                    value = getattr(self, field.name)
                    text = " ".join(map(str, value)) if isinstance(value, tuple) else value
                    given = flag_name(field) if value is True else f"{flag_name(field)}: {text}"
                    raise InputError(f"{given} needs --num-experts")
            return
        self._check_router(self.num_experts)
        if self.moe_shared_expert_intermediate_size is None:
            for name in ("gate", "overlap"):
                if getattr(self, f"moe_shared_expert_{name}"):
                    raise InputError(
                        f"--moe-shared-expert-{name} needs --moe-shared-expert-intermediate-size"
                    )
        if self.moe_shared_expert_overlap and self.moe_token_dispatcher_type != "alltoall":
            raise InputError("--moe-shared-expert-overlap needs --moe-token-dispatcher-type alltoall")
        if self.moe_expert_capacity_factor is None:
            if self.moe_pad_expert_input_to_capacity:
                raise InputError("--moe-pad-expert-input-to-capacity needs --moe-expert-capacity-factor")
            if self.moe_token_drop_policy != "probs":
                raise InputError(
                    f"--moe-token-drop-policy: {self.moe_token_drop_policy} needs --moe-expert-capacity-factor; "
                    "without it no token is dropped"
                )
        self._check_losses()

    def _check_losses(self) -> None:
        types, coefficients = self.moe_router_load_balancing_type, self.moe_aux_loss_coeff
        if len(set(types)) < len(types) or ("none" in types and len(types) > 1):
            raise InputError(f"--moe-router-load-balancing-type: {' '.join(types)}; name each type once")
        if len(types) != len(coefficients):
            raise InputError(
                f"--moe-aux-loss-coeff: {len(coefficients)} values for {len(types)} of "
                f"--moe-router-load-balancing-type {' '.join(types)}; give one for each"
            )
        if types == ("none",) and coefficients != (0.0,):
            raise InputError(
                f"--moe-aux-loss-coeff: {coefficients[0]} needs a --moe-router-load-balancing-type other than none"
            )

    def _check_router(self, experts: int) -> None:
        topk, groups = self.moe_router_topk, self.moe_router_num_groups
        group_topk = self.moe_router_group_topk
        softmax = self.moe_router_score_function == "softmax"
        if topk > experts:
            raise InputError(
                f"--moe-router-topk: {topk} is more than --num-experts {experts}; choose {experts} or less"
            )
        if self.moe_router_pre_softmax and not softmax:
            raise InputError("--moe-router-pre-softmax needs --moe-router-score-function softmax")
        if softmax and topk == 1 and not self.moe_router_pre_softmax:
            raise InputError(
                "--moe-router-topk: 1 makes the softmax over one expert 1, from which the router learns nothing; add "
                "--moe-router-pre-softmax"
            )
        if self.moe_router_enable_expert_bias and softmax:
            raise InputError("--moe-router-enable-expert-bias needs --moe-router-score-function sigmoid")
        rate = self.moe_router_bias_update_rate
        if rate != 1e-3 and not self.moe_router_enable_expert_bias:
            raise InputError(f"--moe-router-bias-update-rate: {rate} needs --moe-router-enable-expert-bias")
        if groups is None or group_topk is None:
            names = {"--moe-router-num-groups": groups, "--moe-router-group-topk": group_topk}
            for (name, value), other in zip(names.items(), reversed(names), strict=True):
                if value is not None:
                    raise InputError(f"{name}: {value} needs {other}")
            return
        if experts % groups:
            fitting = either(n for n in range(1, experts + 1) if experts % n == 0)
            raise InputError(
                f"--moe-router-num-groups: {groups} does not divide --num-experts {experts}; choose {fitting}"
            )
        if group_topk > groups:
            raise InputError(
                f"--moe-router-group-topk: {group_topk} is more than --moe-router-num-groups {groups}; choose {groups} "
                "or less"
            )
        if topk % group_topk or topk // group_topk > experts // groups:
            raise InputError(
                f"--moe-router-group-topk: {group_topk} groups of {experts // groups} experts cannot share "
                f"--moe-router-topk {topk} equally; choose a divisor of {topk} that is at least "
                f"{math.ceil(topk * groups / experts)}"
            )

    def expert_layers(self, layers: int) -> list[bool]:
        """For each layer, true if its MLP is a mixture of experts.

        Raises:
            InputError: --moe-layer-freq is malformed, is for another number of layers, or gives none of them experts.
        """
        if self.num_experts is None:
            return [False] * layers
        frequency = self.moe_layer_freq
        pattern = layer_pattern("--moe-layer-freq", frequency, layers, lambda n, i: i % n == 0)
        if not any(pattern):
            raise InputError(
                f"--moe-layer-freq: {self.moe_layer_freq} gives no layer experts; leave --num-experts out"
            )
        return pattern


def layer_pattern(flag: str, value: str, layers: int, bit: Callable[[int, int], bool]) -> list[bool]:
    """Parse a flag that has a bit for each layer: a sum of lists, or a number N, which means `bit(N, layer)`.

    Raises:
        InputError: the value is malformed, or for another number of layers.
    """
    text = value.replace(" ", "")
    if text.isdecimal():
        if int(text) == 0:
            raise InputError(f"{flag}: {value} must be at least 1, or a pattern such as '[0]*1+[1]*26'")
        return [bit(int(text), layer) for layer in range(layers)]
    repeated = re.fullmatch(r"\((.*)\)(?:\*(\d{1,5}))?", text)
    text, times = (repeated[1], int(repeated[2] or 1)) if repeated else (text, 1)
    pattern: list[bool] = []
    for part in text.split("+"):
        match = re.fullmatch(r"\(?\[([01](?:,[01])*)\](?:\*(\d{1,5}))?\)?", part)
        if match is None:
            raise InputError(f"{flag}: {value!r} is neither a number nor a pattern such as '[0]*1+[1]*26'")
        pattern += [digit == "1" for digit in match[1].split(",")] * int(match[2] or 1)
    if len(pattern) * times != layers:
        raise InputError(
            f"{flag}: {value} is for {len(pattern) * times} layers, and --num-layers is {layers}"
        )
    return pattern * times
