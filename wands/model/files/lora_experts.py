"""Find LoRA files, and decide which expert of a model each file changes.

One rule holds for every command. The first of these that says something decides: the user's option, the file's metadata, its
tensor names, its name (also the name that its training program stored in the metadata), and the name of its folder.

A name says "high" or "low" as a word: `style_HIGH_fp16`, `HighNoise-v2` and `high_noise`, but not `highway` or `slow`. In a name
that contains "high noise" or "low noise", the words elsewhere in the name do not count.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from wands.errors import ConfigError
from wands.model.files.hashes import check_files
from wands.model.files.lora_files import LORA_FILE, PEFT_FILE, read_lora_file
from wands.model.files.lora_update import LoraUpdate
from wands.model.files.name_maps import EXPERTS
from wands.model.files.tensor_files import TensorFiles

EXPERT_NAMES = dict(zip(EXPERTS, ("high_noise", "low_noise"), strict=True))
"""Experts as `wands export` and most publishers write them into the names of files and folders."""
EXPERT_OF = dict(zip(("high", "low"), EXPERTS, strict=True))
"""Maps the values of options, such as model.experts=low, to names of DiTs."""
EXPERT_KEY = "expert"
"""Key in the metadata of the LoRA files that wands writes. Its value is "high_noise" or "low_noise"."""
_BY_TENSORS = "its tensor names"
_TITLES = ("ss_output_name", "modelspec.title")
"""Keys in the metadata of other programs for the name that the file had after the training."""


@dataclass(frozen=True)
class FoundLora:
    """LoRA file, and the DiTs that it changes.

    Attributes:
        experts: names of the DiTs, one or both of `EXPERTS`; empty if nothing says it.
        reason: source of the experts, such as "its file name"; empty if nothing says it.
    """

    path: Path
    experts: tuple[str, ...] = ()
    reason: str = ""

    def read(self, where: str) -> dict[str, LoraUpdate]:
        """Return what the file adds to each of its DiTs. Tensor names without the name of an expert fit either."""
        updates = read_lora_file(TensorFiles([self.path], where))
        alone = next(iter(updates.values()))
        return {expert: updates.get(expert, alone) for expert in self.experts or updates}

    def __str__(self) -> str:
        experts = " and ".join(EXPERT_NAMES[expert].replace("_", "-") for expert in self.experts)
        folder = self.path.absolute().parent.name
        name = f"{folder}/{self.path.name}" if expert_in_name(folder) else self.path.name
        return f"{name} changes the {experts} expert ({self.reason})"


def expert_in_name(name: str) -> str | None:
    """Return the DiT that a name says by the word "high" or "low", or None if it says neither or both."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|[\W\d_]+", " ", name).lower()
    found = re.findall(r"\b(high|low) ?noise\b", words) or re.findall(r"\b(high|low)\b", words)
    return EXPERT_OF[found[0]] if len(set(found)) == 1 else None


def describe_file(path: Path, where: str, more_names: Sequence[str] = ()) -> FoundLora:
    """Return a LoRA file with the experts that its metadata, its tensor names or its name say.

    `more_names` count after those of the file and its folder, such as the id of a Hub repository. A damaged file raises
    CheckpointError.
    """
    files = TensorFiles([path], where)
    if stated := expert_in_name(files.metadata.get(EXPERT_KEY, "")):
        return FoundLora(path, (stated,), "its metadata")
    prefixes = {name.partition(".")[0] for name in files.tensors}
    if EXPERTS[1] in prefixes:
        return FoundLora(path, tuple(part for part in EXPERTS if part in prefixes), _BY_TENSORS)
    titles = [files.metadata.get(key, "") for key in _TITLES]
    names = {path.stem: "its file name"} | dict.fromkeys(titles, "the name in its metadata")
    names |= dict.fromkeys((path.absolute().parent.name, *more_names), "the name of its folder")
    for name, reason in names.items():
        if stated := expert_in_name(name):
            return FoundLora(path, (stated,), reason)
    return FoundLora(path)


