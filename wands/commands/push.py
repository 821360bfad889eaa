"""The command `wands push`: upload the folder of a pipeline or a LoRA to the Hugging Face Hub, with a model card.

Only known file names and types in known folders are uploaded, all in one commit; training state is left out. Paths of this
machine are removed from the uploaded JSON and text files, but not from the local ones.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import CommitInfo, CommitOperationAdd, metadata_load

from wands.commands.plots import save_loss_plot
from wands.config.options import ExportOptions, PushOptions
from wands.errors import WandsError, one_line
from wands.export import model_card
from wands.export.export_record import RECORD_FILE, SAMPLES_FILE, check_record, read_record, read_sample_rows
from wands.export.model_card import FolderContents, LoraFile
from wands.export.upload import RETRY_WAITS, Hub, connect, open_repository
from wands.files import read_json_object, write_text
from wands.model.files.hashes import HASH_FILE
from wands.model.files.hub import check_link, is_hub_id
from wands.model.files.lora_experts import EXPERT_NAMES, describe_file
from wands.model.files.name_maps import EXPERTS
from wands.model.files.tensor_files import TensorFiles
from wands.secret_patterns import contains_secret
from wands.texts import is_local, plural, without_paths
from wands.version import __version__

log = logging.getLogger(__name__)

_UPLOADED = (
    *("*.safetensors", "*.safetensors.index.json", "model_index.json", "*config.json"),
    *("*.model", "tokenizer.json", "vocab.*", "merges.txt", "special_tokens_map.json", "added_tokens.json"),
    *("README.md", "README.txt", "LICENSE*", "NOTICE*", SAMPLES_FILE, RECORD_FILE),
    *("*.mp4", "*.webm", "*.gif", "*.png", "*.jpg", "*.jpeg", "*.webp"),
)
"""Patterns for the names of the files that are uploaded."""
_SKIPPED = (".*", "*.tmp", "*optim*")
_STATE_FILE = "wands_state.json"  # the folder that contains it is a training checkpoint


def push(options: PushOptions, token: str | None = None) -> str:
    """Upload the folder of a pipeline or a LoRA, with a model card, to a repository on the Hugging Face Hub, and return its URL.

    A checkpoint, or the latest one of a run folder, is exported to a temporary folder next to it, which is uploaded instead.
    Before the upload, ``README.md`` and ``loss.png`` are written, unless the user wrote a ``README.md``. A second push uploads
    only new and changed files. The visibility of an existing repository is never changed. Without `token`, HF_TOKEN or the token
    of ``hf auth login`` is used.

    Raises:
        WandsError: if the folder has no pipeline and no LoRA, a link that leads out of it, or a file with a secret; if the name
            of the repository, the token or the server cannot be used; or if the upload fails.
    """
    directory = options.directory
    exported = any((directory / name).is_file() for name in (RECORD_FILE, "model_index.json"))
    if not exported and ((directory / "checkpoints").is_dir() or (directory / _STATE_FILE).is_file()):
        from wands.checkpoint.checkpoint_files import find_checkpoint
        from wands.commands.export import export

        checkpoint, _ = find_checkpoint(directory)
        with _temporary_folder(checkpoint.parent) as parent:
            folder = export(ExportOptions(checkpoint=checkpoint, out=parent / "export"))
            return push(options.model_copy(update={"directory": folder}), token)
    contents = _check_contents(directory)
    record = _read_record(directory, options.training)
    files, left_out = _list_files(directory, contents.folders)
    sizes = [(directory / name).stat().st_size for name in files]
    rows = [f"\n  {size:15,}  {name}" for name, size in zip(files, sizes, strict=True)]
    size = sum(sizes) / 1e6
    log.info("%s to upload, %.1f MB, and the model card:%s", plural(len(rows), "file"), size, "".join(rows))
    if left_out:
        log.warning("these files are not part of a model and are left out: %s", ", ".join(left_out))
    if options.dry_run:
        card = _card_text(directory, options.repo_id, record, contents, lambda base: "apache-2.0")
        log.info(
            "the model card, whose license will be that of the base model:\n\n%s",
            card or "README.md stays as it is",
        )
        return f"dry run: nothing was sent to {options.repo_id}"
    hub = connect(options.repo_id, token, options.endpoint)
    hub = open_repository(hub, public=options.public, revision=options.revision)
    url = f"{hub.api.endpoint}/{hub.repo_id}"
    _write_card(directory, hub, record, contents)
    kind = "LoRA" if contents.loras else "pipeline"
    step = f" of step {record['step']}" if "step" in record else ""
    written = (name for name in ("README.md", model_card.LOSS_FILE) if (directory / name).is_file())
    names = sorted({*files, *written})

    operations: list[CommitOperationAdd] = []

    def send_commit() -> CommitInfo:
        operations[:] = [CommitOperationAdd(name, _uploaded_content(directory / name)) for name in names]
        message = options.message or f"Upload the {kind}{step} with wands {__version__}"
        return hub.api.create_commit(
            hub.repo_id, operations, commit_message=message, revision=options.revision
        )

    log.info("uploading to %s", url)
    commit = hub.call("the upload", send_commit, RETRY_WAITS)
    hub.check_files(operations, commit.oid)
    log.info("%s is complete at commit %s", url, commit.oid)
    return url


def _check_contents(directory: Path) -> FolderContents:
    """Return the contents of the folder to push. Raise WandsError without a complete pipeline or a LoRA."""
    index_path = directory / "model_index.json"
    if not index_path.is_file():
        loras = tuple(_loras_to_push(directory))
        if not loras:
            raise WandsError(
                f"DIRECTORY {directory} is not a diffusers pipeline (no model_index.json) and has no LoRA; set DIRECTORY to a "
                "run folder, or to a folder that `wands export` wrote."
            )
        return FolderContents(loras=loras, folders=(*EXPERT_NAMES.values(), "samples"))
    index = _read_object(index_path)
    parts = [name for name, entry in index.items() if isinstance(entry, list) and entry and all(entry)]
    missing = [name for name in parts if not (directory / name).is_dir()]
    if missing:
        raise WandsError(
            f"DIRECTORY {directory} lacks the folders {', '.join(missing)} that model_index.json lists; run `wands export` again."
        )
    return FolderContents(str(index.get("_class_name", "DiffusionPipeline")), folders=(*parts, "samples"))


def _loras_to_push(directory: Path) -> Iterator[LoraFile]:
    """Yield the LoRA files in the folder and in its subfolders for the experts, without files of another key format.

    A key starts with the DiT that it changes, ``transformer.`` or ``transformer_2.``. But a file whose keys all start with
    ``transformer.`` may be a LoRA for ``transformer_2``, see `wands.model.files.lora_experts`.
    """
    for folder in ("", *EXPERT_NAMES.values()):
        for path in sorted((directory / folder).glob("*.safetensors")):
            names = TensorFiles([path], f"DIRECTORY {directory}").tensors
            prefixes = {name.partition(".")[0] for name in names if ".lora_" in name}
            targets = {prefix: prefix for prefix in EXPERTS if prefix in prefixes}
            stated = describe_file(path, f"DIRECTORY {directory}").experts
            if list(targets) == [EXPERTS[0]] and stated:
                targets[EXPERTS[0]] = stated[0]
            if targets:
                yield LoraFile(path.relative_to(directory).as_posix(), tuple(targets.items()))


def _read_object(path: Path) -> dict[str, Any]:
    return read_json_object(path, fix="run `wands export` again.", error=WandsError)


def _read_record(directory: Path, training: Path | None) -> dict[str, Any]:
    """Return facts about the training run for the model card, from its checkpoint and, with precedence, `wands_export.json`."""
    record: dict[str, Any] = {}
    if training is not None:
        from wands.checkpoint.checkpoint_files import find_checkpoint

        step_dir, state = find_checkpoint(training)
        record = {key: getattr(state, key) for key in ("base", "step", "variant", "recipe", "loss")}
        data = {**state.data_summary, "fingerprint": state.data_fingerprint}
        record |= {"data": data, "checkpoint": step_dir.name}
        check_record(record, step_dir)
    path = directory / RECORD_FILE
    return record | (read_record(path) if path.is_file() else {})


def _license_of(base: str, hub: Hub) -> str:
    """Return the Hub's id of the base model's license; without a readable license, that of the published Wan models."""
    license_id = None
    try:
        if base and (Path(base) / "README.md").is_file():
            license_id = (metadata_load(Path(base) / "README.md") or {}).get("license")
        elif is_hub_id(base):
            info = hub.call("reading the base model", partial(hub.api.model_info, base, timeout=10), ())
            license_id = info.card_data.get("license") if info.card_data else None
    except (OSError, ValueError, yaml.YAMLError, WandsError) as error:
        log.debug("the license of %s is not known (%s)", base, error)
    # apache-2.0 is the license of every Wan release.
    return license_id if isinstance(license_id, str) else "apache-2.0"


def _write_card(directory: Path, hub: Hub, record: Mapping[str, Any], contents: FolderContents) -> None:
    """Write README.md and, if the record has losses, loss.png into the folder, unless it has a README.md of the user."""
    path = directory / "README.md"
    text = _card_text(directory, hub.repo_id, record, contents, partial(_license_of, hub=hub))
    if text is None:
        log.info("%s was not written by wands and is kept", path)
        return
    points = model_card.loss_points(record)
    if points:
        curves = {"train": points, "held-out": record.get("held_out")}
        series = {name: ([x for x, _ in rows], [y for _, y in rows]) for name, rows in curves.items() if rows}
        save_loss_plot(directory / model_card.LOSS_FILE, series, marks=record.get("events") or {})
    # A README.md that is a link is replaced by a file; the target of the link is kept.
    write_text(path, text)


def _card_text(
    directory: Path,
    repo_id: str,
    record: Mapping[str, Any],
    contents: FolderContents,
    find_license: Callable[[str], str],
) -> str | None:
    """Return the model card, or None if the folder has a README.md of the user. `find_license` gets the base model."""
    path = directory / "README.md"
    try:
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else model_card.MARKER
    except OSError as error:
        raise WandsError(f"{path} cannot be read ({one_line(error)}); fix or remove this file.") from error
    if model_card.MARKER not in text:
        return None
    license_id = find_license(str(record.get("base", "")))
    return model_card.build_card(directory, repo_id, record, contents, license_id)


def _list_files(directory: Path, folders: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return (files to upload, files and folders to leave out) as paths in the folder to push, whose model is in `folders`."""
    files: list[str] = []
    left_out: list[str] = []

    def is_kept(path: Path, patterns: Iterable[str]) -> bool:
        if path.name == HASH_FILE:  # the Hub stores other hashes
            return False
        matches = partial(fnmatchcase, path.name)
        if not any(map(matches, patterns)) or any(map(matches, _SKIPPED)):
            left_out.append(path.relative_to(directory).as_posix())
            return False
        _check_path(path, directory)
        return True

    for root, subfolders, names in os.walk(directory, followlinks=True):
        here = Path(root)
        is_state = _STATE_FILE in names
        parts = () if is_state else folders if here == directory else ("*",)
        subfolders[:] = [name for name in subfolders if is_kept(here / name, parts)]
        kept = [here / name for name in names if is_kept(here / name, () if is_state else _UPLOADED)]
        files += [path.relative_to(directory).as_posix() for path in kept]
    return sorted(files), sorted(left_out)


