"""What requests leave in blocks that vLLM writes to before its workers hear of it: prints names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from cxlkv.adapters.vllm.connector import CXLConnector, StepMessage
from cxlkv.adapters.vllm.messages import Left, Message
from cxlkv.adapters.vllm.scheduler import Scheduling

BLOCKS: dict[str, tuple[list[int], ...]] = {
    "zeroed": ([1, 2], [3]),
    "copied to": ([0, 4], [5]),
    "copied from": ([6], [7]),
    "kept": ([8, 9], [0, 10]),
}


def main() -> None:
    connector = object.__new__(CXLConnector)
    connector._reopening, connector._ended_in_step = [], []
    left = [Left(name, 8, b"k") for name in BLOCKS]
    ours = SimpleNamespace(ended=id, message=lambda step: Message(left=list(left)))
    connector.scheduling = cast("Scheduling", ours)
    connector.counting = SimpleNamespace(ended=id)  # type: ignore[assignment]
    for blocks_new, copies in (([2, 11], [KVCacheBlockCopy(7, 5)]), ([2, 11], [])):
        for name, blocks in BLOCKS.items():
            request = cast("Request", SimpleNamespace(request_id=name))
            connector.request_finished_all_groups(request, blocks)
        output = SchedulerOutput.make_empty()
        output.new_block_ids_to_zero, output.kv_cache_block_copies = blocks_new, copies
        message = connector.build_connector_meta(output)
        assert isinstance(message, StepMessage)
        print(", ".join(one.request for one in message.message.left))


if __name__ == "__main__":
    main()
