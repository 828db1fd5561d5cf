"""Programs of NVIDIA's published runs, by release of NeMo or Megatron Bridge.

The facts are those of Megatron Bridge, scripts/performance/configs at its tags v0.2.0 (release 25.11), v0.3.0 and
v0.3.1 (26.02), v0.4.0 and v0.4.2 (26.04), v0.5.0 and v0.5.1 (26.06), and before these of dgxc-benchmarking at v25.04.02
and v25.05.05 (there grok1/cfg and grok1/launch.sh).
"""

from __future__ import annotations

import re
from typing import Any

from megatron.planner.programs import MEGATRON_CORE

# Accesses of an operand of NVFP4 products in forward and in backward together are twice this: read for its largest
# element, then read and written in two layouts of half a byte and a 16th for scales (2509.25149 section 4).
NVFP4_CAST = 1.3
# The same of MXFP8 products, written in two layouts of a byte and a 32nd: 0.5 more than with a scale for each tensor,
# for which Blackwell's tensor cores read one layout in either direction.
MXFP8_CAST = 1.0
# Share of tensor-parallel communication beside products with torchtitan's asynchronous tensor parallelism: as with
# Transformer Engine's.
ASYNC_TP = MEGATRON_CORE.tensor_overlap
# Accesses of an operand of torchao's FP8 products with a scale for each row: so many that a step of 70B takes as long
# as in bf16, as in torchtitan's table (benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md).
ROWWISE_CAST = 5.4
# Expert ranks of AutoModel's runs whose table leaves them out (examples/llm_benchmark/gpt_oss).
AUTOMODEL_RANKS = {"GPT-OSS-20B": 8, "GPT-OSS-120B": 64}
# Seconds that the host needs for a layer with experts whose router and attention are captured in graphs.
CAPTURED_HOST = 0.002
# In a pipeline on hosts with x86 processors, without graphs: by 235B on B200, whose all-to-alls do not overlap; where
# they do, by 235B on H100 and 30B on H100, with 4 and 16 experts a rank, of which each has kernels of its own.
X86_HOST = 0.0109
X86_OVERLAP_HOST, X86_EXPERT_HOST = 0.012, 0.00025


def named(model: str) -> str:
    """Return a model's name with the words that this file looks for in their usual case."""
    for part in ("DeepSeek", "Kimi", "OSS", "Qwen3", "Grok", "235B", "30B"):
        model = re.sub(part, part, model, flags=re.IGNORECASE)
    return model


def release(row: dict[str, Any]) -> str:
    """Year and month of the release that a row is of, with its patches (26.06.01); "" for other programs."""
    if not any(name in row["program"] for name in ("Megatron-Core", "Megatron-Bridge")):
        return ""
    return row["source"].get("section", row["source"].get("tag", "v25.00")[1:]).partition(" ")[0]


def program_name(row: dict[str, Any]) -> str:
    """The planner's name for the program of a row in the form of Megatron Bridge."""
    program = row["program"].lower()
    for text, name in (("torchtitan", "torchtitan"), ("maxtext", "maxtext"), ("automodel", "automodel")):
        if text in program:
            return name
    since = release(row)
    if row["model"]["kind"] == "dense":
        return "megatron-core" if since >= "25.09" else "nemo-2025"
    name = "gpt-oss" if "OSS" in row["model_name"] else "megatron-core"
    if captures_iterations(row):
        return name
    if since < "25.09":
        return "megatron-core-spring-2025"
    return f"{name}-2025" if row["gpu"].startswith("gb") else f"{name}-2025-x86"


def captures_iterations(row: dict[str, Any]) -> bool:
    """True if CUDA graphs of whole iterations have fused grouped MLPs and all-to-alls beside other work, too."""
    gpu, name, since = row["gpu"], row["model_name"], release(row)
    if since < "26.06" or "MX" not in row["precision"] or "Kimi" in name:
        return False
    rack = gpu.startswith("gb")
    later = {"OSS": False, "DeepSeek": gpu == "b300", "235B": True, "30B": True}
    if any(part in name and at_all for part, at_all in later.items()) and since >= "26.06.01":
        return True
    return rack or ("30B" in name and gpu == "b300")


def properties(row: dict[str, Any]) -> dict[str, Any]:
    """Fields of `Program` in which a run differs from its release's program."""
    if row["program"] == "torchtitan":
        found: dict[str, Any] = {}
        if "async tp" in row["notes"].lower():
            found["tensor_overlap"] = ASYNC_TP
        if "rowwise" in row["precision"]:
            found["fp8_cast"] = ROWWISE_CAST
        return found
    if "save_qkv_proj" in row["recompute"]:  # a policy of MaxText
        return {"keeps_queries": True}
    casts: dict[str, Any] = {}
    if "FP4" in row["precision"]:
        casts = {"fp8_cast": NVFP4_CAST}
    elif row["precision"].startswith(("MX", "FP8-MX")):
        casts = {"fp8_cast": MXFP8_CAST}
    if row["model"]["kind"] == "dense":
        return casts
    if row["program"].startswith("NeMo AutoModel"):
        # Its table names DeepEP, its settings fake_balanced_gate; the router's weights are within the activation
        # (components/moe/layers.py and experts.py).
        return {"expert_copies_once": True, "round_robin": True, "weighted": (0, 0)}
    return _mixture_properties(row)


