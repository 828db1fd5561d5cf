"""Read exported Hugging Face folders with the transformers of any Python environment; nothing of this program is used.

Standard input is a JSON object: folder to {"texts", "tokens", "types"}, the last for BERT only. Standard output is one:
"version", and folder to {"ids", "dtype", "logits"}, or to null for a model that this version of transformers lacks.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers


@torch.no_grad()
def read(
    folder: str, texts: list[str], tokens: list[list[int]], types: list[list[int]] | None
) -> dict[str, Any] | None:
    """Return token ids of the texts, the dtype of the weights, and the logits of the tokens in fp32."""
    architecture = json.loads(Path(folder, "config.json").read_text())["architectures"][0]
    if not hasattr(transformers, architecture):
        return None
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    model, report = getattr(transformers, architecture).from_pretrained(
        folder, torch_dtype="auto", attn_implementation="eager", output_loading_info=True
    )
    wrong = {key: list(names) for key, names in report.items() if names}
    assert not wrong, (folder, wrong)
    dtype = str(model.dtype)
    more = {} if types is None else {"token_type_ids": torch.tensor(types)}
    out = model.float().eval()(torch.tensor(tokens), **more)
    names = ("logits", "prediction_logits", "seq_relationship_logits")
    return {"ids": ids, "dtype": dtype, "logits": [out[name].tolist() for name in names if name in out]}


if __name__ == "__main__":
    transformers.utils.logging.set_verbosity_error()
    requests = json.load(sys.stdin)
    results: dict[str, Any] = {folder: read(folder, **request) for folder, request in requests.items()}
    json.dump({"version": transformers.__version__, **results}, sys.stdout)
