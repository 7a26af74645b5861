"""A model: settings in, answers, numbers and servers out. Knows the routes of the server and what they take."""

from __future__ import annotations

import base64
import json
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Union, overload

from . import _native
from ._answers import Answer, Stream, chat_answer, open_call, read, text_answer

if TYPE_CHECKING:
    from types import TracebackType

    import numpy
    from numpy.typing import NDArray
    from typing_extensions import Unpack

#: `{"role": "user", "content": "..."}`, as OpenAI has it.
Message = Mapping[str, Any]
#: A text, or its tokens.
Prompt = Union[str, Sequence[int]]

#: Most texts in one request.
_MAX_TEXTS = 256
#: Bytes of logits that are computed between two looks at signals.
_LOGITS_BYTES = 64 << 20


class Options(TypedDict, total=False):
    """What decides how an answer is written. What is left out is the model's own choice."""

    max_tokens: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    ignore_eos: bool
    seed: int
    temperature: float
    dynatemp_range: float
    dynatemp_exponent: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    top_n_sigma: float
    xtc_probability: float
    xtc_threshold: float
    min_keep: int
    repeat_penalty: float
    repeat_last_n: int
    frequency_penalty: float
    presence_penalty: float
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    dry_sequence_breakers: Sequence[str]
    mirostat: Literal[0, 1, 2]
    mirostat_tau: float
    mirostat_eta: float
    samplers: Sequence[str]
    logit_bias: Mapping[int, float]
    #: Alternatives to report for each token; 0 reports the token alone.
    logprobs: int
    #: Cached prefixes are shared only with requests of the same salt.
    cache_salt: str
    #: The whole answer is JSON of this schema.
    schema: Mapping[str, Any]
    #: As OpenAI has it.
    response_format: Mapping[str, Any]
    #: The whole answer keeps to a grammar, in Lark or GBNF.
    grammar: str
    #: The whole answer matches a regular expression.
    regex: str
    #: The whole answer is one of these.
    choices: Sequence[str]
    #: Objects may have more than their schema names.
    open_objects: bool


class ChatOptions(Options, total=False):
    """The same, and what conversations have."""

    tools: Sequence[Mapping[str, Any]]
    tool_choice: str | Mapping[str, Any]
    parallel_tool_calls: bool
    reasoning_effort: str
    #: Further variables of the template, such as `enable_thinking`.
    chat_template_kwargs: Mapping[str, Any]
    #: The last message is the beginning of the answer.
    continue_final_message: bool


#: What the routes call it otherwise.
_NAMES = {"schema": "json_schema", "choices": "guided_choice"}


def _body(function: str, known: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a request; None counts as left out."""
    names = known.__annotations__.keys() | Options.__annotations__.keys()
    for name in options:
        if name not in names:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
    return {_NAMES.get(name, name): _plain(value) for name, value in options.items() if value is not None}


def _plain(value: Any) -> Any:
    """As JSON has it: numbers of NumPy, tuples and other mappings too."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (str, bool, int, float)) or value is None:
        return value
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Sequence):
        return [_plain(inner) for inner in value]
    raise TypeError(f"{type(value).__name__} is no value of JSON")


class Server:
    """Lets clients use a model over HTTP until it is closed: OpenAI's, Anthropic's and Ollama's, and the page."""

    def __init__(self, server: _native.Server) -> None:
        self._server = server

    @property
    def url(self) -> str:
        """Where it listens: `http://127.0.0.1:8080`."""
        return self._server.url

    def close(self, timeout: float = 5.0) -> None:
        """Takes no more requests, waits so many seconds for those that run, and cuts off the others."""
        self._server.close(timeout)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<moebius.Server {self.url}>"


