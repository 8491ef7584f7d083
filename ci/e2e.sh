#!/usr/bin/env bash
# The end-to-end suite on a P/D pair that is up: ci/e2e.sh PREFILL DECODE CONTROL BOOTSTRAP_PORT [ROUTER]
# All cases with the harness in the router's place; with a ROUTER the cases of parity once more through it.
set -euo pipefail
prefill=$1 decode=$2 control=$3 port=$4 router=${5-}
pair="$decode?prefill=$prefill&decode=$decode&control=$control&bootstrap=$port"
kvshard() { "${PYTHON:-python}" -m harness.cli "$@"; }
status=0
kvshard run "$pair" --suite e2e --budget "${BUDGET:-smoke}" --traces "${TRACES:-kvshard-traces}" || status=$?
if [ -n "$router" ]; then
  kvshard run "$pair&through=$router" --suite e2e --budget smoke --traces "${TRACES:-kvshard-traces}" -k parity || status=$?
fi
exit "$status"
