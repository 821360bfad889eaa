"""Checks of a DiT: what training computes on a pack is what stock diffusers computes sample by sample.

The stock model is loaded, asked and gone before the packed one is loaded, by the code that training loads it with.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from diffusers import WanTransformer3DModel

from wands.attention.ulysses import context_attention
from wands.attention.varlen import choose_backend
from wands.commands.selftest.parity_pack import Comparison, Pack
from wands.commands.selftest.parity_setup import Outcome, Setup, Skipped, free_memory
from wands.config.recipe import ParallelConfig
from wands.distributed.bootstrap import init_process_group, ranks_per_node
from wands.distributed.dims import ParallelDims, ProcessGroups, choose_degrees
from wands.distributed.layout import ContextLayout
from wands.encoders.components import quiet_without_terminal
from wands.errors import CheckpointError, ConfigError
from wands.model.files.loading import build_empty, load_transformer
from wands.model.files.names import rename_all, to_diffusers, to_official
from wands.model.transformer import PackedWanTransformer
from wands.variants import Expert

PARAMETERS = (
    "patch_embedding.weight",
    "condition_embedder.text_embedder.linear_1.weight",
    "condition_embedder.time_embedder.linear_1.weight",
    "condition_embedder.image_embedder.ff.net.0.proj.weight",
    "blocks.0.scale_shift_table",
    "blocks.0.attn1.to_q.weight",
    "blocks.0.attn2.to_k.weight",
    "blocks.0.attn2.add_k_proj.weight",
    "blocks.0.ffn.net.2.weight",
    "proj_out.weight",
)
"""Whose gradients are compared: those of the whole model would take as much memory as it."""


class DiTChecks:
    """One DiT of the model."""

    def __init__(self, setup: Setup, expert: Expert) -> None:
        """Take what is tested; weights are loaded when a check asks for them.

        Args:
            setup: what is tested.
            expert: which DiT.
        """
        self.setup, self.expert = setup, expert
        self._found: dict[str, Comparison] = {}
        self._tried: set[str] = set()

    def check_names(self) -> Outcome:
        """Official Wan's names and diffusers' are one to one."""
        names = [name for name, _ in build_empty(dict(self.setup.config)).named_parameters()]
        try:
            official = rename_all(names, to_official, "diffusers")
            back = rename_all(official, to_diffusers, "official")
        except CheckpointError as error:
            return Outcome(False, str(error), "one to one")
        same = sum(official[stored] == name for name, stored in back.items())
        return Outcome(same == len(names), f"{same} of {len(names)} names come back", "all")

    def check_output(self) -> Outcome:
        """The velocity of each sample of a pack."""
        return self._against_stock("packed").judge_output()

    def check_gradients(self) -> Outcome:
        """Some parameters' gradients of a pack."""
        return self._against_stock("packed").judge_gradients()

    def check_timesteps(self) -> Outcome:
        """TI2V: a given first frame is clean, its tokens are at timestep 0 and the others are not."""
        return self._against_stock("first_frame").judge_output()

    def check_cp_output(self) -> Outcome:
        """The velocity of a pack that is spread over all ranks."""
        return self._against_one_process().judge_output()

    def check_cp_gradients(self) -> Outcome:
        """Some parameters' gradients of such a pack."""
        return self._against_one_process().judge_gradients()

    def _against_stock(self, kind: str) -> Comparison:
        """Both packs at once, so that each model is loaded once."""
        if kind not in self._found:
            self._try_once("stock")
            packs = {"packed": Pack(self.setup, self.expert)}
            if "first_frame" in self.setup.variant.conditions:
                packs["first_frame"] = Pack(self.setup, self.expert, num_samples=1, i2v_ratio=1.0)
            stock = self._load_stock()
            right = {name: pack.ask_stock(stock, torch.float32) for name, pack in packs.items()}
            rounded = right
            if self.setup.dtype == "bf16":
                _cast_as_diffusers(stock)
                rounded = {name: pack.ask_stock(stock, torch.bfloat16) for name, pack in packs.items()}
            del stock
            free_memory()
            model = self._load_packed(self.setup.torch_dtype)
            for name, pack in packs.items():
                found = pack.ask_packed(model)
                self._found[name] = Comparison(found, right[name], rounded[name], "stock diffusers")
        return self._found[kind]

    def _against_one_process(self) -> Comparison:
        """Every rank runs the whole pack alone, then its part of it with the others."""
        if "cp" not in self._found:
            self._try_once("cp")
            groups = _meet(self.setup)
            grid, fp32 = groups.dims, torch.float32
            pack = Pack(self.setup, self.expert, i2v_ratio=1.0)
            model = self._load_in_turn()
            right = pack.ask_packed(model, dtype=fp32)
            rounded = right
            if self.setup.dtype == "bf16":
                self._attend(model, torch.bfloat16)
                rounded = pack.ask_packed(model)
            self._attend(model, self.setup.torch_dtype, groups)
            layout = ContextLayout.build(
                pack.batch.seq_lens,
                ulysses_degree=grid.ulysses_degree,
                ring_degree=grid.ring_degree,
                cp_rank=grid.cp_rank,
            )
            found = pack.ask_packed(model, layout)
            split = f"Ulysses {grid.ulysses_degree} x ring {grid.ring_degree}"
            self._found["cp"] = Comparison(found, right, rounded, "one process", split)
        return self._found["cp"]

    def _try_once(self, what: str) -> None:
        """What did not run for one check is not loaded again for the next."""
        if what in self._tried:
            raise Skipped("the model does not run, see above")
        self._tried.add(what)

    def _load_stock(self) -> WanTransformer3DModel:
        part = self.expert.subfolder
        with quiet_without_terminal():
            try:
                model, info = WanTransformer3DModel.from_pretrained(
                    self.setup.folder, subfolder=part, torch_dtype=torch.float32, output_loading_info=True
                )
            except (OSError, ValueError, RuntimeError) as error:
                reason = " ".join(str(error).split())[:200]
                raise ConfigError(
                    f"model={self.setup.folder}: its {part} cannot be loaded ({reason})."
                ) from None
        wrong = [*info["missing_keys"], *info["unexpected_keys"], *info["mismatched_keys"]]
        if wrong:
            raise ConfigError(
                f"model={self.setup.folder}: {len(wrong)} tensors of its {part} do not fit its config (first {wrong[0]}); "
                "restore it."
            )
        _choose_trained(model)
        return model.to(self.setup.device).eval()

    def _load_packed(self, dtype: torch.dtype) -> PackedWanTransformer:
        """fp32 weights, as a training run has them, and the kernel that it would choose here for `dtype`."""
        model = load_transformer(self.setup.folder, subfolder=self.expert.subfolder).to(self.setup.device)
        _choose_trained(model)
        self._attend(model, dtype)
        return model

    def _load_in_turn(self) -> PackedWanTransformer:
        """The ranks of a node one after the other: on the host there is one copy at a time, if they have GPUs."""
        for turn in range(dist.get_world_size()):  # nodes may have unequal numbers of ranks
            if turn == int(os.environ["LOCAL_RANK"]):
                model = self._load_packed(torch.float32)
            dist.barrier()
        return model

    def _attend(
        self, model: PackedWanTransformer, dtype: torch.dtype, groups: ProcessGroups | None = None
    ) -> None:
        backend = choose_backend("auto", self.setup.device, dtype, self.setup.variant.dit.head_dim)
        rings = () if groups is None else (groups.ulysses, groups.ring, groups.ring_grad)
        model.set_attention(context_attention(backend, *rings), backend)

    CHECKS: ClassVar[dict[str, Callable[[Any], Outcome]]] = {
        "names": check_names,
        "packed.output": check_output,
        "packed.gradients": check_gradients,
        "first_frame.timesteps": check_timesteps,
        "cp.output": check_cp_output,
        "cp.gradients": check_cp_gradients,
    }


def _meet(setup: Setup) -> ProcessGroups:
    """The process groups of all ranks as one context-parallel group."""
    rank, world_size, device = init_process_group()
    if device.type != setup.device.type:
        raise ConfigError(
            f"device={setup.device.type}, but DeepSpeed runs these processes on {device.type}; set DS_ACCELERATOR="
            f"{setup.device.type}.",
            agreed=True,
        )
    degrees = choose_degrees(
        ParallelConfig(cp_size=world_size),
        num_heads=setup.variant.dit.num_heads,
        ranks_per_node=ranks_per_node(),
        model=setup.variant.name,
    )
    return ProcessGroups.build(ParallelDims(world_size, rank, *degrees), device)


def _choose_trained(model: torch.nn.Module) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in PARAMETERS)


def _cast_as_diffusers(stock: WanTransformer3DModel) -> None:
    """To bf16 in place, but for what `from_pretrained(torch_dtype=bfloat16)` keeps."""
    kept = set(WanTransformer3DModel._keep_in_fp32_modules)
    for name, parameter in stock.named_parameters():
        if not kept & set(name.split(".")):
            parameter.data = parameter.data.to(torch.bfloat16)
