#!/usr/bin/env bash
# Arms of sglang's real server, several at once, and a table of what each came to:
#   bash ci/sglang_arms.sh SITE OUT AT_ONCE ARM:TOPOLOGY:MODEL ...        for example h2d_delay:p1d1:/models/gqa
# TOPOLOGY as for `ci/sglang_gpu.sh run`. An arm is one switch, and is asked all cases, or where that says more the flood of ci.flood.
# Exit code 1: one did not end as it must (a planted fault must be seen). LIMIT is how many seconds one may take.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

settings() { # of an arm: its words for `kvshard up`, and in FLOOD, ONLY and wanted what is asked and how that must end
  local prefill=prefill decode=decode both=(prefill decode)
  [ "$2" = p1 ] && prefill=server decode=server both=(server)
  each() { local worker; for worker in "${both[@]}"; do words+=(--set "$worker.env.$1"); done; }
  delay() { words+=(--set "$prefill.env.SGLANG_TEST_HICACHE_H2D_DELAY_CYCLES=${1:-100000000}"); } # 0.05 s a layer
  planted() {
    words+=(--set "$prefill.env.SGLANG_SERVER=ci.sglang_planted" --set "$prefill.env.SGLANG_PLANTED=$1")
    ONLY=$2 wanted=1
  }
  case $1 in
    plain) ;;
    no_hicache) words+=(--set "$prefill.env.SGLANG_HICACHE=''") ;;
    mooncake) each "SGLANG_MORE=--disaggregation-transfer-backend mooncake"; export MOONCAKE_PROTOCOL=${MOONCAKE_PROTOCOL:-tcp} ;;
    h2d_delay) delay ;;
    no_load_wait | early_send) delay; planted "$1" "host or recall" ;;
    owner_filter | no_gather_wait) planted "$1" "cache.answers or recall" ;; # of a sharded cache
    checks) # sglang's own invariants
      for each in SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY SGLANG_CHECK_KV_PAGE_INVARIANTS SGLANG_ENABLE_TREE_CACHE_SANITY_CHECK \
        SGLANG_ENABLE_RANK_CONSENSUS_CHECKER; do words+=(--set "defaults.env.$each=1"); done ;;
    retries) words+=(--set "$prefill.env.SGLANG_TEST_FORCE_OPTIMISTIC_PREFILL_RETRY_PROB='0.5'") ;;
    retract) words+=(--set "$decode.env.SGLANG_TEST_RETRACT=1") ;;
    checksum) each "SGLANG_MORE=--disaggregation-enable-kv-checksum" ;;
    checksum_mismatch)
      each "SGLANG_MORE=--disaggregation-enable-kv-checksum"
      words+=(--set "$decode.env.SGLANG_TEST_DISAGG_KV_CHECKSUM_MISMATCH_PROB='0.2'") FLOOD="--errors 0.4" ;;
    failures) each "SGLANG_TEST_DISAGG_FAILURE_PROB='0.0005'"; FLOOD="--errors 0.95 --rounds 12 --at-once 16" ;; # at each look at a room
    flood) FLOOD="--rounds 10" ;;
    flood_delay) delay 20000000; FLOOD="--rounds 6" ;;
    flood_checks)
      for each in SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY SGLANG_CHECK_KV_PAGE_INVARIANTS; do words+=(--set "defaults.env.$each=1"); done
      FLOOD="--rounds 6" ;;
    *) echo "$0: no arm $1; expected one of those in settings()" >&2; return 2 ;;
  esac
}

one() { # SITE OUT ARM:TOPOLOGY:MODEL
  local arm topology model words=() wanted=0 status=0 begun=$SECONDS name
  IFS=: read -r arm topology model <<<"$3"
  name=$arm-$topology-$(basename "$model")
  settings "$arm" "$topology" || return
  export FLOOD=${FLOOD:-} ONLY=${ONLY:-}
  timeout "${LIMIT:-400}" bash ci/sglang_gpu.sh run "$topology" "$1" "$model" "$2/$name" "${words[@]}" >"$2/$name.txt" 2>&1 || status=$?
  local said
  said=$(grep -aE '^([0-9]+ pass|\{"asked")' "$2/$name.txt" | tail -n 1 | cut -c1-240)
  printf '%s\t%s\t%s s\t%s\n' "$([ "$status" = "$wanted" ] && echo ok || echo "NOT AS WANTED (exit $status)")" "$name" $((SECONDS - begun)) \
    "${said:-no verdict: $(tail -n 1 "$2/$name.txt" | cut -c1-160)}" | tee -a "$2/table.tsv"
  [ "$status" = "$wanted" ]
}

case ${1:-} in
  one) shift; one "$@" ;;
  *)
    [ $# -ge 4 ] || { sed -n '3p' "$0" | cut -c3- >&2; exit 2; }
    site=$1 out=$2 at_once=$3
    shift 3
    mkdir -p "$out"
    printf '%s\0' "$@" | xargs -0 -n 1 -P "$at_once" bash "$0" one "$site" "$out"
    ;;
esac
