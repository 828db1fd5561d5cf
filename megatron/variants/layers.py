"""Orders of a layer's attention, MLP and norms other than pre-norm."""

from __future__ import annotations

from torch import Tensor

from megatron.model.transformer import LayerInputs, TransformerLayer


class PostNormLayer(TransformerLayer):
    """The original BERT's order (arXiv 1909.08053 figure 7a): norm(x) takes the place of x in both sums.

    With a first norm on the embeddings and the last one on the output, that is BERT's x = norm(x + f(x)).
    """

    def forward(self, x_sbh: Tensor, inputs: LayerInputs) -> Tensor:
        x_sbh = self.input_layernorm(x_sbh)
        x_sbh = self.pre_mlp_layernorm(x_sbh + self.attention_block(x_sbh, inputs))
        return x_sbh + self.mlp_block(x_sbh, inputs)


class ParallelLayer(TransformerLayer):
    """Parallel residual, x + attention(norm(x)) + mlp(norm(x)), with two norms (GPT-NeoX, arXiv 2204.06745)."""

    def forward(self, x_sbh: Tensor, inputs: LayerInputs) -> Tensor:
        attended_sbh = self.attention_block(self.input_layernorm(x_sbh), inputs)
        return x_sbh + attended_sbh + self.mlp_block(self.pre_mlp_layernorm(x_sbh), inputs)
