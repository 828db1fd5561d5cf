"""The planner's search for layouts."""

from __future__ import annotations

import re
import time

import pytest
from published import cluster, job

from megatron.errors import InputError
from megatron.planner.explain import other_choices, takeaways, why_not
from megatron.planner.layout import OURS
from megatron.planner.memory import fits, max_memory
from megatron.planner.models import MODELS
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
        assert gpt.model.num_layers % (layout.pipeline * layout.chunks) == 0
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
        assert re.match(r"(\d+\.\d% slower: |does not fit: needs \d+ GB of 74$|as fast; needs )", text), text
    assert any(text.startswith("does not fit") for text in reasons.values())
    assert "recomputation" in reasons["full recomputation"]
    paragraphs = takeaways(best, gpt, machine)
    assert [f"takeaway {n}" in " ".join(paragraphs) for n in (1, 2, 3)] == [True] * 3


def test_a_model_that_fits_nowhere_names_the_smallest_cluster():
    gpt = MODELS["39.1b"].job()
    with pytest.raises(InputError) as error:
        found(gpt, cluster(4))
    message = str(error.value)
    assert "no layout fits this model on 4 a100-80gb with 73.6 GB each" in message
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


def test_a_layer_that_fits_nowhere_is_an_error():
    with pytest.raises(InputError, match="nor on more of them: a single layer is too large"):
        found(job(2, 400_000, 16, 8), cluster(8))


def test_a_batch_that_no_layout_divides_is_an_error():
    with pytest.raises(
        InputError,
        match=r"--global-batch-size: no layout divides 7 samples, .* over 64 devices; choose \d+ samples, or",
    ):
        found(job(25, 5 * 128, 5, 7), cluster(64))
