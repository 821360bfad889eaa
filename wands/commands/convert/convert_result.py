"""Summary of a conversion, for the console."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from wands.model.files.name_maps import shorten


@dataclass(frozen=True)
class ComponentSummary:
    """Numbers about one converted component or LoRA file.

    Attributes:
        name: name of the component or file.
        read: number of tensors in the source.
        written: number of tensors in the result.
        renamed: number of written tensors whose name differs from the name in the source.
        num_bytes: size of the written tensors in bytes.
        unused: names of the source's tensors that the new layout does not have.
        forward: text about the comparison of the outputs of two forward passes; "" if they were not compared.
    """

    name: str
    read: int
    written: int
    renamed: int
    num_bytes: int
    unused: tuple[str, ...] = ()
    forward: str = ""

    def __str__(self) -> str:
        text = (
            f"{self.name}: {self.read} tensors read, {self.written} written, {self.renamed} renamed, "
            f"{self.num_bytes / 1e6:.1f} MB; read back equal, bit for bit"
        )
        if self.unused:
            text += f"; {len(self.unused)} have no place in the new layout ({shorten(self.unused, 3)})"
        return f"{text}; {self.forward}" if self.forward else text


@dataclass
class ConvertResult:
    """Result of the function `convert`.

    Attributes:
        out: folder that was written.
        summaries: one summary for each component or LoRA file.
        notes: texts for the user, such as which parts the folder lacks and how to get them.
    """

    out: Path
    summaries: list[ComponentSummary] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        notes = (f"note: {note}" for note in self.notes)
        return "\n".join([*map(str, self.summaries), *notes, str(self.out)])
