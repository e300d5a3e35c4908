#!/bin/sh
# SGLang's hierarchical cache keeps its pages in a pool of this machine, which outlives the server.
#
#     sh examples/sglang.sh MODEL [more options of the server]
#
# Needs: SGLang 0.5.23 or a later 0.5 on a machine with a GPU, and cxlkv where it is installed.
# `cxlkv pool list` shows the pool. docs/engines/sglang.md has all settings.
set -eu
model=${1:?usage: sh sglang.sh MODEL}
shift
exec python -m sglang.launch_server --model-path "$model" \
    --enable-hierarchical-cache \
    --hicache-mem-layout page_first --hicache-write-policy write_through \
    --hicache-storage-backend dynamic \
    --hicache-storage-backend-extra-config '{
        "backend_name": "cxlkv",
        "module_path": "cxlkv.adapters.sglang",
        "class_name": "CXLHiCache",
        "interface_v1": 1,
        "hicache_storage_pass_prefix_keys": true,
        "cxlkv": {"capacity": "64GiB"}
    }' "$@"
