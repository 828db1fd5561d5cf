"""Predictions of steps with --enable-optimizer-post-validation."""

from __future__ import annotations

import dataclasses

import pytest
from performance.test_post_validation import times
from published import cluster, job

from megatron.planner.explain import other_choices
from megatron.planner.layout import Job, Layout
from megatron.planner.our_program import memory_of, simulator_of
from megatron.planner.search import make_plan, search
from megatron.planner.simulate import Simulator
from megatron.planner.space import variants
from megatron.planner.trace import trace_events


def gpt(microbatches: int) -> Job:
    plain = job(16, 4096, 32, microbatches)
    model = dataclasses.replace(plain.model, untie_embeddings_and_output_weights=True)
    return dataclasses.replace(plain, model=model)


def simulator(name: str, stages: int, microbatches: int) -> Simulator:
    chunks = 2 if name == "zb-v" else 1
    layout = Layout(pipeline=stages, chunks=chunks, pipeline_schedule=name, post_validation=True)
    return simulator_of(gpt(microbatches), layout, cluster(8))


@pytest.mark.parametrize(
    ("name", "stages", "microbatches"),
    [
        ("zb-h2", 2, 4),
        ("zb-h2", 4, 8),
        ("zb-h2", 8, 16),
        ("zb-h1", 4, 8),
        ("zb-v", 4, 8),
        ("zb-v", 4, 16),
        ("zb-v", 2, 6),
    ],
)
def test_what_is_saved_if_passes_take_equal_times(
    name: str, stages: int, microbatches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a simulation of several steps, pass by pass: p - 1 passes with zb-h2."""
    monkeypatch.setattr(Simulator, "pass_seconds", lambda self, rank, chunk: (1.0, 2.0, 1.0, 1.0))
    monkeypatch.setattr(Simulator, "_transfer", lambda self: 0.0)
    monkeypatch.setattr(Simulator, "end_of_step", lambda self: 0.0)
    monkeypatch.setattr(Simulator, "optimizer", lambda self: 0.0)
    waiting, validated = times(name, stages, microbatches)
    assert simulator(name, stages, microbatches).saved == pytest.approx(waiting - validated)
    if name == "zb-h2":
        assert waiting - validated == stages - 1


def test_a_step_with_post_validation() -> None:
    """The bubble of zb-h2 is all but gone, the copy takes a pass over 16 bytes, and the bound holds."""
    validated = simulator("zb-h2", 4, 12)
    plain = dataclasses.replace(validated.layout, post_validation=False)
    machine = validated.cluster
    before, after = (make_plan(validated.job, x, machine) for x in (plain, validated.layout))
    owned = before.memory.moments / 8
    assert after.memory.total - before.memory.total == pytest.approx(16 * owned, rel=1e-3)
    copied = after.step.optimizer - before.step.optimizer
    assert copied == pytest.approx(before.step.optimizer * 32 / 34, rel=0.01)
    assert after.step.seconds == pytest.approx(before.step.seconds + copied - validated.saved)
    assert after.step.bubble < 0.25 * before.step.bubble
    assert validated.lower_bound() <= after.step.seconds * (1 + 1e-9)
    # Many microbatches are not simulated one by one, and what is saved of a step is the same.
    assert simulator("zb-h2", 4, 120).saved == pytest.approx(validated.saved, rel=0.05)


def test_a_search_chooses_it_where_it_gains() -> None:
    machine = cluster(8, "h100-80gb")
    model = gpt(16)
    both = {layout.post_validation for layout in variants(Layout(pipeline=8), model, machine)}
    assert both == {False, True}
    shape = Layout(pipeline=8)
    best = search(model, machine, num_plans=1, progress=lambda count: None, among=[shape]).plans[0]
    assert best.layout.pipeline_schedule == "zb-h2" and best.layout.post_validation
    assert "--enable-optimizer-post-validation" in best.layout.flags(model)
    changes = dict(other_choices(best, model, machine))
    assert not changes["no post-validation"].post_validation
    assert changes["1F1B or interleaving"].post_validation is False
    tied = dataclasses.replace(
        model, model=dataclasses.replace(model.model, untie_embeddings_and_output_weights=False)
    )
    assert not any(layout.post_validation for layout in variants(shape, tied, machine))
    experts = {"num_experts": 8, "moe_ffn_hidden_size": 1024, "add_bias_linear": False}
    mixture = dataclasses.replace(model, model=dataclasses.replace(model.model, **experts))
    assert any(layout.post_validation for layout in variants(shape, mixture, machine))


def test_a_trace_has_updates_where_stages_end() -> None:
    validated = simulator("zb-h2", 4, 8)
    updates = [event for event in trace_events(validated) if event.get("cat") == "optimizer"]
    assert len({event["ts"] for event in updates}) > 1
    assert memory_of(validated.job, validated.layout, validated.cluster).backup > 0
