"""The part that GPT and BERT share: from token ids to the hidden states of the last layer."""

from __future__ import annotations

from torch import Tensor, nn

from megatron.model.config import ModelConfig
from megatron.model.context import ModelContext
from megatron.model.transformer import LayerInputs, Transformer
from megatron.model.variants import ROPE_SCALINGS
from megatron.model.vocabulary import Embedding, VocabParallelEmbedding, num_valid_rows
from megatron.ops.rotary import rotary_angles
from megatron.parallel.stages import Chunk


class LanguageModel(nn.Module):
    """Base of GPT and BERT, or of one chunk of their layers: holds the embedding and runs the transformer.

    Subclasses add the transformer under their own name and the heads on top of it. They are built on the meta device:
    parameters get memory from `ParamBuffer` and values from a checkpoint or `ParamBuffer.initialize`.
    """

    def __init__(
        self,
        config: ModelConfig,
        context: ModelContext,
        chunk: Chunk | None,
        *,
        output_layer: bool = True,
        token_types: int = 0,
    ) -> None:
        """`output_layer`: the last chunk ends in a projection to the vocabulary."""
        super().__init__()
        self.config, self.context = config, context
        self.chunk = chunk or Chunk(range(config.num_layers))
        self.num_valid_rows = num_valid_rows(config, context)
        self.embedding: Embedding | None = None
        if self.chunk.first:
            untied = config.untie_embeddings_and_output_weights or not output_layer
            tied = not (self.chunk.last or self.chunk.v_shaped) and (not untied or config.mtp_num_layers > 0)
            self.embedding = Embedding(config, context, tied=tied, token_types=token_types)
        # The chunk of this rank whose embedding this one uses, in a tuple, since it is no submodule.
        self.first_chunk: tuple[LanguageModel, ...] = (self,) if self.chunk.first else ()

    @property
    def word_embeddings(self) -> VocabParallelEmbedding | None:
        """The word embeddings, if this chunk or the rank's first chunk has them."""
        embeddings = [chunk.embedding for chunk in self.first_chunk]
        return embeddings[0].word_embeddings if embeddings and embeddings[0] is not None else None

    @property
    def word_table(self) -> Tensor | None:
        """The weight of `word_embeddings`."""
        return None if self.word_embeddings is None else self.word_embeddings.weight

    def rotary(self, position_ids_bs: Tensor) -> tuple[Tensor, Tensor] | None:
        """`LayerInputs.rotary` at these positions; None without RoPE."""
        config = self.config
        if config.position_embedding_type != "rope":
            return None
        scaling = ROPE_SCALINGS[config.rope_scaling_type](config) if config.use_rope_scaling else None
        return rotary_angles(position_ids_bs, config.rotary_channels, config.rotary_base, scaling)

    def transform(
        self,
        transformer: Transformer,
        tokens_bs: Tensor,
        position_ids_bs: Tensor,
        inputs: LayerInputs,
        hidden_sbh: Tensor | None,
        types_bs: Tensor | None = None,
    ) -> Tensor:
        """Hidden states after this chunk's layers, [s, b, h]; with sequence parallelism this rank's part of s.

        Args:
            hidden_sbh: output of the chunk before, unless this is the first.
            types_bs: token types, if the model has them.
        """
        if self.embedding is not None:
            hidden_sbh = self.embedding(tokens_bs, position_ids_bs, inputs.dropout_key, types_bs)
        return transformer(hidden_sbh, inputs)
