"""Invalid layouts are refused in one line, before anything is built, with valid suggestions."""

from __future__ import annotations

import pytest

from megatron.arguments import parse_run_config
from megatron.errors import InputError
from megatron.model.config import ModelConfig
from megatron.training.layout import check_layout

BASE = (
    "--num-layers 12 --hidden-size 96 --num-attention-heads 12 --seq-length 64 --micro-batch-size 2 "
    "--train-samples 1000 --lr 1e-3"
)
T, P = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
SCHEDULE, LAYOUT, DEPTHS = "--pipeline-schedule", "--pipeline-model-parallel-layout", "--mtp-num-layers"
EMBEDDING, LOSS = "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"
V = "--num-layers-per-virtual-pipeline-stage"
FIRST, LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
GQA, FULL = "--group-query-attention --num-query-groups", "--recompute-granularity full"

# Processes, flags, message, and its suggestions: flags to add, after the number of processes if it differs.
INVALID = [
    (
        2,
        f"{T} 3",
        f"{T} 3 x {P} 1 needs a multiple of 3 processes, and there are 2; start 3 ",
        ["3", f"{T} 2"],
    ),
    (
        6,
        f"{T} 4",
        f"{T} 4 x {P} 1 needs a multiple of 4 processes, and there are 6; start 4 or 8",
        ["4", "8"],
    ),
    (8, f"{T} 2 {P} 3", f"{T} 2 x {P} 3 needs a multiple of 6 processes", ["6", "12", f"{P} 4"]),
    (
        1,
        f"{P} 2",
        f"{T} 1 x {P} 2 needs a multiple of 2 processes, and there is 1; start 2 ",
        ["2", f"{P} 1"],
    ),
    (8, f"{T} 8", f"{T}: 8 does not divide --num-attention-heads 12; choose 4, or ", [f"{T} 4", f"6 {T} 6"]),
    (5, f"{T} 5", f"{T}: 5 does not divide --num-attention-heads 12; choose 1, or ", [f"{T} 1", f"4 {T} 4"]),
    (
        4,
        f"{T} 4 --ffn-hidden-size 90",
        f"{T}: 4 does not divide --ffn-hidden-size 90; choose 2, or ",
        [f"{T} 2"],
    ),
    (
        4,
        f"{T} 4 --sequence-parallel --seq-length 66",
        f"{T}: 4 does not divide --seq-length 66, as ",
        [f"{T} 2"],
    ),
    (
        4,
        f"{T} 4 {FULL} --distribute-saved-activations --hidden-size 98 --kv-channels 8 --ffn-hidden-size 96",
        f"{T}: 4 does not divide --hidden-size 98, as --distribute-saved-activations needs; choose 2",
        [f"{T} 2"],
    ),
    (
        4,
        f"{T} 4 {GQA} 3",
        f"{T}: 4 neither divides --num-query-groups 3 nor is a multiple",
        ["3 " + f"{T} 3"],
    ),
    (
        6,
        f"{T} 3 {GQA} 2",
        f"{T}: 3 neither divides --num-query-groups 2 nor is a multiple",
        [f"{T} 2", f"{T} 6"],
    ),
    (5, f"{P} 5", f"{P}: 5 stages do not divide --num-layers 12; choose 1, 2, 3, 4, 6 or 12", [f"{FIRST} 4"]),
    (16, f"{P} 16", f"{P}: 16 stages do not divide --num-layers 12; choose 1, 2, 3, 4, ", [f"{P} 4"]),
    (
        4,
        f"{P} 4 {V} 2",
        f"{V} 2: chunks of 2 layers on 4 stages ({P}) do not make up --num-layers 12; choose chunks of 1 or 3",
        [f"{V} 1 --global-batch-size 8"],
    ),
    (
        5,
        f"{P} 5 {V} 1",
        f"{V} 1: chunks of 1 layer on 5 stages ({P}) do not",
        ["--num-layers 10 --global-batch-size 10"],
    ),
    (
        4,
        f"{P} 4 {FIRST} 1",
        f"{FIRST} 1: the other layers of --num-layers 12 do not divide into the other 3",
        [f"{FIRST} 0", f"{FIRST} 3"],
    ),
    (
        4,
        f"{P} 4 {LAST} 13",
        f"{LAST} 13: the other layers of --num-layers 12 do not divide into the other 3",
        [f"{LAST} 6", f"{LAST} 9"],
    ),
    (
        4,
        f"{P} 4 {FIRST} 12",
        f"{FIRST} 12: the other layers of --num-layers 12 do not divide into the other 3",
        [f"{FIRST} 6", f"{FIRST} 9"],
    ),
    (
        4,
        f"{P} 4 {FIRST} 8 {LAST} 8",
        f"{FIRST} 8 and {LAST} 8: the other layers of --num-layers 12 do not",
        [f"{FIRST} 2"],
    ),
    (
        2,
        f"{P} 2 {FIRST} 1 {LAST} 1",
        f"{FIRST} 1 and {LAST} 1: the two stages hold 2 layers of",
        [f"{LAST} 11"],
    ),
    (
        20,
        f"{P} 20 {FIRST} 1",
        f"{FIRST} 1: the other layers of --num-layers 12 do not divide into the other 19",
        [f"12 {P} 12 {FIRST} 1"],
    ),
    (
        4,
        f"{P} 4 {EMBEDDING} {LOSS}",
        f"{P}: 4 stages do not divide --num-layers 12 with the embedding and the loss, 14 in all; choose "
        "--num-layers 10 or 14",
        ["--num-layers 10", "--num-layers 14"],
    ),
    (
        2,
        f"{P} 2 {V} 2 {LOSS}",
        f"{V} 2: chunks of 2 layers on 2 stages ({P}) do not make up --num-layers 12 with the loss, 13 in all; choose "
        "--num-layers 11 or 13",
        ["--num-layers 11 --global-batch-size 8", f"--num-layers 15 {V} 4 --global-batch-size 8"],
    ),
    (
        2,
        f"{P} 2 {LAYOUT} Et*6|t*6,x,L",
        f"{LAYOUT} Et*6|t*6,x,L: 'x' is none of E (embedding), t (layer), ",
        [],
    ),
    (
        2,
        f"{P} 2 {LAYOUT} Et*6|t*6",
        f"{LAYOUT} Et*6|t*6: the model begins with one E and ends with one L, ",
        [],
    ),
    (
        2,
        f"{P} 2 {LAYOUT} Et*6,m|t*6,L",
        f"{LAYOUT} Et*6,m|t*6,L: the model begins with one E and ends with ",
        [],
    ),
    (3, f"{P} 3 {LAYOUT} Et*6||t*6L", f"{LAYOUT} Et*6||t*6L: part 2 of 3 is empty; give it a t", []),
    (
        2,
        f"{P} 2 {LAYOUT} Et*6|t*5,L",
        f"{LAYOUT} Et*6|t*5,L: it has 11 layers (t), and --num-layers is 12",
        [],
    ),
    (
        2,
        f"{P} 2 {LAYOUT} Et*6|t*6,m*2,L {DEPTHS} 1",
        f"{LAYOUT} Et*6|t*6,m*2,L: it has 2 depths of multi-token prediction (m), and {DEPTHS} is 1; make them equal",
        [f"{DEPTHS} 2"],
    ),
    (
        4,
        f"{P} 2 {V} 3 {SCHEDULE} dualpipe-v --global-batch-size 12",
        f"{SCHEDULE}: dualpipe-v needs 4 microbatches, two for each stage; --global-batch-size 12 makes 3; "
        "use zb-v, or at least 16",
        ["--global-batch-size 16", f"{SCHEDULE} zb-v"],
    ),
    (
        2,
        f"{P} 2 {V} 2 {SCHEDULE} zb-v",
        f"{SCHEDULE}: zb-v has two chunks on each of 2 stages, but 3 are given; set {V} to --num-layers / 4",
        [f"{V} 3"],
    ),
    (
        2,
        f"{P} 2 {V} 2 {SCHEDULE} auto",
        f"{SCHEDULE}: auto has two chunks on each of 2 stages, but 3 are given; set {V} to --num-layers / 4, or leave "
        "it out for one chunk",
        [f"{V} 3"],
    ),
    (
        2,
        f"{P} 2 {SCHEDULE} zb-h1 --overlap-grad-reduce",
        f"{SCHEDULE}: zb-h1 does not go with --overlap-grad-",
        [],
    ),
    (
        2,
        f"{P} 2 {SCHEDULE} zb-h2 --ops-backend layers",
        f"{SCHEDULE}: zb-h2 splits the backward pass, which ",
        [],
    ),
    (2, f"{P} 2 {SCHEDULE} zb-v", f"{SCHEDULE}: zb-v needs {V}", [f"{V} 3"]),
    (2, f"{P} 2 {V} 3 {SCHEDULE} zb-h1", f"{SCHEDULE}: zb-h1 does not go with {V} 3", [f"{SCHEDULE} zb-v"]),
    (
        2,
        f"{P} 2 {V} 3 {SCHEDULE} zb-v --sample-interval 1 --sample-prompts file",
        f"--sample-interval does not go with {SCHEDULE} zb-v; leave it out",
        [],
    ),
    (2, f"{P} 2 {FULL} --recompute-num-layers 20", "--recompute-num-layers: 20 is more than the 6 ", []),
    (
        4,
        "--global-batch-size 12",
        "--global-batch-size 12 is not a multiple of 8, ",
        ["--global-batch-size 8"],
    ),
    (4, "--global-batch-size 2", "--global-batch-size 2 is not a multiple of 8, ", ["--global-batch-size 8"]),
    (
        8,
        f"{P} 4 {V} 1 --global-batch-size 20",
        f"{V}: the interleaved schedule needs a multiple of 4 microbatches, one for each stage; "
        "--global-batch-size 20 makes 5, and the nearest is 16 or 32",
        ["--global-batch-size 16", "--global-batch-size 32"],
    ),
    (
        2,
        f"{P} 2 {V} 3 --global-batch-size 8 --rampup-batch-size 2 2 100",
        f"{V}: the interleaved schedule needs a multiple of 2 microbatches, one for each stage; "
        "--rampup-batch-size 2 2 100: its batch size 2 makes 1, and the nearest is 4",
        ["--rampup-batch-size 4 4 100"],
    ),
]


