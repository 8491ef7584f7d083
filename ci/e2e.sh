#!/usr/bin/env bash
# The end-to-end suite on a P/D pair that is up: ci/e2e.sh PREFILL DECODE CONTROL BOOTSTRAP_PORT [ROUTER [LOG_DIR]]
# All cases with the harness in the router's place; with a ROUTER the cases of parity through it first, and with the LOG_DIR of
# the `kvshard up` also those that kill and restart the pair. PROMISES= is for random weights; ONLY chooses cases; RECORD is a file.
set -euo pipefail
prefill=$1 decode=$2 control=$3 port=$4 router=${5-} log_dir=${6-}
pair="$decode?prefill=$prefill&decode=$decode&control=$control&bootstrap=$port&promises=${PROMISES-recalls_facts}"
kvshard() { "${PYTHON:-python}" -m harness.cli "$@"; }
status=0
if [ -n "$router" ]; then # before the deaths: a router asks rarely whether a worker is back
  kvshard run "$pair&through=$router" --suite e2e --budget smoke --traces "${TRACES:-kvshard-traces}" -k parity || status=$?
fi
kvshard run "$pair${log_dir:+&operate=$log_dir}" --suite e2e --budget "${BUDGET:-smoke}" --traces "${TRACES:-kvshard-traces}" ${ONLY:+-k "$ONLY"} \
  ${RECORD:+--record "$RECORD"} ||
  status=$?
exit "$status"
