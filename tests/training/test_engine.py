"""Internals of a training step on several processes."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from distributed import run_distributed
from models import CPU, config_of, engine_of

from megatron.data.gpt_dataset import GPTBatch
from megatron.model.transformer import TransformerLayer
from megatron.parallel.mesh import init_mesh
from megatron.reports.layout import describe_layout


def batches(count: int):
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        tokens = torch.randint(60, (2, 17), generator=generator)
        yield GPTBatch(
            tokens=tokens[:, :-1],
            labels=tokens[:, 1:],
            loss_mask=torch.ones(2, 16),
            position_ids=torch.arange(16).expand(2, 16),
        )


def train(flags: str) -> tuple[list[np.ndarray], list[float]]:
    """Return this rank's embedding tables after three steps, and the losses of these steps."""
    config = config_of(f"--spike-skip 100 --attention-dropout 0 {flags}")
    with init_mesh(config.parallel, CPU) as mesh:
        engine = engine_of(mesh, config)
        for step in range(3):
            engine.train_step(
                batches(2), num_microbatches=2, consumed_samples=4 * step, lr=1e-2, weight_decay=0.1
            )
            # The optimizer must not run, nor a checkpoint be written, while neighbors may still wait for a send.
            assert not engine.transfers.sending
        engine.buffer.gather.finish()
        parameters = [item for module in engine.modules for item in module.named_parameters()]
        names = ("embedding.word_embeddings.weight", "output_layer.weight")
        tables = [p.detach().float().numpy() for name, p in parameters if name in names]
        (spikes,) = engine.optimizer.rules
        losses, _ = spikes.state()
        return tables, losses[-3:]


def test_tied_embeddings_stay_equal_bit_for_bit() -> None:
    """All ranks also use the loss of the whole batch to detect spikes, whichever stage computes it."""
    _, losses = train("")
    for processes, flags in (
        (2, "--pipeline-model-parallel-size 2"),
        (2, "--pipeline-model-parallel-size 2 --bf16 --num-layers-per-virtual-pipeline-stage 1"),
        (
            8,
            "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --use-distributed-optimizer "
            "--overlap-param-gather",
        ),
    ):
        held, known = zip(*run_distributed(train, processes, flags), strict=True)
        assert known == (known[0],) * processes
        # Replicas read the same batches here but draw different dropout masks, and bf16 rounds.
        exact = processes == 2 and "bf16" not in flags
        assert known[0] == pytest.approx(losses, rel=1e-6 if exact else 1e-2)
        half = processes // 2
        for first, last in zip(held[:half], held[half:], strict=True):
            assert len(first) == len(last) == 1
            np.testing.assert_array_equal(first[0], last[0])


def parameters_not_waited_for(flags: str) -> list[str]:
    """Names of parameters that forward and backward used without waiting until they were gathered."""
    config = config_of(
        f"--use-distributed-optimizer --overlap-param-gather --ddp-bucket-size 1 --hidden-dropout 0 {flags}"
    )
    with init_mesh(config.parallel, CPU) as mesh:
        engine = engine_of(mesh, config)
        inputs = {"num_microbatches": 2, "consumed_samples": 0}
        engine.train_step(batches(2), **inputs, lr=1e-2, weight_decay=0.1)
        engine.forward_backward(engine.next_global_batch(batches(2), 2, 0))
        return [
            param.name for i in engine.buffer.gather.pending for param in engine.buffer.buckets[i].flat_params
        ]


@pytest.mark.parametrize(
    ("processes", "flags"),
    [
        (2, "--untie-embeddings-and-output-weights"),
        (2, "--num-experts 4 --disable-bias-linear --expert-model-parallel-size 1"),
        (4, "--pipeline-model-parallel-size 2"),  # the last stage has a copy of the table
    ],
)
def test_all_gathered_parameters_are_waited_for(processes: int, flags: str) -> None:
    assert run_distributed(parameters_not_waited_for, processes, flags) == [[]] * processes


def test_a_gather_may_end_between_forward_and_backward() -> None:
    """Autograd refused the weights of modules that had run before a later bucket arrived."""
    config = config_of("--ddp-bucket-size 1")
    with init_mesh(config.parallel, CPU) as mesh:
        engine = engine_of(mesh, config)
        bucket = engine.buffer.buckets[-1]

        def arrive(*_: object) -> None:
            engine.buffer.params[bucket.start : bucket.end].mul_(1)

        layer = next(x for x in engine.modules[0].modules() if isinstance(x, TransformerLayer))
        layer.register_forward_hook(arrive)
        engine.train_step(batches(2), num_microbatches=2, consumed_samples=0, lr=1e-2, weight_decay=0.1)


