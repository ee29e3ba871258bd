#!/usr/bin/env bash
# Tests the Python package and its C++ layer on the simulated GPU, then builds a wheel like the distributed one,
# installs it into an empty environment and uses it there. Needs Python 3.9 or later (for the wheel 3.10), a Rust
# toolchain, PyPI and a C++ compiler; no GPU. PyTorch is installed for the predictions. With `--short` the wheel has
# what these tests compiled, for this machine alone, and no backend: half a minute instead of ten.
set -euo pipefail
cd "$(dirname "$0")/../.."
export WARPOOL_DRIVER=sim PYTHONDONTWRITEBYTECODE=1
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
unset WARPOOL_CONF PYTORCH_CUDA_ALLOC_CONF

# With the features of `cargo test --workspace`, after which little is left to compile.
cargo build --workspace --all-targets
export WARPOOL_ANSWERS_LIBRARY=$target/debug/libwarpool_answers.so WARPOOL_COMMAND=$target/debug/warpool
# PyTorch and Ray. A test that needs one says so where it could not be installed.
python/tests/environments
if "$target/ray/bin/python" -c "import ray" 2>/dev/null; then
  export WARPOOL_RAY_PYTHON=$target/ray/bin/python
fi
for test in answers ranks native enable recorder account sleep memory_saver elastic stable sharing backend compare; do
  PYTHONPATH=python WARPOOL_LIBRARY=$target/debug/libwarpool_torch.so python3 "python/tests/test_$test.py"
done
PYTHONPATH=python python3 python/tests/test_predict_parts.py
# Predictions, with the real PyTorch for CUDA (no GPU is needed).
torch_python=${WARPOOL_TORCH_PYTHON:-$target/torch/bin/python}
if "$torch_python" -c 'import numpy, torch' 2>/dev/null; then
  PYTHONPATH=python "$torch_python" python/tests/test_predict_operators.py
  PYTHONPATH=python "$torch_python" python/tests/test_predict.py
  # A job's ranks gather one report, through torch.distributed.
  PYTHONPATH=python WARPOOL_LIBRARY=$target/debug/libwarpool_torch.so "$torch_python" python/tests/torch_ranks.py
  # The classes of torch_memory_saver and vLLM, whose place Warpool takes.
  if [ -d "$target/serving/vllm" ] && [ -d "$target/serving/torch_memory_saver" ]; then
    PYTHONPATH=python:$target/serving WARPOOL_LIBRARY=$target/debug/libwarpool_torch.so \
      "$torch_python" python/tests/serving_packages.py
  else
    echo "torch_memory_saver and vLLM could not be installed: Warpool was NOT compared with their classes"
  fi
else
  PYTHONPATH=python python3 python/tests/test_predict_operators.py
  echo "PyTorch could not be installed from the package index: predictions, gather_report and the classes of" \
    "torch_memory_saver and vLLM were NOT tested"
fi
# The C++ layer, against the headers of one version of PyTorch, with its libc10 and libc10_cuda.
if ! command -v "${CXX:-c++}" >/dev/null; then
  echo "a C++ compiler is not installed: the C++ layer was NOT compiled"
else
  python/tests/backend/run 2.11
fi

if [ "${1:-}" = --short ]; then
  tools=$target/wheel/short-tools files=$target/wheel/short-files
  [ -x "$tools/bin/pyproject-build" ] || {
    python3 -m venv --clear "$tools"
    "$tools/bin/pip" install --quiet --disable-pip-version-check "hatchling>=1.25" "build>=1.2"
  }
  rm -rf "$files" "$target/python-wheels"
  mkdir -p "$files"
  for name in libwarpool_torch.so libwarpool_inject.so libwarpool_answers.so warpool; do
    objcopy --strip-debug "$target/debug/$name" "$files/$name"
  done
  WARPOOL_WHEEL_FILES=$files WARPOOL_WHEEL_PLATFORM=linux_$(uname -m) \
    "$tools/bin/pyproject-build" --no-isolation --outdir "$target/python-wheels" python
  python/tests/wheel "$target"/python-wheels/warpool-*.whl
  python/tests/sdist "$target"/python-wheels/warpool-*.tar.gz
  exit 0
fi

# Unoptimized, and with the backend of one version of PyTorch.
backends=(--torch 2.11)
command -v "${CXX:-c++}" >/dev/null || backends=(--without-backends)
scripts/wheel --profile dev --sdist --out "$target/python-wheels" "${backends[@]}"
python/tests/wheel "$target"/python-wheels/warpool-*.whl
python/tests/sdist --install "$target"/python-wheels/warpool-*.tar.gz
if [ "${backends[0]}" = --torch ]; then
  parts=$target/wheel/torch/x86_64-unknown-linux-gnu files=$target/wheel/files/x86_64-unknown-linux-gnu
  python/tests/backend/drive "$parts/2.11" "$files/backends/libwarpool_backend-2.11.so" "$files/libwarpool_torch.so"
fi
