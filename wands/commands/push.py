"""`wands push`: the folder of a pipeline or a LoRA becomes a repository on the Hugging Face Hub, with a model card.

What goes up is staged first as a folder of links: there linked components are real folders (the Hub client
does not enter a linked one), training state is left out, and the JSON files carry no path of this machine.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from safetensors import SafetensorError, safe_open

from wands import __version__
from wands.commands.plots import save_loss_plot
from wands.errors import WandsError
from wands.export import model_card
from wands.export.upload import RETRY_WAITS, Hub, connect, open_repository
from wands.files import atomic_path
from wands.model.files.lora_files import EXPERT_NAMES

log = logging.getLogger(__name__)

_SKIPPED_FILES = (
    *(".*", "*.tmp", "*.pyc"),
    *("*_optim_states.pt", "*_model_states.pt", "zero_to_*.py", "latest"),  # DeepSpeed's
    *("metrics.jsonl", "samples-rank*.jsonl", "events.out.tfevents.*"),  # a run folder's
)
_SKIPPED_FOLDERS = (".*", "__pycache__", "*.tmp", "global_step*")
_STATE_FILE = "wands_state.json"  # the folder that holds it is a training checkpoint


def push(
    directory: Path,
    repo_id: str,
    *,
    token: str | None = None,
    public: bool = False,
    endpoint: str | None = None,
    revision: str | None = None,
    message: str | None = None,
    training: Path | None = None,
) -> str:
    """Upload the folder of a pipeline or a LoRA and its model card; run again after a failure, it sends only what is missing.

    Writes ``README.md`` and ``loss.png`` into the folder. A ``README.md`` that wands did not write is kept.

    Args:
        directory: what `wands export` wrote.
        repo_id: ``owner/name``, or ``name`` for the token's own account.
        token: a Hub token with write access; None takes HF_TOKEN or the one that ``hf auth login`` stored.
        public: make a new repository public. The visibility of an existing one is never changed.
        endpoint: address of the Hub; None takes HF_ENDPOINT or the public Hub.
        revision: branch to commit to, made when missing; None is ``main``.
        message: commit message.
        training: run or checkpoint folder, for what the folder's own `wands_export.json` lacks in the card.

    Returns:
        The address of the repository.

    Raises:
        WandsError: the folder is no pipeline and no LoRA; name, token or server cannot be used; the upload failed.
    """
    directory = Path(directory)
    contents = _check_contents(directory)
    record = _read_record(directory, training)
    hub = open_repository(connect(repo_id, token, endpoint), public=public, revision=revision)
    url = f"{hub.api.endpoint}/{hub.repo_id}"
    _write_card(directory, hub, record, contents)
    with tempfile.TemporaryDirectory(prefix="wands-push-") as staging:
        num_files, num_bytes = _stage(directory, Path(staging))
        log.info("uploading %d files, %.1f MB, to %s", num_files, num_bytes / 1e6, url)
        step = f" of step {record['step']}" if "step" in record else ""
        what = "LoRA" if contents.loras else "pipeline"
        upload = partial(
            hub.api.upload_folder,
            repo_id=hub.repo_id,
            folder_path=staging,
            revision=revision,
            commit_message=message or f"Upload the {what}{step} with wands {__version__}",
        )
        commit = hub.call("the upload", upload, RETRY_WAITS)
    log.info("%s is complete at commit %s", url, commit.oid)
    return url


def _check_contents(directory: Path) -> model_card.FolderContents:
    """Tell what the folder holds; one that diffusers could not load is refused."""
    index_path = directory / "model_index.json"
    if not index_path.is_file():
        loras = tuple(_find_loras(directory))
        if not loras:
            raise WandsError(
                f"DIR={directory} is no diffusers pipeline (no model_index.json) and no LoRA; give what `wands export` wrote."
            )
        return model_card.FolderContents(loras=loras)
    index = _read_json(index_path)
    parts = [
        name for name, entry in index.items() if isinstance(entry, list) and len(entry) == 2 and entry[1]
    ]
    missing = [name for name in parts if not (directory / name).is_dir()]
    if missing:
        raise WandsError(f"DIR={directory} lacks the parts {', '.join(missing)}; run `wands export` again.")
    return model_card.FolderContents(str(index.get("_class_name", "DiffusionPipeline")))


def _find_loras(directory: Path) -> Iterator[model_card.LoraFile]:
    """The LoRAs that diffusers loads by its own keys, of the folder and of those of the two experts in it."""
    for folder, own in (("", "transformer"), *((name, part) for part, name in EXPERT_NAMES.items())):
        for path in sorted((directory / folder).glob("*.safetensors")):
            try:
                with safe_open(path, framework="pt") as file:
                    names = list(file.keys())
            except (SafetensorError, OSError) as error:
                raise WandsError(f"{path} cannot be read ({error}); run `wands export` again.") from error
            prefixes = {name.partition(".")[0] for name in names if ".lora_" in name}
            parts = {prefix: prefix for prefix in ("transformer", "transformer_2") if prefix in prefixes}
            if list(parts) == ["transformer"]:
                parts["transformer"] = own
            if parts:
                yield model_card.LoraFile(path.relative_to(directory).as_posix(), tuple(parts.items()))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WandsError(f"{path} cannot be read ({error}); run `wands export` again.") from error
    if not isinstance(value, dict):
        raise WandsError(
            f"{path} must hold a JSON object, not a {type(value).__name__}; run `wands export` again."
        )
    return value


def _read_record(directory: Path, training: Path | None) -> dict[str, Any]:
    """Return what is known of the training: the folder's own record, and what it lacks from a checkpoint."""
    record: dict[str, Any] = {}
    if training is not None:
        from wands.train.checkpoint import find_checkpoint

        where, state = find_checkpoint(Path(training))
        record = {key: getattr(state, key) for key in ("base", "step", "variant", "recipe", "loss")}
        record["data"] = {**state.data_summary, "fingerprint": state.data_fingerprint}
        record["checkpoint"] = where.name
    own = directory / model_card.RECORD_FILE
    return record | (_read_json(own) if own.is_file() else {})


