"""What requests leave in blocks that vLLM writes to before its workers hear of it: prints names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from cxlkv.adapters.vllm.connector import CXLConnector, StepMessage
from cxlkv.adapters.vllm.groups import BlockGroup
from cxlkv.adapters.vllm.messages import Left, Message
from cxlkv.adapters.vllm.scheduler import Scheduling

BLOCKS: dict[str, tuple[list[int], ...]] = {
    "zeroed": ([1, 2], [3]),
    "copied to": ([0, 4], [5]),
    "copied from": ([6], [7]),
    "kept": ([8, 9], [0, 10]),
    "of a state now": ([12], [13]),
    "of other tokens now": ([14], [15]),  # which the step itself writes
}


def main() -> None:
    connector = object.__new__(CXLConnector)
    connector._reopening, connector._ended_in_step = [], []
    connector._groups = [BlockGroup(8), BlockGroup(8, state=True)]
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
        output.num_scheduled_tokens["a"] = 1
        cached = output.scheduled_cached_reqs
        cached.req_ids, cached.new_block_ids, cached.num_computed_tokens = (
            ["a"],
            [([14], [12])],
            [8],
        )
        message = connector.build_connector_meta(output)
        assert isinstance(message, StepMessage)
        print(", ".join(one.request for one in message.message.left))


if __name__ == "__main__":
    main()
