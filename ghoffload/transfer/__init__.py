"""Moving bytes over the link: chunks, paced write-back, reload, staging buffers."""

from ghoffload.transfer.link import Pairs, Reload, WriteBack, chunked
from ghoffload.transfer.staging import Staging

__all__ = ["Pairs", "Reload", "Staging", "WriteBack", "chunked"]
