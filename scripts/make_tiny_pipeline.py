"""Build a complete diffusers pipeline folder of real Wan classes, small enough to train on a laptop.

    python scripts/make_tiny_pipeline.py OUT [--variant NAME] [--seed N] [--captions FILE_OR_DIR]

--variant names a Wan model, such as wan2.1-t2v-1.3b. --captions names texts from which the tokenizer also learns.

The pipeline has the interfaces of the variant: T5 tokenizer, UMT5 encoder, causal VAE with the variant's channels and stride,
CLIP if the variant has it, one or two experts, patch 1x2x2, and UniPC with flow sigmas. Only widths and depths are smaller. The
DiT, CLIP and the text encoder have random weights. The VAE has trained weights: train_tiny_vae.py wrote scripts/tiny_vae (16
latent channels) and scripts/tiny_vae_48 (48 latent channels). `diffusers.DiffusionPipeline.from_pretrained(OUT)` loads the
pipeline.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from diffusers import (
    AutoencoderKLWan,
    DiffusionPipeline,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    CLIPVisionModel,
    T5TokenizerFast,
    UMT5Config,
    UMT5EncoderModel,
)

from wands.variants import VARIANTS, Variant

SCRIPTS = Path(__file__).resolve().parent
SHIPPED_VAES = {16: SCRIPTS / "tiny_vae", 48: SCRIPTS / "tiny_vae_48"}
"""Maps the number of latent channels to the folder of a trained VAE."""

# 1.25 M parameters: enough to memorise a handful of clips in minutes. 32 = 12 + 10 + 10 channels of RoPE. Few and wide
# layers, because on a CPU the operators of a layer cost more than their arithmetic.
DEMO_DIT = {"num_attention_heads": 4, "attention_head_dim": 32, "num_layers": 4, "ffn_dim": 512}
# A token of 48 channels is 192 numbers, and their noise must pass the residual stream whole: wider.
DEMO_DIT_48 = {"num_attention_heads": 10, "attention_head_dim": 24, "num_layers": 4, "ffn_dim": 448}
# For tests: four heads, so that head splits of 2 and 4 exist; two layers; 12 = 4 + 4 + 4.
TEST_DIT = {
    "num_attention_heads": 4,
    "attention_head_dim": 12,
    "num_layers": 2,
    "ffn_dim": 96,
    "freq_dim": 32,
}
DIT = {
    "patch_size": (1, 2, 2),
    "freq_dim": 256,
    "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads",
}
TEXT = {
    "demo": {"d_model": 64, "d_kv": 16, "num_heads": 4, "d_ff": 128, "num_layers": 2},
    "test": {"d_model": 32, "d_kv": 8, "num_heads": 4, "d_ff": 64, "num_layers": 1},
}
VOCAB_SIZE = {"demo": 800, "test": 400}
# 224 pixels in patches of 14, as ViT-H/14 has them: 257 tokens of a picture.
CLIP = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "patch_size": 14,
}
DEFAULT_VARIANT = "wan2.1-t2v-1.3b"

# What the tokenizer learns English from, besides the captions: scenes of many kinds in captions' words.
ENGLISH = """
A woman walks along a quiet beach at sunset while small waves roll over the sand and wet her feet.
Two children are playing with a yellow ball in the garden behind the house.
A brown dog runs quickly through deep snow towards the camera, its ears flapping in the wind.
An old man with glasses reads a newspaper on a wooden bench under a tall tree.
Aerial view of a winding mountain road with a red car driving slowly through the forest.
Close-up of hands kneading dough on a table covered with flour, warm light from the left.
The camera pans from right to left across a crowded market, people buying fruit and vegetables.
A chef in a white apron cuts onions and tomatoes in a bright modern kitchen.
Traffic moves along a busy highway at night, the lights drawing long lines, time lapse.
A black cat sits on the window sill and watches birds flying outside in the rain.
Slow motion shot of a glass of water falling and breaking on the dark stone floor.
A group of friends laugh and talk around a camp fire near the lake, stars above them.
Heavy clouds gather over green fields, then lightning strikes far away on the horizon.
A young girl in a blue dress is dancing on a stage in front of a large audience.
Fish of many colours swim between corals in clear shallow water.
The train leaves the station, passengers wave through its windows, steam rising from below.
Black and white film of workers building a bridge across a wide river many years ago.
An astronaut floats inside the space station and looks at the earth through a round window.
A football player kicks the ball into the goal and the crowd is jumping and cheering.
Autumn leaves fall in a park where a couple is riding bicycles on a narrow path.
Cartoon animation of a little robot waking up, opening its eyes and looking around the room.
Anime style, a swordsman stands alone on a hill, his long hair and coat moving with the storm.
A doctor explains something to a patient, both sitting at the desk, medium shot, shallow focus.
Handheld camera follows a runner up the stairs of a stadium early in the morning.
Macro video of a bee collecting nectar from a purple flower, blurred background.
A ship with white sails crosses the open sea under a cloudless sky, view from a drone.
The teacher writes numbers on the blackboard: 1, 2, 3, 4, 5, 6, 7, 8, 9 and 10; the pupils repeat them.
Horses gallop over dry grass, dust behind them, mountains in the distance, golden hour.
Blurry, low quality, static, overexposed, subtitles, watermark, deformed, ugly, worst quality, JPEG artifacts.
Best quality, highly detailed, cinematic lighting, realistic style, 4K, film grain, colour grading.
"""


class BuildError(Exception):
    """Raised if the pipeline cannot be built. The message contains the reason and the fix."""


def init_wan_weights(model: WanTransformer3DModel, seed: int) -> None:
    """Initialize the weights of a Wan DiT in place as the official code does, without the global random generator.

    Linear layers and the patch embedding are Xavier-uniform. The text and time embeddings are normal with standard
    deviation 0.02, and the modulation tables are normal with standard deviation 1 / sqrt(dim). Biases and the head are
    zero, so the untrained model predicts 0. The weights of norms remain one.

    Source: `WanModel.init_weights` of the official Wan 2.1 repository. The official code keeps PyTorch's random bias in
    the patch embedding. Here, this bias is zero, so that the seed determines all weights.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Conv3d):
            if name.startswith(("condition_embedder.time_embedder", "condition_embedder.text_embedder")):
                nn.init.normal_(module.weight, std=0.02, generator=generator)
            elif name == "proj_out":
                nn.init.zeros_(module.weight)
            else:
                nn.init.xavier_uniform_(module.weight.data.flatten(1), generator=generator)
            nn.init.zeros_(module.bias)
    dim = model.config.num_attention_heads * model.config.attention_head_dim
    for name, parameter in model.named_parameters():
        if name.endswith("scale_shift_table"):
            nn.init.normal_(parameter, std=dim**-0.5, generator=generator)


