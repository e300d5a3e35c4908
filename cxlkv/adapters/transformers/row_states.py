"""RowStates are the states that a cache's rows have now, and copies of them to come back to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from cxlkv.adapters.transformers.states import ONE_AT_A_TIME, Bytes, StateForm, StateLayer
from cxlkv.errors import BadArgumentError, UnsupportedError

UNEVEN = (
    "a pass failed on its way, and states cannot be taken back: crop() to a checkpoint, or "
    "release() the cache and read the text anew"
)


class RowStates:
    """States of the rows of one cache, in transformers' own layers.

    A pass asks each layer for its state once and has each attention layer attend once: enter()
    counts both, so that a pass that failed half way is not built upon.
    """

    def __init__(
        self,
        form: StateForm,
        layers: Mapping[int, StateLayer],
        attention_layers: int,
        device: torch.device,
        name: str,
    ) -> None:
        self.form, self._layers, self._device = form, layers, device
        self._one_at_a_time = name if name in ONE_AT_A_TIME else ""
        self._units = [*(("states", at) for at in layers)]
        self._units += [("attention", at) for at in range(attention_layers)]
        self._copies: dict[int, list[Tensor]] = {}  # by the tokens that were seen
        self._level()

    def _level(self) -> None:
        self._passes = dict.fromkeys(self._units, 0)

    # ---- in a pass ----

    def check(self, kind: str, layer: int) -> None:
        """Raises BadArgumentError where a layer is to take part in a pass and the last failed."""
        if self._passes[kind, layer] > min(self._passes.values()):
            raise BadArgumentError(UNEVEN)

    def enter(self, kind: str, layer: int) -> None:
        """A layer has taken its part in a pass."""
        self._passes[kind, layer] += 1

    def check_pass(self, place: int, rows: int, tokens: int) -> None:
        """Raises BadArgumentError for other rows than are cached, UnsupportedError where the model
        would forget its state in such a pass."""
        layer = self._layers[place]
        if not all(layer.has_previous_state.values()):
            return
        known = next(one.shape[0] for one in layer.conv_states.values() if one is not None)
        if rows != known:
            self._passes["states", place] -= 1
            raise BadArgumentError(
                f"a batch of {rows} rows, the cache holds states of {known}: for another prompt "
                "call cache.release() first, or make another CXLCache"
            )
        if self._one_at_a_time and tokens > 1:
            self._passes["states", place] -= 1
            raise UnsupportedError(
                f"{self._one_at_a_time}: transformers begins its scan anew in a pass of several "
                "tokens behind cached ones, which gives other tokens: feed the text in one pass, "
                "or one token at a time"
            )

    @property
    def feeds_one_at_a_time(self) -> bool:
        return bool(self._one_at_a_time)

    @property
    def is_even(self) -> bool:
        """Whether all layers have taken part in the same passes."""
        return len(set(self._passes.values())) == 1

    # ---- as a whole ----

    def clear(self) -> None:
        """As before the first token."""
        for layer in self._layers.values():
            StateLayer.__init__(layer, layer.number_of_states)
        self._copies.clear()
        self._level()

    def tensors(self) -> list[Tensor]:
        """The states of all rows. Raises BadArgumentError when a pass failed half way."""
        if not self.is_even:
            raise BadArgumentError(UNEVEN)
        return self.form.tensors(self._layers)

    def row(self, row: int) -> Bytes:
        """A checkpoint of it."""
        return self.form.pack(self.tensors(), row)

    def load(self, rows: Sequence[Bytes | None]) -> None:
        """Go on from these checkpoints, None: from nothing. Raises BadArgumentError."""
        tensors = self.form.unpack(rows, self._device)
        self.clear()
        self.form.put(self._layers, tensors)

    def follow(self, other: RowStates) -> None:
        """Become a copy of another cache's."""
        tensors = other.tensors() if other.has_any else None
        self.clear()
        self._copies = dict(other._copies)
        if tensors is not None:
            self.form.put(self._layers, tensors)

    @property
    def has_any(self) -> bool:
        return any(all(one.has_previous_state.values()) for one in self._layers.values())

    def pick(self, rows: Sequence[int]) -> None:
        """Row i goes on from row rows[i]."""
        if not self.has_any:
            return
        tensors = self.tensors()
        at = torch.tensor(rows, device=tensors[0].device)
        self.form.put(self._layers, [tensor.index_select(0, at) for tensor in tensors])
        self._copies = {
            seen: [one.index_select(0, at) for one in copies]
            for seen, copies in self._copies.items()
        }

    # ---- coming back ----

    def keep(self, seen: int) -> None:
        """Copy the states of now, behind `seen` tokens, for crop()."""
        self._copies[seen] = [one.clone() for one in self.tensors()]

    @property
    def _recorded(self) -> bool:
        """Whether transformers' layers can take back the last tokens themselves."""
        return self.is_even and all(
            one.record_past and one.is_croppable for one in self._layers.values()
        )

    def record(self) -> None:
        """Keep what crop() needs to take back the tokens of a pass. Raises UnsupportedError."""
        if self.form.is_recurrent:
            raise UnsupportedError(
                "a recurrent state holds all tokens, so no drafted ones can be taken back: decode "
                "without an assistant"
            )
        for layer in self._layers.values():
            layer.activate_past_recording()  # type: ignore[no-untyped-call]

    def check_crop(self, keep: int, removed: int) -> None:
        """Raises BadArgumentError where no states are kept behind `keep` tokens."""
        if keep and keep not in self._copies and removed and not self._recorded:
            kept = ", ".join(map(str, sorted(self._copies))) or "none"
            raise BadArgumentError(
                f"the states behind {keep} tokens are not kept, only those behind: {kept}. Call "
                "cache.checkpoint() where crop() is to come back to, or release() and read the "
                "text anew"
            )

    def crop(self, keep: int, removed: int) -> None:
        """Back to `keep` tokens, `removed` ones fewer."""
        if not keep:
            self.clear()
        elif self._recorded:
            for layer in self._layers.values():
                layer.crop(-removed)
        elif keep in self._copies:
            self.form.put(self._layers, self._copies[keep])
            self._level()
        self._copies = {seen: one for seen, one in self._copies.items() if seen <= keep}
