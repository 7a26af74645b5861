"""Moebius: language models of mixtures of experts, in this process.

    import moebius
    m = moebius.Model("model.gguf")
    print(m.chat("Why is the sky blue?"))

Without a name, `Model` loads the small model that comes with the package.
"""

from ._answers import Answer, Logprob, Stream, ToolCall, Usage
from ._model import ChatOptions, Message, Model, Options, Server
from ._native import Error, __version__

__all__ = [
    "Answer",
    "ChatOptions",
    "Error",
    "Logprob",
    "Message",
    "Model",
    "Options",
    "Server",
    "Stream",
    "ToolCall",
    "Usage",
    "__version__",
]
