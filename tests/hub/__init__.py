"""A stand-in for the Hugging Face Hub on 127.0.0.1, so that the real clients can be tested without a network.

``with serve() as hub:`` starts it; a client process is pointed at it by ``HF_ENDPOINT=hub.url`` (read when
huggingface_hub is imported) and logs in by ``HF_TOKEN``, one of ``accounts.TOKENS``.

The hub and its object store listen on two ports, so that they are two origins, as the real ones are: the store takes no
``Authorization`` header, and a client that sends its token along fails.
"""

from .server import serve
from .store import Hub

__all__ = ["Hub", "serve"]
