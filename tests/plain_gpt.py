"""A GPT and its training loop in plain PyTorch, as a reference.

One process, separate tensors, no flat memory, and torch's AdamW.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        # Rows of qkv are grouped by head, as in Megatron-LM.
        q, k, v = self.qkv(self.ln_1(x)).view(b, t, self.heads, 3, c // self.heads).permute(3, 0, 2, 1, 4)
        scores = q @ k.transpose(-2, -1) / math.sqrt(c // self.heads)
        future = torch.ones(t, t, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, -math.inf).softmax(-1)
        x = x + self.proj((weights @ v).transpose(1, 2).reshape(b, t, c))
        return x + self.out(F.gelu(self.fc(self.ln_2(x)), approximate="tanh"))


class PlainGPT(nn.Module):
    def __init__(self, *, vocab_size: int, width: int, heads: int, layers: int, length: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.ln_f(x) @ self.wte.weight.t()

    def load_weights(self, weights: dict[str, torch.Tensor]) -> None:
        """Copy the weights of a checkpoint without the rows of vocabulary padding."""
        names = {
            "embedding.word_embeddings": "wte",
            "embedding.position_embeddings": "wpe",
            "decoder.final_layernorm": "ln_f",
            "decoder.layers": "blocks",
            "input_layernorm": "ln_1",
            "pre_mlp_layernorm": "ln_2",
            "self_attention.linear_qkv": "qkv",
            "self_attention.linear_proj": "proj",
            "mlp.linear_fc1": "fc",
            "mlp.linear_fc2": "out",
        }
        for name, tensor in weights.items():
            for theirs, ours in names.items():
                name = name.replace(theirs, ours)
            parameter = self.get_parameter(name)
            parameter.data.copy_(tensor[: len(parameter)])


def train(
    model: PlainGPT,
    batches: Iterable[torch.Tensor],
    *,
    steps: int,
    lr: float,
    min_lr: float,
    warmup: int,
    weight_decay: float,
    clip: float,
) -> Iterator[tuple[float, float]]:
    """Yield loss and gradient norm of each step. A batch is [b, t + 1] tokens."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), eps=1e-8)
    for step, batch in zip(range(steps), batches, strict=False):
        # Cosine decay with linear warmup; the first step has learning rate 0, as in Megatron-LM.
        if step <= warmup:
            rate = lr * step / warmup
        else:
            share = (step - warmup) / (steps - warmup)
            rate = min_lr + 0.5 * (lr - min_lr) * (1 + math.cos(math.pi * share))
        for group in optimizer.param_groups:
            group["lr"] = rate
        logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        yield loss.item(), norm.item()
