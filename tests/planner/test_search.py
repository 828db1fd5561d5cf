"""The planner's search for layouts."""

from __future__ import annotations

import re
import time

import pytest
from published import cluster, job

from megatron.errors import InputError
from megatron.model.config import ModelConfig
from megatron.planner.cluster import cluster_from_data_sheet
from megatron.planner.device_specs import data_sheet
from megatron.planner.explain import other_choices, takeaways, why_not
from megatron.planner.layout import Job
from megatron.planner.memory import fits, max_memory
from megatron.planner.models import MODELS
from megatron.planner.programs import OURS
from megatron.planner.search import SearchResult, search, shapes, variants
from megatron.planner.simulate import Simulator


def found(job, cluster) -> SearchResult:
    return search(job, cluster, num_plans=10, progress=lambda count: None)


def test_the_best_plan_is_the_best_of_all_layouts():
    gpt, machine = job(24, 2048, 16, 64), cluster(8)
    fitting = [
        layout
        for shape in shapes(gpt, machine)
        for layout in variants(shape, gpt)
        if fits(max_memory(gpt, layout, machine, OURS), machine)
    ]
    every = [Simulator(gpt, layout, machine, OURS).step().seconds for layout in fitting]
    result = found(gpt, machine)
    assert result.timed == len(fitting)
    seconds = [plan.step.seconds for plan in result.plans]
    assert seconds == sorted(seconds)
    assert seconds[0] == min(every)


def test_plans_fit_and_divide():
    gpt, machine = MODELS["39.1b"].job(), cluster(512)
    result = found(gpt, machine)
    assert len(result.plans) == 10
    assert result.too_large > 0
    for plan in result.plans:
        layout = plan.layout
        assert layout.processes == 512
        assert fits(plan.memory, machine)
        assert layout.splits_layers(gpt)
        assert gpt.global_batch_size % (layout.data * layout.micro_batch_size) == 0
        if layout.chunks > 1:
            assert layout.microbatches(gpt) % layout.pipeline == 0


def test_a_small_model_needs_no_model_parallelism():
    """Takeaway 2 of arXiv 2104.04473: model parallelism only until the model fits."""
    best = found(MODELS["1.7b"].job(), cluster(32)).plans[0]
    assert (best.layout.tensor, best.layout.pipeline) == (1, 1)


@pytest.mark.slow
def test_a_trillion_parameters_stay_within_nodes():
    """Takeaway 1: tensor parallelism up to the size of a node, then pipelines. The search takes less than a minute."""
    begin = time.perf_counter()
    best = found(MODELS["1t"].job(), cluster(3072)).plans[0]
    assert time.perf_counter() - begin < 60
    assert best.layout.tensor == 8
    assert best.layout.pipeline >= 16


def test_other_choices_state_their_cost():
    gpt, machine = MODELS["18.4b"].job(), cluster(256)
    best = found(gpt, machine).plans[0]
    reasons = {
        words: why_not(other, best, gpt, machine) for words, other in other_choices(best, gpt, machine)
    }
    assert len(reasons) >= 8
    for text in reasons.values():
        assert re.match(r"(\d+\.\d% slower: |does not fit: needs \d+ GB of 79$|as fast; needs )", text), text
    assert any(text.startswith("does not fit") for text in reasons.values())
    assert "recomputation" in reasons["full recomputation"]
    paragraphs = takeaways(best, gpt, machine)
    assert [f"takeaway {n}" in " ".join(paragraphs) for n in (1, 2, 3)] == [True] * 3


def test_a_model_that_fits_nowhere_names_the_smallest_cluster():
    gpt = MODELS["39.1b"].job()
    with pytest.raises(InputError) as error:
        found(gpt, cluster(4))
    message = str(error.value)
    assert "no layout fits this model on 4 a100-80gb with 79 GB each" in message
    smallest = int(re.search(r"the smallest cluster that fits it has ([\d]+) of them", message)[1])
    assert found(gpt, cluster(smallest)).plans
    assert smallest == 16
    with pytest.raises(InputError, match="has 16 of them"):
        found(gpt, cluster(8))


def test_the_smallest_cluster_divides_the_batch():
    """The model fits with two replicas but not with one, and two replicas cannot divide seven samples."""
    for batch, expected in ((8, "32 of them (T8 P2 D2, "), (7, "112 of them (T8 P2 D7, ")):
        with pytest.raises(InputError, match="has " + re.escape(expected)):
            found(job(2, 57344, 64, batch), cluster(8))


def test_other_choices_divide_the_sequence():
    gpt, machine = job(8, 4096, 32, 48, seq_length=1004), cluster(8)
    others = [other for plan in found(gpt, machine).plans for _, other in other_choices(plan, gpt, machine)]
    assert {2, 4} <= {other.tensor for other in others if other.sequence_parallel} < {2, 4, 8}
    assert 8 in {other.tensor for other in others}


def llama_405b(batch: int) -> Job:
    """Llama 3.1 405B, whose 126 layers no usual number of stages divides (arXiv 2407.21783 section 3.3)."""
    model = ModelConfig(
        num_layers=126,
        hidden_size=16384,
        num_attention_heads=128,
        group_query_attention=True,
        num_query_groups=8,
        ffn_hidden_size=53248,
        swiglu=True,
        normalization="RMSNorm",
        position_embedding_type="rope",
        add_bias_linear=False,
        untie_embeddings_and_output_weights=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        max_position_embeddings=8192,
    )
    return Job(model, 8192, 128256, batch)


def test_stages_may_be_uneven():
    """16 stages of 126 layers: the first and the last have one layer less, as in arXiv 2407.21783 section 3.3.2."""
    gpt, machine = llama_405b(2048), cluster_from_data_sheet(data_sheet("h100-80gb", where=""), 16384)
    layouts = [plan.layout for plan in found(gpt, machine).plans]
    sixteen = next(layout for layout in layouts if layout.pipeline == 16)
    assert [sixteen.layers_per_chunk(gpt, stage) for stage in (0, 1, 14, 15)] == [7, 8, 8, 7]
    flags = " ".join(sixteen.flags(gpt))
    assert "--decoder-first-pipeline-num-layers 7 --decoder-last-pipeline-num-layers 7" in flags


def test_a_cluster_that_no_layout_divides_is_told_what_would_fit():
    """The model fits fewer devices than there are, but no layout of it divides their number."""
    machine = cluster_from_data_sheet(data_sheet("h100-80gb", where=""), 8 * 257)
    with pytest.raises(
        InputError, match=r"no layout fits .* and divides them .* choose a multiple of \d+ of them"
    ):
        found(llama_405b(8 * 257), machine)


def test_a_layer_that_fits_nowhere_is_an_error():
    with pytest.raises(InputError, match="nor on more of them: a single layer is too large"):
        found(job(2, 400_000, 16, 8), cluster(8))


def test_a_batch_that_no_layout_divides_is_an_error():
    with pytest.raises(
        InputError,
        match=r"--global-batch-size: no layout divides 7 samples, .* over 64 devices; choose \d+ samples, or",
    ):
        found(job(25, 5 * 128, 5, 7), cluster(64))
