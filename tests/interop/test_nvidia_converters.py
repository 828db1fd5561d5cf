"""Exported Megatron-LM checkpoints, read by the unchanged converters of `transformers`.

transformers has had no converters since 4.48. To run these tests, unpack an older wheel and name its folder of models:

    pip download transformers==4.47.1 --no-deps && unzip transformers-4.47.1-py3-none-any.whl -d unpacked
    TRANSFORMERS_CONVERTERS=unpacked/transformers/models pytest tests/interop/test_nvidia_converters.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from nvidia import checkpoint_of

from megatron.checkpoint.checkpoint import Checkpoint
from megatron.inference.conversion import TOLERANCE, largest_difference, our_logits, their_logits
from megatron.interop.nvidia.write import write_megatron

FUSED, ERF, OPENAI = {}, {"bias_gelu_fusion": False}, {"bias_gelu_fusion": False, "openai_gelu": True}


def convert(kind: str, checkpoint: Checkpoint, folder: Path, *flags: object) -> Path:
    """Export a checkpoint, run transformers' converter on it, and return the resulting Hugging Face folder."""
    converters = os.environ.get("TRANSFORMERS_CONVERTERS")
    if converters is None:
        pytest.skip("needs TRANSFORMERS_CONVERTERS, the folder transformers/models of a version before 4.48")
    script = Path(converters).resolve() / kind / f"convert_{kind}_checkpoint.py"
    write_megatron(checkpoint, folder / "megatron", lambda size: None, tensor_parallel=1, pipeline_parallel=1)
    path = folder / "megatron" / "release" / "mp_rank_00" / "model_optim_rng.pt"
    # The files hold an argparse.Namespace, which torch loads only with this variable. They are trusted.
    env = os.environ | {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1", "HF_HUB_OFFLINE": "1"}
    words = [sys.executable, script, *flags, path]
    done = subprocess.run(list(map(str, words)), cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return path.parent


@pytest.mark.parametrize("fields", [FUSED, ERF, OPENAI], ids=["fused", "erf", "openai"])
def test_gpt2(tmp_path: Path, shared: Path, fields: dict) -> None:
    checkpoint = checkpoint_of(tmp_path, **fields)
    checkpoint.state["config"]["tokenizer"]["tokenizer_type"] = "GPT2BPETokenizer"
    tokenizer = tmp_path / "openai-community" / "gpt2"  # the converter would download it
    tokenizer.mkdir(parents=True)
    for theirs, ours in (("vocab.json", "gpt2-tiny-vocab.json"), ("merges.txt", "gpt2-tiny-merges.txt")):
        (tokenizer / theirs).symlink_to(shared / "data" / ours)
    config = {"model_type": "gpt2", "tokenizer_class": "GPT2Tokenizer"}
    (tokenizer / "config.json").write_text(json.dumps(config))
    folder = convert("megatron_gpt2", checkpoint, tmp_path)
    difference = largest_difference(our_logits(checkpoint), their_logits(folder, checkpoint))
    assert difference < TOLERANCE


@pytest.mark.parametrize("fields", [ERF, OPENAI], ids=["erf", "openai"])
def test_bert(tmp_path: Path, fields: dict) -> None:
    transformers = pytest.importorskip("transformers")
    checkpoint = checkpoint_of(tmp_path, "BERT", **fields)
    config = transformers.MegatronBertConfig(
        layer_norm_eps=1e-5, hidden_act="gelu_new" if fields == OPENAI else "gelu", intermediate_size=128
    )
    config.architectures = ["MegatronBertForPreTraining"]
    config.to_json_file(tmp_path / "config.json", use_diff=False)
    folder = convert("megatron_bert", checkpoint, tmp_path, "--config_file", tmp_path / "config.json")
    difference = largest_difference(our_logits(checkpoint), their_logits(folder, checkpoint))
    assert difference < TOLERANCE
