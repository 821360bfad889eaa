"""`wands plan` and the refusal of `wands train`: what they say follows from the estimates, and what they write is legal."""

from __future__ import annotations

import json
import platform
import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.support.commands import plan
from tests.support.runs import MOCK
from wands.cli import main
from wands.commands.calibrate import calibrate
from wands.commands.plan import what_fits
from wands.commands.train import run_train
from wands.config.deepspeed import build_ds_config, load_ds_config
from wands.config.options import CalibrateOptions, TrainOptions
from wands.config.recipe_loading import load_recipe
from wands.distributed.dims import choose_degrees
from wands.errors import CacheError, ConfigError
from wands.planning.hardware import MACHINES, Machine, measurement_file
from wands.planning.step_time import Prediction, predict
from wands.planning.weights import list_weights
from wands.planning.workload import Workload
from wands.texts import format_seconds
from wands.train import trainer
from wands.variants import VARIANTS

ROOT = Path(__file__).resolve().parents[3]


def run(recipe: str | None = "wan2.1-t2v-14b-finetune", **options) -> str:
    return plan(recipe, **options)


def rows_of(report: str) -> list[list[str]]:
    """Cells of the table's rows."""
    lines = report.split("\n\n")[1].splitlines()[1:]
    return [re.split(r"\s{2,}", line.strip()) for line in lines]


@pytest.mark.slow
def test_the_line_that_starts_it_can_be_pasted():
    line = run(overrides=("lora={rank: 8, alpha: 16}",)).splitlines()[-1]
    assert "lora={rank: 8, alpha: 16}" in shlex.split(line)


def test_report_of_a_shipped_recipe():
    report = run()
    assert "32,760" in report
    for words in (
        "weights",
        "optimizer",
        "gradients",
        "activations",
        "fragmentation",
        "MFU",
    ):
        assert words in report
    rows = rows_of(report)
    assert len(rows) == 10
    gib = [float(row[6]) for row in rows]
    assert max(gib) <= 0.97 * (MACHINES["h100"].memory - 1.4 * 2**30) / 2**30, "a margin is left"
    speeds = [int(row[9].replace(",", "")) for row in rows]
    assert speeds[1:] == sorted(speeds[1:], reverse=True)
    assert speeds[0] >= 0.98 * max(speeds)
    # 12 bytes a parameter in a checkpoint at ZeRO-3: masters, which are the weights, and moments
    assert "a checkpoint 171.5 GB" in report


@pytest.mark.slow
def test_a_plan_recomputes_no_more_blocks_than_memory_asks_for():
    settings = ["zero3", "1 x 8", "selective"]
    [num_blocks] = [int(row[3]) for row in rows_of(run()) if row[:3] == settings]
    assert f"--set model.checkpoint_blocks={num_blocks} " in run()
    for number, fits in ((num_blocks, True), (num_blocks - 1, False)):
        keys = ("model.checkpointing=selective", f"model.checkpoint_blocks={number}")
        assert (settings in [row[:3] for row in rows_of(run(overrides=keys))]) == fits


@pytest.mark.slow
def test_a_plan_needs_no_cache(tmp_path):
    options = {
        "recipe": "wan2.1-t2v-1.3b-lora",
        "overrides": ("data.cache=nowhere", "train.max_steps=1500"),
        "gpus": 1,
    }
    with pytest.raises(
        CacheError, match=r"cache=nowhere is not a folder; .* To plan without a cache, add --clips N\.$"
    ):
        run(**options)
    few, many = (run(**options, clips=number) for number in (40, 400))
    seconds = seconds_of(many)
    assert f"the run of 1,500 steps takes {format_seconds(1500 * seconds)}; " in many
    assert "an epoch of 1,310,400 tokens has 40 steps" in few
    assert "an epoch of 13,104,000 tokens has 400 steps" in many
    assert "assumed: 400 clips (--clips) of 81 frames (--frames), 480p (--size)" in many.splitlines()
    assert "--set data.cache=DIR" not in many
    assert "--set data.cache=DIR" in run("wan2.1-t2v-1.3b-lora")


def test_a_plan_of_a_lora_prints_the_hours_of_one_clip_in_a_step_and_of_eight():
    report = run("wan2.1-t2v-1.3b-lora", gpus=1, clips=40, hardware="rtx4090", deepspeed="zero2")
    assert "the run of 1,500 steps takes" in report, "the rule of max_steps: auto"
    one, eight = re.findall(r"steps takes? ([\d.]+) h", report)
    assert float(eight) == pytest.approx(8 * float(one), rel=0.02)
    assert "1 clips in a step; with 8 (train.bins_per_step)" not in report


