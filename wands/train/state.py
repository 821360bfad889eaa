"""What a run must remember besides weights and optimizer: almost nothing, because everything random is a function of the step."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
from typing import Any

from wands.errors import CheckpointError

# Keys of the recipe that decide which samples form step n; another value would lose the position in the data.
_POSITION_KEYS = (
    "train.seed",
    "train.bins_per_step",
    "packing.max_tokens",
    "packing.level_bins",
    "packing.buffer_size",
)
_PUBLISHER = "Wan-AI/"  # of the official models: whatever is called so, folder or Hub id, is one of them


def _what_is_trained(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Key -> values in two recipes that decide what is trained, and of a LoRA on which base, which its checkpoint lacks."""
    names = ["lora.rank", "lora.alpha", "lora.targets", "lora.quantize", "model.trainable", "model.freeze"]
    names += ["precision.weights"]
    missing = {"precision.weights": "fp32", "lora.quantize": "none"}  # in a recipe that is older than the key
    if theirs.get("lora"):
        names += ["model.path", "model.init", "model.merge_loras"]

    def value(recipe: dict[str, Any], name: str) -> Any:
        section, key = name.split(".")
        found = (recipe.get(section) or {}).get(key, missing.get(name))
        if name == "model.merge_loras":
            found = with_whole_paths(found or [])
        return PurePath(found).name if name == "model.path" and found else found or None  # a folder may move

    return {name: (value(ours, name), value(theirs, name)) for name in names}


def with_whole_paths(merge_loras: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`model.merge_loras` of a recipe with paths that mean the same from every working directory."""
    return [{**merge, "path": str(Path(merge["path"]).resolve())} for merge in merge_loras]


@dataclass(frozen=True)
class TrainState:
    """The contents of `wands_state.json`.

    Attributes:
        step: optimizer steps made.
        epoch: epoch that the next step belongs to (for people; it follows from `step`).
        world_size: ranks that wrote the shards.
        zero_stage: how the shards are cut.
        variant: name of the model's variant.
        parts: the DiTs that were trained, by their names in the pipeline; each has a folder of that name.
        transformer_config: diffusers config of the DiT (of each), enough to rebuild it.
        data_fingerprint: identifies keys and lengths of all samples, in order.
        data_summary: counts for the model card.
        recipe: the resolved recipe.
        base: `model.path` of the run, a folder with its whole path.
        loss: (step, loss) of the run so far, thinned to at most 2,000 points.
        files: name -> bytes of every other file in the folder; a checkpoint is complete when they agree.
        base_on_hub: whether `base` is a Hub id; None in the checkpoints of older versions, which kept a folder's path as it
            was typed. One that may be either gets a "./" in front here, so that nobody asks the Hub for it.
    """

    step: int
    epoch: int
    world_size: int
    zero_stage: int
    variant: str
    parts: list[str]
    transformer_config: dict[str, Any]
    data_fingerprint: str
    data_summary: dict[str, Any]
    recipe: dict[str, Any]
    base: str
    loss: list[tuple[int, float]]
    files: dict[str, int]
    base_on_hub: bool | None = None

    def __post_init__(self) -> None:
        known = self.base_on_hub is not None or self.base.startswith(_PUBLISHER)
        if self.base and not known and not self.base.startswith((".", "/")):
            object.__setattr__(self, "base", f"./{self.base}")

    def to_json(self) -> dict[str, Any]:
        """Plain data for json.dump."""
        return asdict(self)

    def check_resumable(
        self,
        *,
        where: str,
        world_size: int,
        zero_stage: int,
        recipe: dict[str, Any],
        parts: list[str],
        transformer_config: dict[str, Any],
        data_fingerprint: str,
    ) -> None:
        """Refuse a run that could not go on exactly where this state stopped.

        Raises:
            CheckpointError: another world size or ZeRO stage (the shards are cut differently), or other data or another plan.
        """
        if world_size != self.world_size:
            raise CheckpointError(
                f"--resume {where}: world_size={world_size} must equal the {self.world_size} that wrote the checkpoint; "
                f"start {self.world_size} processes, or export it and train on from the exported model."
            )
        if zero_stage != self.zero_stage:
            raise CheckpointError(
                f"--resume {where}: zero_optimization.stage={zero_stage} must equal the {self.zero_stage} that wrote the "
                "checkpoint; use the same DeepSpeed JSON, or export it and train on from the exported model."
            )
        for name in _POSITION_KEYS:
            section, key = name.split(".")
            ours, theirs = recipe[section][key], self.recipe[section].get(key)  # not in an older recipe
            if ours != theirs:
                raise CheckpointError(
                    f"--resume {where}: {name}={ours} must equal the checkpoint's {theirs}, or the position in the data is "
                    "lost; set it back, or export the checkpoint and start a new run from it."
                )
        ours, theirs = recipe["optim"]["name"], self.recipe["optim"].get("name", "adamw")
        if ours != theirs:
            raise CheckpointError(
                f"--resume {where}: optim.name={ours} must equal the checkpoint's {theirs}, whose states it holds; set it back, "
                "or export the checkpoint and start a new run from it."
            )
        if parts != self.parts:
            raise CheckpointError(
                f"--resume {where}: model.experts={recipe['model']['experts']} must equal the checkpoint's "
                f"{self.recipe['model'].get('experts')}; set it back, or export the checkpoint and start a new run from it."
            )
        changed = [
            key
            for key, value in self.transformer_config.items()
            if key[0] != "_" and transformer_config.get(key) != value
        ]
        if changed:
            raise CheckpointError(
                f"--resume {where}: model.path is another model than the checkpoint's ({', '.join(changed)} differ); set it "
                f"back to {self.base}."
            )
        for name, (ours, theirs) in _what_is_trained(recipe, self.recipe).items():
            if ours != theirs:
                raise CheckpointError(
                    f"--resume {where}: {name}={ours} must equal the checkpoint's {theirs}, or its weights would come to other "
                    "places or stand on another base; set it back, or export the checkpoint and start a new run (a LoRA goes on "
                    "with lora.init_from)."
                )
        if data_fingerprint != self.data_fingerprint:
            raise CheckpointError(
                f"--resume {where}: the data has changed (fingerprint {data_fingerprint}, checkpoint {self.data_fingerprint}); "
                "use the same cache, or export the checkpoint and start a new run from it."
            )
