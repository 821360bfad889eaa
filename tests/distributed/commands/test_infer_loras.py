"""`wands infer --lora`: files of every layout give what the same update merged into the weights gives."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline, WanPipeline
from huggingface_hub.utils import filter_repo_objects
from peft import LoraConfig, get_peft_model
from peft.utils import get_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor

from tests.support.commands import export
from tests.support.infer_runs import records
from tests.support.runs import run_training
from tests.support.sampling import infer, source_of
from wands.distributed.dims import ParallelDims
from wands.errors import ConfigError
from wands.model.files import hub
from wands.model.files.lora_files import lora_tensors
from wands.model.files.lora_update import LoraPair
from wands.sampling import sample as sampling
from wands.sampling.loras import find_loras
from wands.sampling.pipeline import find_pipeline, load_pipeline
from wands.sampling.requests import SampleRequest
from wands.sampling.sharing import share_pipeline

REQUEST = SampleRequest(prompt="a red bike", height=32, width=48, num_frames=5, num_inference_steps=3, seed=3)
TARGETS = ("blocks.0.attn1.to_q", "blocks.1.attn2.to_out.0", "blocks.1.ffn.net.0.proj", "proj_out")
RANK = 2
ALPHA = 3.0
PARTS = ("transformer", "transformer_2")


@dataclass(frozen=True)
class Trained:
    """Updates of both experts of a pipeline folder, and the folder itself."""

    folder: Path
    pairs: dict[str, dict[str, LoraPair]]

    def pipeline(self, **loras: list[str]) -> DiffusionPipeline:
        options = {"lora": []} | loras
        pipeline = load_pipeline(find_pipeline(self.folder, loras=find_loras(**options)))
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    def sample(self, **loras: list[str]) -> Tensor:
        return sampling.sample_latents(self.pipeline(**loras), REQUEST)

    def merged(self, scales: dict[str, float]) -> Tensor:
        """The dumb way: the update is added to the weights."""
        pipeline = self.pipeline()
        for part, scale in scales.items():
            for name, pair in self.pairs[part].items():
                weight = getattr(pipeline, part).get_submodule(name).weight
                weight.data += scale * pair.delta().float()
        return sampling.sample_latents(pipeline, REQUEST)

    def state(self, part: str, prefix: str) -> dict[str, Tensor]:
        return {
            f"{prefix}{name}.lora_{half}.weight": value.contiguous()
            for name, pair in self.pairs[part].items()
            for half, value in zip("AB", (pair.lora_A, pair.lora_B), strict=True)
        }


@pytest.fixture(scope="module")
def trained(tiny_variant: Callable[[str], Path]) -> Trained:
    folder = tiny_variant("wan2.2-t2v-a14b")
    pipeline = WanPipeline.from_pretrained(folder)
    generator = torch.Generator().manual_seed(5)
    pairs = {}
    for part in PARTS:
        layers = {name: getattr(pipeline, part).get_submodule(name) for name in TARGETS}
        pairs[part] = {
            name: LoraPair(
                torch.randn(RANK, layer.in_features, generator=generator),
                0.2 * torch.randn(layer.out_features, RANK, generator=generator),
                ALPHA / RANK,
            )
            for name, layer in layers.items()
        }
    return Trained(folder, pairs)


def metadata(*parts: str) -> dict[str, str]:
    """As diffusers' `save_lora_weights` notes rank and alpha."""
    settings = {"r": RANK, "lora_alpha": ALPHA, "target_modules": list(TARGETS)}
    told = {f"{part}.{key}": value for part in parts for key, value in settings.items()}
    return {"format": "pt", "lora_adapter_metadata": json.dumps(told)}


@pytest.fixture(scope="module")
def files(trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every layout in which the LoRA of the high-noise expert may come, and both experts' in one folder."""
    root = tmp_path_factory.mktemp("loras")
    (root / "diffusers").mkdir()
    save_file(
        trained.state("transformer", "transformer."),
        root / "diffusers" / "pytorch_lora_weights.safetensors",
        metadata("transformer"),
    )
    high = trained.pairs["transformer"]
    save_file(
        {k: v.contiguous() for k, v in lora_tensors(high, "comfyui").items()}, root / "comfyui.safetensors"
    )
    bare = lora_tensors(high, "official")
    save_file({key: value.contiguous() for key, value in bare.items()}, root / "official.safetensors")
    model = WanPipeline.from_pretrained(trained.folder).transformer
    peft = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(TARGETS)))
    state = get_peft_model_state_dict(peft)
    ours = trained.state("transformer", "base_model.model.")
    assert state.keys() == ours.keys()
    for key, value in peft.named_parameters():
        if "lora_" in key:
            value.data.copy_(ours[key.replace(".default", "")])
    peft.save_pretrained(root / "peft")
    both = trained.state("transformer", "transformer.") | trained.state("transformer_2", "transformer_2.")
    (root / "both").mkdir()
    save_file(both, root / "both" / "pytorch_lora_weights.safetensors", metadata(*PARTS))
    save_file(
        trained.state("transformer_2", "transformer."), root / "low.safetensors", metadata("transformer")
    )
    return {path.stem: path for path in root.iterdir()}