def test_a_fully_masked_batch_has_loss_zero() -> None:
    """The mean over no tokens would be NaN, and would stop the run."""
    config = config_of("")
    with init_mesh(config.parallel, CPU) as mesh:
        engine = engine_of(mesh, config)
        masked = (dataclasses.replace(batch, loss_mask=torch.zeros(2, 16)) for batch in batches(2))
        losses, stats = engine.train_step(
            masked, num_microbatches=2, consumed_samples=0, lr=1e-2, weight_decay=0.1
        )
    assert losses.tolist() == [0] and stats["grad norm"] == stats["skipped"] == 0


def layout(flags: str) -> str:
    config = config_of(flags)
    with init_mesh(config.parallel, CPU) as mesh:
        return describe_layout(engine_of(mesh, config))


def test_layout_table() -> None:
    """The paper's count, 12 L h² (1 + 13 / 12h + (V + s) / 12 L h), plus 2 h for the final norm, which it omits."""
    flags = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --use-distributed-optimizer"
    table = run_distributed(layout, 4, flags)[0]
    parameters = 4 * (12 * 32**2 + 13 * 32) + (60 + 16) * 32 + 2 * 32
    first, last = (4 * (12 * 32**2 + 13 * 32) // 2 + extra for extra in ((64 + 16) * 32, 64 * 32 + 2 * 32))
    assert table.splitlines()[:4] == [
        "  layout      tensor 1 x data 2 x pipeline 2 = 4 processes; distributed optimizer; interleaved schedule; "
        "2 chunks per stage",
        f"  stage 0     ranks 0-1; layers 0, 2; {first:,} parameters on each rank",
        f"  stage 1     ranks 2-3; layers 1, 3; {last:,} parameters on each rank",
        f"  parameters  {parameters:,} unique, excluding vocabulary padding",
    ]


def dropouts(flags: str) -> tuple[dict[str, np.ndarray], list[np.ndarray]]:
    """Zeros that dropout left in a training step, by location in the model, and each layer's attention output.

    All heads have the same weights, so the attention of two ranks differs only by dropout.
    """
    config = config_of(f"--tensor-model-parallel-size 2 --hidden-dropout 0.5 --attention-dropout 0.5 {flags}")
    zeros, attended = {}, []
    with init_mesh(config.parallel, CPU) as mesh:
        engine = engine_of(mesh, config)
        (model,) = engine.modules
        model.embedding.register_forward_hook(lambda *call: zeros.update(embedding=call[2] == 0))
        for i, layer in model.decoder.layers.items():
            stream = []  # the residual stream before and after each dropout-add
            qkv = layer.self_attention.linear_qkv.weight
            qkv.data.copy_(torch.randn(qkv.shape, generator=torch.Generator().manual_seed(0)))
            layer.register_forward_pre_hook(lambda _, x, stream=stream: stream.append(x[0]))
            layer.pre_mlp_layernorm.register_forward_pre_hook(lambda _, x, stream=stream: stream.append(x[0]))

            def after(_: object, __: object, x: torch.Tensor, i=i, stream=stream) -> None:
                zeros.update({f"attention {i}": stream[1] == stream[0], f"mlp {i}": x == stream[1]})

            layer.register_forward_hook(after)
            layer.self_attention.linear_proj.register_forward_pre_hook(lambda _, x: attended.append(x[0]))
        engine.forward_backward(engine.next_global_batch(batches(1), 1, 0))
    return {location: x.numpy() for location, x in zeros.items()}, [x.detach().numpy() for x in attended]


@pytest.mark.parametrize("sequence", ["", "--sequence-parallel"])
def test_dropout_differs_only_where_ranks_hold_shards(sequence: str) -> None:
    (zeros, attended), (other_zeros, other_attended) = run_distributed(dropouts, 2, sequence)
    assert len(zeros) == 1 + 2 * 4 and len(attended) == 4
    for location, mask in zeros.items():
        assert 0.4 < mask.mean() < 0.6
        if sequence:
            assert 0.4 < (mask != other_zeros[location]).mean() < 0.6, location
        else:
            np.testing.assert_array_equal(mask, other_zeros[location], location)
    for mask, other in itertools.combinations(zeros.values(), 2):
        assert 0.4 < (mask != other).mean() < 0.6
    for here, there in zip(attended, other_attended, strict=True):
        assert (
            here != there
        ).mean() > 0.5  # the first positions attend to few tokens, all of which may be dropped