class Model:
    """A loaded model. It may be used by several threads, whose answers are computed together.

    `model` is a GGUF file, a folder of safetensors, or a name that `moebius models` lists; None is the small model that
    comes with the package. Settings are those of `moebius serve`; memory is a number of bytes or a text such as "12G".
    Variables and the configuration file of the command count for nothing here.

    Raises Error where the model cannot be loaded.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        backend: Literal["auto", "cpu", "cuda", "metal", "reference"] | None = None,
        device: int | None = None,
        threads: int | None = None,
        context: int | None = None,
        batch: int | None = None,
        memory: int | str | None = None,
        gpu_memory: int | str | None = None,
        parallel: int | None = None,
        queue: int | None = None,
        cache_tokens: int | None = None,
        cache_type: Literal["f16", "f32"] | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        copy_weights: Literal["auto", "none", "dense", "all"] | None = None,
        chat_template: str | os.PathLike[str] | None = None,
        name: str | None = None,
    ) -> None:
        settings = {
            "model": model,
            "backend": backend,
            "device": device,
            "threads": threads,
            "ctx": context,
            "batch": batch,
            "memory": memory,
            "gpu-memory": gpu_memory,
            "parallel": parallel,
            "max-queue": queue,
            "cache-tokens": cache_tokens,
            "cache-type": cache_type,
            "cache-dir": cache_dir,
            "copy-weights": copy_weights,
            "chat-template-file": chat_template,
            "alias": name,
        }
        self._engine = _native.Engine(_flags(settings))
        self._about = self._engine.about()
        self._scoring = threading.Lock()

    @property
    def name(self) -> str:
        """What answers call it: the file's name, or what was given."""
        return str(self._about["name"])

    @property
    def description(self) -> str:
        """Architecture and weight type, such as `qwen3moe Q4_K_M`."""
        return str(self._about["description"])

    @property
    def architecture(self) -> str:
        """As GGUF files name it, such as `qwen3moe`."""
        return str(self._about["architecture"])

    @property
    def file_type(self) -> str:
        """How its weights are stored, such as `Q4_K_M`."""
        return str(self._about["file_type"])

    @property
    def context(self) -> int:
        """Most tokens of a prompt and its answer together."""
        return int(self._about["context"])

    @property
    def vocab_size(self) -> int:
        """Number of tokens in its vocabulary."""
        return int(self._about["vocab_size"])

    @property
    def parameters(self) -> int:
        """Number of its weights."""
        return int(self._about["parameters"])

    @property
    def size_bytes(self) -> int:
        """Bytes of its weights."""
        return int(self._about["size_bytes"])

    @property
    def backend(self) -> str:
        """What computes, such as `CPU avx2`."""
        return str(self._about["backend"])

    @property
    def notes(self) -> list[str]:
        """What a user should know: who computes and why, where weights are."""
        return list(self._about["notes"])

    @overload
    def chat(
        self, messages: str | Sequence[Message], *, stream: Literal[False] = False, **options: Unpack[ChatOptions]
    ) -> Answer: ...
    @overload
    def chat(
        self, messages: str | Sequence[Message], *, stream: Literal[True], **options: Unpack[ChatOptions]
    ) -> Stream: ...
    @overload
    def chat(
        self, messages: str | Sequence[Message], *, stream: bool, **options: Unpack[ChatOptions]
    ) -> Answer | Stream: ...

    def chat(
        self, messages: str | Sequence[Message], *, stream: bool = False, **options: Unpack[ChatOptions]
    ) -> Answer | Stream:
        """An answer in a conversation; a text is one message of the user. With `stream` it comes piece by piece.

        Raises Error where the request is refused or fails, TypeError for a keyword that is none.
        """
        body = _body("chat", ChatOptions, options)
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        body["messages"] = _plain(messages)
        if "logprobs" in body:
            body["top_logprobs"], body["logprobs"] = body["logprobs"], True
        if stream:
            return self._stream("/v1/chat/completions", body)
        return chat_answer(self.request("/v1/chat/completions", body))

    @overload
    def complete(
        self, prompt: Prompt, *, stream: Literal[False] = False, suffix: str | None = None, **options: Unpack[Options]
    ) -> Answer: ...
    @overload
    def complete(
        self, prompt: Prompt, *, stream: Literal[True], suffix: str | None = None, **options: Unpack[Options]
    ) -> Stream: ...
    @overload
    def complete(
        self, prompt: Prompt, *, stream: bool, suffix: str | None = None, **options: Unpack[Options]
    ) -> Answer | Stream: ...

    def complete(
        self, prompt: Prompt, *, stream: bool = False, suffix: str | None = None, **options: Unpack[Options]
    ) -> Answer | Stream:
        """How a text goes on, or a list of tokens; between it and `suffix`, for models that fill gaps.

        Raises Error where the request is refused or fails, TypeError for a keyword that is none.
        """
        body = {"max_tokens": -1} | _body("complete", Options, options)
        body["prompt"] = _plain(prompt)
        if suffix is not None:
            body["suffix"] = suffix
        if stream:
            return self._stream("/v1/completions", body)
        return text_answer(self.request("/v1/completions", body))

    def tokenize(self, text: str, *, add_special: bool = False, parse_special: bool = True) -> list[int]:
        """Tokens of a text. `add_special` adds those that the model wants around it; `parse_special` reads names of
        special tokens as those tokens."""
        body = {"content": text, "add_special": add_special, "parse_special": parse_special}
        return list(self.request("/tokenize", body)["tokens"])

    def detokenize(self, tokens: Sequence[int]) -> str:
        """Text of tokens."""
        return str(self.request("/detokenize", {"tokens": _plain(tokens)})["content"])

    def render(self, messages: Sequence[Message], **variables: Any) -> str:
        """The prompt that a conversation becomes; `tools` and other variables of the template are keywords."""
        body: dict[str, Any] = {"messages": _plain(messages)}
        for field in ("tools", "add_generation_prompt"):
            if field in variables:
                body[field] = _plain(variables.pop(field))
        if variables:
            body["chat_template_kwargs"] = _plain(variables)
        return str(self.request("/apply-template", body)["prompt"])

    def logits(self, tokens: Sequence[int]) -> NDArray[numpy.float32]:
        """Logits behind each token, float32 [number of tokens, vocab_size].

        They are computed by a second program beside the engine's, with a cache of its own, on the CPU where no backend
        was named. Needs NumPy.
        """
        import numpy

        ids = [int(token) for token in tokens]
        rows = numpy.empty((len(ids), self.vocab_size), numpy.float32)
        step = max(32, _LOGITS_BYTES // (4 * self.vocab_size))
        with self._scoring:
            for start in range(0, len(ids), step):
                chunk = ids[start : start + step]
                computed = self._engine.logits(chunk, start, len(ids))
                rows[start : start + step] = numpy.frombuffer(computed, numpy.float32).reshape(len(chunk), -1)
        return rows

    def logprobs(self, prompt: Prompt) -> NDArray[numpy.float32]:
        """Natural logarithms of the probabilities of a text's tokens, each behind those before it, float32 [number of
        tokens - 1]: the first has nothing before it. Needs NumPy."""
        import numpy

        body = {"prompt": _plain(prompt), "max_tokens": 0, "echo": True, "logprobs": 0}
        told = self.request("/v1/completions", body)["choices"][0]["logprobs"]
        return numpy.array(told["token_logprobs"][1:], numpy.float32)

    def embed(
        self,
        texts: str | Sequence[str],
        *,
        pooling: Literal["last", "mean", "cls"] | None = None,
        normalize: bool = True,
        dimensions: int | None = None,
    ) -> NDArray[numpy.float32]:
        """A vector for each text, float32 [number of texts, size]. Needs NumPy.

        Any model gives vectors; those of models that were trained for it say what texts mean.
        """
        import numpy

        texts = [texts] if isinstance(texts, str) else list(texts)
        rows = []
        for start in range(0, len(texts), _MAX_TEXTS):
            body: dict[str, Any] = {"input": texts[start : start + _MAX_TEXTS], "encoding_format": "base64"}
            body |= {"pooling": pooling, "normalize": normalize, "dimensions": dimensions}
            for entry in self.request("/v1/embeddings", body)["data"]:
                rows.append(numpy.frombuffer(base64.b64decode(entry["embedding"]), "<f4").astype(numpy.float32))
        return numpy.stack(rows) if rows else numpy.empty((0, 0), numpy.float32)

    def request(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """What a route of the server answers, as values of JSON: POST where there is a body.

        `/openapi.json` lists them. For what has no method here: `/v1/rerank`, `/infill`, `/v1/routing`.

        Raises Error where the request is refused or fails.
        """
        call = self._call(path, body)
        open_call(call)
        return json.loads(read(call))

    def serve(
        self,
        host: str = "127.0.0.1",
        port: int = 8080,
        *,
        api_keys: Sequence[str] = (),
        allowed_hosts: Sequence[str] = (),
        cors: Sequence[str] = (),
    ) -> Server:
        """Lets clients use this model over HTTP; port 0 takes a free one.

        Answers of clients and of this program are computed together. The server ends when it is closed or dropped.

        Raises Error where the address cannot be had.
        """
        flags = _flags({"host": host, "port": port})
        flags += [f"--allowed-host={allowed}" for allowed in allowed_hosts] + [f"--cors={origin}" for origin in cors]
        return Server(self._engine.serve(flags, "\n".join(api_keys)))

    def close(self) -> None:
        """Ends the engine and frees its memory; what runs is cut off."""
        self._engine.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<moebius.Model {self.name}: {self.description}, {self.backend}, context {self.context}>"

    def _call(self, path: str, body: Mapping[str, Any] | None) -> _native.Call:
        text = None if body is None else json.dumps(body, allow_nan=False, separators=(",", ":"))
        return self._engine.call(path, text)

    def _stream(self, path: str, body: dict[str, Any]) -> Stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        return Stream(self._call(path, body))


def _flags(settings: Mapping[str, Any]) -> list[str]:
    given = {name: value for name, value in settings.items() if value is not None}
    return [f"--{name}={os.fspath(v) if isinstance(v, os.PathLike) else v}" for name, v in given.items()]


def _start_children() -> None:
    """Grammars are tried in a process of their own, which has limits."""
    file = getattr(_native, "__file__", None)
    if sys.executable and file:
        child = Path(__file__).with_name("_child.py")
        _native.start_with([sys.executable, "-I", "-S", str(child), file])


_start_children()
