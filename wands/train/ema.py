"""An exponential moving average of the trained weights, cut as the optimizer's fp32 masters are: no rank has all of it.

A fragment is the run of a parameter's values that a rank owns, fp32 [N]. Where ZeRO shards nothing, the ranks share the
average among themselves all the same.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from wands.config.recipe import EmaConfig
from wands.errors import CheckpointError, ConfigError
from wands.model.files.tensor_files import LazyTensor, TensorFiles, write_safetensors
from wands.train.state import TrainState

_BLOCK = 2**28  # elements: 1 GiB
_METADATA = "wands_ema"


def average_file(rank: int) -> str:
    """Name of a rank's file in a part's folder of a checkpoint."""
    return f"ema_rank_{rank:05d}.safetensors"


def has_average(state: TrainState, part: str) -> bool:
    """Whether a checkpoint holds the average of a DiT."""
    return f"{part}/{average_file(0)}" in state.files


def decay_after(section: EmaConfig, num_steps: int) -> float:
    """Share that the average keeps in its `num_steps`-th optimizer step.

    Source: the warm-up is that of TensorFlow's ExponentialMovingAverage(num_updates), also diffusers' EMAModel.
    """
    return min(section.decay, (1 + num_steps) / (10 + num_steps)) if section.warmup else section.decay


@dataclass(frozen=True)
class _Fragment:
    """What a rank owns of a parameter: values from `start` on of the flattened whole."""

    name: str
    start: int
    shape: tuple[int, ...]
    master: Callable[[], Tensor]

    def place(self) -> list[Any]:
        """For a file's header."""
        return [self.start, list(self.shape)]


