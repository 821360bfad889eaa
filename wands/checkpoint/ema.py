"""Exponential moving average of the trained weights, divided among the ranks like the optimizer's fp32 master weights.

Each rank averages its own fragments, in fp32. At ZeRO stage 0, where every rank has all weights, each takes a range of every
parameter.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.distributed as dist

from wands.checkpoint.buffers import allocate
from wands.checkpoint.checkpoint_files import Checkpoint
from wands.checkpoint.engine_state import Fragment, refresh_weights, trained_fragments
from wands.checkpoint.fragment_files import FragmentFiles
from wands.config.recipe import EmaConfig
from wands.distributed.engine_protocol import Engines, TrainingEngine
from wands.model.files.tensor_files import LazyTensor
from wands.texts import Log


def decay_after(section: EmaConfig, num_steps: int) -> float:
    """Return the decay of the update `num_steps` optimizer steps after the average started; below `ema.decay` in the warm-up.

    Source: the warm-up follows TensorFlow's ExponentialMovingAverage(num_updates) and diffusers' EMAModel.
    """
    return min(section.decay, (1 + num_steps) / (10 + num_steps)) if section.warmup else section.decay


class WeightAverage:
    """Moving average of the trained parameters of one engine of any ZeRO stage. It starts with the weights at `step`."""

    def __init__(self, engine: TrainingEngine, section: EmaConfig, step: int) -> None:
        self.section = section
        # Skipped optimizer steps do not count, so that the average is that of a run without these steps. `_step` is the number
        # of steps made, `_first` this number when the average started, and `_last` at the last update of the average.
        self._step = self._first = self._last = step
        fragments = own_fragments(engine)
        device = torch.device("cpu") if section.device == "cpu" else engine.device
        self._crosses = device.type == "cpu" and any(fragment.tensor.is_cuda for fragment in fragments)
        sizes = [4 * fragment.numel for fragment in fragments]
        vectors = allocate(sizes, device, self._crosses, "ema.device=cpu", "set ema.device=gpu")
        averages = [vector.view(torch.float32) for vector in vectors]
        self._pairs = list(zip(fragments, averages, strict=True))
        for fragment, average in self._pairs:
            average.copy_(fragment.read())

    @property
    def decay(self) -> float:
        """Decay of the last update."""
        return decay_after(self.section, self._last - self._first)

    @torch.no_grad()
    def update(self) -> None:
        """Update the average after an optimizer step that was not skipped. Only every `ema.every`-th call has an effect.

        average += (1 - decay ** n) * (weights - average), where n is the number of steps since the last update.
        """
        self._step += 1
        if self._step % self.section.every:
            return
        num_steps = self._step - self._last
        self._last = self._step
        weight = 1.0 - self.decay**num_steps
        for fragment, average in self._pairs:
            master = fragment.read()
            # The update runs on the device of the weights, in the order of its stream, so the host does not wait.
            updated = average.to(master.device, non_blocking=master.is_cuda)
            updated.lerp_(master.float(), weight)
            if updated is not average:
                average.copy_(updated, non_blocking=master.is_cuda)

    @torch.no_grad()
    def exchange(self, engine: TrainingEngine) -> None:
        """Swap the weights of the engine and the average; a second call swaps them back, bit for bit. Every rank must call it."""
        for fragment, average in self._pairs:
            master = fragment.read()
            weights = master.clone()  # the copies run in the order of the stream
            master.copy_(average, non_blocking=master.is_cuda)
            average.copy_(weights, non_blocking=master.is_cuda)
        if engine.zero_optimization_stage():
            refresh_weights(engine)
        else:
            # At ZeRO-0, every rank sends its share of each parameter. A sum with zeros keeps all bits, also those of -0.0.
            group = engine.seq_data_parallel_group
            for fragment in trained_fragments(engine):
                share = _own_share(fragment, group)
                bits = fragment.read().view(torch.int32)
                bits[: share.offset] = bits[share.offset + share.numel :] = 0
                dist.all_reduce(bits, group=group)

    def stored(self) -> tuple[list[LazyTensor], dict[str, str]]:
        """Return this rank's part of the average as (tensors, metadata) of a Safetensors file."""
        if self._crosses:
            torch.cuda.synchronize()  # the last copy to the host may not have finished
        pairs = [(fragment, average) for fragment, average in self._pairs if not fragment.is_copy]
        places = {fragment.name: fragment.place_without_flat for fragment, _ in pairs}
        header = {"first_step": self._first, "last_step": self._last, "step": self._step, "fragments": places}
        tensors = [LazyTensor.of(fragment.name, average) for fragment, average in pairs]
        return tensors, {"wands_ema": json.dumps(header)}

    def load(self, folder: Path) -> None:
        """Restore this rank's part of the average from a DiT folder, which any number of ranks may have written.

        Raises:
            CheckpointError: if the files in the folder do not contain the whole moving average.
        """
        files = FragmentFiles(folder, "ema")
        files.read({fragment.name: (fragment.range, average) for fragment, average in self._pairs})
        header = next(iter(files.headers.values()))
        self._first = header["first_step"]
        self._last = header["last_step"]
        self._step = header["step"]


def build_averages(
    section: EmaConfig | None, checkpoint: Checkpoint | None, engines: Engines, log: Log
) -> dict[str, WeightAverage]:
    """Return the moving average of each trained DiT; {} without an `ema` section.

    The averages are restored from `checkpoint` if it has some, and start with the current weights otherwise. The engines must
    already have the checkpoint's weights.
    """
    saved = checkpoint is not None and any(checkpoint.state.has_average(part) for part in engines)
    if section is None:
        if saved:
            log("the recipe has no ema section: the moving average in the checkpoint is ignored")
        return {}
    step = checkpoint.state.step if checkpoint else 0
    averages = {part: WeightAverage(engine, section, step) for part, engine in engines.items()}
    if checkpoint and saved:
        for part, average in averages.items():
            average.load(checkpoint.folder / part)
    elif checkpoint:
        log(f"the checkpoint has no moving average: ema starts from the weights at step {step}")
    return averages


def own_fragments(engine: TrainingEngine) -> list[Fragment]:
    """Return the fragments whose moving average this rank computes; at ZeRO-0, an equal share of each parameter."""
    fragments = trained_fragments(engine)
    if engine.zero_optimization_stage():
        return fragments
    group = engine.seq_data_parallel_group
    return [share for share in (_own_share(fragment, group) for fragment in fragments) if share.numel]


def _own_share(fragment: Fragment, group: dist.ProcessGroup) -> Fragment:
    """Return this rank's share of a fragment that all ranks of `group` have."""
    rank = dist.get_rank(group)
    size = dist.get_world_size(group)
    numel = fragment.numel
    start = numel * rank // size
    end = numel * (rank + 1) // size
    return fragment._replace(start=fragment.start + start, offset=start, numel=end - start)