def _mixture_properties(row: dict[str, Any]) -> dict[str, Any]:
    """`properties` of NVIDIA's run of a mixture."""
    gpu, name, since = row["gpu"], row["model_name"], release(row)
    found: dict[str, Any] = {"expert_cast": NVFP4_CAST} if "FP4" in row["precision"] else {}
    if name.startswith("Grok") or "tokendrop" in row["notes"]:
        # With a capacity the host does not wait for the numbers of rows.
        found |= {"host": (0.0, 0.0), "pipeline_host": None, "starved": 0.0}
    if name.startswith("Grok") and since.startswith("25.04"):
        found["tensor_overlap"] = 0.0  # ub_tp_comm_overlap: false
    if since.startswith("25.09") and name.startswith("DeepSeek") and gpu == "h100":  # run_script.py at v0.1.0
        found |= {"expert_overlap": MEGATRON_CORE.expert_overlap, "expert_copies_once": True}
    if since < "25.11":
        return found
    rack, bf16 = gpu.startswith("gb"), row["precision"] == "BF16"
    if name.startswith("DeepSeek"):  # mla_up_proj among recompute_modules
        other = gpu == "gb300" and (bf16 or since < "26.02" or since >= "26.06")
        found["latent_recompute"] = not other and not (
            gpu == "gb200" and not bf16 and "26.04" <= since < "26.06"
        )
    if captures_iterations(row):
        return found
    found["expert_copies_once"] = sends_once(row)
    if overlaps_experts(row):
        found["expert_overlap"] = MEGATRON_CORE.expert_overlap
    if not rack and "OSS" not in name and "pipeline_host" not in found:
        found["pipeline_host"] = (0.0, x86_host(row))
    graphs = {
        # Elsewhere router and preprocessing alone are captured.
        "30B": rack or (gpu == "b200" and since >= "26.02.01"),
        "235B": rack,
        "DeepSeek": gpu == "gb200"
        or (gpu == "gb300" and bf16)
        or (gpu in ("b200", "b300") and since >= "26.04.01" and row["layout"]["pp"] == 8),
        "Kimi": gpu == "gb200",
        "OSS": gpu.endswith("b300"),
    }
    # In 25.11 a run with graphs takes as long for a layer as the host needs without them.
    if since >= "26.02" and any(captured for part, captured in graphs.items() if part in name):
        found |= {"host": (0.0, CAPTURED_HOST), "pipeline_host": None}
    if "OSS" in name and not gpu.endswith("b300"):
        found["module_recompute"] = True
    return found


def sends_once(row: dict[str, Any]) -> bool:
    """True for the dispatchers HybridEP and DeepEP, False for all-to-alls."""
    gpu, name, since = row["gpu"], row["model_name"], release(row)
    rack = gpu.startswith("gb")
    if "OSS" in name:
        return (
            since == "26.04" and row["layout"].get("ep") == (64 if gpu == "gb200" else 8) and gpu != "gb300"
        )
    if "235B" in name or "Kimi" in name:
        return rack or (gpu == "b300" and "235B" in name and since >= "26.04.01")
    return since >= "26.02" or rack or (gpu == "h100" and "DeepSeek" in name)


def overlaps_experts(row: dict[str, Any]) -> bool:
    """True if all-to-alls of experts run beside other work (moe_a2a_overlap)."""
    gpu, name, since = row["gpu"], row["model_name"], release(row)
    if "235B" in name:
        # The run of 26.02.01 on B300 has the layout of 26.02, whose recipe overlaps them.
        return (
            gpu == "h100"
            or (gpu, since) == ("b200", "25.11")
            or (gpu == "b300" and row["layout"].get("vp") == 4)
        )
    if "OSS" in name:
        return gpu == "gb200" and "26.04" <= since < "26.06" and row["global_batch_size"] == 1280
    if "DeepSeek" in name and gpu == "b200":
        return since >= "26.04.01" and row["layout"].get("ep") == 32
    return gpu == "h100" and since in (("25.11", "26.02") if "30B" in name else ("25.11",))


def x86_host(row: dict[str, Any]) -> float:
    """Seconds that a host with x86 processors needs for a layer with experts in a pipeline."""
    if not overlaps_experts(row):
        return X86_HOST
    return X86_OVERLAP_HOST + X86_EXPERT_HOST * row["model"]["experts"] / (expert_ranks(row) or 1)


def expert_ranks(row: dict[str, Any]) -> int | None:
    """Groups of ranks that divide the experts; None if they are not stated."""
    ranks = AUTOMODEL_RANKS.get(row["model_name"]) if "AutoModel" in row["program"] else None
    return ranks or row["layout"].get("ep")


def division(name: str, layers: int, parts: int) -> tuple[int, ...] | None:
    """Layers of each part of DeepSeek-V3 and Kimi K2; None for equal numbers.

    The last part has fewer, since it has multi-token prediction and the loss (recipes/deepseek/deepseek_v3.py); of 32
    parts, the first and the last.
    """
    if parts == 1 or not name.startswith(("DeepSeek", "Kimi")):
        return None
    longest = -(-layers // parts)
    if parts == 32:
        return (layers - longest * (parts - 2), *(longest,) * (parts - 2), 0)
    last = layers - longest * (parts - 1)
    return (*(longest,) * (parts - 1), last) if last > 0 else None
