"""Print the contents of a latent cache, or decode one of its samples.

python -m data_tools.inspect CACHE [--rows N]
python -m data_tools.inspect CACHE --decode KEY --model DIR_OR_HUB_ID --out FILE.mp4|FILE.png
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from data_tools.program import program
from wands.conditions.arrays import ArraySpec
from wands.config.base import ARGUMENT, Options, Spelling
from wands.data.cache.reader import LatentCache
from wands.errors import ConfigError
from wands.preprocess.length_histogram import token_histogram
from wands.texts import plural, safe_lines

STRIP_FRAMES = 8


def describe_cache(cache: LatentCache, num_rows: int) -> str:
    """Return a text that describes a cache and lists its first `num_rows` samples. No latents are decoded to images."""
    index = cache.index
    variant = cache.manifest["variant"]
    tokens = cache.num_tokens(tuple(variant["patch_size"]))
    text = index.text_lens
    lines = [
        f"{cache.path}: {plural(len(cache), 'sample')} in {plural(len(index.shard_names), 'shard')}, "
        f"{cache.num_bytes:,} bytes",
        f"variant       {variant['name']}: VAE stride {_times(variant['vae_stride'])}, patch "
        f"{_times(variant['patch_size'])}, {variant['latent_channels']} latent channels, text width "
        f"{variant['text_dim']}",
        f"conditions    {', '.join(cache.manifest['conditions'])}",
        *(f"{spec.name:<13} {spec.dtype} {_dims(spec)}" for spec in cache.arrays),
        *(f"{part:<13} {_short(values)}" for part, values in cache.fingerprint.items()),
        f"empty caption {plural(len(cache.null_text_embeds), 'token')}",
        f"masks         {plural((cache.mask_sums[:, 0] > 0).sum(), 'sample')}",
    ]
    if len(cache):
        lines += [
            f"frames        {index.num_frames.min()} to {index.num_frames.max()}, at "
            f"{', '.join(f'{fps:g}' for fps in np.unique(index.fps))} per second",
            f"text          {text.min()} to {text.max()} tokens, {text.mean():.0f} on average",
            token_histogram(tokens),
            "",
            *(_row(cache, i, int(tokens[i])) for i in range(min(num_rows, len(cache)))),
        ]
    if len(cache) > num_rows:
        lines.append(f"... and {len(cache) - num_rows:,} more (--rows N lists N samples)")
    return "\n".join(lines)


def decode(cache: LatentCache, key: str, model: str, out: Path) -> tuple[int, ...]:
    """Decode one sample to an .mp4, or to a .png with up to eight frames side by side, and return its shape [F, H, W, 3].

    Raises:
        CacheError: if the sample does not exist or is damaged, or the VAE of `model` did not make the cache.
        ConfigError: if `out` ends in neither .mp4 nor .png, or `model` is not a pipeline.
    """
    if out.suffix.lower() not in (".mp4", ".png"):
        raise ConfigError(f"--out={out} must end in .mp4 or .png; change the file name.")
    i = cache.find(key)
    sample = cache.read(i)

    from wands.data.clips.video import save_video, to_frames
    from wands.encoders.fingerprint import fingerprint_pipeline
    from wands.encoders.vae import WanVideoEncoder

    cache.check_encoders({"vae": fingerprint_pipeline(model).get("vae")}, model)
    frames = to_frames(WanVideoEncoder.load(model).decode(sample.latents))
    if out.suffix.lower() == ".mp4":
        save_video(out, frames, float(cache.index.fps[i]))
    else:
        from PIL import Image

        count = min(STRIP_FRAMES, len(frames))
        chosen = frames[np.linspace(0, len(frames) - 1, count).round().astype(int)]
        out.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.concatenate(list(chosen), axis=1)).save(out)
    return frames.shape


def _row(cache: LatentCache, i: int, tokens: int) -> str:
    meta = cache.meta(i)
    channels, frames, rows, columns = cache.index.latent_shapes[i]
    return (
        f"{cache.keys[i]}: {meta['num_frames']} frames of {meta.get('width')}x{meta.get('height')} at "
        f"{meta['fps']:g}/s, latents {channels}x{frames}x{rows}x{columns}, {tokens:,} video tokens, "
        f"{cache.index.text_lens[i]} text tokens\n  {meta.get('caption')}"
    )


def _dims(spec: ArraySpec) -> str:
    sizes = " x ".join("any length" if dim is None else str(dim) for dim in spec.dims)
    return sizes + (" (some samples)" if spec.optional else "")


def _short(values: Any) -> str:
    """Return one component of a fingerprint, such as the VAE, in one line, with the first eight digits of hashes."""
    return ", ".join(f"{name} {value}" for name, value in _flat(values))


def _flat(values: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value)
        elif value not in (None, False):
            yield name, str(value)[:8] if name.endswith("_sha256") else str(value)


def _times(numbers: Sequence[int]) -> str:
    return "x".join(map(str, numbers))


class InspectArguments(Options):
    """Print the contents of a latent cache, or decode one of its samples.

    Examples:
        python -m data_tools.inspect cache
        python -m data_tools.inspect cache --decode KEY --model Wan-AI/Wan2.1-T2V-1.3B-Diffusers --out clip.mp4
    """

    cache: Annotated[Path, ARGUMENT]
    """Cache folder that `wands preprocess` wrote."""
    rows: int = 5
    """Number of samples to list."""
    decode: Annotated[str | None, Spelling(metavar="KEY")] = None
    """Decode the sample with this key instead of describing the cache."""
    model: str | None = None
    """Pipeline folder or Hub id with the VAE that decodes the sample. This option is required with --decode."""
    out: Path | None = None
    """File to write, required with --decode: an .mp4 file for a video, or a .png file for a row of frames."""


def _run(options: InspectArguments) -> int:
    if options.decode is None:
        print(safe_lines(describe_cache(LatentCache(options.cache, verify=True), options.rows)))
        return 0
    if not (options.model and options.out):
        raise ConfigError("--decode needs --model and --out; add both options.")
    cache = LatentCache(options.cache, verify=True)
    frames, height, width, _ = decode(cache, options.decode, options.model, options.out)
    print(f"{options.out}: {frames} frames of {width}x{height}")
    return 0


main = program(InspectArguments, _run)

if __name__ == "__main__":
    sys.exit(main())