def read_captions(source: Path) -> list[str]:
    """Return captions from a text file with one caption per line, or from a source of clips that `wands preprocess` reads.

    Raises:
        BuildError: if `source` cannot be read or contains no caption.
    """
    if source.suffix == ".txt" and source.is_file():
        captions = [line.strip() for line in source.read_text(encoding="utf-8").splitlines() if line.strip()]
    else:
        from wands.data.clips.layouts import load_source
        from wands.errors import WandsError

        try:
            captions = [row.caption for row in load_source(str(source))[0]]
        except WandsError as error:
            raise BuildError(str(error)) from None
    if not captions:
        raise BuildError(
            f"--captions={source} contains no caption. Pass a text file with captions, or a folder of clips with captions."
        )
    return captions


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> T5TokenizerFast:
    """Train a Unigram tokenizer with the special tokens of T5: <pad> has id 0, </s> has id 1, and <unk> has id 2.

    Args:
        texts: texts from which the pieces are learned. The vocabulary also contains each printable ASCII character.
        vocab_size: largest number of pieces.

    Returns:
        A tokenizer that encodes ASCII text without unknown pieces, and decodes the pieces to the same text.
    """
    raw = Tokenizer(models.Unigram())
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size,
        special_tokens=["<pad>", "</s>", "<unk>"],
        unk_token="<unk>",
        initial_alphabet=[chr(code) for code in range(0x21, 0x7F)],
        show_progress=False,
    )
    raw.train_from_iterator(texts, trainer)
    vocab = json.loads(raw.to_str())["model"]["vocab"]
    assert [piece for piece, _ in vocab[:3]] == ["<pad>", "</s>", "<unk>"]
    # ASCII that the texts lack gets the lowest score less 0.0001, 0.0002, ... in the order of a hash table:
    # level it, and order equal scores by the piece, so that ids repeat.
    floor = round(min(score for _, score in vocab[3:]), 5)
    levelled = ((piece, floor if score < floor + 0.02 else round(score, 5)) for piece, score in vocab[3:])
    pieces = sorted(levelled, key=lambda row: (-row[1], row[0]))
    vocab = [(piece, 0.0) for piece, _ in vocab[:3]] + pieces
    return T5TokenizerFast(vocab=vocab, extra_ids=10, model_max_length=512)