def assert_close(found: Tensor, wanted: Tensor) -> None:
    assert (found - wanted).abs().max() <= 2e-5 * wanted.abs().max()


@pytest.mark.slow
def test_every_layout_is_the_merged_update(trained: Trained, files: dict[str, Path]) -> None:
    wanted = trained.merged({"transformer": 1.0})
    plain = trained.sample()
    assert (wanted - plain).abs().max() > 1e-2
    for layout in ("diffusers", "comfyui", "official", "peft"):
        assert_close(trained.sample(lora_1=[str(files[layout])]), wanted)
    # Without its alpha it would be another model: the mistake of trainers whose files lose it.
    wrong = trained.merged({"transformer": RANK / ALPHA})
    assert (wrong - wanted).abs().max() > 1e-3


def test_scales_and_experts(trained: Trained, files: dict[str, Path]) -> None:
    path = str(files["diffusers"])
    assert_close(trained.sample(lora_1=[f"{path}=0.5"]), trained.merged({"transformer": 0.5}))
    assert_close(
        trained.sample(lora_1=[path, f"{files['comfyui']}=0.5"]), trained.merged({"transformer": 1.5})
    )
    assert_close(trained.sample(lora=[str(files["low"])]), trained.merged({"transformer_2": 1.0}))
    both = trained.merged({"transformer": 0.5, "transformer_2": 0.5})
    assert_close(trained.sample(lora=[f"{files['both']}=0.5"]), both)
    apart = trained.sample(
        lora_1=[f"{path}=0.5"], lora_2=[f"{files['both']}=0.5"]
    )  # the low-noise half alone is taken
    assert_close(apart, both)


