"""vLLM calls register() in each of its processes before it builds anything."""

from __future__ import annotations

import logging

from cxlkv.adapters.common.versions import Versions

log = logging.getLogger("cxlkv")

NAME = "CXLConnector"
VERSIONS = Versions("vLLM", (0, 32), (0, 33), "connectors")


def register() -> None:
    """Make the connector's name known. Never raises: engines without it must not feel it."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        _log_as_engine()
        if NAME not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(
                NAME, "cxlkv.adapters.vllm.connector", "CXLConnector"
            )
            _register_attention()
    except Exception as error:
        log.warning("cxlkv is not available in this vLLM (%s): %s", VERSIONS, error)


class _ToEngine(logging.Handler):
    """Hands our lines to the engine's logger, however that is set up by then."""

    def emit(self, record: logging.LogRecord) -> None:
        logger = logging.getLogger("vllm.cxlkv")
        if logger.isEnabledFor(record.levelno):
            logger.handle(record)


def _log_as_engine() -> None:
    if not log.handlers:
        log.addHandler(_ToEngine())
        log.setLevel(logging.INFO)
        log.propagate = False


def _register_attention() -> None:
    """Register attention. On CPU in place of the engine's: it is the stock one unless the settings
    ask for the pool's. On CUDA as CUSTOM, which a user asks for, and which another plugin may have
    taken."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    folder = "cxlkv.adapters.vllm"
    if not current_platform.is_cuda():
        register_backend(AttentionBackendEnum.CPU_ATTN, f"{folder}.attention_backend.PoolBackend")
        register_backend(AttentionBackendEnum.CPU_MLA, f"{folder}.latent_backend.CpuLatentBackend")
        register_backend(AttentionBackendEnum.AMX_MLA, f"{folder}.latent_backend.AmxLatentBackend")
    elif not AttentionBackendEnum.CUSTOM.is_overridden():
        register_backend(AttentionBackendEnum.CUSTOM, f"{folder}.attention_backend.GpuPoolBackend")
    else:
        log.warning(
            "cxlkv: --attention-backend CUSTOM is %s, of another plugin: no attention in the pool",
            AttentionBackendEnum.CUSTOM.get_path(),
        )
