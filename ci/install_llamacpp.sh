#!/usr/bin/env bash
# llama.cpp's server in a wheel, and what writes its model: bash ci/install_llamacpp.sh PYTHON. A few seconds, 210 MB.
# PYTHON is the interpreter of an environment of its own (python3 -m venv FOLDER), which holds nothing of this project.
set -euo pipefail
python=${1:?"usage: bash ci/install_llamacpp.sh PYTHON, the interpreter of an environment of its own"}
lock=$(dirname "${BASH_SOURCE[0]}")/llamacpp.lock
"$python" -m pip install -qq --disable-pip-version-check --no-deps --only-binary :all: -r "$lock" ||
  { echo "$0: the pinned packages of $lock did not install into $python" >&2; exit 1; }
"$python" -c 'import gguf, numpy, xllamacpp' || { echo "$0: what is installed into $python cannot be imported" >&2; exit 1; }
