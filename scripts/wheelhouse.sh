#!/usr/bin/env bash
# Collect the packages that a GPU machine with PyTorch, but without a network, lacks: bash scripts/wheelhouse.sh FOLDER [--with av|bitsandbytes]
# Then, on the GPU machine, in this checkout: WANDS_VENV=none WANDS_WHEELS=FOLDER bash scripts/gpu.sh
# For Python 3.12 on x86-64 Linux, with torch >= 2.11, transformers 5, peft, accelerate, h5py, huggingface_hub, tensorboard, torchmetrics,
# pyarrow, pandas, matplotlib, rich, psutil, pytest, pytest-xdist, hypothesis, sentencepiece, requests and safetensors installed there.
# Sizes: 14 MB; --with av (36 MB) for the stage infer; --with bitsandbytes (4 MB, CUDA 13.0 only) for the tests of 8-bit optimizers and quantized LoRAs.
# This machine needs zip, pip, and setuptools and torch in the Python of $PYTHON (default: python), because deepspeed is built from source.
set -euo pipefail
root="$(cd "$(dirname "$0")/.." && pwd)"
folder="${1:?name the folder to fill}"; shift
python="${PYTHON:-python}"
mkdir -p "$folder"
get() {
  "$python" -m pip download --quiet --no-deps --disable-pip-version-check -c "$root/scripts/constraints.txt" --python-version 3.12 \
    --only-binary=:all: --platform manylinux_2_28_x86_64 --platform manylinux_2_24_x86_64 --platform manylinux_2_17_x86_64 \
    --platform manylinux2014_x86_64 --platform any -d "$folder" "$@"
}
build() { "$python" -m pip wheel --quiet --no-deps --no-build-isolation --disable-pip-version-check -w "$folder" "$@"; }
get diffusers datasets ftfy wcwidth pydantic annotated-types typing-inspection hjson dill multiprocess py-cpuinfo msgpack xxhash
get "$(grep -m1 -oE 'pydantic-core==[0-9.]+' <(unzip -p "$folder"/pydantic-2*.whl '*/METADATA'))"
DS_BUILD_OPS=0 DS_ACCELERATOR=cpu build deepspeed -c "$root/scripts/constraints.txt"
source_copy="$(mktemp -d)" # a build leaves folders in its source
trap 'rm -rf "$source_copy"' EXIT
cp -rL "$root"/{wands,data_tools,pyproject.toml,README.md,LICENSE} "$source_copy"
build "$source_copy"
while [ $# -gt 0 ]; do
  case "$1 ${2:-}" in
    "--with av") get av; shift 2 ;;
    "--with bitsandbytes")
      get bitsandbytes
      # Of its kernels for a dozen versions of CUDA, ROCm and oneAPI, only those for CUDA 13.0.
      zip --quiet --delete "$folder"/bitsandbytes-*.whl '*_rocm*.so' '*_xpu*.so' '*_cuda11*.so' '*_cuda12*.so' '*_cuda132.so'
      shift 2 ;;
    *) echo "wheelhouse.sh: unknown option $*; use --with av or --with bitsandbytes" >&2; exit 2 ;;
  esac
done
du -sh "$folder"; ls "$folder"
