"""The public names of wands, which `import wands` offers."""

from wands.attention.units import Unit
from wands.conditions.arrays import ArraySpec, ClipSize
from wands.conditions.clip_files import ClipFile
from wands.conditions.condition import Channels, ClipFrames, Condition, CrossAttention, SecondClip
from wands.config.recipe import Recipe
from wands.config.recipe_loading import load_recipe
from wands.data.clips.video import to_pixels
from wands.engine.engine import build_model, build_schedule
from wands.flow.noise import NoisyBatch
from wands.flow.rng import SampleKey, rng
from wands.model.adapter_off import adapter_off
from wands.objectives.flow_matching import FlowMatching
from wands.objectives.objective import ClipCosts, ClipFacts, Forwards, Loss, Objective
from wands.patches import patchify
from wands.plugin import Plugin, load_plugins
from wands.train.jobs import FinishedStep, Job
from wands.train.prepare import prepare_run
from wands.train.trainer import Trainer
from wands.train.training import Training

__all__ = [
    "ArraySpec",
    "Channels",
    "ClipCosts",
    "ClipFacts",
    "ClipFile",
    "ClipFrames",
    "ClipSize",
    "Condition",
    "CrossAttention",
    "FinishedStep",
    "FlowMatching",
    "Forwards",
    "Job",
    "Loss",
    "NoisyBatch",
    "Objective",
    "Plugin",
    "Recipe",
    "SampleKey",
    "SecondClip",
    "Trainer",
    "Training",
    "Unit",
    "adapter_off",
    "build_model",
    "build_schedule",
    "load_plugins",
    "load_recipe",
    "patchify",
    "prepare_run",
    "rng",
    "to_pixels",
]
