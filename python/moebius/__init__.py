"""Moebius: language models of mixtures of experts, in this process.

    import moebius
    m = moebius.Model("model.gguf")
    print(m.chat("Why is the sky blue?"))

Without a name, `Model` loads the small model that comes with the package.
"""

from ._answers import Answer, AsyncStream, Logprob, Stream, ToolCall, Usage
from ._model import ChatOptions, Message, Model, Options, Server
from ._native import Error, __version__
from ._trace import Router, Trace

__all__ = [
    "Answer",
    "AsyncStream",
    "ChatOptions",
    "Error",
    "Logprob",
    "Message",
    "Model",
    "Options",
    "Router",
    "Server",
    "Stream",
    "ToolCall",
    "Trace",
    "Usage",
    "__version__",
]
