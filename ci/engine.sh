#!/usr/bin/env bash
# The end-to-end cases on a server that nobody here wrote, from nothing to the verdicts:
#   bash ci/engine.sh llamacpp|vllm|vllm_pd [--install-only | arguments of kvshard run]
# Needs kvshard on PATH. The server's own environment is kept in .venv-llamacpp or .venv-vllm and made anew when its lock has
# changed; model and logs go to out/engine. Nothing runs any more when this ends. PYTHON makes the environment, python3 by default.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
name=${1:-}
case $name in
  llamacpp) engine=llamacpp options="dialect=llama.cpp" ;;
  vllm) engine=vllm options="dialect=vllm&promises=-seeded" ;; # docs/findings/vllm-seeded-chunk-ends-the-engine.md
  vllm_pd) engine=vllm options="dialect=vllm&promises=-seeded&prefill={url:prefill}" ;;
  *) echo "$0: no engine ${name:-named}; expected llamacpp, vllm or vllm_pd" >&2; exit 2 ;;
esac
shift
command -v kvshard >/dev/null || { echo "$0: no kvshard on PATH; activate the environment it is installed in" >&2; exit 2; }

own=$PWD/.venv-$engine
lock=$(sha256sum <"ci/$engine.lock")
if [ "$(cat "$own/lock" 2>/dev/null)" != "$lock" ]; then
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
exec kvshard up "fixtures/topologies/$name.toml" --log-dir "$out/$name-logs" -- \
  kvshard run "{entry}?$options&control={url:control}&operate={log_dir}" --suite e2e --budget smoke "$@"