@pytest.fixture
def published(
    trained: Trained, files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Hub with LoRAs: of both experts as `wands export` lays them out, of one, PEFT's, and a repository without any."""
    names = {"transformer": "high_noise", "transformer_2": "low_noise"}
    for repo, parts in {"both": PARTS, "low": ("transformer_2",), "high": ("transformer",)}.items():
        for part in parts:
            folder = tmp_path / "hub" / "you" / repo / names[part]
            folder.mkdir(parents=True)
            state = trained.state(part, "transformer.")
            save_file(state, folder / "pytorch_lora_weights.safetensors", metadata("transformer"))
    shutil.copytree(files["peft"], tmp_path / "hub" / "you" / "peft" / "adapter")
    (tmp_path / "hub" / "you" / "pickles").mkdir()
    (tmp_path / "hub" / "you" / "pickles" / "lora.bin").touch()

    def fetch(repo_id: str, *, allow_patterns: list[str], ignore_patterns: None) -> str:
        there = tmp_path / "hub" / repo_id
        here = tmp_path / "cache" / repo_id
        every = [str(path.relative_to(there)) for path in there.rglob("*") if path.is_file()]
        for name in filter_repo_objects(every, allow_patterns=allow_patterns):
            (here / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(there / name, here / name)
        return str(here)

    monkeypatch.setattr(hub, "snapshot_download", fetch)
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("published")
def test_a_hub_id_lands_in_the_expert_that_it_names(trained: Trained) -> None:
    both = trained.merged({"transformer": 1.0, "transformer_2": 1.0})
    low = trained.merged({"transformer_2": 1.0})
    assert (both - low).abs().max() > 1e-2
    assert_close(trained.sample(lora=["you/both"]), both)
    assert_close(trained.sample(lora=["you/low"]), low)
    assert_close(trained.sample(lora_2=["you/both"]), low)
    assert_close(trained.sample(lora_1=["you/peft=0.5"]), trained.merged({"transformer": 0.5}))


@pytest.mark.usefixtures("published")
def test_a_hub_id_in_record_and_mistakes(trained: Trained, tiny_pipeline: Path, tmp_path: Path) -> None:
    infer(trained.folder, [REQUEST], out_dir=tmp_path / "out", lora=["you/both=0.5"])
    assert records(tmp_path / "out")[0]["loras"] == [
        {"path": "you/both", "part": part, "scale": 0.5} for part in PARTS
    ]
    with pytest.raises(ConfigError, match=r"^--lora=you/pickles contains no \.safetensors file\. Set"):
        find_loras(["you/pickles"])
    with pytest.raises(
        ConfigError, match=r"^--lora=you/both is for a model with two experts, but this model"
    ):
        find_pipeline(tiny_pipeline, loras=find_loras(["you/both"]))


def sample_with_lora_on_ranks(trained: Trained, path: str) -> Tensor:
    pipeline = trained.pipeline(lora=[path])
    share_pipeline(pipeline, ParallelDims(2, int(os.environ["RANK"]), ring_degree=2))
    return sampling.sample_latents(pipeline, REQUEST)


@pytest.mark.slow
def test_ranks_share_a_pipeline_with_loras(run_world, trained: Trained, files: dict[str, Path]) -> None:
    wanted = trained.sample(lora=[str(files["both"])])
    for found in run_world(2, sample_with_lora_on_ranks, trained, str(files["both"])):
        assert_close(found, wanted)


@pytest.mark.slow
def test_a_lora_run_is_sampled_three_ways(
    run_world, tiny_variant: Callable[[str], Path], tmp_path: Path
) -> None:
    """From its checkpoint, from the folder of its LoRAs, and from the exported pipeline into which they are merged."""
    folder = tiny_variant("wan2.2-t2v-a14b")
    settings = ("lora.rank=2", "lora.alpha=3", "train.max_steps=2", "optim.lr=0.05", "loss.reduction=sample")
    run_world(2, run_training, folder, tmp_path / "run", settings, {"zero_optimization": {"stage": 3}})
    export(tmp_path / "run", tmp_path / "lora")
    export(tmp_path / "run", tmp_path / "merged", merge=True)

    def sample(model: Path, **options: object) -> Tensor:
        lora = [tmp_path / "lora"] if options.pop("with_lora", False) else []
        source = source_of(model, lora=lora, **options)
        experts = [part for one in source.loras for file in one.files for part in file.experts]
        assert experts == (list(PARTS) if lora else [])
        pipeline = load_pipeline(source)
        pipeline.set_progress_bar_config(disable=True)
        return sampling.sample_latents(pipeline, REQUEST)

    wanted = sample(tmp_path / "merged")
    assert (sample(folder) - wanted).abs().max() > 1e-3
    assert_close(sample(folder, checkpoint=tmp_path / "run"), wanted)
    assert_close(sample(folder, with_lora=True), wanted)


def test_offload_and_record(trained: Trained, files: dict[str, Path], tmp_path: Path) -> None:
    source = find_pipeline(trained.folder, loras=find_loras([files["both"]]))
    offloaded = load_pipeline(source, offload="model", dtype=torch.bfloat16)
    offloaded.set_progress_bar_config(disable=True)
    assert sampling.sample_latents(offloaded, REQUEST).isfinite().all()
    infer(trained.folder, [REQUEST], out_dir=tmp_path, lora=[f"{files['both']}=0.5"])
    assert records(tmp_path)[0]["loras"] == [
        {"path": str(files["both"]), "part": part, "scale": 0.5} for part in PARTS
    ]


def test_mistakes(trained: Trained, files: dict[str, Path], tmp_path: Path, tiny_pipeline: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "pickle.pt").write_bytes(b"x")
    (tmp_path / "cut.safetensors").write_bytes(b"cut")
    save_file({"blocks.99.self_attn.q.diff": torch.zeros(2, 3)}, tmp_path / "other.safetensors")
    save_file({"weights": torch.zeros(2, 3)}, tmp_path / "no_lora.safetensors")
    high = trained.state("transformer", "transformer.")
    state = {key: value[:, :1].repeat(1, 7) if "lora_A" in key else value for key, value in high.items()}
    save_file(state, tmp_path / "wide.safetensors")
    save_file(
        {key: value.to(torch.float8_e4m3fn) for key, value in high.items()}, tmp_path / "fp8.safetensors"
    )

    def said(folder: Path, **options: list) -> str:
        with pytest.raises(ConfigError) as caught:
            load_pipeline(find_pipeline(folder, loras=find_loras(**{"lora": []} | options)))
        text = str(caught.value)
        assert "\n" not in text
        return text.replace(str(tmp_path), "").replace(str(files["both"]), "both")

    folder = trained.folder
    for name, words in {
        "empty": "--lora=/empty contains no .safetensors file. Set --lora to a LoRA file.",
        "pickle.pt": "--lora=/pickle.pt must be a .safetensors file. Convert the file to safetensors.",
        "cut.safetensors": "--lora=/cut.safetensors: /cut.safetensors cannot be read (",
        "other.safetensors": "--lora=/other.safetensors fits no parameter of the transformer: all 1 parameters of the LoRA are "
        "missing there, such as blocks.99.attn1.to_q.weight.",
        "no_lora.safetensors": "--lora=/no_lora.safetensors is not a LoRA of Wan. Unknown keys: ",
        "wide.safetensors": "--lora=/wide.safetensors: the LoRA changes a parameter blocks.0.attn1.to_q.weight of shape [48, 7]",
        "fp8.safetensors": "--lora=/fp8.safetensors does not fit the transformer (",
    }.items():
        assert said(folder, lora_1=[tmp_path / name]).startswith(words.replace("--lora", "--lora-1"))
    assert said(tiny_pipeline, lora=[files["both"]]).startswith(
        "--lora=both is for a model with two experts, but this model has one."
    )
