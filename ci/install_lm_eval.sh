#!/usr/bin/env bash
# lm-eval, for the tests that ask its tasks: bash ci/install_lm_eval.sh PYTHON, an interpreter that has kvshard's `dev`.
set -euo pipefail
python=${1:?"usage: bash ci/install_lm_eval.sh PYTHON, an interpreter whose environment has kvshard"}
cd "$(dirname "${BASH_SOURCE[0]}")/.."
"$python" -m pip install -qq --disable-pip-version-check --no-compile --editable '.[lm-eval]'