def build_text_encoder(tokenizer: T5TokenizerFast, size: str) -> UMT5EncoderModel:
    """Return a UMT5 encoder with random weights. Its final RMS norm scales each token's embedding to an RMS of 1."""
    return UMT5EncoderModel(UMT5Config(vocab_size=len(tokenizer), dropout_rate=0.0, **TEXT[size])).eval()


def build_vae(vae_dir: str | Path | None, size: str, variant: Variant) -> AutoencoderKLWan:
    """Return the VAE of a pipeline.

    Args:
        vae_dir: folder of a VAE, or "random" for random weights. None means the trained VAE in scripts/ for the size
            "demo", and random weights for the size "test".
        size: "demo" or "test".
        variant: variant whose latent channels and stride the VAE must have.

    Raises:
        BuildError: if the folder contains no VAE, or a VAE with another number of latent channels.
    """
    channels = variant.dit.out_channels
    if vae_dir is None:
        vae_dir = "random" if size == "test" else SHIPPED_VAES[channels]
    if vae_dir == "random":
        # Wan 2.2's own VAE of TI2V cuts pixels into patches before a VAE of stride 8 begins.
        patch = {"in_channels": 12, "out_channels": 12, "patch_size": 2, "scale_factor_spatial": 16}
        # The latents of random weights have mean 0 and deviation 0.15 to 0.25, far from Wan's own statistics.
        return AutoencoderKLWan(
            base_dim=4,
            z_dim=channels,
            num_res_blocks=1,
            dim_mult=[1, 2, 4, 4],
            latents_mean=[0.0] * channels,
            latents_std=[0.2] * channels,
            **(patch if variant.vae_stride[1] == 16 else {}),
        ).eval()
    if not (Path(vae_dir) / "config.json").is_file():
        raise BuildError(
            f"--vae={vae_dir} contains no VAE (config.json is missing). Pass --vae random, or train a VAE with "
            "scripts/train_tiny_vae.py."
        )
    vae = AutoencoderKLWan.from_pretrained(vae_dir, torch_dtype=torch.float32).eval()
    if vae.config.z_dim != channels:
        raise BuildError(
            f"--vae={vae_dir} has {vae.config.z_dim} latent channels, but {variant.name} needs {channels}. "
            "Pass --vae random."
        )
    return vae


