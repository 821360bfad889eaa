"""Read the fragments of a DiT, the ranges of flattened parameters of `wands.checkpoint.ranges`, from the files of all ranks."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor

from wands.checkpoint.ranges import Range, copy_common
from wands.errors import CheckpointError
from wands.model.files.tensor_files import open_safetensors
from wands.values import Count, Text, check_values

_Place = (
    tuple[Count, list[Count]]
    | tuple[Count, list[Count], Count]
    | tuple[Count, list[Count], Count, tuple[Count, Count]]
)


@dataclass(frozen=True)
class _FragmentHeader:
    """Types of the JSON object in a file of fragments, which may have further entries."""

    fragments: dict[Text, _Place]
    frozen: dict[Text, _Place] = field(default_factory=dict)


_HEADER = TypeAdapter(_FragmentHeader)


class FragmentFiles:
    """Files with the fragments of a DiT. Any range can be read, even if it is spread over several fragments.

    Args:
        folder: DiT folder of a checkpoint.
        kind: "state" for the weights and the optimizer state (`state_rank_*`), "ema" for the moving average (`ema_rank_*`). The
            metadata has a JSON object under the key "wands_state" or "wands_ema".

    Attributes:
        headers: JSON object of each file, by path. Its "fragments" (trained parameters) and "frozen" (frozen parameters) map a
            parameter name to the place of the fragment, see `Range.of_place`.
        dtypes: maps the name of each stored tensor to its dtype. Scalars are left out.

    Raises:
        CheckpointError: if there is no such file, or a file cannot be read or was not written by `wands train`.
    """

    def __init__(self, folder: Path, kind: str) -> None:
        self._where = f"checkpoint={folder.parent}"
        self._pattern = f"{kind}_rank_*"
        self.headers: dict[Path, dict[str, Any]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self._numels = Counter[str]()  # number of stored values of each tensor, in all files together
        for path in sorted(folder.glob(f"{self._pattern}.safetensors")):
            with open_safetensors(path, self._where) as file:
                try:
                    self.headers[path] = json.loads(file.metadata()[f"wands_{kind}"])
                    check_values(_HEADER, self.headers[path])
                except (TypeError, KeyError, ValueError):
                    raise CheckpointError(
                        f"{path} was not written by wands train, or was replaced (no wands_{kind} metadata); use another step_* "
                        "folder of the run."
                    ) from None
                for name in file.keys():  # noqa: SIM118, not a dict
                    shape = file.get_slice(name).get_shape()
                    if shape:
                        self._numels[name] += shape[0]
                    if name not in self.dtypes and shape:
                        self.dtypes[name] = file.get_slice(name)[:0].dtype
        if not self.headers:
            raise CheckpointError(
                f"{self._where} has no file {folder.name}/{self._pattern}.safetensors, and wands reads no other weights of a "
                "checkpoint, because a pickle can run any code; use another step_* folder."
            )

    def join(self, section: str, suffix: str, excluded: Collection[str] = ()) -> dict[str, Tensor]:
        """Return whole parameters as fp32 CPU tensors, joined from the fragments that the ranks wrote.

        `section` is "fragments" for the trained parameters, "frozen" for the frozen ones. `suffix` follows the parameter's name
        in the names of the stored tensors, such as "/master".

        Raises:
            CheckpointError: if a file cannot be read, or the fragments do not cover every element of a parameter.
        """
        shapes = {
            name: place[1]
            for header in self.headers.values()
            for name, place in header.get(section, {}).items()
            if name not in excluded
        }
        for name, shape in shapes.items():  # before memory is allocated
            if math.prod(shape) > self._numels[name + suffix]:
                raise self.incomplete(name + suffix)
        whole = {name: torch.empty(shape) for name, shape in shapes.items()}
        self.read({name + suffix: (Range(0, value.shape), value.view(-1)) for name, value in whole.items()})
        return whole

    @torch.no_grad()
    def read(self, wanted: Mapping[str, tuple[Range, Tensor]]) -> None:
        """Read ranges of stored tensors into flat tensors: (range, target) by tensor name. Only one file is open at a time.

        Raises:
            CheckpointError: if a file cannot be read, or the files lack a requested value.
        """
        missing = {name: target.numel() for name, (_, target) in wanted.items()}
        for path, header in self.headers.items():
            places = {**header.get("frozen", {}), **header["fragments"]}
            with open_safetensors(path, self._where) as file:
                for name in wanted.keys() & set(file.keys()):
                    own, target = wanted[name]
                    place = places.get(name) or places.get(name.rpartition("/")[0])
                    if place is None:
                        raise self.incomplete(name)
                    missing[name] -= copy_common(own, target, Range.of_place(place), file.get_slice(name))
        if incomplete := [name for name, numel in missing.items() if numel]:
            raise self.incomplete(incomplete[0])

    def incomplete(self, name: str) -> CheckpointError:
        """Return the error for a parameter of which the files lack values."""
        return CheckpointError(
            f"{self._where}: the files {self._pattern} lack values of {name}; use another step_* folder of the run."
        )

    def read_all(self, path: Path, prefix: str) -> dict[str, Tensor]:
        """Return the tensors of a file whose names start with `prefix`, by the rest of the name."""
        with open_safetensors(path, self._where) as file:
            names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118, not a dict
            return {name.removeprefix(prefix): file.get_tensor(name).clone() for name in names}

    def read_overlapping(
        self, ranges: Mapping[str, tuple[int, int]]
    ) -> dict[str, list[tuple[int, dict[str, Tensor]]]]:
        """Read the optimizer state of stored fragments that overlap with ranges (first index, end) of flattened parameters.

        Return for each parameter a list of (index of the fragment's first value, tensors of the whole fragment by the name of the
        state, such as "exp_avg").
        """
        found: dict[str, list[tuple[int, dict[str, Tensor]]]] = {name: [] for name in ranges}
        for path, header in self.headers.items():
            with open_safetensors(path, self._where) as file:
                keys: dict[str, list[str]] = {}
                for key in file.keys():  # noqa: SIM118, not a dict
                    keys.setdefault(key.rpartition("/")[0], []).append(key)
                for name in ranges.keys() & header["fragments"].keys():
                    start = header["fragments"][name][0]
                    (first, last) = ranges[name]
                    numel = file.get_slice(f"{name}/master").get_shape()[0]
                    if start < last and first < start + numel:
                        states = [key for key in keys[name] if key != f"{name}/master"]
                        values = {key.rpartition("/")[2]: file.get_tensor(key).clone() for key in states}
                        found[name].append((start, values))
        return found
