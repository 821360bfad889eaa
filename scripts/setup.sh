# Sourced by demo.sh, test.sh, gpu.sh and .ci/run: `source scripts/setup.sh EXTRA`. Makes .venv with wands[EXTRA] in it, activates it and sets the
# variables that a run on this machine needs. A second call finds everything in place and takes no time.
# WANDS_VENV=DIR puts the environment elsewhere; WANDS_VENV=none takes the Python that is there, with what is installed in it.
# With WANDS_VENV=none, WANDS_WHEELS=DIR adds the wheels of a folder, without a network (scripts/wheelhouse.sh fills the folder).
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${WANDS_VENV:-$ROOT/.venv}"
SETUP="$ROOT/.setup"
extra="${1:-}"
case "$extra" in
  "" | -*)
    sed -n '1,4s/^# //p' "$ROOT/scripts/setup.sh"
    echo "EXTRA: $(sed -n '/^\[project.optional-dependencies\]/,/^$/s/^\([a-z0-9]*\) = .*/\1/p' "$ROOT/pyproject.toml" | paste -sd' ')"
    exit 2 ;;
esac
mkdir -p "$SETUP"

say() { printf '\n\033[1m== %s\033[0m\n' "$*"; }

find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3.12 python3.11 python3.13 python3 python; do
    if [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "wands needs Python 3.11 or newer; install it or set PYTHON=/path/to/python3.11" >&2
  return 1
}

# Whether a Python finds the wands of this checkout, and not the one of another checkout with the same environment.
has_this_wands() {
  [ "$(cd / && "$1" -c 'import wands; print(wands.__path__[0])' 2>/dev/null)" -ef "$ROOT/wands" ]
}

stamp="$(cat "$ROOT/pyproject.toml" "$ROOT/scripts/constraints.txt" | cksum | cut -d' ' -f1)"
if [ "$VENV" = none ]; then
  if [ -n "${WANDS_WHEELS:-}" ]; then
    site="$SETUP/site" # not into the environment, which may be read-only or belong to the system
    wheels="$(cksum "$WANDS_WHEELS"/*.whl | cksum)"
    if [ "$(cat "$site/.wheels" 2>/dev/null)" != "$wheels" ]; then
      rm -rf "$site"
      python -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile --target "$site" "$WANDS_WHEELS"/*.whl
      echo "$wheels" >"$site/.wheels"
    fi
    export PATH="$site/bin:$PATH" PYTHONPATH="$ROOT:$site${PYTHONPATH:+:$PYTHONPATH}"
  fi
  for needed in python wands deepspeed; do
    command -v "$needed" >/dev/null || { echo "WANDS_VENV=none: no $needed on the PATH; pip install -e '$ROOT[$extra]' first" >&2; exit 2; }
  done
  if ! has_this_wands python; then
    echo "WANDS_VENV=none: python does not import the wands of this checkout; pip install -e '$ROOT[$extra]' first" >&2
    exit 2
  fi
else
  if [ "$(cat "$VENV/.wands-$extra" 2>/dev/null)" != "$stamp" ] || ! has_this_wands "$VENV/bin/python"; then
    say "set-up: packages into ${VENV#"$ROOT"/} (once)"
    if [ ! -x "$VENV/bin/python" ]; then
      echo "set-up 1/3: a Python environment"
      "$(find_python)" -m venv "$VENV"
    fi
    echo "set-up 2/3: PyTorch, the largest download"
    # torch first and alone: whatever is installed later then keeps this build.
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check -c "$ROOT/scripts/constraints.txt" torch
    echo "set-up 3/3: wands and the other packages"
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check -c "$ROOT/scripts/constraints.txt" -e "$ROOT[$extra]"
    echo "$stamp" >"$VENV/.wands-$extra"
  fi
  export PATH="$VENV/bin:$PATH"
fi
export PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
if ! command -v nvidia-smi >/dev/null 2>&1 || ! nvidia-smi -L >/dev/null 2>&1; then
  export DS_ACCELERATOR=cpu OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
fi
# Optimizers that DeepSpeed compiles on first use (offload to the host) are kept in the checkout.
export TORCH_EXTENSIONS_DIR="${TORCH_EXTENSIONS_DIR:-$SETUP/torch_extensions}"
[ "${BASH_SOURCE[0]}" != "$0" ] || say "done; now run: source $VENV/bin/activate"
