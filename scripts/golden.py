"""Compare the results of the working tree and of a commit bit for bit, to check that a refactoring changes no result.

    python scripts/golden.py --against REF             # compare the working tree with the commit REF
    python scripts/golden.py --against REF --only t2v  # only the cases whose name starts with t2v

The working tree and REF run the same command lines. REF therefore needs the same commands and options, but not the same Python
modules. The commands encode real clips, plan one epoch, train tiny models in fp32, and export the trained models. Each model is
trained on one process and, with ZeRO-3, on two processes. The script compares the loss and the gradient norm of every step, and
digests of the caches, the plan and the exported tensors. The exit code is 1 if a value differs or is missing on one side.

The results of REF are stored in .setup/golden for later calls. The working tree and REF take about four minutes each.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import av

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / ".setup" / "golden"
ADDED = {"index/arrays", "index/mask_sums"}
"""Arrays in the index of a cache that earlier versions of wands do not write: descriptions of the samples' arrays, and sums of
token weights, which were written only for caches with masks."""
RENAMED = {"index/text_lens": "index/free_lens"}
"""Maps names of arrays in the index in earlier versions to their present names. The bytes are equal."""
PLACES = {f"index/{name}" for name in ("rows", "offsets", "shard_ids", "shard_bytes")}
"""Arrays in the index of a cache that locate the samples in the shards. The places depend on the order in which workers finish
and on the attributes of the samples. They are therefore compared with the shards, and not with the other commit."""
STEPS = 8
UNTAGGED_HD = "bigbuckbunny.mp4"
"""A clip of 720 lines that names no color matrix. Commits up to d91d6ded decode it as BT.601, later ones as BT.709."""
BT601 = 6
"""Number of the color matrix, the primaries and the transfer of BT.601 in a video file."""
PREPROCESS = ["--max-frames", "9", "--max-pixels", "12288", "--text-dtype", "fp32"]
TRAIN = {
    "packing.max_tokens": 256,
    "train.max_steps": STEPS,
    "train.bins_per_step": 2,
    "train.log_every": STEPS,
    "checkpoint.every": 0,
    "optim.warmup": 0,
    "flow.flow_shift": 5.0,
}
LORA = {"lora.rank": 8, "lora.alpha": 32, "lora.targets": "all-linear"}
EXPERTS = {"model.experts": "both"}
SERIES = {
    "t2v": ("wan2.1-t2v-1.3b", {}),
    "lora": ("wan2.1-t2v-1.3b", LORA),
    "i2v": ("wan2.1-i2v-14b", {}),
    "experts": ("wan2.2-t2v-a14b", EXPERTS),
}
"""Maps the name of each training run to its model variant, and to its recipe settings in addition to `TRAIN`."""
CACHES = {"wan2.1-t2v-1.3b": "t2v", "wan2.1-i2v-14b": "i2v", "wan2.2-t2v-a14b": "t2v"}
"""Maps each variant to the name of its cache. Text-to-video variants with the same VAE share a cache."""


def name_matrix(path: Path) -> None:
    """Write BT.601 as the color matrix into a video file, without encoding the video again."""
    named = path.with_name(f"named-{path.name}")
    with av.open(path) as source, av.open(named, "w") as target:
        stream = source.streams.video[0]
        copy = target.add_stream_from_template(stream)
        codec = copy.codec_context
        codec.colorspace = codec.color_primaries = codec.color_trc = BT601
        for packet in source.demux(stream):
            if packet.dts is not None:
                packet.stream = copy
                target.mux(packet)
    named.replace(path)


class Checkout:
    """Source tree of one version of wands, and the folder to which its commands write.

    Args:
        root: folder of the source code: the working tree, or a worktree of a commit.
        out: folder for caches, runs and exported models.
    """

    def __init__(self, root: Path, out: Path) -> None:
        self.root = root
        self.out = out

    def run(self, *command: str, root: Path | None = None) -> None:
        """Run Python with the arguments `command`. Python imports wands from the folder `root`; None means `self.root`.

        If the command fails, exit with the last 20 lines of log.txt, to which all commands write their output.
        """
        log = self.out / "log.txt"
        with log.open("a") as handle:
            done = subprocess.run(
                [sys.executable, *command],
                cwd=self.out,
                env={
                    **os.environ,
                    "PYTHONPATH": str(root or self.root),
                    "DS_ACCELERATOR": "cpu",
                    "OMP_NUM_THREADS": "1",
                },
                stdout=handle,
                stderr=subprocess.STDOUT,
            )
        if done.returncode:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
            sys.exit(f"golden.py: {' '.join(command)} failed in {self.root}:\n{tail}")

    def once(self, name: str, make: Callable[[Path], None]) -> Path:
        """Return the path of the file or folder `name`. The first call creates it with `make`."""
        path = self.out / name
        if not path.exists():
            make(path)
        return path

    def model(self, variant: str) -> Path:
        """Return the folder of a variant's tiny pipeline.

        scripts/make_tiny_pipeline.py of this checkout builds the pipeline, even if `root` is the folder of another commit.
        """
        script = str(ROOT / "scripts" / "make_tiny_pipeline.py")
        return self.once(
            f"model-{variant}", lambda path: self.run(script, str(path), "--variant", variant, root=ROOT)
        )

    def clips(self) -> Path:
        """Return a folder with the demo's four real clips and their captions. Each clip names its color matrix or is small.

        The captions come from demo_report.py of this checkout, even if `root` is the folder of another commit.
        """
        report = str(ROOT / "scripts" / "demo_report.py")
        source = os.environ.get("WANDS_CLIPS", str(ROOT / ".setup" / "clips"))

        def make(path: Path) -> None:
            self.run(report, "clips", source, str(path))
            name_matrix(path / UNTAGGED_HD)

        return self.once("clips", make)

    def cache(self, variant: str) -> Path:
        """Return the folder of the latent cache for training a model variant. The first call creates the cache."""
        command = ["-m", "wands", "preprocess", str(self.clips()), "--model", str(self.model(variant))]
        return self.once(
            f"cache-{CACHES[variant]}", lambda path: self.run(*command, "--out", str(path), *PREPROCESS)
        )

    def settings(self, variant: str, more: dict[str, Any]) -> list[str]:
        """Return the `--set` arguments of a command. `more` contains recipe keys and values in addition to `TRAIN`."""
        values = {"model.path": self.model(variant), "data.cache": self.cache(variant), **TRAIN, **more}
        return [word for key, value in values.items() for word in ("--set", f"{key}={value}")]

    def train(self, case: str, num_processes: int) -> Path:
        """Return the folder of the training run `case` (a key of `SERIES`) on `num_processes` processes.

        The first call runs the training.
        """
        variant, more = SERIES[case]
        path = self.out / f"run-{case}-{num_processes}"
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(num_processes)]
        launcher += ["--master-port", str(free_port())]
        stage = self.root / "ds_configs" / f"{'zero3' if num_processes > 1 else 'zero2'}.json"
        command = ["-m", "wands", "train", "tiny", "--deepspeed", str(stage), *self.settings(variant, more)]
        self.once(path.name, lambda path: self.run(*launcher, *command, "--set", f"output_dir={path}"))
        return path

    def export(self, case: str) -> Path:
        """Return the folder of the pipeline or LoRA that is exported from the training run `case` (a key of `SERIES`).

        The first call trains on two processes and exports.
        """
        run = self.train(case, 2)
        command = ["-m", "wands", "export", str(run), "--copy"]
        command = command[:-1] if case == "lora" else command
        return self.once(f"exported-{case}", lambda path: self.run(*command, "--out", str(path)))

    def plan(self) -> Path:
        """Return the path of the plan file that `wands tools pack` writes. The first call runs the command."""
        # Commits before 0.1.0's command groups have `wands pack`.
        has_groups = "def tools" in (self.root / "wands" / "cli.py").read_text()
        name = ["tools", "pack"] if has_groups else ["pack"]
        command = ["-m", "wands", *name, "tiny", *self.settings("wan2.1-t2v-1.3b", {})]
        return self.once("plan.jsonl", lambda path: self.run(*command, "--out", str(path)))


def free_port() -> int:
    """Return a TCP port that is free now."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def series(run: Path) -> list[str]:
    """Return the loss and the gradient norm of every step of a training run, as exact hexadecimal floats."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    assert len(rows) == STEPS, f"{run} has {len(rows)} steps"
    return [f"{row['loss'].hex()} {row['grad_norm'].hex()}" for row in rows]


def cache_digests(cache: Path) -> dict[str, str]:
    """Return a digest of each array of each sample in a cache, the stored checksums, and a digest of each array in the index.

    The names of the digests contain the keys of the samples, because the order of the samples in the shards may change.
    Instead of a digest of the arrays in `PLACES`, the function checks that they locate the samples in the shards.
    """
    import h5py
    import numpy as np

    digests = {}
    places = {}
    ids = []
    shards = sorted(cache.glob("*.h5"))
    for shard in shards:
        with h5py.File(shard, locking=False) as file:
            ids.append(file.attrs["id"])

            def visit(name: str, item: Any) -> None:
                if "key" in item.attrs:
                    digests[f"{item.attrs['key']} crc32"] = str(item.attrs["crc32"])
                    offsets = sorted(array.id.get_offset() for array in item.values())
                    places[item.attrs["key"]] = (int(Path(name).name), offsets)
                if isinstance(item, h5py.Dataset):
                    sample = item.parent.attrs.get("key", item.parent.name)
                    digests[f"{sample} {Path(name).name}"] = digest(item[()].tobytes())

            file.visititems(visit)
    with np.load(cache / "index.npz") as index:
        arrays = {f"index/{name}": index[name] for name in sorted(index.files)}
    arrays = {RENAMED.get(name, name): array for name, array in arrays.items()}
    rows = arrays["index/rows"].tolist()
    offsets = arrays["index/offsets"].tolist()
    located = [(row, sorted(filter(None, of_row))) for row, of_row in zip(rows, offsets, strict=True)]
    assert located == [places[key] for key in sorted(places)], (
        f"{cache}: the index does not locate the samples"
    )
    assert arrays["index/shard_bytes"].tolist() == [shard.stat().st_size for shard in shards], cache
    assert all(name.encode() in arrays["index/shard_ids"].tobytes() for name in ids), cache
    return digests | {name: digest(array.tobytes()) for name, array in arrays.items() if name not in PLACES}


def tensor_digests(folder: Path) -> dict[str, str]:
    """Return the digest of each tensor in the safetensors files of a folder, by file and tensor name."""
    from safetensors import safe_open

    digests = {}
    for path in sorted(folder.rglob("*.safetensors")):
        with safe_open(path, "np") as file:
            for name in sorted(file.keys()):
                digests[f"{path.relative_to(folder)}/{name}"] = digest(file.get_tensor(name).tobytes())
    return digests


def plan_lines(path: Path) -> list[str]:
    """Return a digest of each line of a plan file. Keys of the header that depend on folders are removed first."""
    header, *steps = (json.loads(line) for line in path.open(encoding="utf-8"))
    for volatile in ("sources", "data_fingerprint"):
        header.pop(volatile)
    return [digest(json.dumps(line, sort_keys=True).encode()) for line in (header, *steps)]


def digest(data: bytes) -> str:
    """Return a hash of `data`, 16 hexadecimal digits."""
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def cases(checkout: Checkout) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the name of each result to compare, and a function that computes this result with the code in `checkout`."""
    yield "t2v cache", lambda: cache_digests(checkout.cache("wan2.1-t2v-1.3b"))
    yield "i2v cache", lambda: cache_digests(checkout.cache("wan2.1-i2v-14b"))
    yield "t2v plan", lambda: plan_lines(checkout.plan())
    for case in SERIES:
        for processes in (1, 2):
            yield (
                f"{case} losses, {processes} process",
                lambda c=case, n=processes: series(checkout.train(c, n)),
            )
        yield f"{case} export", lambda c=case: tensor_digests(checkout.export(c))


