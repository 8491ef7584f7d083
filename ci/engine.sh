#!/usr/bin/env bash
# The end-to-end cases on a server that nobody here wrote, from nothing to the verdicts:
#   bash ci/engine.sh llamacpp|llamacpp_slots|vllm|vllm_pd|vllm_tp2|vllm_disk [--install-only | arguments of kvshard run]
# Needs kvshard on PATH. The server's own environment is kept in .venv-llamacpp or .venv-vllm and made anew when its lock has
# changed or its packages are gone; model and logs go to out/engine. Nothing runs any more when this ends. PYTHON makes the environment, python3 by default.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
name=${1:-} known=()
case $name in
  llamacpp | llamacpp_slots) engine=llamacpp needs="xllamacpp gguf" options="dialect=llama.cpp" ;;
  vllm | vllm_tp2 | vllm_disk)
    engine=vllm needs="vllm nixl" options="dialect=vllm&promises=-seeded" # docs/findings/vllm-seeded-chunk-ends-the-engine.md
    [ "$name" != vllm_disk ] || known=(--known fixtures/known/vllm-disk.toml) ;;
  vllm_pd) engine=vllm needs="vllm nixl" options="dialect=vllm&promises=-seeded&prefill={url:prefill}" ;;
  *) echo "$0: no engine ${name:-named}; expected llamacpp, llamacpp_slots, vllm, vllm_pd, vllm_tp2 or vllm_disk" >&2; exit 2 ;;
esac
shift
command -v kvshard >/dev/null || { echo "$0: no kvshard on PATH; activate the environment it is installed in" >&2; exit 2; }

own=$PWD/.venv-$engine
lock=$(sha256sum <"ci/$engine.lock")
there='import sys; from importlib.util import find_spec; sys.exit(not all(map(find_spec, sys.argv[1:])))'
# shellcheck disable=SC2086  # words
if [ "$(cat "$own/lock" 2>/dev/null)" != "$lock" ] || ! "$own/bin/python" -c "$there" $needs; then
  rm -rf "$own"
  "${PYTHON:-python3}" -m venv "$own"
  bash "ci/install_$engine.sh" "$own/bin/python"
  echo "$lock" >"$own/lock" # only once all is installed
fi
[ "${1:-}" != --install-only ] || exit 0

out=$PWD/out/engine
"$own/bin/python" -m "ci.${engine}_model" "$out/$engine"
export LLAMACPP_PYTHON=$own/bin/python LLAMACPP_MODEL=$out/llamacpp/tiny.gguf
export VLLM_PYTHON=$own/bin/python VLLM_MODEL=$out/vllm
logs=$out/$name-logs tier=$out/$name-logs/tier # where a server keeps what has left its memory: gone before and after
rm -rf "$tier"
exec kvshard up "fixtures/topologies/$name.toml" --log-dir "$logs" -- bash -c 'trap "rm -rf \"$0\"" EXIT; kvshard run "$@"' "$tier" \
  "{entry}?$options&control={url:control}&operate={log_dir}" --suite e2e --budget smoke "${known[@]}" "$@"
