"""Compile Triton kernels for an H100, without one. Prints the loads and stores, registers and spilled bytes of each.

PYTHONPATH=TRITON:tests python tests/gpu_path/ptx.py KERNELS

KERNELS is a JSON list of names and texts, as `generated_code.kernels` has them.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from gpu_path.generated_code import Kernel
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

HEADER = """
import triton
import triton.language as tl
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_helpers import libdevice, math as tl_math
"""
# Blocks among those that torch's heuristics try.
BLOCKS = {
    "pointwise": {"XBLOCK": 1024},
    "reduction": {"XBLOCK": 64, "R0_BLOCK": 64},
    "persistent_reduction": {"XBLOCK": 1},
}
SPLIT = {"RSPLIT_SIZE": 16, "NUM_STAGES": 1}
# Bytes that a thread loads or stores at once.
ACCESS = re.compile(r"\b(?:ld|st)\.global[\w.:]*?(?:\.v(\d))?\.[bsuf](\d+)")


def measure(kernel: Kernel, folder: Path) -> dict[str, int]:
    path = folder / f"{kernel.name}.py"
    path.write_text(HEADER + kernel.source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(kernel.name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, kernel.name)
    kind = re.search(r"@triton_heuristics\.(\w+)\(", kernel.text)[1]
    blocks = BLOCKS[kind] | SPLIT
    types = {name: kernel.signature.get(name, "constexpr") for name in function.arg_names}
    source = ASTSource(
        fn=function,
        signature=types,
        constexprs={(i,): blocks[name] for i, name in enumerate(types) if types[name] == "constexpr"},
        attrs={(i,): [["tt.divisibility", 16]] for i, name in enumerate(types) if types[name] != "constexpr"},
    )
    warps = 8 if kind == "reduction" else 4
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps}).asm["ptx"]
    sizes = [int(count or 1) * int(bits) // 8 for count, bits in ACCESS.findall(ptx)]
    found = {"bytes": sum(sizes), "bytes of vectors": sum(size for size in sizes if size >= 8)}
    return found | assemble(ptx, folder)


def assemble(ptx: str, folder: Path) -> dict[str, int]:
    path = folder / "kernel.ptx"
    path.write_text(ptx, encoding="utf-8")
    command = [
        get_ptxas(90).path,
        "-v",
        "--gpu-name",
        "sm_90a",
        str(path),
        "-o",
        str(folder / "kernel.cubin"),
    ]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return {
        "registers": int(re.search(r"Used (\d+) registers", report)[1]),
        "spilled": sum(map(int, re.findall(r"(\d+) bytes spill", report))),
    }


def main() -> None:
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, text in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
            found[name] = measure(Kernel(name, text), Path(folder))
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
