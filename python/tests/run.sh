#!/usr/bin/env bash
# Tests the Python package and its C++ layer on the simulated GPU, then builds a wheel like the distributed one,
# installs it into an empty environment and uses it there. Needs Python 3.9 or later (for the wheel 3.10), a Rust
# toolchain, PyPI and a C++ compiler; no PyTorch, no GPU. `--no-wheel` skips the wheel.
set -euo pipefail
cd "$(dirname "$0")/../.."
export WARPOOL_DRIVER=sim PYTHONDONTWRITEBYTECODE=1
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
unset WARPOOL_CONF PYTORCH_CUDA_ALLOC_CONF

cargo build --package warpool-torch --package warpool-python --package warpool-cli
export WARPOOL_ANSWERS_LIBRARY=$target/debug/libwarpool_answers.so WARPOOL_COMMAND=$target/debug/warpool
for test in answers native enable sleep backend compare; do
  PYTHONPATH=python WARPOOL_LIBRARY=$target/debug/libwarpool_torch.so python3 "python/tests/test_$test.py"
done
# The C++ layer, against the headers of one version of PyTorch, with its libc10 and libc10_cuda.
if ! command -v "${CXX:-c++}" >/dev/null; then
  echo "a C++ compiler is not installed: the C++ layer was NOT compiled"
else
  python/tests/backend/run 2.11
fi
[ "${1:-}" != --no-wheel ] || exit 0

# Unoptimized, and with the backend of one version of PyTorch.
backends=(--torch 2.11)
command -v "${CXX:-c++}" >/dev/null || backends=(--without-backends)
scripts/wheel --profile dev --out "$target/python-wheels" "${backends[@]}"
python/tests/wheel "$target"/python-wheels/warpool-*.whl
if [ "${backends[0]}" = --torch ]; then
  python/tests/backend/drive "$target/wheel/torch/2.11" "$target/wheel/files/backends/libwarpool_backend-2.11.so" \
    "$target/wheel/files/libwarpool_torch.so"
fi
