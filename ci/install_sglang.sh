#!/usr/bin/env bash
# sglang's own components for a CPU: bash ci/install_sglang.sh PYTHON. About a minute, and 1.3 GB beside torch.
# PYTHON is the interpreter of an environment that has torch. sglang asks for a newer torch and for GPU packages, which the
# components judged here do not need, so it comes without its dependencies; what they import follows, pinned.
set -euo pipefail
python=${1:?"usage: bash ci/install_sglang.sh PYTHON, an interpreter whose environment has torch"}
"$python" -c 'import torch' || { echo "$0: $python has no torch; install it first: pip install torch==2.13.0" >&2; exit 1; }
quiet=(-qq --disable-pip-version-check --no-compile)
"$python" -m pip install "${quiet[@]}" --no-deps sglang==0.5.23 compressed-tensors==0.20.1 triton==3.8.0
"$python" -m pip install "${quiet[@]}" numpy==2.4.6 orjson==3.13.0 psutil==7.2.2 requests==2.34.2 packaging==26.4 \
  pillow==13.0.0 starlette==1.10.0 pydantic==2.14.4 pyzmq==27.3.0 tqdm==4.70.1 ipython==9.18.1 apache-tvm-ffi==0.1.15.post2 \
  transformers==5.19.0 gguf==0.19.0 openai==3.57.0 partial-json-parser==0.2.1.1.post7 einops==0.8.2 \
  prometheus_client==0.26.0 msgspec==0.23.0 pybase64==1.5.1 aiohttp==3.14.5 dill==0.4.1 loguru==0.7.3 sentencepiece==0.2.3
