"""The connector: what vLLM's scheduler and workers call, handed on to the part that does it."""

from __future__ import annotations

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1 import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)

from cxlkv.adapters.vllm.plugin import check_version
from cxlkv.adapters.vllm.settings import read_settings


class CXLConnector(KVConnectorBase_V1, SupportsHMA):
    """See the package's text. One is made in the scheduler's process, one in each worker."""

    def __init__(self, vllm_config, role, kv_cache_config):  # type: ignore[no-untyped-def]
        super().__init__(vllm_config, role, kv_cache_config)
        check_version(vllm.__version__)
        self.settings = read_settings(self._kv_transfer_config.kv_connector_extra_config)
        self.is_scheduler = role == KVConnectorRole.SCHEDULER