def _license_of(base: str, hub: Hub) -> str:
    """Return the licence that the base model states; a base that cannot be asked is taken for a stock Wan."""
    from huggingface_hub import metadata_load

    stated = None
    try:
        if base and (Path(base) / "README.md").is_file():
            stated = (metadata_load(Path(base) / "README.md") or {}).get("license")
        elif model_card.hub_id(base):
            card = hub.call(
                "asking for the base", partial(hub.api.model_info, base, timeout=10), ()
            ).card_data
            stated = card.get("license") if card else None
    except (OSError, ValueError, yaml.YAMLError, WandsError) as error:
        log.debug("the licence of %s is not known (%s)", base, error)
    return stated if isinstance(stated, str) else model_card.DEFAULT_LICENSE


def _write_card(
    directory: Path, hub: Hub, record: Mapping[str, Any], contents: model_card.FolderContents
) -> None:
    """Write README.md and loss.png into the folder, unless a person wrote the README.md."""
    path = directory / "README.md"
    try:
        foreign = path.exists() and model_card.MARKER not in path.read_text(
            encoding="utf-8", errors="replace"
        )
    except OSError as error:
        raise WandsError(f"{path} cannot be read ({error.strerror}); mend or remove it.") from error
    if foreign:
        log.info("%s was not written by wands and stays as it is", path)
        return
    points = model_card.loss_points(record)
    if points:
        steps, losses = zip(*points, strict=True)
        save_loss_plot(directory / model_card.LOSS_FILE, {"loss": (steps, losses)})
    license_id = _license_of(str(record.get("base", "")), hub)
    text = model_card.build_card(directory, hub.repo_id, record, contents, license_id)
    with atomic_path(path) as temporary:  # a README.md linked from elsewhere becomes a file: that one stays
        temporary.write_text(text, encoding="utf-8")


def _files(directory: Path) -> Iterator[Path]:
    """Yield the files that belong to the pipeline, linked folders entered, training state left out."""
    for folder, folders, names in os.walk(directory, followlinks=True):
        here = Path(folder)
        if _STATE_FILE in names:
            folders.clear()
            continue
        folders[:] = sorted(
            name for name in folders if not any(fnmatch(name, skip) for skip in _SKIPPED_FOLDERS)
        )
        for name in folders:
            if (here / name).is_symlink() and here.resolve().is_relative_to((here / name).resolve()):
                raise WandsError(f"{here / name} links to a folder that holds it; remove the link.")
        yield from (
            here / name for name in sorted(names) if not any(fnmatch(name, skip) for skip in _SKIPPED_FILES)
        )


def _stage(directory: Path, staging: Path) -> tuple[int, int]:
    """Lay out what is to be uploaded as links; return the number of files and their bytes."""
    num_files = num_bytes = 0
    try:
        for source in _files(directory):
            if not os.access(source, os.R_OK):
                raise WandsError(f"{source} is a broken link or not readable; run `wands export` again.")
            target = staging / source.relative_to(directory)
            target.parent.mkdir(parents=True, exist_ok=True)
            cleaned = _cleaned(source)
            if cleaned is None:
                target.symlink_to(source.resolve())
            else:
                target.write_text(cleaned, encoding="utf-8")
            num_files, num_bytes = num_files + 1, num_bytes + target.stat().st_size
    except OSError as error:
        raise WandsError(
            f"DIR={directory} cannot be read ({error}); mend that and run the same command again."
        ) from error
    return num_files, num_bytes


def _cleaned(path: Path) -> str | None:
    """Return a file's text without the places on this machine that it names, None to send it as it is."""
    if path.name == model_card.RECORD_FILE:
        return json.dumps(model_card.without_paths(_read_json(path)), indent=2) + "\n"
    if path.name == "README.txt":  # beside an exported LoRA
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        return "".join(f"{model_card.without_paths(line)}\n" for line in lines)
    if path.name == model_card.SAMPLES_FILE:
        rows = [
            {key: value if "prompt" in key else model_card.without_paths(value) for key, value in row.items()}
            for row in model_card.read_rows(path)
        ]
        return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    if path.name != "model_index.json" and not path.name.endswith("config.json"):
        return None
    content = _read_json(path)
    cleaned = _without_origin(content)
    return json.dumps(cleaned, indent=2) + "\n" if cleaned != content else None


def _without_origin(value: Any) -> Any:
    """Drop the folder that diffusers and transformers note a part was loaded from."""
    if isinstance(value, list):
        return [_without_origin(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: _without_origin(item)
        for key, item in value.items()
        if not (
            key in ("_name_or_path", "name_or_path") and isinstance(item, str) and model_card.is_local(item)
        )
    }
