"""Pipeline schedules by name, and their kinds. `megatron.plugin_flags` adds them to those of the core."""

from __future__ import annotations

from megatron.parallel.schedules import Schedule
from megatron.variants.auto_schedule import best_schedule
from megatron.variants.half_memory import v_half, v_min
from megatron.variants.schedules import breadth_first, gpipe, interleaved
from megatron.variants.zero_bubble import dualpipe_v, zb_h1, zb_h2, zb_v

NAMED: dict[str, Schedule] = {
    "gpipe": gpipe,
    "interleaved": interleaved,
    "breadth-first": breadth_first,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zb-v": zb_v,
    "v-half": v_half,
    "v-min": v_min,
    "dualpipe-v": dualpipe_v,
    "auto": best_schedule,
}
# Two chunks on a stage, of which the second comes back from the last stage to the first; auto also has one chunk.
V_SHAPES = {"auto", "zb-v", "v-half", "v-min", "dualpipe-v"}
# Several chunks on a stage.
WITH_CHUNKS = {"interleaved", "breadth-first", *V_SHAPES - {"auto"}}
# Split backward passes.
SPLIT_BACKWARD = {"zb-h1", "zb-h2", *V_SHAPES}
