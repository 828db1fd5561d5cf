"""Kernels that torch.compile makes of a transformer layer on a GPU, without one.

A function is compiled on a CPU up to Inductor's graph. That graph is moved to a stand-in H100 and goes through the
lowering and fusion of Inductor, which decide the kernels, and through its generation of Triton code.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
import types
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gpu_path.layer_trace import MATMUL, Operation
from models import flat
from torch import Tensor, fx
from torch._dynamo import device_interface
from torch._guards import detect_fake_mode
from torch._inductor import scheduler
from torch._inductor.compile_fx import (
    _recursive_post_grad_passes,
    compile_fx,
    record_original_output_strides,
)
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from megatron.model.context import ModelContext
from megatron.model.transformer import LayerInputs, Transformer
from megatron.ops.backend import Ops, choose_ops
from megatron.ops.config import OpsConfig
from megatron.ops.rotary import rotary_angles
from megatron.parallel.pipeline import WgradQueue
from megatron.parallel.random import DropoutKey
from megatron.parallel.stages import Chunk
from megatron.performance.compiled_layer import device_keys, inductor_options
from megatron.performance.config import Fp8Config
from megatron.performance.fp8 import make_products, set_products
from megatron.planner.fakes import ON_A_GPU
from megatron.training.config import RunConfig

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
# The properties that Inductor asks for.
H100 = types.SimpleNamespace(
    type="cuda",
    index=0,
    major=9,
    minor=0,
    multi_processor_count=132,
    warp_size=32,
    max_threads_per_block=1024,
    max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=65536,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    L2_cache_size=50 << 20,
    total_memory=80 << 30,
    gcnArchName="",
)


class StandIn(device_interface.CudaInterface):
    """Inductor's interface to a device, for one H100."""

    class Worker(device_interface.CudaInterface.Worker):
        get_device_properties = staticmethod(lambda device=None: H100)

    is_available = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: 0)
    get_device_properties = staticmethod(lambda device=None: H100)  # type: ignore[assignment]
    get_compute_capability = staticmethod(lambda device=None: 90)
    is_bf16_supported = staticmethod(lambda including_emulation=False: True)
    is_triton_capable = staticmethod(lambda device=None: True)
    raise_if_triton_unavailable = staticmethod(lambda device=None: None)


@dataclasses.dataclass
class Compiled:
    """Compiled graphs, forward and backward.

    Attributes:
        operations: their kernels; those that torch.compile makes are named "compiled".
        code: Python with Triton kernels and a call of each, one text per graph.
    """

    operations: list[Operation] = dataclasses.field(default_factory=list)
    code: list[str] = dataclasses.field(default_factory=list)


def compiled_layer(config: RunConfig, *, causal: bool) -> Compiled:
    """One layer, forward and backward."""
    found = Compiled()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", ON_A_GPU[F, "scaled_dot_product_attention"])
        run_layer(config, functools.partial(lower, found), causal=causal)
    return found


def compiled_function(function: Callable, *inputs: Any) -> Compiled:
    """A function of tensors. Nothing is computed."""
    found = Compiled()
    torch.compiler.reset()
    backend = functools.partial(compile_fx, inner_compile=functools.partial(lower, found))
    torch.compile(function, backend=backend, fullgraph=True, dynamic=False)(*inputs)
    return found


