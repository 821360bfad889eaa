"""Read a DiT's parameters from a checkpoint, in which each rank stored fragments (slices of the flattened parameters).

One process can read what any number of ranks wrote, at any ZeRO stage.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wands.errors import CheckpointError
from wands.model.files.tensor_files import open_safetensors

AVERAGE_METADATA, STATE_METADATA = "wands_ema", "wands_state"


class FragmentFiles:
    """Files in which the ranks of a run stored fragments (slices of flattened parameters) of a DiT.

    Any slice of a flattened parameter can be read, even if it is spread over several fragments.

    Args:
        folder: DiT folder of a checkpoint.
        pattern: glob pattern of the files without ".safetensors", such as "ema_rank_*".
        metadata: key of wands' JSON object in the metadata of a file: `STATE_METADATA` for a training state,
            `AVERAGE_METADATA` for a moving average.

    Attributes:
        headers: maps the path of each file to its JSON object. The entry "fragments" of the object maps a parameter name to
            a list that starts with [start, shape]. start is the index of the fragment's first value in the flattened
            parameter. shape is the shape of the whole parameter.
        dtypes: maps the name of each stored tensor to its dtype. Scalars are left out.

    Raises:
        CheckpointError: if a file cannot be read, or was not written by `wands train`.
    """

    def __init__(self, folder: Path, pattern: str, metadata: str) -> None:
        self._where, self._pattern = f"checkpoint={folder.parent}", pattern
        self.headers: dict[Path, dict[str, Any]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        for path in sorted(folder.glob(f"{pattern}.safetensors")):
            with open_safetensors(path, self._where) as file:
                try:
                    self.headers[path] = json.loads(file.metadata()[metadata])
                except (TypeError, KeyError, ValueError):
                    raise CheckpointError(
                        f"{path} was not written by wands train, or was replaced (no {metadata} metadata); use another step_* "
                        "folder of the run."
                    ) from None
                for name in file.keys():  # noqa: SIM118, not a dict
                    if name not in self.dtypes and file.get_slice(name).get_shape():
                        self.dtypes[name] = file.get_slice(name)[:0].dtype

    def join(self, section: str, suffix: str, excluded: Collection[str] = ()) -> dict[str, Tensor]:
        """Join the fragments (slices of flattened parameters) that the ranks wrote to whole parameters.

        Args:
            section: entry of the headers with the fragments to join: "fragments" for trained parameters, "frozen" for frozen
                parameters.
            suffix: text after the parameter's name in the names of the stored tensors, such as "/master".
            excluded: names of parameters to leave out.

        Returns:
            A dict that maps the name of each parameter to an fp32 CPU tensor.

        Raises:
            CheckpointError: if a file cannot be read, or the fragments do not cover every element of a parameter.
        """
        whole = {
            name: torch.empty(place[1])
            for header in self.headers.values()
            for name, place in header[section].items()
            if name not in excluded
        }
        self.read({name + suffix: (0, value.view(-1)) for name, value in whole.items()})
        return whole

    @torch.no_grad()
    def read(self, wanted: Mapping[str, tuple[int, Tensor]]) -> None:
        """Read slices of stored tensors into given tensors. Only one file is open at a time.

        Args:
            wanted: maps the name of a stored tensor to (start, flat tensor to fill). start is the index of the first value
                to read. The number of values to read is the length of the flat tensor.

        Raises:
            CheckpointError: if a file cannot be read, or the files lack a requested value.
        """
        missing = {name: target.numel() for name, (_, target) in wanted.items()}
        for path, header in self.headers.items():
            places = {**header.get("frozen", {}), **header["fragments"]}
            with open_safetensors(path, self._where) as file:
                for name in wanted.keys() & set(file.keys()):
                    values, (first, target) = file.get_slice(name), wanted[name]
                    start = places[name if name in places else name.rpartition("/")[0]][0]
                    low = max(first, start)
                    high = min(first + target.numel(), start + values.get_shape()[0])
                    if low < high:
                        target[low - first : high - first] = values[low - start : high - start]
                        missing[name] -= high - low
        if incomplete := [name for name, numel in missing.items() if numel]:
            raise CheckpointError(
                f"{self._where}: the files {self._pattern} lack values of {incomplete[0]}; use another step_* folder of the run."
            )

    def read_all(self, path: Path, prefix: str) -> dict[str, Tensor]:
        """Read the tensors of one file whose names start with a prefix, and return them without the prefix in their names."""
        with open_safetensors(path, self._where) as file:
            names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118, not a dict
            return {name.removeprefix(prefix): file.get_tensor(name).clone() for name in names}

    def read_overlapping(
        self, ranges: Mapping[str, tuple[int, int]]
    ) -> dict[str, list[tuple[int, dict[str, Tensor]]]]:
        """Read the optimizer state of all stored fragments that overlap with given ranges of the flattened parameters.

        Args:
            ranges: maps the name of a parameter to (index of the first value, index after the last value) of a range.

        Returns:
            A dict that maps the name of a parameter to a list with one pair (start, tensors) for each fragment. start is the
            index of the fragment's first value. tensors maps the name of an optimizer state to its tensor.
        """
        found: dict[str, list[tuple[int, dict[str, Tensor]]]] = {name: [] for name in ranges}
        for path, header in self.headers.items():
            with open_safetensors(path, self._where) as file:
                keys: dict[str, list[str]] = {}
                for key in file.keys():  # noqa: SIM118, not a dict
                    keys.setdefault(key.rpartition("/")[0], []).append(key)
                for name in ranges.keys() & header["fragments"].keys():
                    start, (first, last) = header["fragments"][name][0], ranges[name]
                    numel = file.get_slice(f"{name}/master").get_shape()[0]
                    if start < last and first < start + numel:
                        states = [key for key in keys[name] if key != f"{name}/master"]
                        values = {key.rpartition("/")[2]: file.get_tensor(key).clone() for key in states}
                        found[name].append((start, values))
        return found
