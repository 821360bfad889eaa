"""Summary of a conversion, for the console."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from wands.model.files.name_maps import shorten


@dataclass(frozen=True)
class ComponentSummary:
    """Summary of one converted component or LoRA file.

    Attributes:
        name: name of the component or file.
        read: number of tensors in the source.
        written: number of tensors in the result.
        renamed: number of written tensors whose name differs from the name in the source.
        num_bytes: size of the written tensors in bytes.
        unused: names of the source's tensors that were not converted, because the new layout does not have them.
        forward: text about the comparison of the DiT's outputs before and after the conversion; "" if no outputs were
            compared.
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
            f"{self.num_bytes / 1e6:.1f} MB; the written tensors equal the source bit for bit"
        )
        if self.unused:
            text += f"; {len(self.unused)} tensors are not in the new layout ({shorten(self.unused, 3)})"
        return f"{text}; {self.forward}" if self.forward else text


@dataclass
class ConvertResult:
    """Result of a conversion: the written folder, a summary of each component, and notes for the user.

    Attributes:
        out: folder that was written.
        summaries: one summary for each component or LoRA file.
        notes: sentences for the user, for example about a missing component and how to get it.
    """

    out: Path
    summaries: list[ComponentSummary] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        notes = (f"note: {note}" for note in self.notes)
        return "\n".join([*map(str, self.summaries), *notes, str(self.out)])
