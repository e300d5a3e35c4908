"""The vLLM connector keeps prefixes in a pool, or attends near the data.

    python -m vllm.entrypoints.openai.api_server --model MODEL \
        --kv-transfer-config '{"kv_connector": "CXLConnector", "kv_role": "kv_both"}'

`plugin` makes the connector known in all of the engine's processes. `connector` is what the engine
calls: thin, it asks `scheduler` in the scheduler's process, and in the workers `engine_attention`
(prefixes are copied between the engine's blocks and the pool) or `pool_attention` (K and V live in
the pool). `messages` go from the scheduler to the workers, `settings` reads what the user wrote,
`pools` finds or makes the pool of each rank. `counting` has the figures, which `metrics` gives to
the engine's log and its /metrics endpoint. `attention` has our attention backends, `device_steps`
the steps of that on CUDA. Only `connector`, `attention`, `blocks` and `metrics` import vLLM, and
`plugin` when it is called.
"""