def collect(root: Path, only: str) -> dict[str, Any]:
    """Compute the cases whose name starts with `only`, with the source code of wands in the folder `root`. A case is a result.

    Return a dictionary that maps the name of each case to its result.
    """
    results = {}
    with tempfile.TemporaryDirectory(prefix="wands-golden-") as folder:
        out = Path(folder)
        for name, make in cases(Checkout(root, out)):
            if name.startswith(only):
                results[name] = make()
                print(f"  {name}", flush=True)
    return results


def reference(commit: str, only: str) -> dict[str, Any]:
    """Return the results of a commit for the cases whose name starts with `only`.

    If an earlier call has stored these results, they are read. Otherwise, the cases run in a temporary worktree of the commit.
    """
    key = digest(Path(__file__).read_bytes() + only.encode())
    kept = RESULTS / f"{commit}-{key}.json"
    if kept.is_file():
        print(f"{commit[:9]}: results of an earlier call, {kept.relative_to(ROOT)}")
        return json.loads(kept.read_text())
    print(f"{commit[:9]}:")
    tree = Path(tempfile.mkdtemp(prefix="wands-golden-ref-"))
    git("worktree", "add", "--quiet", "--detach", str(tree), commit)
    try:
        results = collect(tree, only)
    finally:
        git("worktree", "remove", "--force", str(tree))
        shutil.rmtree(tree, ignore_errors=True)
    RESULTS.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(results, indent=1))
    return results


