"""The binding: one function for each of the C core, same noun, checked; the only user of cffi."""

from cxlkv._core.admin import *
from cxlkv._core.base import *
from cxlkv._core.batch import *
from cxlkv._core.objects import *
from cxlkv._core.pool import *
from cxlkv._core.prefix import *
from cxlkv._core.sequence import *
from cxlkv._core.tiers import *
from cxlkv._core.worker import *