def find_lora_files(
    path: Path, key: str, chosen: str | None = None, more_names: Sequence[str] = ()
) -> list[FoundLora]:
    """Return the LoRA at a path: one file, or one file for each expert.

    Args:
        path: a LoRA file, or a folder with one LoRA or one for each expert, also in subfolders with "high" or "low" in their
            names.
        key: option or recipe key that the user typed.
        chosen: DiT that the user chose for this LoRA. Of a folder with a LoRA for each expert, only this expert's file is
            returned.
        more_names: see `describe_file`.

    Raises:
        ConfigError: if `path` does not exist, or contains no LoRA or several files that could be the LoRA.
        CheckpointError: if a file is damaged, or changed after wands stored its hash.
    """
    where = f"{key}={path}"
    if path.is_file():
        if path.suffix != ".safetensors":  # a pickle can run any code
            raise ConfigError(f"{where} must be a .safetensors file. Convert the file to safetensors.")
        found = [path]
    elif path.is_dir():
        found = list_lora_files(path)
        for file in found:
            for folder, part in {path: file.relative_to(path).parts[0], file.parent: file.name}.items():
                check_files(folder, where, parts={part})
    else:
        raise ConfigError(f"{where} does not exist. Set {key} to the file or folder of a LoRA.")
    if not found:
        raise ConfigError(f"{where} contains no .safetensors file. Set {key} to a LoRA file.")
    files = [describe_file(file, where, more_names) for file in found]
    if len(files) > 1:
        files = _sort_pair(files, where)
    if chosen:
        files = [file for file in files if len(files) == 1 or chosen in file.experts]
        files = [replace(file, experts=(chosen,), reason=_reason_of_choice(file, chosen)) for file in files]
    return files


def list_lora_files(folder: Path) -> list[Path]:
    """Return the safetensors files that may be the LoRA of a folder, also those in subfolders that are named after experts."""
    folders = [
        folder,
        *(path for path in sorted(folder.iterdir()) if path.is_dir() and expert_in_name(path.name)),
    ]
    files: list[Path] = []
    for each in folders:
        usual = [each / name for name in (LORA_FILE, PEFT_FILE) if (each / name).is_file()]
        files += usual[:1] or sorted(each.glob("*.safetensors"))
    return files


def _sort_pair(files: Sequence[FoundLora], where: str) -> list[FoundLora]:
    """Return the files of the high-noise and of the low-noise expert, in this order."""
    pair = sorted(files, key=lambda file: file.experts)
    if [file.experts for file in pair] == [(expert,) for expert in EXPERTS]:
        return pair
    names = ", ".join(str(file) if file.experts else file.path.name for file in files[:4])
    raise ConfigError(
        f"{where} contains {len(files)} .safetensors files: {names}. Keep one LoRA, or one LoRA for each expert, with high_noise "
        "in the name of one file and low_noise in the name of the other."
    )


def _reason_of_choice(file: FoundLora, chosen: str) -> str:
    against = file.experts and chosen not in file.experts
    return f"your choice, against {file.reason}" if against else "your choice"


def assign_experts(
    files: Sequence[FoundLora], where: str, *, two_experts: bool, only: str | None = None, ways: str = ""
) -> list[FoundLora]:
    """Decide which DiTs of a model LoRA files change. Names and metadata do not matter for a model with one DiT.

    Args:
        files: result of `find_lora_files`.
        where: option and value that name the LoRA, for error messages.
        two_experts: whether the model has two experts.
        only: the only trained DiT of two; it gets files that say no expert.
        ways: end of the error for a file that says no expert: further ways for the user to say it.

    Raises:
        ConfigError: if the files are for another kind of model, or do not say for which expert they are.
    """
    if not two_experts:
        if len(files) > 1 or (EXPERTS[1] in files[0].experts and files[0].reason == _BY_TENSORS):
            raise ConfigError(
                f"{where} is for a model with two experts, but this model has one. Use a LoRA of this model."
            )
        return [replace(file, experts=EXPERTS[:1], reason="") for file in files]
    assigned = []
    for file in files:
        if not file.experts and only is None:
            raise ConfigError(
                f"{where}: neither metadata nor tensor names nor the name of {file.path.name} say for which of the two experts "
                f"it is. Write high_noise or low_noise into the file name, or {ways}."
            )
        assigned.append(
            file if file.experts else replace(file, experts=(str(only),), reason="the trained expert")
        )
    return assigned
