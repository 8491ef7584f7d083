#!/usr/bin/env bash
# Real sglang on one Hopper GPU of a host without network, from wheels to verdicts:
#   bash ci/sglang_gpu.sh pack PARTS [BYTES]      with network: a folder of its packages, compressed, in parts of so many bytes
#   bash ci/sglang_gpu.sh unpack PARTS SITE       on the host: joins them, links the host's CUDA libraries, writes SITE-python
#   bash ci/sglang_gpu.sh run p1|p1d1|p2d2_gqa|p2d2_mla SITE MODEL OUT [arguments of kvshard up]     the servers of a topology and all cases
# `run` needs kvshard's own packages for the host's python3, and MODEL of `python3 -m ci.sglang_model MODEL --device cuda --seconds 240`.
# ONLY chooses cases; with OPERATE=1 workers are killed and restarted as well. PROMISES are those of the address. FAR is how far one in
# ten log probabilities may be off: rounding decides between two experts that are alike, and then the answer is another's. FLOOD are
# options of ci.flood, which then asks in place of the cases. With ONE_GPU=1 all workers and ranks share the first GPU: one is enough
# for p2d2, but a collective takes turns of the GPU, which takes time. ci/sglang_arms.sh runs several with one switch each.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
usage() { sed -n '3,5p' ci/sglang_gpu.sh | cut -c3- >&2; exit 2; }

pack() {
  local parts work bytes=${2:-57000000} platforms=() p requirement wheel
  parts=$(realpath -m "${1:?PARTS}") work=$(realpath -m "$1").work
  mkdir -p "$parts" "$work/wheels" "$work/site"
  for p in _2_39 _2_34 _2_31 _2_28 _2_27 _2_26 _2_24 _2_18 _2_17 2014 2010 1; do platforms+=(--platform "manylinux${p}_x86_64"); done
  grep -vE '^(#|$)' ci/sglang_gpu.lock | while read -r requirement; do
    python3 -m pip download -qq --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
      --abi cp312 --abi abi3 --abi none "${platforms[@]}" --platform any -d "$work/wheels" "$requirement"
  done
  for wheel in "$work"/wheels/*.whl; do unzip -q -o "$wheel" -d "$work/site"; done
  cd "$work/site"
  # what Hopper does not need, and symbols
  rm -rf torch/include torch/test torch/share sgl_kernel/{sm100,flashmla_ops*,infllm_ops*} jedi/third_party nvidia/nccl/include nixl_ep_cu13 \
    triton/backends/amd triton/backends/nvidia/{lib/cupti*,bin/ptxas-blackwell} triton/_C/libproton.so
  sed -i '/amd/d' triton-*.dist-info/entry_points.txt
  strip --strip-unneeded triton/_C/libtriton.so
  find . -name '*.a' -delete
  tar cf - . | zstd -T0 -8 --long=27 -q | split -b "$bytes" -d -a 2 - "$parts/part_"
  ls -l "$parts"
}

unpack() {
  local site host lib
  site=$(realpath -m "${2:?SITE}")
  mkdir -p "$site"
  cat "${1:?PARTS}"/part_* | decompress | tar xf - -C "$site"
  host=$(python3 -c 'import nvidia; print(list(nvidia.__path__)[0])')
  for lib in "$host"/*; do [ -e "$site/nvidia/$(basename "$lib")" ] || ln -s "$lib" "$site/nvidia/"; done
  printf '#!/bin/sh\nPYTHONPATH=%s exec python3 "$@"\n' "$site" >"$site-python"
  chmod +x "$site-python"
  "$site-python" -c '
import torch, sglang, nixl
from sgl_kernel import flash_ops
print("torch", torch.__version__, "nccl", torch.cuda.nccl.version(), "sglang", sglang.__version__, torch.cuda.get_device_name())'
}

decompress() { # by the program or, where there is none, by the package
  if command -v zstd >/dev/null; then zstd -dc --long=27; else
    python3 -c 'import shutil, sys, zstandard
shutil.copyfileobj(zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(sys.stdin.buffer), sys.stdout.buffer, 1 << 22)'
  fi
}

run() {
  local name=$1 site model out pair options="&far=${FAR-4}&promises=${PROMISES--seeded,-rank_processes,recalls_facts,salts}"
  site=$(realpath "${2:?SITE}") model=$(realpath "${3:?MODEL}") out=$(realpath -m "${4:?OUT}")
  shift 4
  case $name in p1 | p1d1) name=${name}_gqa ;; esac
  [ "$name" = p1_gqa ] && pair="{url:server}?control={url:control}" ||
    pair="{url:decode}?prefill={url:prefill}&decode={url:decode}&control={url:control}&bootstrap={bootstrap_port:prefill}"
  if [ "${ONE_GPU:-}" = 1 ]; then
    set -- --set 'prefill.gpus=["0"]' --set 'decode.gpus=["0"]' --set 'control.gpus=["0"]' --set defaults.env.SGLANG_ONE_GPU=1 \
      --set defaults.env.SGLANG_SERVER=ci.sglang_planted --set defaults.env.SGLANG_ONE_VISIBLE_DEVICE_PER_PROCESS=1 \
      --set defaults.env.NCCL_MULTI_RANK_GPU_ENABLE=1 "$@"
  fi
  mkdir -p "$out"
  export SGLANG_PYTHON=$site-python SGLANG_MODEL=$model FLOOD=${FLOOD-} # ${a:-b} below would be a placeholder of `kvshard up`
  # a counter of hits is there once there was one
  exec python3 -m harness.cli up "fixtures/topologies/sglang_$name.toml" --log-dir "$out/logs" "$@" -- bash -c '
    run() { python3 -m harness.cli run "$1$2" --suite e2e --budget smoke --seed 1 --traces "$3/traces" "${@:4}"; }
    run "$1" "$2" "$3" -k cache.counts_whole_pages
    [ -z "$FLOOD" ] || exec python3 -m ci.flood "$1$2" $FLOOD
    run "$1${OPERATE:+&operate=$4}" "$2" "$3" --record "$3/record.jsonl" ${ONLY:+-k "$ONLY"}' run "$pair" "$options" "$out" "{log_dir}"
}

case ${1:-} in
  pack | unpack) "$@" ;;
  run) case ${2:-} in p1 | p1d1 | p2d2_gqa | p2d2_mla) "$@" ;; *) usage ;; esac ;;
  *) usage ;;
esac
