#!/usr/bin/env bash
# vLLM's server for a CPU, with NIXL: bash ci/install_vllm.sh PYTHON. One to three minutes, 2.4 GB.
# PYTHON is the interpreter of an environment of its own (python3 -m venv FOLDER), which holds nothing of this project. What the
# server runs without on a CPU is left out of the lock: torchvision, torchaudio, torchcodec, triton and three more.
set -euo pipefail
python=${1:?"usage: bash ci/install_vllm.sh PYTHON, the interpreter of an environment of its own"}
lock=$(dirname "${BASH_SOURCE[0]}")/vllm.lock
"$python" -m pip install -qq --disable-pip-version-check --no-compile --no-deps --only-binary :all: -r "$lock" ||
  { echo "$0: the pinned packages of $lock did not install into $python" >&2; exit 1; }
"$python" -c 'import nixl, vllm' 2>/dev/null ||
  { "$python" -c 'import nixl, vllm'; echo "$0: what is installed into $python cannot be imported" >&2; exit 1; }