@pytest.mark.slow
def test_more_memory_needs_less_sharing_and_more_gpus_are_faster():
    small = run(hardware="l40s")
    large = run(hardware="h200")
    assert float(rows_of(small)[0][6]) < 48e9 / 2**30 < float(rows_of(large)[0][6])
    seconds = [seconds_of(run(gpus=n)) for n in (8, 16, 32)]
    assert seconds[0] > 1.8 * seconds[1] > 3.2 * seconds[2]


def seconds_of(report: str) -> float:
    return float(re.search(r"time +([\d.]+) s per step", report)[1])


def predict_step(tokens: int, *keys: str) -> Prediction:
    """A step of the 14B model on 8 H100 GPUs with ZeRO-3, with one clip."""
    name = "wan2.1-t2v-14b"
    recipe = load_recipe(f"{name}-finetune", [f"packing.max_tokens={tokens}", "train.bins_per_step=1", *keys])
    shape = VARIANTS[name].dit
    parallel = recipe.parallel
    degrees = choose_degrees(parallel, num_heads=shape.num_heads, ranks_per_node=8, model=name)
    workload = Workload(
        recipe=recipe,
        shape=shape,
        weights=list_weights(recipe, shape.to_config(), ()),
        num_models=1,
        world_size=8,
        ds_config=build_ds_config(load_ds_config("zero3"), recipe, world_size=8, device_type="cuda"),
        ulysses_degree=degrees.ulysses,
        ring_degree=degrees.ring,
        max_tokens=tokens,
    )
    return predict(workload, Machine(), [tokens])


def test_tensor_parallelism_wins_for_few_tokens_only():
    """One clip a step, which all 8 GPUs share."""
    context = ("parallel.cp_size=8",)
    both = ("parallel.cp_size=2", "parallel.tensor_degree=4")
    assert predict_step(1560, *both).seconds < predict_step(1560, *context).seconds / 2
    assert predict_step(32_760, *both).seconds > 1.2 * predict_step(32_760, *context).seconds


def test_the_sums_of_tensor_parallelism_are_counted():
    """A layer of the 14B model with 32,760 tokens sends 4.7 GB on a rank; recomputation repeats 3 of its 8 sums."""
    alone = ("parallel.tensor_degree=8", "model.checkpointing=none")
    machine = Machine()
    sent = predict_step(32_760, *alone).sums.total / 40 * machine.node_bandwidth
    assert sent == pytest.approx(4.7e9, rel=0.01)
    again = (
        predict_step(32_760, alone[0], "model.checkpointing=full").sums.total / 40 * machine.node_bandwidth
    )
    assert again / sent == pytest.approx(11 / 8, rel=0.01)


@pytest.mark.slow
def test_a_plan_compares_tensor_parallelism():
    assert re.search(
        r"\n  tensor  parallel.tensor_degree=2 is slower: [\d,]+ tokens/s, 0\.\d\d times", run(gpus=8)
    )
    assert "tensor  " not in run("wan2.1-t2v-1.3b-lora", gpus=1)


@pytest.mark.slow
def test_a_machines_own_numbers_count():
    assert seconds_of(run(gpus=64, network_bandwidth=0.5)) > 1.2 * seconds_of(run(gpus=64))
    assert seconds_of(run(node_bandwidth=1.0)) > 1.2 * seconds_of(run())
    rows = rows_of(run(gpus=16, gpus_per_node=2))
    assert all(int(row[1].split(" x ")[1]) <= 2 for row in rows)
    with_host, without = (run(hardware="l40s", gpus=1, host_memory=memory) for memory in (1000.0, 1001.0))
    assert rows_of(with_host) == rows_of(without)
    with pytest.raises(ConfigError, match="no settings fit 1 x L40S 48 GB"):
        run(hardware="l40s", gpus=1, host_memory=100.0)
    assert "on 8 x H100 96 GB" in run(gpu_memory=96.0)