def git(*words: str) -> str:
    """Run git with the arguments `words` in this repository, and return the output."""
    return subprocess.run(["git", "-C", str(ROOT), *words], check=True, capture_output=True, text=True).stdout


def differing(ours: Any, theirs: Any) -> list[str]:
    """Compare two results of one case (such as "t2v cache"), and return the names of the entries that differ.

    Args:
        ours: result of the working tree. If the result is a list, the names of the entries are the positions in the list.
        theirs: result of the commit that the user named with --against. If an entry in `ADDED` is missing in `theirs`, the entry
            does not count as a difference.
    """
    if isinstance(ours, list):
        ours, theirs = ({str(i): line for i, line in enumerate(lines)} for lines in (ours, theirs))
    names = (ours.keys() | theirs.keys()) - (ADDED - theirs.keys())
    return sorted(name for name in names if ours.get(name) != theirs.get(name))


def largest_difference(ours: list[str], theirs: list[str]) -> float:
    """Return the largest relative difference between the losses and gradient norms in `ours` and in `theirs`."""
    pairs = zip(" ".join(ours).split(), " ".join(theirs).split(), strict=True)
    numbers = [(float.fromhex(a), float.fromhex(b)) for a, b in pairs]
    return max(abs(a - b) / abs(b) for a, b in numbers)


def main() -> int:
    """Compute the results of the commit in --against and of the working tree, and print a line for each case.

    Return 1 if a result differs.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", required=True, metavar="REF", help="commit to compare with")
    parser.add_argument("--only", default="", metavar="PREFIX", help="run only cases with this name prefix")
    args = parser.parse_args()
    theirs = reference(git("rev-parse", f"{args.against}^{{commit}}").strip(), args.only)
    print("working tree:")
    ours = collect(ROOT, args.only)
    wrong = 0
    for name in theirs:
        names = differing(ours[name], theirs[name])
        wrong += bool(names)
        verdict = f"{len(names)} of {len(theirs[name])} differ, first {names[0]}" if names else "equal"
        if names and "losses" in name:
            verdict += f", at most by {largest_difference(ours[name], theirs[name]):.1e}"
        print(f"{name:<28} {len(theirs[name]):>5} values  {verdict}")
    print(f"{len(theirs) - wrong} of {len(theirs)} cases are bitwise equal to {args.against}")
    return 1 if wrong or not theirs else 0


if __name__ == "__main__":
    sys.exit(main())