class WeightAverage:
    """The average of one engine's trained parameters; it starts as the weights are now.

    Args:
        engine: DeepSpeed's, of any ZeRO stage.
        section: decay, warm-up, how often and where.
        step: optimizer steps made.
    """

    def __init__(self, engine: Any, section: EmaConfig, step: int) -> None:
        self.section = section
        # The average begins at the one step, and has seen the weights up to the other.
        self._first = self._last = step
        self._fragments = _fragments_of(engine)
        masters = [one.master() for one in self._fragments]
        on_host = section.device == "cpu"
        device = torch.device("cpu") if on_host else engine.device
        self._crosses = on_host and any(master.is_cuda for master in masters)
        self._averages = _allocate([master.numel() for master in masters], device, pinned=self._crosses)
        with torch.no_grad():
            for average, master in zip(self._averages, masters, strict=True):
                average.copy_(master)

    @property
    def num_bytes(self) -> int:
        """Of this rank's share."""
        return sum(average.nbytes for average in self._averages)

    @property
    def decay(self) -> float:
        """Share that the last step kept, warm-up included."""
        return decay_after(self.section, self._last - self._first)

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after an optimizer step: average += (1 - decay ** steps) * (weights - average).

        Args:
            step: optimizer steps made; those that `every` passes over are made up for by the next that counts.
        """
        if step % self.section.every:
            return
        passed, self._last = step - self._last, step
        weight = 1.0 - self.decay**passed
        for average, fragment in zip(self._averages, self._fragments, strict=True):
            master = fragment.master()
            # Worked out where the weights are, in the order of their stream: the host need not wait for it.
            here = average.to(master.device, non_blocking=master.is_cuda)
            here.lerp_(master.float(), weight)
            if here is not average:
                average.copy_(here, non_blocking=master.is_cuda)

    def save(self, folder: Path) -> None:
        """Write this rank's fragments.

        Args:
            folder: of the DiT in a checkpoint that is being written.

        Raises:
            OSError: the disk is full or refuses.
        """
        if self._crosses:
            torch.cuda.synchronize()  # the last update may still be on its way
        entries = [
            LazyTensor(fragment.name, tuple(average.shape), torch.float32, average.cpu)
            for fragment, average in zip(self._fragments, self._averages, strict=True)
        ]
        about = {"first_step": self._first, "last_step": self._last, "fragments": self._places()}
        write_safetensors(folder / average_file(dist.get_rank()), entries, {_METADATA: json.dumps(about)})

    def load(self, folder: Path) -> None:
        """Go on with the fragments that this rank once wrote.

        Args:
            folder: of the DiT in a checkpoint.

        Raises:
            CheckpointError: they are not those of this rank today.
        """
        path = folder / average_file(dist.get_rank())
        with TensorFiles([path], f"checkpoint={folder.parent}") as files:
            about = _read_about(files, path)
            if about["fragments"] != self._places():
                raise CheckpointError(
                    f"checkpoint={folder.parent}: the average in {path.name} is cut differently from this run's weights; use the "
                    "DeepSpeed JSON of the run."
                )
            for average, fragment in zip(self._averages, self._fragments, strict=True):
                average.copy_(files.read(fragment.name))
        self._first, self._last = about["first_step"], about["last_step"]

    def _places(self) -> dict[str, list[Any]]:
        return {fragment.name: fragment.place() for fragment in self._fragments}


def build_averages(
    engines: Mapping[str, Any],
    section: EmaConfig | None,
    resume: tuple[Path, TrainState] | None,
    log: Callable[[str], None],
) -> dict[str, WeightAverage]:
    """The average of each DiT: that of the checkpoint where it holds one, otherwise starting as the weights are.

    Args:
        engines: the DeepSpeed engine of each DiT, with the checkpoint's weights already.
        section: None for no average.
        resume: checkpoint that the run goes on from.
        log: takes a line where something is to be known.

    Raises:
        CheckpointError: the checkpoint's average does not fit.
    """
    found = resume is not None and any(has_average(resume[1], part) for part in engines)
    if section is None:
        if found:
            log("ema is not in the recipe: the checkpoint's average is left behind")
        return {}
    step = resume[1].step if resume else 0
    averages = {part: WeightAverage(engine, section, step) for part, engine in engines.items()}
    if resume and found:
        for part, average in averages.items():
            average.load(resume[0] / part)
    elif resume:
        log(f"the checkpoint holds no average: ema starts as the weights are at step {step}")
    return averages


def load_average(folder: Path) -> dict[str, Tensor]:
    """Put the fragments of all ranks together, in one process; files are read one after another.

    Args:
        folder: of the DiT in a checkpoint that holds its average.

    Returns:
        name of each trained parameter -> fp32 CPU tensor.

    Raises:
        CheckpointError: a file cannot be read, or values are missing.
    """
    whole: dict[str, Tensor] = {}
    spans: dict[str, list[tuple[int, int]]] = {}
    for path in sorted(folder.glob("ema_rank_*.safetensors")):
        with TensorFiles([path], f"checkpoint={folder.parent}") as files:
            for name, (start, shape) in _read_about(files, path)["fragments"].items():
                if name not in whole:
                    whole[name], spans[name] = torch.empty(shape), []
                end = start + math.prod(files.shapes[name])
                whole[name].view(-1)[start:end] = files.read(name)
                spans[name].append((start, end))
    for name, found in spans.items():
        reached = 0
        for start, end in sorted(found):
            reached = max(reached, end) if start <= reached else reached
        if reached != whole[name].numel():
            raise CheckpointError(
                f"checkpoint={folder.parent}: the average of {name} is not whole; use an older step."
            )
    return whole


def _read_about(files: TensorFiles, path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(files.metadata[_METADATA]))
    except (KeyError, ValueError):
        raise CheckpointError(f"{path} is no average that wands wrote; use an older step.") from None


def _fragments_of(engine: Any) -> list[_Fragment]:
    """What this rank owns of the fp32 masters of every trained parameter, as views that see each update."""
    trained = [(name, one) for name, one in engine.module.named_parameters() if one.requires_grad]
    found = [fragment for name, parameter in trained if (fragment := _fragment(engine, name, parameter))]
    return [one for one in found if one.master().numel()]


def _fragment(engine: Any, name: str, parameter: Any) -> _Fragment | None:
    if hasattr(parameter, "ds_id"):  # ZeRO-3
        return _zero3_fragment(engine.optimizer, name, parameter)
    shape = tuple(parameter.shape)
    if hasattr(parameter, "_hp_mapping"):  # ZeRO-1 and 2
        mapping = parameter._hp_mapping
        if mapping is None:  # all of it is on other ranks
            return None
        return _Fragment(
            name, mapping.lp_fragment_address.start, shape, lambda: parameter._hp_mapping.hp_fragment
        )
    rank, world_size = dist.get_rank(), dist.get_world_size()
    start, end = (parameter.numel() * r // world_size for r in (rank, rank + 1))
    return _Fragment(name, start, shape, lambda: parameter.detach().flatten()[start:end])


def _zero3_fragment(optimizer: Any, name: str, parameter: Any) -> _Fragment:
    # What safe_get_local_fp32_param returns, but for two things: that brings it to the GPU when the optimizer is on the host,
    # and has the padding of the last rank in it.
    group, offset, partition = optimizer.grad_position[optimizer.get_param_id(parameter)]
    start = partition * dist.get_rank(parameter.ds_process_group)
    own = max(min(partition, parameter.ds_numel - start), 0)
    return _Fragment(
        name,
        start,
        tuple(parameter.ds_shape),
        lambda: optimizer.fp32_partitioned_groups_flat[group].narrow(0, offset, own),
    )


def _allocate(numels: Sequence[int], device: torch.device, pinned: bool) -> list[Tensor]:
    """fp32 vectors in a few large blocks: CUDA rounds each pinned piece of memory up to a power of two."""
    blocks: list[list[int]] = []
    for numel in numels:
        if not blocks or sum(blocks[-1]) + numel > _BLOCK:
            blocks.append([])
        blocks[-1].append(numel)
    try:
        whole = [
            torch.empty(sum(block), dtype=torch.float32, device=device, pin_memory=pinned) for block in blocks
        ]
    except RuntimeError as error:
        if not pinned:
            raise
        raise ConfigError(
            f"ema.device=cpu cannot pin {4 * sum(numels) / 2**30:.1f} GiB of host memory on this rank "
            f"({str(error).splitlines()[0]}); set ema.device=gpu, or use more ranks, which share the average."
        ) from error
    return [vector for one, block in zip(whole, blocks, strict=True) for vector in one.split(block)]
