"""Numbers of tokens and rows of a mixture of experts. Routing is random by default.

Every expert is as likely as any other, as in NVIDIA's benchmarks, which force a balanced load. The imbalance that is
left is that of random draws. A row is a token's copy for one of its experts.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics

from megatron.model.config import ModelConfig

_NORMAL = statistics.NormalDist()
# Standard deviations beyond which a number of rows does not change the mean number of tiles.
FAR = 4.0


@dataclasses.dataclass(frozen=True)
class Routing:
    """The choice of a token's experts.

    Attributes:
        topk: experts of a token.
        round_robin: number of experts, if each token takes the next `topk` of them after those of the token before;
            None for random choices.
        groups, group_topk: consecutive groups of experts, and how many of them a token's experts are in
            (--moe-router-num-groups and --moe-router-group-topk; 2412.19437 section 2.1.2); 1 without groups.
    """

    topk: int
    groups: int = 1
    group_topk: int = 1
    round_robin: int | None = None

    @classmethod
    def of(cls, model: ModelConfig, *, round_robin: bool = False) -> Routing:
        if round_robin:
            return cls(model.moe_router_topk, round_robin=model.num_experts)
        groups, group_topk = model.moe_router_num_groups, model.moe_router_group_topk
        if groups is None or group_topk is None:
            return cls(model.moe_router_topk)
        return cls(model.moe_router_topk, groups, group_topk)

    def distinct(self, places: float) -> float:
        """Expected number of `places` with an expert of a token, if they divide the experts equally and in order.

        A token's groups are drawn without replacement, its experts among these as if with replacement. Where neither
        groups nor places divide the other, the groups count as none.
        """
        if self.round_robin is not None:
            return consecutive(self.topk, self.round_robin, places)
        topk, groups, chosen = self.topk, self.groups, self.group_topk
        if groups % places and places % groups:
            groups = chosen = 1
        if places >= groups:  # a group is at several places
            return places * chosen / groups * (1 - (1 - groups / (places * chosen)) ** topk)
        inside = int(groups // places)  # groups of a place
        draws = math.comb(groups, chosen)
        return places * sum(
            math.comb(inside, n)
            * math.comb(groups - inside, chosen - n)
            / draws
            * (1 - (1 - n / chosen) ** topk)
            for n in range(1, min(inside, chosen) + 1)
        )


@functools.lru_cache(maxsize=4096)
def consecutive(topk: int, experts: int, places: float) -> float:
    """Mean number of `places` that hold `topk` consecutive experts, which begin at each multiple of `topk`."""
    of_place = experts / places
    starts = range(0, math.lcm(experts, topk), topk)
    return statistics.mean(len({(start + i) % experts // of_place for i in range(topk)}) for start in starts)


@functools.lru_cache(maxsize=4096)
def busiest(tokens: float, topk: int, experts: int, ranks: int) -> float:
    """Expected rows of the busiest of `ranks` that divide the experts, over the mean.

    The rows of a rank are the sum over all tokens of a hypergeometric number, nearly normal; the largest of n normal
    numbers is about the quantile (n - 3/8) / (n + 1/4) (Blom 1958). Ranks have all of a token's rows at most.
    """
    if ranks == 1:
        return 1.0
    share = 1 / ranks
    deviation = math.sqrt(tokens * topk * share * (1 - share) * (experts - topk) / max(experts - 1, 1))
    largest = _NORMAL.inv_cdf((ranks - 3 / 8) / (ranks + 1 / 4))
    return min(1 + largest * deviation / (tokens * topk * share), float(ranks))


@functools.lru_cache(maxsize=65536)
def mean_tiles(rows: float, side: int, deviation: float) -> float:
    """Expected number of tiles of `side` rows that a normal number of rows fills, the last one in part."""
    if deviation <= 0:
        return math.ceil(rows / side)
    first = max(0, math.floor((rows - FAR * deviation) / side))
    last = math.ceil((rows + FAR * deviation) / side)
    # The n-th tile is needed if there are more than n full tiles of rows.
    return first + sum(1 - _NORMAL.cdf((n * side - rows) / deviation) for n in range(first, last + 1))