def check(processes: int, flags: str) -> None:
    check_layout(parse_run_config(f"{BASE} {flags}".split(), description="a test", defaults={}), processes)


@pytest.mark.parametrize(
    ("processes", "flags", "message", "suggestions"), INVALID, ids=[f"{n} {f}" for n, f, _, _ in INVALID]
)
def test_errors_suggest_valid_layouts(
    processes: int, flags: str, message: str, suggestions: list[str]
) -> None:
    with pytest.raises(InputError) as error:
        check(processes, flags)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value) and len(str(error.value)) < 260
    for suggestion in suggestions:
        number = [word for word in suggestion.split()[:1] if word.isdecimal()]
        check(int(number[0]) if number else processes, f"{flags} {suggestion.removeprefix(''.join(number))}")


@pytest.mark.parametrize(
    ("processes", "flags"),
    [
        (1, ""),
        (24, f"{T} 4 {P} 3"),
        (12, f"{T} 12 {GQA} 4"),
        (2, f"{P} 2 {FIRST} 12"),
        (4, f"{P} 4 {FIRST} 0 {LAST} 2"),
        (4, f"{P} 4 --global-batch-size 2"),
        (4, f"{P} 4 {V} 1 --global-batch-size 16"),
        (2, f"{P} 2 {FULL} --recompute-num-layers 6"),
    ],
)
def test_valid_layouts(processes: int, flags: str) -> None:
    check(processes, flags)


@pytest.mark.parametrize(
    ("groups", "sizes"), [(1, [1, 2, 4, 8]), (2, [1, 2, 4, 8]), (8, [1, 2, 4, 8]), (3, [1])]
)
def test_sizes_that_can_split_the_query_groups(groups: int, sizes: list[int]) -> None:
    """Ranks share whole groups, or groups have whole numbers of ranks."""
    shape = {"num_layers": 1, "hidden_size": 96, "num_attention_heads": 24, "max_position_embeddings": 8}
    model = ModelConfig(**shape, group_query_attention=True, num_query_groups=groups)
    assert [ranks for ranks in (1, 2, 4, 8) if model.can_split(ranks)] == sizes
