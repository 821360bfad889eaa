"""What a block keeps for its backward, row by row, and what of it is there at each moment.

Letters: D width of the residual stream, F hidden width of the feed-forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from wands.config.recipe import Recipe
from wands.variants import DiTShape

FP32, BF16 = 4, 2


@dataclass(frozen=True)
class SavedRows:
    """What one block keeps for backward, in rows of a token.

    Attributes:
        wide: fp32 rows of D.
        narrow: rows of D in the compute dtype.
        hidden: rows of F in the compute dtype.
        low: rows of the LoRA's rank in the compute dtype.
    """

    wide: int
    narrow: int
    hidden: int
    low: int


class Activations:
    """What forward leaves for backward on one rank, in bytes.

    Args:
        shape: the DiT.
        recipe: precision, checkpointing, LoRA.
        zero_stage: of the DeepSpeed config.
        tokens: of the rank.
        text_rows: of captions in its bin, and of pictures.
        exchanged: whether Ulysses exchanges heads.
    """

    def __init__(
        self,
        shape: DiTShape,
        recipe: Recipe,
        zero_stage: int,
        *,
        tokens: float,
        text_rows: int,
        exchanged: bool,
    ) -> None:
        self.shape, self.recipe, self.stage = shape, recipe, zero_stage
        self.tokens, self.text_rows, self.exchanged = tokens, text_rows, exchanged
        self.narrow = BF16 if recipe.precision.compute == "bf16" else FP32
        self._quantized = recipe.lora is not None and recipe.lora.quantize != "none"

    def moments(self) -> Iterator[tuple[int, float]]:
        """For each block, from the last to the first: blocks that have not been left, and the bytes at its highest."""
        shape, tokens = self.shape, self.tokens
        block = self._block()
        # Backward begins with a block's feed-forward: the gradients of both of its ends and of its inside.
        working = tokens * (2 * FP32 * shape.dim + self.narrow * shape.ffn_dim) + self._decoded()
        ends = tokens * FP32 * 8 * 4 * shape.out_channels
        # The norm and the modulation before the head with their gradients; what they keep is for tables that learn.
        head = tokens * FP32 * shape.dim * (4 if self._table_learns() else 2)
        for left in range(shape.num_layers, 0, -1):
            last = left == shape.num_layers
            if self.recipe.model.checkpointing == "none":
                yield left, left * block + max(working, head if last else 0.0) + ends
            else:
                held = self._held_on_device(left)
                yield left, held + max(block + working, head if last else 0.0) + ends

    def on_host(self) -> dict[str, float]:
        """Of all blocks."""
        sizes = sum(self._named(name) for name in self.recipe.model.kept_on_host)
        return {"activations": sizes * self.shape.num_layers} if sizes else {}

    def _held_on_device(self, left: int) -> float:
        """Of the blocks before the one that is computed again; of that one, its input."""
        model = self.recipe.model
        on_host = [self._named(name) for name in model.kept_on_host]
        kept = [self._named(name) for name in model.kept_on_device]
        if "block_input" not in model.kept_on_host:
            kept.append(self._named("block_input"))
        # The last two groups of what is offloaded stay, and the next comes while a block is computed.
        return (left - 1) * sum(kept) + min(left, 2) * sum(on_host)

    def _named(self, name: str) -> float:
        """Bytes of one block's tensor of `model.saved_tensors`."""
        shape, exchanged = self.shape, self.exchanged
        rows = {
            "block_input": FP32 * shape.dim,
            "attn_output": (1 + exchanged) * self.narrow * shape.dim + FP32 * shape.num_heads,
            "attn_input": 3 * exchanged * self.narrow * shape.dim,
            "ffn_activation": self.narrow * shape.ffn_dim,
        }
        return self.tokens * rows.get(name, self.narrow * shape.dim)

    def _block(self) -> float:
        """What one block keeps of a whole forward, with autocast's copies of its weights."""
        shape, kept, narrow = self.shape, self._rows(), self.narrow
        rank = self.recipe.lora.rank if self.recipe.lora else 0
        row = (FP32 * kept.wide + narrow * kept.narrow) * shape.dim
        row += narrow * (kept.hidden * shape.ffn_dim + kept.low * rank)
        row += FP32 * (2 * shape.num_heads + 15)  # log-sum-exps of both attentions, statistics of the norms
        # Keys and values of text and pictures; every rank has those of all its samples.
        context = self.text_rows * (2 * FP32 + 2 * narrow) * shape.dim
        return row * self.tokens + context + self._copies()

    def _rows(self) -> SavedRows:
        """Counted in PackedWanBlock.forward.

        Always the inputs of the norms, three and those of queries and keys, in fp32; and the inputs of the projections and what
        both attentions save, in the compute dtype. Layers that learn also keep their own input; ZeRO-3's linear layer always.
        """
        lora = self.recipe.lora
        targets = lora.targets if lora else None
        always = self.stage == 3 and not self._quantized
        ffn, table, norms = targets != "attention" or always, self._table_learns(), lora is None
        rows = SavedRows(
            wide=6 + 3 * norms + 2 * table,
            narrow=8 + ffn + 2 * table,
            hidden=1 + ffn,
            low=(6 if targets == "attention" else 8) if lora else 0,
        )
        if lora and lora.dropout:
            # Every LoRA layer has an input of its own; the one that they shared is then only kept by ZeRO-3's layer.
            both = always and targets != "attention"
            rows = replace(rows, narrow=rows.narrow + (6 if always else 4) + both, hidden=rows.hidden + both)
        return rows

    def _table_learns(self) -> bool:
        return self.recipe.lora is None or self.recipe.lora.targets == "all-linear"

    def _copies(self) -> float:
        """Autocast multiplies with a bf16 copy of an fp32 weight, and backward needs it; ZeRO-3's layer keeps the weight."""
        recipe = self.recipe
        if recipe.precision.compute != "bf16" or recipe.precision.weights == "bf16":
            return 0.0
        return 0.0 if self._quantized or self.stage == 3 else float(BF16 * self._linear_params())

    def _decoded(self) -> float:
        """The largest weight of a quantised base, whole, and what its decoding takes beside it."""
        shape = self.shape
        return 2.0 * FP32 * shape.dim * shape.ffn_dim if self._quantized else 0.0

    def _linear_params(self) -> int:
        """Of one block."""
        shape = self.shape
        return (8 + 2 * bool(shape.image_len)) * shape.dim**2 + 2 * shape.dim * shape.ffn_dim
