"""Random damage to the files of a run, a cache, a model and a LoRA is never used silently and never a traceback."""

from __future__ import annotations

import logging
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from tests.distributed.train.test_datasets import write_cache
from tests.support.runs import BASE, run_training
from tests.support.sampling import source_of
from tests.support.world import WorldPool
from wands.checkpoint.checkpoint_files import find_checkpoint, load_exported_state
from wands.cli import main
from wands.commands.export import export
from wands.commands.train import run_train
from wands.commands.verify import verify
from wands.config.options import ExportOptions, TrainOptions, VerifyOptions
from wands.data.cache.reader import LatentCache
from wands.errors import WandsError
from wands.model.files.hashes import HASH_FILE
from wands.model.files.lora_experts import find_lora_files
from wands.sampling.pipeline import load_pipeline

KINDS = ("flip", "zero", "truncate", "delete", "swap")
NUM_DAMAGES = 200
LORA = ("lora.rank=2", "lora.alpha=4", "lora.targets=attention")


@pytest.fixture(scope="module")
def originals(tiny_pipeline: Path, tmp_path_factory: pytest.TempPathFactory, worlds: WorldPool) -> Path:
    """A run of two steps, both saved, a cache, an export and a LoRA."""
    root = tmp_path_factory.mktemp("originals")
    settings = ("train.max_steps=2", "checkpoint.every=1", "checkpoint.keep=2", "ema.decay=0.9")
    worlds[2].run(run_training, tiny_pipeline, root / "run", settings, {"zero_optimization": {"stage": 2}})
    worlds[1].run(run_training, tiny_pipeline, root / "lora_run", ("train.max_steps=1", *LORA))
    write_cache(root / "cache", tiny_pipeline, "abcdefg", 1)
    export(ExportOptions(checkpoint=root / "run", out=root / "model"))
    export(ExportOptions(checkpoint=root / "lora_run", out=root / "lora"))
    shutil.rmtree(root / "lora_run")
    return root


