"""Predict the memory of activations and their gradients at each moment of the backward pass.

Letters: D width of the residual stream, F hidden width of the feed-forward layer. In comments, a "row of D" is one
tensor with D values for each token.
"""

from __future__ import annotations

from collections.abc import Iterator

from wands.planning.workload import Workload

FP32, BF16 = 4, 2


class Activations:
    """Sizes in bytes of one rank's activations.

    Args:
        workload: model, recipe and parallel degrees of the run, and the number of tokens in its largest forward pass.
    """

    def __init__(self, workload: Workload) -> None:
        self.workload, self.shape, self.recipe = workload, workload.shape, workload.recipe
        self.tokens, self.stage = workload.tokens, workload.zero_stage
        self.text_rows = workload.max_samples * (workload.text_len + workload.shape.image_len)
        self.num_recomputed = self.recipe.model.num_recomputed(self.shape.num_layers)
        self.narrow = BF16 if self.recipe.precision.compute == "bf16" else FP32
        self._quantized = self.recipe.lora is not None and self.recipe.lora.quantize != "none"

    def moments(self) -> Iterator[tuple[int, float]]:
        """Yield (number of blocks whose backward pass remains, peak bytes of activations) for each block.

        The backward pass runs from the last block to the first, so the number of remaining blocks falls.
        """
        shape, tokens = self.shape, self.tokens
        block = self._block()
        # The backward pass of a block starts with the feed-forward layer: gradients of its input, output and hidden state.
        working = tokens * (2 * FP32 * shape.dim + self.narrow * shape.ffn_dim)
        if self._quantized:
            # The largest weight of the base model after decoding, and the buffer for decoding.
            working += 2.0 * FP32 * shape.dim * shape.ffn_dim
        ends = tokens * FP32 * 8 * 4 * shape.out_channels
        # Norm and modulation before the head, with their gradients. Tensors are saved for them only if the tables are trained.
        head = tokens * FP32 * shape.dim * (4 if self._table_learns() else 2)
        for left in range(shape.num_layers, 0, -1):
            before_head = head if left == shape.num_layers else 0.0
            # Blocks with all activations. The backward pass starts with them.
            kept = max(left - self.num_recomputed, 0)
            held = self._held_on_device(left - kept + bool(kept))
            yield left, held + max(max(kept, 1) * block + working, kept * block + before_head) + ends

    def without_gradients(self) -> float:
        """Return the peak bytes of activations on the device while a DiT generates the run's longest sample video.

        Sampling needs no gradients, so only the activations of one layer exist at a time.
        """
        shape, narrow = self.shape, self.narrow
        # Query and key are in fp32 while they are normalised and rotated.
        attention = (14 + 6 * narrow) * shape.dim
        ffn = (2 * FP32 + 2 * narrow) * shape.dim + 2 * narrow * shape.ffn_dim
        tokens = self.workload.video_tokens / self.workload.cp_size
        return tokens * (max(attention, ffn) + FP32 * 4 * shape.in_channels)

    def on_host(self) -> dict[str, float]:
        """Return the bytes of each component in host memory: offloaded activations, and the data of prefetched steps."""
        sizes, shape = sum(self._named(name) for name in self.recipe.model.kept_on_host), self.shape
        # A DiT has separate noisy tokens and targets. Every rank has the text of all samples.
        noisy = self.workload.num_models * self.tokens * FP32 * 4 * (shape.in_channels + shape.out_channels)
        num_batches = self.workload.micro_steps * self.recipe.data.prefetch
        ahead = num_batches * (noisy + BF16 * self.text_rows * shape.text_dim)
        return {"activations": sizes * self.num_recomputed, "prefetched data": ahead}

    def _held_on_device(self, left: int) -> float:
        """Return the bytes on the device that blocks saved for their backward pass, while one block is recomputed.

        The recomputed activations are not included.

        Args:
            left: number of blocks whose backward pass remains, including the recomputed block.
        """
        model = self.recipe.model
        on_host = [self._named(name) for name in model.kept_on_host]
        kept = [self._named(name) for name in model.kept_on_device]
        if "block_input" not in model.kept_on_host:
            kept.append(self._named("block_input"))
        # The device has the offloaded tensors of two blocks: the block that is recomputed, and the next block.
        return (left - 1) * sum(kept) + min(left, 2) * sum(on_host)

    def _named(self, name: str) -> float:
        """Return the bytes of the tensor `name` in one block. `wands.model.checkpointing` lists the tensor names."""
        shape, exchanged = self.shape, self.workload.ulysses_degree > 1
        rows = {
            "block_input": FP32 * shape.dim,
            "attn_output": (1 + exchanged) * self.narrow * shape.dim + FP32 * shape.num_heads,
            "attn_input": 3 * exchanged * self.narrow * shape.dim,
            "ffn_activation": self.narrow * shape.ffn_dim,
        }
        return self.tokens * rows.get(name, self.narrow * shape.dim)

    def _block(self) -> float:
        """Return the bytes that the forward pass of one block keeps for the backward pass.

        A block keeps these tensors (see `PackedWanBlock.forward`):

        - in fp32: the inputs of the block's three norms, and of the norms of queries and keys.
        - in the compute dtype: the inputs of the projections, and the tensors that both attentions save.
        - the input of each trained layer; under ZeRO-3, the input of each linear layer.
        - autocast's copies of the weights.
        """
        shape, lora, narrow = self.shape, self.recipe.lora, self.narrow
        attention_only = lora is not None and lora.targets == "attention"
        always = self.stage == 3 and not self._quantized
        ffn, table = not attention_only or always, self._table_learns()
        # Values per token: rows of D in fp32 (wide), rows of D (narrow_rows) and of F (hidden) in the compute dtype, and the
        # values of the LoRA's width (low).
        wide, narrow_rows, hidden = 6 + 3 * (lora is None) + 2 * table, 8 + ffn + 2 * table, 1 + ffn
        if self.workload.compiled:
            # Queries and keys are kept in the compute dtype before their norm, and no normalised tokens are kept.
            wide, narrow_rows = 3, narrow_rows + 3
        low = (6 if attention_only else 8) * lora.rank if lora else 0
        if lora and lora.dropout:
            # With dropout, every LoRA layer has a separate input. Then only ZeRO-3's linear layer keeps the shared input.
            both = always and not attention_only
            narrow_rows, hidden = narrow_rows + (6 if always else 4) + both, hidden + both
        row = (FP32 * wide + narrow * narrow_rows) * shape.dim + narrow * (hidden * shape.ffn_dim + low)
        row += FP32 * (2 * shape.num_heads + 15)  # log-sum-exps of both attentions, statistics of the norms
        # Every rank has the keys and values of text and images of all samples in the bin.
        context = self.text_rows * (2 * FP32 + 2 * narrow) * shape.dim
        return row * self.tokens + context + self._copies()

    def _table_learns(self) -> bool:
        return self.recipe.lora is None or self.recipe.lora.targets == "all-linear"

    def _copies(self) -> float:
        """Return the bytes of the bf16 copies that autocast makes of a block's fp32 weights.

        The backward pass needs these copies. Under ZeRO-3 there are no copies, because DeepSpeed's linear layer keeps
        the weight instead of a copy.
        """
        shape, precision = self.shape, self.recipe.precision
        casts = precision.compute == "bf16" and precision.weights == "fp32"
        if not casts or self._quantized or self.stage == 3:
            return 0.0
        linear_params = (8 + 2 * bool(shape.image_len)) * shape.dim**2 + 2 * shape.dim * shape.ffn_dim
        return float(BF16 * linear_params)
