# Sourced by quickstart.sh and test.sh: makes or reuses .venv beside this folder and installs kdagen into it.
# Usage: prepare EXTRAS, for example: prepare "" or prepare "[test]"
#
# KDAGEN_VENV         another folder for the environment
# KDAGEN_PYTHON       another Python (3.10 or newer) to make it with
# KDAGEN_TORCH_INDEX  a package index that holds CPU builds of torch, for machines without a GPU whose default index has none
# KDAGEN_TRITON       another Triton than the one below (3.6 to 3.9)

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${KDAGEN_VENV:-$ROOT/.venv}"
TORCH_VERSION="2.13.0"
TRITON_VERSION="${KDAGEN_TRITON:-3.6.0}"

fail() { echo "kdagen: $1" >&2; exit 1; }

step() { echo "== $1"; }

has_gpu() { nvidia-smi -L >/dev/null 2>&1 || rocminfo >/dev/null 2>&1; }

install() {
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check "$@" 2> "$VENV/pip.log" \
        || { tail -n 20 "$VENV/pip.log" >&2; fail "pip could not install: $*"; }
}

# A CPU build of torch, never gigabytes of CUDA libraries: what pip would install is looked at first.
install_cpu_torch() {
    local index=() plan
    [ -n "${KDAGEN_TORCH_INDEX:-}" ] && index=(--index-url "$KDAGEN_TORCH_INDEX")
    plan="$("$VENV/bin/python" -m pip install --dry-run --quiet --disable-pip-version-check --report - \
        "torch==$TORCH_VERSION" ${index[@]+"${index[@]}"} 2> "$VENV/pip.log")" \
        || { tail -n 20 "$VENV/pip.log" >&2; fail "pip found no torch $TORCH_VERSION"; }
    if grep -q '"name": "\(nvidia-\|cuda-\)' <<< "$plan"; then
        fail "this machine has no GPU and its package index offers only a CUDA build of torch (gigabytes).
        Set KDAGEN_TORCH_INDEX to an index with CPU builds (pytorch.org, Get Started, names it), then run this again."
    fi
    install "torch==$TORCH_VERSION" ${index[@]+"${index[@]}"}
}

prepare() {
    local extras="$1" python="${KDAGEN_PYTHON:-python3}" stamp
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null \
        || fail "'$python' is not Python 3.10 or newer; set KDAGEN_PYTHON to one"
    if [ ! -x "$VENV/bin/python" ]; then
        step "environment in $VENV"
        "$python" -m venv "$VENV" || fail "could not make $VENV (on Debian: apt install python3-venv)"
    fi
    # What is installed depends on this file, pyproject.toml, the extras and the Triton version: done once for each.
    stamp="$(cat "$ROOT/pyproject.toml" "$ROOT/scripts/_environment.sh" | cksum | tr ' ' '-')-$TRITON_VERSION-$ROOT"
    if [ "$(cat "$VENV/installed$extras" 2>/dev/null)" != "$stamp" ]; then
        step "packages"
        if has_gpu; then
            "$VENV/bin/python" -c 'import torch, triton' 2>/dev/null || install torch "triton>=3.6,<3.10" "numpy<2.4"
        else
            "$VENV/bin/python" -c "import torch; assert torch.__version__.split('+')[0] == '$TORCH_VERSION'" 2>/dev/null \
                || install_cpu_torch
            install "triton==$TRITON_VERSION" "numpy<2.4"
        fi
        install "setuptools>=77" wheel
        install --no-build-isolation --editable "$ROOT$extras"
        echo "$stamp" > "$VENV/installed$extras"
    fi
}
