"""Export: a folder that stock diffusers loads, equal to the trained weights at every ZeRO stage."""

from __future__ import annotations

import json
import os
import resource
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from diffusers import WanPipeline, WanTransformer3DModel
from PIL import Image
from safetensors import safe_open

from tests.support.commands import export
from tests.support.run_folder import write_run
from tests.support.runs import make_run, run_training, weights
from wands.checkpoint.checkpoint_files import find_checkpoint
from wands.cli import main
from wands.errors import CheckpointError, ConfigError, WandsError
from wands.export.export_record import RECORD_FILE
from wands.export.model_card import MARKER, STRIPS_FILE
from wands.model.files.tensor_files import hash_file, write_sharded


def train_once(run_world, model: Path, out: Path, stage: int) -> Path:
    zero: dict[str, Any] = {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
    run_world(2, run_training, model, out, ("train.max_steps=2",), zero)
    return out


@pytest.fixture(scope="module")
def run(tiny_pipeline: Path, tmp_path_factory: pytest.TempPathFactory, run_world) -> Path:
    return train_once(run_world, tiny_pipeline, tmp_path_factory.mktemp("run"), 3)


@pytest.mark.slow
def test_every_stage_exports_the_same_weights(run: Path, tiny_pipeline: Path, tmp_path: Path, run_world):
    reference = weights(run)
    for stage in (0, 1, 2):
        other = weights(train_once(run_world, tiny_pipeline, tmp_path / str(stage), stage))
        assert other.keys() == reference.keys()
        for name, value in reference.items():
            torch.testing.assert_close(other[name], value, rtol=1e-4, atol=1e-6)


def test_stock_diffusers_loads_the_folder(run: Path, tiny_pipeline: Path, tmp_path: Path):
    out = export(run, tmp_path / "out")
    pipeline = WanPipeline.from_pretrained(out)
    assert type(pipeline.transformer) is WanTransformer3DModel
    trained = weights(run)
    for name, value in pipeline.transformer.state_dict().items():
        assert torch.equal(value, trained[name]), name
    ours, base = (
        json.loads((folder / "transformer" / "config.json").read_text()) for folder in (out, tiny_pipeline)
    )
    assert {k: v for k, v in ours.items() if k[0] != "_"} == {k: v for k, v in base.items() if k[0] != "_"}
    assert ours["_class_name"] == "WanTransformer3DModel"
    for part in ("vae", "text_encoder", "tokenizer", "scheduler", "model_index.json"):
        assert (out / part).exists()
    record = json.loads((out / RECORD_FILE).read_text())
    assert (record["step"], record["base"], len(record["loss"])) == (2, str(tiny_pipeline), 2)


def test_bf16_keeps_what_diffusers_keeps_in_fp32(run: Path, tmp_path: Path):
    out = export(run, tmp_path / "out", dtype="bf16")
    with safe_open(out / "transformer" / "diffusion_pytorch_model.safetensors", "pt") as file:
        names = file.keys()
        dtypes = {name: file.get_slice(name).get_dtype() for name in names}
    assert dtypes["blocks.0.ffn.net.0.proj.weight"] == "BF16"
    assert dtypes["blocks.0.scale_shift_table"] == "F32"
    assert dtypes["condition_embedder.time_embedder.linear_1.weight"] == "F32"


def test_samples_of_the_training_are_part_of_the_export(run: Path, tmp_path: Path):
    copy = tmp_path / "run"
    pictures = write_run(tmp_path / "other", steps=2, every=1) / "samples"
    shutil.copytree(run, copy)
    shutil.copytree(pictures, copy / "samples")
    out = export(copy, tmp_path / "out")
    with Image.open(out / STRIPS_FILE) as sheet:
        assert sheet.width >= 2 * 208
        assert sheet.height >= 2 * 120
        assert len(sheet.convert("RGB").getcolors(sheet.width * sheet.height)) > 100


def test_sharded_export(run: Path, tmp_path: Path):
    out = export(run, tmp_path / "out", max_shard_size="100KB")
    files = list((out / "transformer").glob("*.safetensors"))
    assert len(files) > 1
    assert all(path.stat().st_size < 110_000 for path in files)
    assert WanTransformer3DModel.from_pretrained(out / "transformer").config.num_layers


@pytest.mark.parametrize("size", ["foo", "", "5", "0GB", "-5GB", "5GiB", "nanGB", "9" * 400 + "GB"])
def test_a_shard_size_that_is_none_is_said_before_anything_is_read(tmp_path: Path, size: str):
    with pytest.raises(ConfigError, match=r"--max-shard-size .*must be a number above 0 and a unit"):
        export(tmp_path / "no such run", tmp_path / "out", max_shard_size=size)


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_whoever_the_umask_lets_may_read_the_weights(run: Path, tmp_path: Path, umask: int):
    before = os.umask(umask)
    try:
        out = export(run, tmp_path / "out")
    finally:
        os.umask(before)
    written = [out / "transformer", *(out / "transformer").iterdir(), out / RECORD_FILE]
    modes = {path.name: path.stat().st_mode & 0o666 for path in written}
    assert modes == dict.fromkeys(modes, 0o666 & ~umask)
    assert any(name.endswith(".safetensors") for name in modes)


def test_an_older_step_and_a_second_export(run: Path, tmp_path: Path):
    step = next((run / "checkpoints").glob("step_*"))
    out = export(step, tmp_path / "out")
    again = export(step, tmp_path / "out")  # replaces its own
    assert out == again
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious.txt").write_text("keep me")
    with pytest.raises(
        ConfigError,
        match=r"contains files, but no wands_export\.json of an earlier export; choose a new or an empty folder",
    ):
        export(step, tmp_path / "full")
    assert (tmp_path / "full" / "precious.txt").read_text() == "keep me"


def test_a_folder_of_the_users_is_not_deleted(run: Path, tmp_path: Path):
    (tmp_path / "out.tmp").mkdir()
    (tmp_path / "out.tmp" / "precious.txt").write_text("keep me")
    with pytest.raises(
        ConfigError,
        match=r"--out .*out\.tmp, but a folder .* already exists, and was not left by",
    ):
        export(run, tmp_path / "out")
    assert (tmp_path / "out.tmp" / "precious.txt").read_text() == "keep me"


def test_a_place_that_cannot_be_made(run: Path, tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(WandsError, match=r"--out .*out: lock file .* cannot be created \(Not a directory\)"):
        export(run, tmp_path / "file" / "out")


def test_a_mount_point_is_refused_at_the_start(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from wands.commands import export as module

    (tmp_path / "volume").mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == tmp_path / "volume")
    monkeypatch.setattr(module, "load_full_weights", lambda *_: pytest.fail("read before it was refused"))
    with pytest.raises(
        ConfigError,
        match=r"is a mount point.*choose a folder inside the mount point, such as .*volume/output\.",
    ):
        export(run, tmp_path / "volume")
    assert os.listdir(tmp_path) == ["volume"]


def test_another_base_is_refused(run: Path, tiny_pipeline: Path, tmp_path: Path):
    base = tmp_path / "base"
    shutil.copytree(tiny_pipeline, base)
    path = base / "transformer" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_layers": 9}))
    with pytest.raises(
        ConfigError, match=r"does not fit the run's base model: num_layers=9 instead of 2; set --base"
    ):
        export(run, tmp_path / "out", base=str(base))


def test_a_diverged_model_is_not_exported(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from wands.commands import export as module

    broken = {name: torch.full_like(value, float("nan")) for name, value in weights(run).items()}
    monkeypatch.setattr(module, "load_full_weights", lambda *_: broken)
    with pytest.raises(CheckpointError):
        export(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.tmp").exists()


@pytest.mark.parametrize("link", [False, True])  # a copied file does not fit; the written weights do not fit
def test_a_full_disk_is_one_sentence_and_leaves_nothing(run: Path, tmp_path: Path, link: bool):
    """The limit on file sizes makes writes fail as a full disk does, with another errno."""
    out = tmp_path / "out"
    earlier = export(run, out)
    before = (earlier / RECORD_FILE).read_text()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(WandsError, match=r"--out .*out cannot be written \(.*File too large") as caught:
            export(run, out, link=link)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert isinstance(caught.value.__cause__, shutil.Error) is not link
    assert "\n" not in str(caught.value)
    assert os.listdir(tmp_path) == ["out"]
    assert (out / RECORD_FILE).read_text() == before


def test_a_program_that_writes_into_an_export_does_not_change_the_base(
    run: Path, tiny_pipeline: Path, tmp_path: Path
):
    """safetensors and diffusers open an existing file and write into it, so a hard link would change the base."""
    base = tmp_path / "base"
    shutil.copytree(tiny_pipeline, base)
    before = {path: path.read_bytes() for path in base.rglob("*") if path.is_file()}
    out = export(run, tmp_path / "out", base=str(base))
    secret = tmp_path / "secret"
    secret.write_text("key")
    (out / "samples").mkdir()
    (out / "samples" / "link.png").symlink_to(secret)
    export(run, out, base=str(base))
    assert (out / "samples" / "link.png").is_symlink()  # a hard link would look like a file of the export
    (out / "samples" / "link.png").unlink()
    for path in [path for path in out.rglob("*") if path.is_file()]:
        with path.open("r+b") as file:
            file.write(b"changed")
    assert {path: path.read_bytes() for path in before} == before
    linked = export(run, tmp_path / "linked", base=str(base), link=True)
    assert (linked / "vae" / "config.json").samefile(base / "vae" / "config.json")
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize("name", ["vae/LICENSE", "LICENSE", "scheduler"])
@pytest.mark.parametrize("link", [False, True])
def test_a_link_out_of_the_base_is_refused(
    run: Path, tiny_pipeline: Path, tmp_path: Path, name: str, link: bool
):
    """`wands push` would publish the copy of a private key."""
    base = tmp_path / "base"
    shutil.copytree(tiny_pipeline, base)
    shutil.rmtree(base / "scheduler")
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "id_ed25519").write_text("key")
    (base / name).symlink_to(secret if name == "scheduler" else secret / "id_ed25519")
    with pytest.raises(
        WandsError, match=rf"{name} leads to .*/secret.*outside --base .* replace the link by a copy"
    ):
        export(run, tmp_path / "out", base=str(base), link=link)
    assert not (tmp_path / "out").exists()


def test_a_base_of_links_into_the_hub_cache_is_copied(run: Path, tiny_pipeline: Path, tmp_path: Path):
    """A snapshot consists of links into `../../blobs`, also in a cache that HF_HUB_CACHE does not name."""
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot = blobs.parent / "snapshots" / "0123"
    blobs.mkdir(parents=True)
    for number, path in enumerate(path for path in tiny_pipeline.rglob("*") if path.is_file()):
        target = snapshot / path.relative_to(tiny_pipeline)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, blobs / str(number))
        target.symlink_to(os.path.relpath(blobs / str(number), target.parent))
    out = export(run, tmp_path / "out", base=str(snapshot))
    assert not any(path.is_symlink() for path in out.rglob("*"))
    assert (out / "vae" / "config.json").read_bytes() == (tiny_pipeline / "vae" / "config.json").read_bytes()
    shutil.rmtree(out)
    blobs.rename(tmp_path / "secret")
    blobs.symlink_to(tmp_path / "secret")
    with pytest.raises(WandsError, match="outside --base"):
        export(run, tmp_path / "out", base=str(snapshot))


def test_export_into_the_current_folder(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert export(run, Path(".")) == tmp_path / "here"
    assert (tmp_path / "here" / "transformer" / "config.json").is_file()


@pytest.mark.parametrize(
    ("text", "says"), [(None, "no such file"), ("{", "cannot be read"), ("[]", "must contain a JSON object")]
)
def test_a_damaged_base_is_one_sentence(
    run: Path, tiny_pipeline: Path, tmp_path: Path, text: str | None, says: str
):
    base = tmp_path / "base"
    shutil.copytree(tiny_pipeline, base)
    path = base / "transformer" / "config.json"
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        export(run, tmp_path / "out", base=str(base))


class _Runs:
    def __init__(self, code: str) -> None:
        self.code = code

    def __reduce__(self) -> Any:
        return exec, (self.code,)


def test_a_pickle_in_a_checkpoint_is_never_opened(run: Path, tmp_path: Path):
    """The pickle would write a file. Every size and hash is right."""
    ran = tmp_path / "ran"
    copied = shutil.copytree(run, tmp_path / "run")
    step, state = find_checkpoint(copied)
    for path in (step / "transformer").glob("*.safetensors"):
        path.unlink()
    pickled = step / "transformer" / "state_rank_00000.pt"
    torch.save({"module": _Runs(f"open({str(ran)!r}, 'w')")}, pickled)
    state.write(step, {"transformer/state_rank_00000.pt": hash_file(pickled)})
    with pytest.raises(CheckpointError, match=r"no file transformer/state_rank_\*\.safetensors, .* pickle"):
        export(copied, tmp_path / "out")
    assert CliRunner().invoke(main, ["convert", str(copied), "--to", "official", "--out", "x"]).exit_code == 2
    assert not ran.exists()


def test_a_checkpoint_keeps_the_whole_path_of_its_base(
    tiny_pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "wan").symlink_to(tiny_pipeline)
    monkeypatch.chdir(tmp_path)
    training_run = make_run(Path("models/wan"), tmp_path / "run", world_size=1)
    assert training_run.state.base == str(tiny_pipeline.resolve())
    monkeypatch.chdir(tiny_pipeline)  # no folder from here: an id, or there would be no run
    assert replace(training_run).state.base == "models/wan"


def test_a_second_export_keeps_what_people_added(run: Path, tmp_path: Path):
    out = export(run, tmp_path / "out")
    (out / "samples" / "more").mkdir(parents=True)
    (out / "samples" / "more" / "a.mp4").write_bytes(b"video")
    (out / "README.md").write_text("my own words ![](loss.png)")
    (out / "loss.png").write_bytes(b"plot")
    export(run, out, dtype="bf16")
    assert (out / "samples" / "more" / "a.mp4").read_bytes() == b"video"
    assert (out / "README.md").read_text() == "my own words ![](loss.png)"
    assert (out / "loss.png").read_bytes() == b"plot"
    assert json.loads((out / RECORD_FILE).read_text())["dtype"] == "bf16"
    (out / "README.md").write_text(f"{MARKER} step 2")
    export(run, out)
    assert not (out / "README.md").exists()  # says the old step; push writes it again
    assert not (out / "loss.png").exists()
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("dies_at", [1, 2])
def test_whenever_it_dies_a_whole_export_is_left(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_at: int
):
    from wands import files as module

    out = export(run, tmp_path / "out")

    def die(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if dies_at == 1:  # between the renames
            move = module.publish
            patch.setattr(module, "publish", lambda new, path: die() if path == out else move(new, path))
        else:  # both are done, the old one is not deleted yet
            real = shutil.rmtree
            patch.setattr(
                module.shutil,
                "rmtree",
                lambda path, *a, **k: die() if path.name == "out.old" else real(path, *a, **k),
            )
        with pytest.raises(KeyboardInterrupt):
            export(run, out, dtype="bf16")
    whole = out if out.exists() else tmp_path / "out.old"
    assert WanTransformer3DModel.from_pretrained(whole / "transformer").config.num_layers
    export(run, out)  # Ctrl-C left a lock file, so that the old folder is known as wands' own
    assert os.listdir(tmp_path) == ["out"]


def test_a_disk_that_changes_a_bit_is_found(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from wands.export import trained_weights as module

    def damaged(*args: Any) -> None:
        (path,) = write_sharded(*args)
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)

    monkeypatch.setattr(module, "write_sharded", damaged)
    with pytest.raises(
        CheckpointError, match=r"export: \S+ was written to .*, but reading the file returns other values"
    ):
        export(run, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
