"""Hostile values of the columns of a table."""

from __future__ import annotations

from typing import Any

from tests.support.hostile_box import Sandbox

TIMES: list[Any] = [
    float("nan"),
    float("inf"),
    -1,
    "1e999",
    1e308,
    "0x10",
    "1_0",
    [1],
    {},
    True,
    10**400,
    "00:00:01",
    "-0",
    "1e-320",
]


def _crops(box: Sandbox) -> list[Any]:
    crops: list[Any] = [
        "0,0,16,16px",
        "0,0,1e9,1e9",
        "-1,-1,16,16",
        "0,0,0,0",
        "0,0,1,1",
        "16,16,64,64",
        "50%,0,9,9",
        "a",
        [1],
        {},
    ]
    crops += [
        "0,0,16",
        "0,0,16,16,16",
        f"0,0,{10**40},{10**40}",
        [0, 0, 1e308, 1e308],
        [True] * 4,
        [[0]] * 4,
        "nan,0,16,16",
        "1,1,17,17",
    ]
    crops += [
        "0" * 5000,
        "0,0,64,48;movie=private.mp4",
        f"$({box.shell}),0,16,16",
        "0,0,16,inf",
        float("nan"),
        -1,
        "١,٢,16,16",
    ]
    return crops


def _masks(box: Sandbox) -> list[Any]:
    masks: list[Any] = [
        "/dev/zero",
        "/proc/self/mem",
        str(box.root / "pipe.mp4"),
        "nowhere.png",
        str(box.outside),
        "../" * 40 + "etc/passwd",
    ]
    masks += [
        f"{box.url}/mask.png",
        "x" * 5000,
        "a\0b",
        5,
        ["good.mp4"],
        "~nouser/x.png",
        "\ud800.png",
        f"$({box.shell})",
        str(box.outside / "private.txt"),
    ]
    return masks


def hostile_rows(box: Sandbox) -> list[dict[str, Any]]:
    """Columns of a row that has a clip and a caption."""
    rows: list[dict[str, Any]] = [{"crop": crop} for crop in _crops(box)] + [
        {"mask": mask} for mask in _masks(box)
    ]
    rows += [{name: time} for name in ("start", "end") for time in TIMES]
    rows += [
        {"start": 1.4, "end": 1.4000001},
        {"start_frame": 0, "end_frame": 10**30},
        {"start_frame": "a", "end_frame": None},
    ]
    rows += [
        {"license": "x" * 100_000},
        {"license": ["a", {}]},
        {"a\nb": 1, "\x1b[2J": 2},
        {"": "", "video": None, "crop": None},
    ]
    rows += [
        {"motion": value} for value in ("nan", "inf", 10**400, "1e999", [[]], "=1+1", None, b"x".decode())
    ]
    return rows


def hostile_paths(box: Sandbox) -> list[Any]:
    """Values of a video column that lead to no clip, or to a clip somewhere else."""
    return [
        "/etc/passwd",
        "/dev/zero",
        "/dev/stdin",
        "/proc/self/environ",
        "/proc/self/mem",
        "/proc/self/fd/0",
        "/",
        ".",
        "..",
        "",
        str(box.clip),
        "../../outside/private.mp4",
        "../" * 60 + "etc/passwd",
        str(box.root / "pipe.mp4"),
        str(box.outside),
        "~/x.mp4",
        "~nouser/x.mp4",
        f"file://{box.clip}",
        f"{box.url}/a.mp4",
        "s3://a/b.mp4",
        "hf://datasets/a/b/c.mp4",
        "-",
        "--help",
        "concat:good.mp4|good.mp4",
        f"subfile,,start,0,end,9,,:{box.clip}",
        "pipe:0",
        "data:video/mp4;base64,AAAA",
        "x" * 300,
        "x" * 5000,
        "a\0b.mp4",
        "\ud800.mp4",
        "a\nb.mp4",
        "\x1b[2J.mp4",
        f"$({box.shell}).mp4",
        f"`{box.shell}`",
        f"|{box.shell}",
        f"; {box.shell};",
        "good.mp4/",
        "good.mp4/x",
        "./good.mp4",
        "GOOD.MP4",
        "%67ood.mp4",
        "good.mp4\u200b",
        "e\u0301" * 2000,
        "\u0300\u0323" * 300_000,
        *(5, 1e308, True, None, [], ["good.mp4"], {"path": "good.mp4"}, {"bytes": "x"}, [[]], {"a": {}}),
    ]


def hostile_captions(shell: str) -> list[Any]:
    """Values of a caption column that are commands, templates, formulas, or no text."""
    captions: list[Any] = [
        shell,
        f"$({shell})",
        "{{7*7}}",
        "{video.__class__}",
        f"=cmd|'/C {shell}'!A1",
        "@SUM(1)",
        "\x1b]0;x\7",
        "\0",
        "\ud800",
    ]
    captions += [
        5,
        [],
        [[]],
        {},
        {"a": 1},
        [None],
        True,
        float("nan"),
        "&lt;" * 100_000,
        "\u0300\u0323" * 300_000,
        ["a"] * 50,
        " ",
        "a\nb\r\nc",
        "<b>",
    ]
    return captions