def _check_path(path: Path, directory: Path) -> None:
    """Check that a file or folder may be uploaded.

    Raise WandsError if it leads out of the folder to push, cannot be read, contains itself through a link, or contains a secret.
    """
    check_link(path, directory, "DIRECTORY")
    if not (path.is_dir() or path.is_file()) or not os.access(path, os.R_OK):
        raise WandsError(f"{path} is a broken link or not readable; run `wands export` again.")
    if path.is_file() and path.name != RECORD_FILE and contains_secret(path):  # the record is cleaned
        raise WandsError(f"{path} contains a token, a password or a private key; remove this secret.")


@contextmanager
def _temporary_folder(parent: Path) -> Iterator[Path]:
    """Yield a new folder in `parent`, and delete it afterwards. Also delete the temporary folders of killed processes."""
    for leftover in parent.glob("wands-push-*"):
        with suppress(OSError):  # a folder of another user, or of a process that runs
            with _locked(leftover):
                shutil.rmtree(leftover)
    with tempfile.TemporaryDirectory(prefix="wands-push-", dir=parent) as folder, ExitStack() as stack:
        with suppress(OSError):  # a file system without locks
            stack.enter_context(_locked(Path(folder)))
        yield Path(folder)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _uploaded_content(path: Path) -> Path | bytes:
    """Return `path` if the file can be uploaded unchanged, otherwise its content without paths of this machine."""
    text = None
    if path.name == RECORD_FILE:
        text = json.dumps(without_paths(_read_object(path)), indent=2) + "\n"
    elif path.name == "README.txt":  # next to an exported LoRA
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        text = "".join(f"{without_paths(line)}\n" for line in lines)
    elif path.name == SAMPLES_FILE:
        rows = [
            {key: value if "prompt" in key else without_paths(value) for key, value in row.items()}
            for row in read_sample_rows(path)
        ]
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    elif path.name == "model_index.json" or path.name.endswith("config.json"):
        content = _read_object(path)
        if (cleaned := json.loads(json.dumps(content), object_hook=_without_origin)) != content:
            text = json.dumps(cleaned, indent=2) + "\n"
    return path if text is None else text.encode()


def _without_origin(entries: dict[str, Any]) -> dict[str, Any]:
    """Return a JSON object without the local path that diffusers and transformers store as "_name_or_path" or "name_or_path"."""
    return {
        key: value
        for key, value in entries.items()
        if not (key in ("_name_or_path", "name_or_path") and isinstance(value, str) and is_local(value))
    }
