"""The converter of llama.cpp takes exports: the GGUF file has their weights and tokens.

LLAMA_CPP names a checkout of llama.cpp, and OTHER_PYTHON the Python of an environment that its converter runs in.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hf_models import save_hf
from safetensors.numpy import load_file

from megatron.checkpoint.find import find_checkpoint
from megatron.interop.convert import write_native
from megatron.interop.huggingface.read import open_huggingface
from megatron.interop.huggingface.write import write_huggingface

LLAMA_CPP = os.environ.get("LLAMA_CPP", "")
# The converter knows the tokenizers of published models only, such as GPT-2's.
NUM_TOKENS = 50257


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "llama", "llama tied"])
def test_conversion_to_gguf(kind: str, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not LLAMA_CPP:
        pytest.skip("needs LLAMA_CPP, a checkout of llama.cpp")
    vocabulary = shared / "data" / "gpt2-vocab.json"
    monkeypatch.syspath_prepend(str(Path(LLAMA_CPP) / "gguf-py"))
    gguf = pytest.importorskip("gguf")
    theirs, written, result = tmp_path / "theirs", tmp_path / "written", tmp_path / "model.gguf"
    theirs.mkdir()
    shutil.copy(vocabulary, theirs / "vocab.json")
    shutil.copy(shared / "data" / "gpt2-merges.txt", theirs / "merges.txt")
    length = "n_positions" if kind == "gpt2" else "max_position_embeddings"
    save_hf(theirs, kind, torch.float32, **{"vocab_size": NUM_TOKENS, length: 64})
    write_native(open_huggingface(theirs), tmp_path / "native", lambda n: None)
    write_huggingface(find_checkpoint(str(tmp_path / "native"), None), written, lambda n: None)

    python = os.environ.get("OTHER_PYTHON") or sys.executable
    converter = [python, Path(LLAMA_CPP) / "convert_hf_to_gguf.py", written]
    done = subprocess.run(
        [*converter, "--outtype", "f32", "--outfile", result], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = gguf.GGUFReader(result)
    # Some are transposed or have the rows of their heads in another order.
    exported = sorted_values(load_file(written / "model.safetensors").values())
    assert sorted_values(tensor.data for tensor in found.tensors) == exported
    tokens = found.fields["tokenizer.ggml.tokens"]
    ids = json.loads(vocabulary.read_text(encoding="utf-8"))
    assert [bytes(tokens.parts[i]).decode() for i in tokens.data] == sorted(ids, key=ids.__getitem__)


def sorted_values(tensors: object) -> list[bytes]:
    """The values of each tensor in order."""
    return sorted(np.sort(np.asarray(x), axis=None).tobytes() for x in tensors)
