"""GPT: embedding, causal transformer, output layer over the vocabulary.

Shapes in names: s sequence, b batch, h hidden, v vocabulary, n tokens whose logits are computed. With tensor
parallelism v counts this rank's part of the vocabulary; with sequence parallelism the s of `hidden_sbh` counts its part
of the sequence.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megatron.model.config import ModelConfig
from megatron.model.context import ModelContext
from megatron.model.language_model import LanguageModel
from megatron.model.transformer import Cache, LayerInputs, Transformer
from megatron.model.variants import variant
from megatron.model.vocabulary import OutputLayer
from megatron.ops.attention import MaskSpec
from megatron.parallel.collectives import gather_sequence
from megatron.parallel.random import DropoutKey
from megatron.parallel.stages import Chunk


class GPTModel(LanguageModel):
    """A decoder-only language model, GPT-2 by default and Llama by flags; or one chunk of its layers.

    Parameters are named as in Megatron core: `embedding.word_embeddings.weight`,
    `decoder.layers.0.self_attention.linear_qkv.weight`, ..., `output_layer.weight`.
    """

    def __init__(self, config: ModelConfig, context: ModelContext, chunk: Chunk | None = None) -> None:
        """Build `chunk` of the model, by default all of it."""
        super().__init__(config, context, chunk)
        self.decoder = variant(Transformer, config)(config, context, self.chunk)
        self.output_layer: OutputLayer | None = None
        if self.chunk.last:
            holds = self.chunk.first or self.chunk.v_shaped
            self.output_layer = variant(OutputLayer, config)(config, context, first=holds)

    def forward(
        self,
        tokens_bs: Tensor,
        position_ids_bs: Tensor,
        *,
        hidden_sbh: Tensor | None = None,
        labels_bs: Tensor | None = None,
        loss_grad_bs: Tensor | None = None,
        document_ids_bs: Tensor | None = None,
        cache: Cache | None = None,
        logit_positions: tuple[Tensor, Tensor] | None = None,
        dropout_key: DropoutKey | None = None,
        sequence_grad: Tensor | None = None,
    ) -> Tensor:
        """Logits [b, s, v], or [n, v] at `logit_positions`; with labels the loss of every position in fp32, [b, s].
        A chunk that is not the last returns its hidden states.

        Args:
            hidden_sbh: output of the chunk before, unless this is the first.
            loss_grad_bs: gradient of each loss, if it is known.
            document_ids_bs: if given, positions attend only within their own document.
            cache: if given, the tokens continue those that it holds.
            logit_positions: rows [n] and positions [n] of the tokens whose logits are computed.
            dropout_key: None drops nothing.
            sequence_grad: as in `LayerInputs`.
        """
        inputs = self.layer_inputs(
            position_ids_bs, document_ids_bs, cache, dropout_key=dropout_key, sequence_grad=sequence_grad
        )
        hidden_sbh = self.transform(self.decoder, tokens_bs, position_ids_bs, inputs, hidden_sbh)
        if self.output_layer is None:
            return hidden_sbh
        if labels_bs is not None:
            return self.output_layer(hidden_sbh, self.word_table, labels_bs, loss_grad_bs)
        if logit_positions is None:
            logits_sbv = self.output_layer(hidden_sbh, self.word_table)
            return logits_sbv[..., : self.num_valid_rows].transpose(0, 1)
        if self.context.sequence_parallel:
            hidden_sbh = gather_sequence(hidden_sbh, self.context.tp)
        rows, positions = logit_positions
        hidden_1nh = hidden_sbh[positions, rows].unsqueeze(0)
        # With sequence parallelism the output layer gathers [1, n, h] to [tp, n, h], of equal rows.
        return self.output_layer(hidden_1nh, self.word_table)[0, :, : self.num_valid_rows]

    def layer_inputs(
        self, position_ids_bs: Tensor, document_ids_bs: Tensor | None, cache: Cache | None, **others: Any
    ) -> LayerInputs:
        """Inputs of the layers, from arguments of `forward`; `others` are further fields."""
        others |= {"rotary": self.rotary(position_ids_bs), "position_ids_bs": position_ids_bs}
        if cache is None:
            spec = MaskSpec(
                length=position_ids_bs.shape[1] * self.context.cp.size,
                document_ids_bs=document_ids_bs,
                device=position_ids_bs.device,
            )
            return LayerInputs(mask_bnst=self.context.ops.make_mask(spec), mask_spec=spec, **others)
        mask_bnst = None if cache.mask_bst is None else cache.mask_bst.unsqueeze(1)
        return LayerInputs(mask_bnst=mask_bnst, causal=cache.causal, cache=cache, **others)