@pytest.mark.slow
def test_measured_speeds_replace_the_data_sheet(tmp_path, monkeypatch):
    """Speeds of `wands tools calibrate` are refused for another device, and read for theirs, by name or from the cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    sheet = run()
    assert "this is a prediction, with the speeds of kernels from the data sheet" in sheet
    file = tmp_path / "speeds.json"
    assert f"of CPU {platform.machine()} in bytes/s, FLOP/s and seconds, written to {file}" in calibrate(
        CalibrateOptions(out=file)
    )
    with pytest.raises(
        ConfigError, match=rf"--hardware-file {file} was measured on CPU \w+, not on H100 80 GB"
    ):
        run(hardware_file=file)
    found = json.loads(file.read_text())
    assert all(speed > 0 for speed in (*found["attention_flops"]["cpu"], found["linear_flops"]))
    known = found | {"device": "NVIDIA H100 80GB HBM3"}
    file.write_text(json.dumps(known))
    report = run(hardware_file=file)
    assert f"speeds of kernels from {file}" in report
    assert seconds_of(report) > 10 * seconds_of(sheet)  # an H100 as slow as this CPU
    cached = measurement_file("NVIDIA H100 80GB HBM3")
    assert cached == measurement_file("H100 80 GB") == tmp_path / "cache" / "wands" / "hardware" / "h100.json"
    cached.parent.mkdir(parents=True)
    file.rename(cached)
    assert seconds_of(run()) == seconds_of(report)
    assert f"from {cached}" in run()
    cached.write_text(json.dumps(known | {"speed": 1}))
    with pytest.raises(ConfigError, match=r"h100\.json has keys that are not from wands tools calibrate"):
        run()


def test_written_recipe_and_json_are_legal(tmp_path):
    report = run(out=tmp_path / "start")
    recipe = load_recipe(tmp_path / "start" / "recipe.yaml")
    user = json.loads((tmp_path / "start" / "deepspeed.json").read_text())
    build_ds_config(user, recipe, world_size=8, device_type="cuda")
    assert recipe.train.bins_per_step == 32
    assert str(tmp_path / "start" / "recipe.yaml") in report


@pytest.mark.slow
def test_command_line_starts_what_was_planned():
    own = ("optim.lr=1e-6", "model.checkpointing=offload", "model.saved_tensors=[attn_output]")
    words = shlex.split(run(overrides=own).splitlines()[-1])
    name = words[words.index("--deepspeed") + 1]
    asked = [text for flag, text in pairwise(words) if flag == "--set"]
    assert load_ds_config(name)["zero_optimization"]["stage"] == 3
    assert "optim.lr=1e-6" in asked
    recipe = load_recipe("wan2.1-t2v-14b-finetune", asked)
    row = rows_of(run(overrides=own))[0]
    assert row[2] == recipe.model.checkpointing
    assert recipe.parallel.group_size == int(row[1].split(" x ")[0]) * int(row[1].split(" x ")[1])


@pytest.mark.slow
def test_many_nodes_are_started_by_their_script():
    line = run(gpus=32).splitlines()[-1].strip()
    start = "bash scripts/launch_multinode.sh --nnodes 4 --node-rank R --master-addr HOST -- wan2.1-t2v-14b-finetune "
    assert line.startswith(start + "--deepspeed zero3")


@pytest.mark.slow
def test_lengths_are_the_datas_where_the_recipe_has_some(tiny_pipeline):
    report = run(None, overrides=(f"model.path={tiny_pipeline}", MOCK, "train.bins_per_step=8"))
    assert "an epoch of 77 tokens" in report  # 8 + 12 + 2 + 24 + 6 + 16 + 9
    assert "7 clips" in report


@pytest.mark.slow
def test_a_loras_frozen_base_has_no_states():
    parts = []
    for name in ("wan2.1-t2v-14b-lora", "wan2.1-t2v-14b-finetune"):
        report = run(name, deepspeed="zero3")
        parts.append(
            {key: float(re.search(rf"{key} ([\d.]+) GiB", report)[1]) for key in ("weights", "optimizer")}
        )
    lora, full = parts
    assert lora["weights"] == pytest.approx(full["weights"] / 2, rel=0.05)  # bf16
    assert lora["optimizer"] < 0.02 * full["optimizer"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"hardware": "rtx4090", "gpus": 1}, "no settings fit 1 x RTX 4090 24 GB: the smallest settings ("),
        ({"hardware": "abacus"}, "--hardware abacus is not a known GPU. The known GPUs are h100, "),
        (
            {"hardware": "abacus"},
            "; use the name of a similar one, and set --gpu-memory to the memory of yours in GB.",
        ),
        ({"gpus": 12}, "--gpus 12 must be a multiple of 8"),
        ({"size": "big"}, "--size big is neither 480p, 720p nor HEIGHTxWIDTH"),
        ({"size": "1000x8"}, "--size 1000x8 is smaller than one video token"),
        ({"overrides": ("model.experts=high",)}, "model.experts=high applies to models with two experts"),
        ({"variant": "wan9"}, "--variant wan9 is not a published model; use one of wan2.1-t2v-1.3b"),
        ({"deepspeed": "zero9"}, "--deepspeed zero9 cannot be read"),
    ],
)
def test_what_cannot_be_planned(options, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        run(**options)


@pytest.mark.slow
def test_without_a_model():
    with pytest.raises(
        ConfigError,
        match=r"model\.path is not set; add --set model\.path=DIR_OR_HUB_ID\. With wands plan, you can",
    ):
        run(None)
    report = run(None, variant="wan2.2-ti2v-5b")
    assert report.startswith("wan2.2-ti2v-5b, full finetune, on 8 x H100")
    assert "--set model.path=DIR_OR_HUB_ID" in report.splitlines()[-1]


def test_the_command():
    result = CliRunner().invoke(
        main, ["plan", "wan2.1-t2v-1.3b-lora", "--gpus", "1", "--hardware", "rtx4090"]
    )
    assert result.exit_code == 0, result.output
    assert "1 x RTX 4090 24 GB" in result.output
    refused = CliRunner().invoke(
        main, ["plan", "wan2.1-t2v-14b-finetune", "--gpus", "1", "--hardware", "rtx3090"]
    )
    assert refused.exit_code == 2
    assert "no settings fit" in refused.output


@pytest.mark.slow
def test_table_says_more_of_larger_machines():
    lines = what_fits(("rtx4090", "h100"), (8,)).splitlines()
    assert lines[0] == "| 8 GPUs of | 24 GB | 80 GB |"
    cells = {
        cell[0]: cell[1:] for cell in ([x.strip() for x in line.strip("|").split("|")] for line in lines[2:])
    }
    assert len(cells) == 8
    assert cells["A14B full"][0] == "–"
    assert all(cell[1] != "–" for cell in cells.values())


class Started(Exception):
    """Stands where the process group would be formed."""


@pytest.fixture
def train(tiny_pipeline, tmp_path, monkeypatch):
    """`wands train` on a host with so much memory, up to where it would begin; what it says."""

    def start(memory: float, *overrides: str, **flags: bool) -> str:
        def begin() -> None:
            raise Started

        host = Machine("a small host", memory=memory, host_memory=memory)
        monkeypatch.setattr(trainer, "machine_here", lambda *_: host)
        monkeypatch.setattr(trainer, "init_process_group", begin)
        data = "data.mock={num_samples: 4, shapes: [[8, 44, 96]]}"  # 8,448 tokens: the memory is activations
        keys = [
            f"model.path={tiny_pipeline}",
            data,
            f"output_dir={tmp_path / 'run'}",
            "packing.max_tokens=8448",
        ]
        keys += ["model.checkpointing=none", "train.max_steps=1", "precision.compute=fp32", *overrides]
        said: list[str] = []
        run_train(TrainOptions(overrides=tuple(keys), **flags), said.append)
        return "\n".join(said)

    return start


def test_train_refuses_what_does_not_fit_and_names_a_cure_that_does(train):
    enough = train(1e9, dry_run=True)
    assert "memory may not" not in enough
    needed = float(re.search(r"memory +about ([\d.]+) MiB per rank", enough)[1]) * 2**20
    with pytest.raises(ConfigError, match=r"of device memory per rank \(a small host: ") as refused:
        train(0.9 * needed)
    cure = re.search(
        r"; set (.*?)\. Run wands plan to find what fits, or add --force to start anyway", str(refused.value)
    )[1]
    with pytest.raises(Started):
        train(0.9 * needed, *cure.split(" and "))


def test_a_cure_leaves_degrees_that_were_asked_for(train, monkeypatch):
    """Another cp_size would contradict them and be refused: the next setting that helps is named instead."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    own = (
        "train.bins_per_step=4",
        "model.checkpointing=full",
        "data.mock={num_samples: 16, shapes: [[8, 44, 96]]}",
    )
    for degrees, names_cp in (((), True), (("parallel.ulysses_degree=1", "parallel.ring_degree=1"), False)):
        said = train(40e6, *own, *degrees, dry_run=True)
        assert "memory may not be enough" in said
        assert ("parallel.cp_size=" in said.split("memory may not be enough")[1]) is names_cp, said


def test_dry_run_and_force_only_say_so(train):
    assert "memory may not be enough: this run needs about" in train(1e6, dry_run=True)
    with pytest.raises(ConfigError, match="no setting fits; use more or larger GPUs"):
        train(1e6)
    with pytest.raises(Started):
        train(1e6, force=True)


@pytest.mark.slow
def test_the_table_of_the_docs_is_what_is_printed():
    """One column of the table: all columns take half a minute."""
    printed = what_fits(("h100",), (8,)).splitlines()
    page = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8").splitlines()
    start = page.index("| 8 GPUs | 12 GB | 16 GB | 24 GB | 32 GB | 48 GB | 80 GB | 141 GB |")
    rows = [[x.strip() for x in row.split("|")] for row in page[start : start + len(printed)]]
    column = [(row[1], row[7]) for row in rows]
    assert column[2:] == [tuple(x.strip() for x in row.split("|")[1:3]) for row in printed[2:]]
