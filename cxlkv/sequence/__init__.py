"""Sequences and batches of them: append, select, fetch, attend; one call into the core for each."""

from cxlkv.sequence.batch import Batch as Batch
from cxlkv.sequence.hit import Hit as Hit
from cxlkv.sequence.sequence import PagePlaces as PagePlaces
from cxlkv.sequence.sequence import Sequence as Sequence
from cxlkv.sequence.sequence import one_budget as one_budget
from cxlkv.sequence.sequence import query_rows as query_rows
