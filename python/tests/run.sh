#!/usr/bin/env bash
# Tests the Python package on the simulated GPU, then builds the wheel, installs it into an empty environment and uses
# it there. Needs Python 3.9 or later, a Rust toolchain, and PyPI for maturin; no PyTorch, no GPU. `--no-wheel` skips
# the wheel.
set -euo pipefail
cd "$(dirname "$0")/../.."
export WARPOOL_DRIVER=sim PYTHONDONTWRITEBYTECODE=1
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
unset WARPOOL_CONF PYTORCH_CUDA_ALLOC_CONF

cargo build --package warpool-torch
for test in native enable backend compare; do
  PYTHONPATH=python WARPOOL_LIBRARY=$target/debug/libwarpool_torch.so python3 "python/tests/test_$test.py"
done
[ "${1:-}" != --no-wheel ] || exit 0

# The tools are kept in the target folder; the wheel and the environment are made anew.
tools=$target/python-tools wheels=$target/python-wheels fresh=$target/python-fresh
[ -x "$tools/bin/maturin" ] || { python3 -m venv "$tools" && "$tools/bin/pip" install --quiet 'maturin>=1.8,<2' cffi; }
rm -rf "$wheels" "$fresh"
# Unoptimized like the build of the tests, whose crates it shares; `pip install python/` builds optimized.
(cd python && PATH="$tools/bin:$PATH" CARGO_TARGET_DIR=$target \
  maturin build --quiet --interpreter "$tools/bin/python" --out "$wheels")
python3 -m venv "$fresh"
"$fresh/bin/pip" install --quiet --no-deps --no-index "$wheels"/warpool-*-py3-none-*.whl
cd "$fresh"
env -u WARPOOL_LIBRARY "$fresh/bin/python" - <<'PYTHON'
import warpool
from warpool import _native

assert warpool.library_path().endswith("warpool/warpool_torch/libwarpool_torch.so"), warpool.library_path()
assert _native.version() == warpool.__version__, (_native.version(), warpool.__version__)
ptr = _native.malloc(1 << 20)
assert _native.stats(0)["allocated_bytes.all.current"] == 1 << 20
_native.free(ptr, 1 << 20)
try:
    import warpool.torch

    warpool.torch.enable()
except ImportError as error:
    print(f"the wheel of {warpool.__version__} works; without PyTorch it reports: {error}")
PYTHON