def run_layer(config: RunConfig, inner_compile: Callable[..., Any], *, causal: bool) -> None:
    """Compile a layer forward and backward. Nothing is computed: the values of all tensors are arbitrary."""
    torch.compiler.reset()
    model, samples, length = config.model, config.training.micro_batch_size, config.data.seq_length
    context = ModelContext(vocab_size=1, padded_vocab_size=1, ops=layer_ops(inner_compile))
    layer = Transformer(model, context, Chunk(layers=range(1), first=True, last=False))
    products = make_products(config.plugin(Fp8Config), emulate=False)
    if products is not None:
        stage: Any = types.SimpleNamespace(modules=[layer], context=context, wgrads=WgradQueue())
        set_products(config, stage, products)
    flat(layer, torch.bfloat16)
    x = torch.empty(length, samples, model.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    rotary = None
    if model.position_embedding_type == "rope":
        positions = torch.arange(length).expand(samples, length)
        cos, sin = rotary_angles(positions, model.kv_channels, model.rotary_base)
        rotary = cos, sin
    (key,) = device_keys([DropoutKey(1, 0)], 1, CPU)
    mask = None if causal else torch.ones(samples, 1, 1, length, dtype=torch.bool)
    out = layer(x, LayerInputs(rotary=rotary, mask_bnst=mask, causal=causal, dropout_key=key))
    out.backward(torch.empty_like(out))


def layer_ops(inner_compile: Callable[..., Any]) -> Ops:
    options = inductor_options()
    backend = functools.partial(compile_fx, inner_compile=inner_compile, config_patches=options)

    @functools.cache
    def compiled(function: Callable) -> Callable:
        return torch.compile(function, backend=backend, fullgraph=True, dynamic=False)

    return choose_ops(
        OpsConfig(ops_backend="layers"),
        work=1,
        dtype=torch.bfloat16,
        device=CPU,
        find=lambda _: (lambda function, *arguments: compiled(function)(*arguments), ""),
    )


def lower(
    found: Compiled,
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    is_backward: bool = False,
    **_: Any,
) -> Callable[[list], list]:
    """Add a graph to `found`. Returns a function that stands for the compiled graph."""
    (outputs,) = next(node for node in graph.graph.nodes if node.op == "output").args
    made = [node.meta["val"] if isinstance(node, fx.Node) else node for node in outputs]
    direction = "backward" if is_backward else "forward"
    with pytest.MonkeyPatch.context() as patch:
        install_stand_in(patch)
        lowered = lower_on_gpu(copy.deepcopy(graph), inputs, is_backward)
        operations = [operation(node, direction) for node in lowered.scheduler.nodes if launches(node)]
        code = generate(lowered)
    # Sums over blocks, of which the scheduler regards some as part of the next kernel, are calls of torch.
    more = kernel_calls(code) - sum(o.name == "compiled" for o in operations)
    found.operations += operations + [Operation(direction, "compiled", 0, ())] * more
    found.code.append(code)

    def run(_: list) -> list:
        return [
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype) if isinstance(x, Tensor) else x
            for x in made
        ]

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def install_stand_in(patch: pytest.MonkeyPatch) -> None:
    device_interface.get_registered_device_interfaces()  # else they are registered over it later
    for name in ("cuda", "cuda:0"):
        patch.setitem(device_interface.device_interfaces, name, StandIn)
    patch.setattr(scheduler, "has_triton", lambda: True)
    patch.setattr(torch.utils._triton, "triton_hash_with_backend", lambda: "")
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "device_count", lambda: 1)
    patch.setattr(torch.cuda, "current_device", lambda: 0)
    patch.setattr(torch.cuda, "get_device_properties", lambda _=None: H100)
    patch.setattr(torch.cuda, "get_device_capability", lambda _=None: (9, 0))
    patch.setattr(torch.cuda, "_lazy_init", lambda: None)


def lower_on_gpu(graph: fx.GraphModule, inputs: Sequence[Any], is_backward: bool) -> GraphLowering:
    for node in graph.graph.nodes:
        if isinstance(node.kwargs.get("device"), torch.device):
            node.kwargs = {**node.kwargs, "device": GPU}
    mode = detect_fake_mode(inputs)
    assert mode is not None
    with mode:
        moved = [
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=GPU)
            if isinstance(x, Tensor)
            else x
            for x in inputs
        ]
    with V.set_fake_mode(mode), V.set_debug_handler(DebugContext()):
        FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*moved)
        _recursive_post_grad_passes(graph, is_inference=False)
        graph.graph.eliminate_dead_code()  # outputs that an operation has no longer once it works in place
        FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*moved)
        record_original_output_strides(graph)
        lowered = GraphLowering(graph, example_inputs=moved, is_backward=is_backward)
        with V.set_graph_handler(lowered), V.set_extern_kernel_nodes([]):
            lowered.run(*moved)
            lowered.init_wrapper_code()
            lowered._update_scheduler()
            for node in lowered.scheduler.nodes:
                node.get_read_write_buffers_sizes()  # kept by the node
    return lowered


def generate(lowered: GraphLowering) -> str:
    with (
        V.set_fake_mode(lowered.fake_mode),
        V.set_debug_handler(DebugContext()),
        V.set_graph_handler(lowered),
        V.set_extern_kernel_nodes([]),
    ):
        lowered.scheduler.codegen()
        code, _ = lowered.wrapper_code.generate(lowered.is_inference)
    return code.value


def kernel_calls(code: str) -> int:
    """Number of kernels that generated code launches besides matrix products and attention."""
    return len(re.findall(r"\.run\(|\.sum\(dim=0\)", code))


def launches(node: scheduler.BaseSchedulerNode) -> bool:
    """True unless the node only names an output of another one."""
    return not isinstance(node, scheduler.NopKernelSchedulerNode) and node.get_read_write_buffers_sizes() > 0


def operation(node: scheduler.BaseSchedulerNode, direction: str) -> Operation:
    name = "compiled"
    if isinstance(node, scheduler.ExternKernelSchedulerNode):
        (ir,) = node.get_nodes()
        kernel = str(getattr(ir.node, "python_kernel_name", "") or ir.node)
        parts = kernel.split(".")
        name = next((part for part in parts if part in MATMUL or part.startswith("_scaled_dot")), kernel)
    return Operation(direction, name, node.get_read_write_buffers_sizes(), ())
