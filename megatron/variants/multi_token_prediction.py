"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437 section 2.2).

At depth k = 1 ... D a layer of its own predicts token i + k + 1 at position i. Its input joins the hidden state of
depth k - 1 with the embedding of token i + k. Embedding and output layer are the model's.

Shapes in names: s sequence (with sequence parallelism this rank's part for hidden states), b batch, h hidden.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.data.batch import Batch, sequence_field
from megatron.data.gpt_dataset import GPTBatch
from megatron.errors import InputError
from megatron.model.config import ModelConfig
from megatron.model.context import ModelContext
from megatron.model.gpt import GPTModel
from megatron.model.layers import ColumnParallelLinear
from megatron.model.transformer import LayerInputs, Norm, TransformerLayer
from megatron.model.variants import variant
from megatron.model.vocabulary import OutputLayer, VocabParallelEmbedding
from megatron.parallel.mesh import ALONE
from megatron.parallel.parameters import normal, xavier_uniform
from megatron.parallel.random import DropoutKey, dropout
from megatron.parallel.recompute import recompute
from megatron.parallel.stages import Chunk
from megatron.training.config import RunConfig
from megatron.training.task import Task


@dataclasses.dataclass(frozen=True, kw_only=True)
class MTPBatch(GPTBatch):
    """A batch with what each position reads of later ones, which context parallelism gives to other ranks.

    Attributes:
        later_tokens: int64 [batch, seq, D], the token k = 1 ... D positions later.
        later_labels: int64 [batch, seq, 1 + D], the label 0 ... D positions later.
        loss_masks: float32 [batch, seq, 1 + D], those of `loss_masks`.
    """

    later_tokens: Tensor = sequence_field(dim=1)
    later_labels: Tensor = sequence_field(dim=1)
    loss_masks: Tensor = sequence_field(dim=1)

    @classmethod
    def of(cls, batch: GPTBatch, depths: int) -> MTPBatch:
        """The batch with what `depths` read, if it has it not yet."""
        if isinstance(batch, MTPBatch):
            return batch
        return cls(
            **dict(batch.items()),
            later_tokens=torch.stack([shifted(batch.tokens, k + 1) for k in range(depths)], -1),
            later_labels=torch.stack([shifted(batch.labels, k) for k in range(1 + depths)], -1),
            loss_masks=loss_masks(batch, depths).movedim(0, -1),
        )


class MTPLayer(nn.Module):
    """The module of one depth. Parameters are named and laid out as in Megatron core.

    Every tensor-parallel rank holds the joining projection, `eh_proj`, whole.
    """

    def __init__(self, config: ModelConfig, depth: int, context: ModelContext) -> None:
        """`depth`: k - 1."""
        super().__init__()
        self.context, self.dropout, h = context, config.hidden_dropout, config.hidden_size
        self.fp32, norm = config.fp32_residual_connection, variant(Norm, config)
        self.enorm, self.hnorm = norm(config, context), norm(config, context)
        alone = dataclasses.replace(context, tp=ALONE, kv=ALONE, sequence_parallel=False)
        xavier = config.init_method_xavier_uniform
        init = xavier_uniform(2 * h, h) if xavier else normal(config.init_method_std)
        shard = context.replicated(h, 2 * h)
        self.eh_proj = ColumnParallelLinear(2 * h, h, bias=False, init=init, context=alone, shard=shard)
        # Dense or with experts as the model's last layer is.
        self.transformer_layer = variant(TransformerLayer, config)(config, config.num_layers - 1, context)
        self.transformer_layer.layer = config.num_layers + depth  # keys its dropout
        self.final_layernorm = norm(config, context)

    def forward(self, hidden_sbh: Tensor, embedded_sbh: Tensor, inputs: LayerInputs) -> Tensor:
        """Hidden states of this depth, [s, b, h], from those of the depth before and the embeddings of its tokens."""
        layer, ops = self.transformer_layer, self.context.ops
        if self.dropout > 0 and inputs.dropout_key is not None:
            key, parts = inputs.dropout_key.at_layer(layer.layer), self.context.dropout_parts
            embedded_sbh = ops.run(dropout, embedded_sbh, self.dropout, key, "embedding", *parts)
        x_sbh = self.eh_proj(torch.cat((self.enorm(embedded_sbh), self.hnorm(hidden_sbh)), dim=-1))
        if self.fp32:
            x_sbh = x_sbh.float()

        def run(x: Tensor) -> Tensor:
            return layer(x, inputs)

        ((_, recomputed), *_) = self.context.recompute.groups(1)
        x_sbh = recompute(run, x_sbh, self.context.recompute.axis) if recomputed else run(x_sbh)
        return self.final_layernorm(x_sbh).to(layer.dtype)


class MTPBlock(nn.Module):
    """The modules of all depths.

    Attributes:
        word_embeddings: on the last of several pipeline stages, its copy of the word embeddings.
    """

    def __init__(self, config: ModelConfig, context: ModelContext, *, first: bool) -> None:
        """`first`: the stage also holds the embedding, which the depths use."""
        super().__init__()
        self.word_embeddings: VocabParallelEmbedding | None = None
        if not first:
            self.word_embeddings = variant(VocabParallelEmbedding, config)(config, context, tied=True)
        self.layers = nn.ModuleList(MTPLayer(config, i, context) for i in range(config.mtp_num_layers))


class MTPModel(GPTModel):
    """A GPT, or one chunk of its layers, whose last chunk also predicts later tokens in training.

    `forward` is GPT's, logits and losses of the next token, unless it gets `mtp_batch`.
    """

    def __init__(self, config: ModelConfig, context: ModelContext, chunk: Chunk | None = None) -> None:
        super().__init__(config, context, chunk)
        self.mtp: MTPBlock | None = None
        if self.chunk.last:
            # A tied output layer uses the block's copy of the table in place of a copy of its own.
            self.output_layer = variant(OutputLayer, config)(config, context, first=True)
            self.mtp = MTPBlock(config, context, first=self.chunk.first or self.chunk.v_shaped)

    @property
    def word_embeddings(self) -> VocabParallelEmbedding | None:
        """The word embeddings, or the last stage's copy of them, if this chunk has them."""
        own = None if self.mtp is None else self.mtp.word_embeddings
        return super().word_embeddings if own is None else own

    def forward(
        self,
        tokens_bs: Tensor,
        position_ids_bs: Tensor,
        *,
        hidden_sbh: Tensor | None = None,
        dropout_key: DropoutKey | None = None,
        mtp_batch: GPTBatch | None = None,
        **others: Any,
    ) -> Tensor:
        """As `GPTModel.forward`, or with `mtp_batch`, which has the other arguments, `loss_sums` of the last chunk."""
        if mtp_batch is None:
            return super().forward(
                tokens_bs, position_ids_bs, hidden_sbh=hidden_sbh, dropout_key=dropout_key, **others
            )
        inputs = self.layer_inputs(
            position_ids_bs,
            mtp_batch.document_ids,
            None,
            dropout_key=dropout_key,
            sequence_grad=mtp_batch.sequence_grad,
        )
        hidden_sbh = self.transform(self.decoder, tokens_bs, position_ids_bs, inputs, hidden_sbh)
        if self.mtp is None:
            return hidden_sbh
        return self.loss_sums(hidden_sbh, inputs, MTPBatch.of(mtp_batch, len(self.mtp.layers)))

    def loss_sums(self, hidden_sbh: Tensor, inputs: LayerInputs, batch: MTPBatch) -> Tensor:
        """Sums over the batch of the losses of each depth from 0, the next token, to D, [1 + D] fp32.

        Args:
            hidden_sbh: the model's hidden states after the final norm.
        """
        output_layer, embeddings = self.output_layer, self.word_embeddings
        assert output_layer is not None and self.mtp is not None and embeddings is not None
        embedded = [embeddings(tokens_bs.t()) for tokens_bs in batch.later_tokens.unbind(-1)]
        sums = []
        for depth, mask_bs in enumerate(batch.loss_masks.unbind(-1)):
            if depth > 0:
                hidden_sbh = self.mtp.layers[depth - 1](hidden_sbh, embedded[depth - 1], inputs)
            grad_bs = None if batch.loss_grad is None else mask_bs * batch.loss_grad[depth]
            labels_bs = batch.later_labels[..., depth]
            losses_bs = output_layer(hidden_sbh, self.word_table, labels_bs, grad_bs)
            sums.append((losses_bs * mask_bs).sum())
        return torch.stack(sums)


def shifted(x_bs: Tensor, by: int, fill: int = 0) -> Tensor:
    """Entry i + `by` at each position i, and `fill` at the last positions."""
    return F.pad(x_bs[:, by:], (0, by), value=fill)


def loss_masks(batch: GPTBatch, depths: int) -> Tensor:
    """Weight of each prediction, [1 + depths, b, s], as in Megatron core.

    Depth k has the loss mask of position i + k at i, and 0 at the last k positions. With --reset-attention-mask it is 0
    too if the two are of different documents, as in Megatron core with packed sequences.
    """
    masks = [shifted(batch.loss_mask, k) for k in range(1 + depths)]
    ids = batch.document_ids
    if ids is not None:
        masks = [mask * (shifted(ids, k, -1) == ids) for k, mask in enumerate(masks)]
    return torch.stack(masks)


def with_mtp(config: RunConfig, task: Task) -> Task:
    """The task with a further loss for each of --mtp-num-layers, in training and in its validation.

    Raises:
        InputError: the task or the model allow no multi-token prediction.
    """
    depths, model = config.model.mtp_num_layers, config.model
    name = f"--mtp-num-layers: {depths}"
    if not depths:
        if model.mtp_loss_scaling_factor != ModelConfig.mtp_loss_scaling_factor:
            raise InputError(
                f"--mtp-loss-scaling-factor: {model.mtp_loss_scaling_factor} needs --mtp-num-layers"
            )
        return task
    if task.name != "GPT":
        raise InputError(f"{name} is for GPT, not {task.name}; leave it out")
    if task.loss_names != ("lm loss",):
        raise InputError(f"{name} is for GPT's loss, not {' and '.join(task.loss_names)}; leave it out")
    if model.position_embedding_type not in ("rope", "none"):
        raise InputError(
            f"{name} needs --position-embedding-type rope or none, not {model.position_embedding_type}"
        )
    if model.embed_layernorm:
        raise InputError(f"{name} and --embed-layernorm exclude each other; drop one")
    if depths >= config.data.seq_length:
        raise InputError(
            f"{name} predicts no token within --seq-length {config.data.seq_length}; choose a smaller number"
        )

    def build_model(config: RunConfig, context: ModelContext, chunk: Chunk | None) -> MTPModel:
        return MTPModel(config.model, context, chunk)

    def with_later(batch: Batch) -> Batch:
        # Other tasks' batches, which the run evaluates, have no losses of later tokens.
        return MTPBatch.of(batch, depths) if isinstance(batch, GPTBatch) else batch

    def loss_denominators(batch: GPTBatch) -> Tensor:
        return MTPBatch.of(batch, depths).loss_masks.sum((0, 1))

    return dataclasses.replace(
        task,
        loss_names=(*task.loss_names, *(f"mtp_{k + 1} loss" for k in range(depths))),
        loss_weights=(1.0, *[model.mtp_loss_scaling_factor / depths] * depths),
        build_model=build_model,
        before_dividing=with_later,
        loss_denominators=loss_denominators,
        forward=forward,
    )


def forward(model: MTPModel, batch: GPTBatch, hidden: Tensor | None, key: DropoutKey | None) -> Tensor:
    """`Task.forward`."""
    return model(batch.tokens, batch.position_ids, hidden_sbh=hidden, dropout_key=key, mtp_batch=batch)