def dit_config(variant: Variant, size: str, dit: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the config of a small DiT with the inputs and outputs of a model variant. `dit` replaces entries of the config."""
    demo = DEMO_DIT_48 if variant.dit.out_channels == 48 else DEMO_DIT
    config = {
        **DIT,
        **(demo if size == "demo" else TEST_DIT),
        "in_channels": variant.dit.in_channels,
        "out_channels": variant.dit.out_channels,
        "text_dim": TEXT[size]["d_model"],
        **(dit or {}),
    }
    if variant.dit.image_dim:
        config["image_dim"] = CLIP["hidden_size"]
        config["added_kv_proj_dim"] = config["num_attention_heads"] * config["attention_head_dim"]
        config["pos_embed_seq_len"] = variant.dit.image_positions or None
    return config


def build_tiny_pipeline(
    out_dir: str | Path,
    seed: int = 0,
    captions: Sequence[str] | None = None,
    vae_dir: str | Path | None = None,
    dit: Mapping[str, Any] | None = None,
    size: Literal["demo", "test"] = "demo",
    variant: str = DEFAULT_VARIANT,
) -> DiffusionPipeline:
    """Build a small pipeline with the parts and interfaces of a Wan model, and save the pipeline in a folder.

    Args:
        out_dir: folder to write. Existing files are overwritten.
        seed: seed of all random weights. The global random generator is not changed.
        captions: texts from which the tokenizer learns, in addition to the sentences in `ENGLISH`.
        vae_dir: folder of an AutoencoderKLWan, or "random" for random weights. None means the trained VAE in scripts/ for
            the size "demo", and random weights for the size "test".
        dit: entries of the WanTransformer3DModel config that replace the defaults of `size`.
        size: "demo" initializes the DiT as official training does, with a head of zeros. "test" is far smaller and keeps
            diffusers' random head, because with a head of zeros the outputs of any two models would be equal.
        variant: name of the Wan model, a key of `wands.variants.VARIANTS`.

    Returns:
        The saved pipeline, float32, on the CPU.

    Raises:
        BuildError: if `vae_dir` contains no VAE, or a VAE with another number of latent channels.
    """
    row = VARIANTS[variant]
    texts = [line for line in ENGLISH.splitlines() if line] + list(captions or [])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer = train_tokenizer(texts, VOCAB_SIZE[size])
        text_encoder = build_text_encoder(tokenizer, size)
        experts = [
            WanTransformer3DModel(**dit_config(row, size, dit)).eval()
            for _ in range(2 if row.boundary_ratio else 1)
        ]
        if size == "demo":
            for number, expert in enumerate(experts):
                init_wan_weights(expert, seed + number)
        parts: dict[str, Any] = {"transformer": experts[0], "vae": build_vae(vae_dir, size, row)}
        if row.num_images:
            parts |= {"image_encoder": None, "image_processor": None}
        if "clip" in row.conditions:
            encoder = CLIPVisionModel(CLIPVisionConfig(**CLIP)).eval()
            parts |= {"image_encoder": encoder, "image_processor": CLIPImageProcessor()}
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )
    pipeline = (WanImageToVideoPipeline if row.num_images else WanPipeline)(
        tokenizer=tokenizer,
        text_encoder=text_encoder,
        scheduler=scheduler,
        transformer_2=experts[1] if row.boundary_ratio else None,
        boundary_ratio=row.boundary_ratio,
        expand_timesteps="first_frame" in row.conditions,
        **parts,
    )
    pipeline.save_pretrained(out_dir)
    return pipeline


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder of the pipeline")
    parser.add_argument("--variant", choices=sorted(VARIANTS), default=DEFAULT_VARIANT)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--captions", type=Path, help="text file (one caption a line) or a source of captioned clips"
    )
    parser.add_argument("--vae", default=None, help='VAE folder, or "random"; default: a VAE in scripts/')
    parser.add_argument("--size", choices=("demo", "test"), default="demo")
    args = parser.parse_args()
    try:
        captions = read_captions(args.captions) if args.captions else None
        pipeline = build_tiny_pipeline(
            args.out, args.seed, captions, args.vae, size=args.size, variant=args.variant
        )
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    counts = {
        name: sum(p.numel() for p in getattr(pipeline, name).parameters())
        for name in ("transformer", "transformer_2", "text_encoder", "image_encoder", "vae")
        if getattr(pipeline, name, None) is not None
    }
    print(f"{args.out}: " + ", ".join(f"{name} {count:,}" for name, count in counts.items()) + " parameters")
    return 0


if __name__ == "__main__":
    sys.exit(main())