def damage(folder: Path, rng: random.Random, kind: str) -> str:
    """Damage one file of a folder. Returns what was done."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    if folder.name == "run":  # the newest step
        files = [path for path in files if "step_00000002" in path.parts]
    weights = [path.stat().st_size ** 0.3 for path in files]
    (path,) = rng.choices(files, weights)
    data = bytearray(path.read_bytes())
    place = rng.randrange(len(data))
    if kind == "flip":
        data[place] ^= 1 << rng.randrange(8)
    elif kind == "zero":
        data[place : place + 4096] = bytes(len(data[place : place + 4096]))
    elif kind == "truncate":
        del data[place:]
    if kind == "delete":
        path.unlink()
    elif kind == "swap":
        other = rng.choice([other for other in files if other != path])
        path.write_bytes(other.read_bytes())
        other.write_bytes(data)
        return f"{kind} {path.relative_to(folder)} and {other.relative_to(folder)}"
    else:
        path.write_bytes(data)
    return f"{kind} {path.relative_to(folder)} at {place}"


def values_of(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: value.contiguous().view(torch.uint8).numpy().tobytes() for name, value in tensors.items()}


def use_run(folder: Path) -> Any:
    """Return the step that an export of the run reads, its weights and their average."""
    step, state = find_checkpoint(folder, verify=True)
    average = load_exported_state(step, ema=True)
    return state.step, values_of(load_exported_state(step)), values_of(average)


def use_cache(folder: Path) -> Any:
    cache = LatentCache(folder, verify=True)
    samples = [cache.read(i) for i in range(len(cache.keys))]
    return [(one.sample_id, values_of({"a": one.latents, "b": one.text_embeds})) for one in samples]


def use_model(folder: Path) -> Any:
    source = source_of(folder)
    pipeline = load_pipeline(source)
    weights = {
        f"{part}.{name}": value
        for part in ("transformer", "vae", "text_encoder")
        for name, value in getattr(pipeline, part).state_dict().items()
    }
    configs = [str(getattr(pipeline, part).config) for part in ("transformer", "vae", "scheduler")]
    return values_of(weights), [text.replace(str(folder), "") for text in configs]


def use_lora(folder: Path) -> Any:
    """An export has the LoRA in two files of different formats, and uses the second if the first is missing."""
    [file] = [found.path for found in find_lora_files(folder, "--lora")]
    return file.name, file.read_bytes()


USES: dict[str, Callable[[Path], Any]] = {
    "run": use_run,
    "cache": use_cache,
    "model": use_model,
    "lora": use_lora,
}


def outcome(name: str, original: Path, folder: Path, seed: int) -> tuple[str, str]:
    """Damage a copy and use it. Returns what was done, and "refused", "older step", "equal", "SILENT" or "TRACEBACK"."""
    rng = random.Random(seed)
    shutil.copytree(original, folder)
    done = f"{name}: {damage(folder, rng, KINDS[seed % len(KINDS)])}"
    wanted = USES[name](original)
    try:
        found = USES[name](folder)
    except WandsError as error:
        return done, "refused" if str(error).strip() else "TRACEBACK"
    except Exception as error:  # what the test looks for
        return done, f"TRACEBACK {type(error).__name__}: {error}"
    finally:
        shutil.rmtree(folder)
    if name == "run" and found[0] == 1:
        return done, "older step"
    if name == "lora":
        wanted = (found[0], (original / found[0]).read_bytes())
    return done, "equal" if found == wanted else "SILENT"


@pytest.mark.slow
@pytest.mark.parametrize(
    "seeds", [range(16), pytest.param(range(16, NUM_DAMAGES), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_no_damage_is_used_silently(
    seeds: range, originals: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    names = sorted(USES)
    outcomes = [
        outcome(name, originals / name, tmp_path / name, seed)
        for seed in seeds
        for name in [names[(seed // len(KINDS) + seed) % len(names)]]
    ]
    bad = [pair for pair in outcomes if pair[1] not in ("refused", "older step", "equal")]
    assert not bad
    kinds = [result for _, result in outcomes]
    assert kinds.count("refused") + kinds.count("older step") > 0.7 * len(kinds)


def begin(model: Path, out: Path) -> tuple[list[str], list[str]]:
    """Resume a run, on each rank: what was printed, and what was logged."""
    said: list[str] = []
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("wands").addHandler(handler)
    settings = ("train.max_steps=3", "checkpoint.every=1", "checkpoint.keep=2", "ema.decay=0.9")
    overrides = (*BASE, f"model.path={model}", f"output_dir={out}", *settings)
    try:
        run_train(TrainOptions(overrides=overrides, resume="auto", force=True), said.append)
    finally:
        logging.getLogger("wands").removeHandler(handler)
    return said, logged


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_every_rank_resumes_from_the_older_step(
    rank: int, originals: Path, tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool
):
    run = shutil.copytree(originals / "run", tmp_path / "run")
    file = run / f"checkpoints/step_00000002/transformer/state_rank_0000{rank}.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 4
    file.write_bytes(data)
    results = worlds[2].run(begin, tiny_pipeline, run)
    said = "\n".join(results[0][0])
    assert "resumed from" in said
    assert "step_00000001 at step 1" in said
    for _, logged in results:
        assert any(f"{file.name} is damaged" in line and "step_00000002" in line for line in logged)
    assert find_checkpoint(run, verify=True).state.step == 3
    assert (run / "checkpoints/step_00000002").is_dir()  # made again
    assert (run / "checkpoints/step_00000002.abandoned").is_dir()


def test_a_flip_in_the_base_is_refused_before_training(originals: Path, tmp_path: Path, worlds: WorldPool):
    model = shutil.copytree(originals / "model", tmp_path / "model")
    file = next((model / "transformer").glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 64
    file.write_bytes(data)
    with pytest.raises(AssertionError, match=rf"{file.name} is damaged .* Write or download the file again"):
        worlds[2].run(begin, model, tmp_path / "run")
    assert not list(tmp_path.glob("run/checkpoints/*"))


@pytest.mark.parametrize("name", sorted(USES))
def test_verify_names_the_damage(name: str, originals: Path, tmp_path: Path):
    copy = shutil.copytree(originals / name, tmp_path / name)
    assert "intact: " in verify(VerifyOptions(path=copy))
    pattern = {"cache": "*.h5", "run": "state_rank_00001*"}.get(name, "*.safetensors")
    file = sorted(copy.rglob(pattern))[-1]
    data = bytearray(file.read_bytes())
    place = len(data) // 2
    if name == "cache":  # other bytes of a shard may be unused
        cache = LatentCache(copy)
        place = data.index(cache.read(len(cache.keys) - 1).text_embeds.view(torch.uint8).numpy().tobytes())
    data[place] ^= 1
    file.write_bytes(data)
    result = CliRunner().invoke(main, ["tools", "verify", str(copy)])
    assert result.exit_code == 2
    assert file.name in result.output
    assert "damaged" in result.output


def test_hashes_of_the_hub_are_used(originals: Path, tmp_path: Path):
    """Both layouts of the Hub client: a cache of links to blobs, and a folder with metadata."""
    import hashlib

    source = sorted((originals / "model" / "transformer").glob("*.safetensors"))[0]
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    cached = tmp_path / "cached/snapshots/1/transformer"
    local = tmp_path / "local/transformer"
    blobs = tmp_path / "cached/blobs"
    records = tmp_path / "local/.cache/huggingface/download/transformer"
    for folder in (cached, local, blobs, records):
        folder.mkdir(parents=True)
    shutil.copy(source, blobs / digest)
    (cached / source.name).symlink_to(blobs / digest)
    shutil.copy(source, local / source.name)
    (records / f"{source.name}.metadata").write_text(f"{'0' * 40}\n{digest}\n1.0\n")
    for folder, file in ((cached.parent, blobs / digest), (local.parent, local / source.name)):
        assert "1 file in" in verify(VerifyOptions(path=folder))
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        with pytest.raises(WandsError, match="is damaged"):
            verify(VerifyOptions(path=folder))


def test_nothing_to_verify_is_one_sentence(tmp_path: Path):
    with pytest.raises(WandsError, match="no file with a stored hash"):
        verify(VerifyOptions(path=tmp_path))
    (tmp_path / HASH_FILE).write_text("{")
    with pytest.raises(WandsError, match="is damaged"):
        verify(VerifyOptions(path=tmp_path))
