"""A model: settings in, answers, numbers and servers out. Knows the routes of the server and what they take."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import struct
import sys
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Union, overload

from . import _native
from ._answers import Answer, AsyncStream, Stream, answer_of, chat_answers, text_answers
from ._sampling import Sampling
from ._trace import Router, Trace, by_layer

if TYPE_CHECKING:
    from types import TracebackType

    import numpy
    from numpy.typing import NDArray
    from typing_extensions import Unpack

#: `{"role": "user", "content": "..."}`, as OpenAI has it.
Message = Mapping[str, Any]
#: A text, or its tokens.
Prompt = Union[str, Sequence[int]]
#: Several of them.
Prompts = Union[list[str], tuple[str, ...], Sequence[Sequence[int]]]
#: A conversation; a text is one message of the user.
Conversation = Union[str, Sequence[Message]]
#: A file's name, its bytes, a data URI, or pixels: uint8, [height, width] or [height, width, 1, 3 or 4].
Image = Union[str, "os.PathLike[str]", bytes, bytearray, memoryview, "NDArray[numpy.uint8]"]
#: Several of them.
Conversations = Union[list[str], tuple[str, ...], Sequence[Sequence[Message]]]
#: What answers are asked for with, a request each.
_Bodies = list[dict[str, Any]]

#: Most texts in one request.
_MAX_TEXTS = 256
#: Streams whose next piece is waited for at a time, where an event loop reads them.
_MAX_READERS = 64
#: Bytes of logits that are computed between two looks at signals.
_LOGITS_BYTES = 64 << 20


class Options(Sampling, total=False):
    """Options of an answer; those left out keep the model's defaults."""

    max_tokens: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    ignore_eos: bool
    seed: int
    dry_sequence_breakers: Sequence[str]
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
    #: Maximum number of tokens of the model's thought.
    thinking_budget: int
    #: Further variables of the template, such as `enable_thinking`.
    chat_template_kwargs: Mapping[str, Any]
    #: The last message is the beginning of the answer.
    continue_final_message: bool
    #: Report the experts of each token: `Answer.routing`.
    routing: bool


    #: Shown with the last message of the user: files, their bytes, data URIs, or arrays of pixels.
    images: Sequence[Image]


#: What the routes call it otherwise.
_NAMES = {"schema": "json_schema", "choices": "guided_choice"}


def _body(function: str, known: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a request; None counts as left out."""
    names = known.__annotations__.keys() | Options.__annotations__.keys() | Sampling.__annotations__.keys()
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
    comes with the package. With `pull` a name of Hugging Face's, `ORG/REPO:TYPE`, is downloaded unless it is on this
    machine. Settings are those of `moebius serve`; memory is a number of bytes or a text such as "12G".
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
        cache_type: str | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        copy_weights: Literal["auto", "none", "dense", "all"] | None = None,
        draft: Literal["off", "auto", "ngram", "mtp"] | str | os.PathLike[str] | None = None,
        draft_tokens: int | None = None,
        rope_scaling: str | None = None,
        think_budget: int | None = None,
        on_full: Literal["refuse", "trim"] | None = None,
        chat_template: str | os.PathLike[str] | None = None,
        mmproj: str | os.PathLike[str] | None = None,
        image_tokens: int | None = None,
        name: str | None = None,
        pull: bool = False,
    ) -> None:
        if pull and model is not None:
            model = _native.pull(os.fspath(model))
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
            "draft": draft,
            "draft-tokens": draft_tokens,
            "rope-scaling": rope_scaling,
            "think-budget": think_budget,
            "on-full": on_full,
            "chat-template-file": chat_template,
            "mmproj": mmproj,
            "image-tokens": image_tokens,
            "alias": name,
        }
        self._engine = _native.Engine(_flags(settings))
        self._about = self._engine.about()
        self._scoring = threading.Lock()
        # As many whole answers as the engine computes at a time: more would wait there, or be refused.
        self._workers = ThreadPoolExecutor(self._about["parallel"], "moebius-answers")
        self._readers = ThreadPoolExecutor(_MAX_READERS, "moebius-streams")

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
    def routers(self) -> list[Router]:
        """The layers that choose among experts; none of a dense model."""
        return [Router(*router) for router in self._about["routers"]]

    @property
    def notes(self) -> list[str]:
        """What a user should know: who computes and why, where weights are."""
        return list(self._about["notes"])

    @overload
    def chat(
        self, messages: Conversation, *, stream: Literal[False] = False, n: None = None, **options: Unpack[ChatOptions]
    ) -> Answer: ...
    @overload
    def chat(
        self, messages: Conversation, *, stream: Literal[False] = False, n: int, **options: Unpack[ChatOptions]
    ) -> list[Answer]: ...
    @overload
    def chat(
        self, messages: Conversations, *, stream: Literal[False] = False, n: None = None, **options: Unpack[ChatOptions]
    ) -> list[Answer]: ...
    @overload
    def chat(
        self, messages: Conversations, *, stream: Literal[False] = False, n: int, **options: Unpack[ChatOptions]
    ) -> list[list[Answer]]: ...
    @overload
    def chat(
        self, messages: Conversation, *, stream: Literal[True], n: None = None, **options: Unpack[ChatOptions]
    ) -> Stream: ...
    @overload
    def chat(
        self, messages: Conversation, *, stream: bool, n: None = None, **options: Unpack[ChatOptions]
    ) -> Answer | Stream: ...

    def chat(
        self,
        messages: Conversation | Conversations,
        *,
        stream: bool = False,
        n: int | None = None,
        **options: Unpack[ChatOptions],
    ) -> Answer | list[Answer] | list[list[Answer]] | Stream:
        """An answer in a conversation; a text is one message of the user. With `stream` it comes piece by piece.

        A list of texts or of conversations gives a list of answers, which are computed together. With `n` there are n
        answers to each, as a list; answer i uses seed + i.

        Raises Error where the request is refused or fails, TypeError for a keyword that is none.
        """
        bodies, is_batch = self._chat_bodies(messages, stream, n, options)
        if stream:
            return Stream(self._call(_CHAT, bodies[0]), self.routers)
        return _shaped([chat_answers(told, self.routers) for told in self._ask(_CHAT, bodies)], is_batch, n)

    @overload
    async def achat(
        self, messages: Conversation, *, stream: Literal[False] = False, n: None = None, **options: Unpack[ChatOptions]
    ) -> Answer: ...
    @overload
    async def achat(
        self, messages: Conversation, *, stream: Literal[False] = False, n: int, **options: Unpack[ChatOptions]
    ) -> list[Answer]: ...
    @overload
    async def achat(
        self, messages: Conversations, *, stream: Literal[False] = False, n: None = None, **options: Unpack[ChatOptions]
    ) -> list[Answer]: ...
    @overload
    async def achat(
        self, messages: Conversations, *, stream: Literal[False] = False, n: int, **options: Unpack[ChatOptions]
    ) -> list[list[Answer]]: ...
    @overload
    async def achat(
        self, messages: Conversation, *, stream: Literal[True], n: None = None, **options: Unpack[ChatOptions]
    ) -> AsyncStream: ...
    @overload
    async def achat(
        self, messages: Conversation, *, stream: bool, n: None = None, **options: Unpack[ChatOptions]
    ) -> Answer | AsyncStream: ...

    async def achat(
        self,
        messages: Conversation | Conversations,
        *,
        stream: bool = False,
        n: int | None = None,
        **options: Unpack[ChatOptions],
    ) -> Answer | list[Answer] | list[list[Answer]] | AsyncStream:
        """As `chat`, without blocking the event loop. A task that is cancelled ends its request."""
        bodies, is_batch = self._chat_bodies(messages, stream, n, options)
        if stream:
            return await self._astream(_CHAT, bodies[0])
        return _shaped([chat_answers(told, self.routers) for told in await self._aask(_CHAT, bodies)], is_batch, n)

    @overload
    def complete(
        self,
        prompt: Prompt,
        *,
        stream: Literal[False] = False,
        n: None = None,
        suffix: str | None = None,
        **options: Unpack[Options],
    ) -> Answer: ...
    @overload
    def complete(
        self,
        prompt: Prompt,
        *,
        stream: Literal[False] = False,
        n: int,
        suffix: str | None = None,
        **options: Unpack[Options],
    ) -> list[Answer]: ...
    @overload
    def complete(
        self,
        prompt: Prompts,
        *,
        stream: Literal[False] = False,
        n: None = None,
        suffix: str | None = None,
        **options: Unpack[Options],
    ) -> list[Answer]: ...
    @overload
    def complete(
        self,
        prompt: Prompts,
        *,
        stream: Literal[False] = False,
        n: int,
        suffix: str | None = None,
        **options: Unpack[Options],
    ) -> list[list[Answer]]: ...
    @overload
    def complete(
        self,
        prompt: Prompt,
        *,
        stream: Literal[True],
        n: None = None,
        suffix: str | None = None,
        **options: Unpack[Options],
    ) -> Stream: ...
    @overload
    def complete(
        self, prompt: Prompt, *, stream: bool, n: None = None, suffix: str | None = None, **options: Unpack[Options]
    ) -> Answer | Stream: ...

    def complete(
        self,
        prompt: Prompt | Prompts,
        *,
        stream: bool = False,
        n: int | None = None,
        suffix: str | None = None,
        **options: Unpack[Options],
    ) -> Answer | list[Answer] | list[list[Answer]] | Stream:
        """How a text goes on, or a list of tokens; between it and `suffix`, for models that fill gaps.

        A list of texts or of lists of tokens gives a list of answers, which are computed together. With `n` there are n
        answers to each, as a list; answer i uses seed + i.

        Raises Error where the request is refused or fails, TypeError for a keyword that is none.
        """
        bodies, is_batch = self._text_bodies(prompt, stream, n, suffix, options)
        if stream:
            return Stream(self._call(_TEXT, bodies[0]))
        return _shaped(_by_prompt(self._ask(_TEXT, bodies), n), is_batch, n)

    @overload
    async def acomplete(
        self,
        prompt: Prompt,
        *,
        stream: Literal[False] = False,
        n: None = None,
        suffix: str | None = None,
        **options: Unpack[Options],
    ) -> Answer: ...
    @overload
    async def acomplete(
        self,
        prompt: Prompt,
        *,
        stream: Literal[False] = False,
        n: int,
        suffix: str | None = None,
        **options: Unpack[Options],
    ) -> list[Answer]: ...
    @overload
    async def acomplete(
        self,
        prompt: Prompts,
        *,
        stream: Literal[False] = False,
        n: None = None,
        suffix: str | None = None,
        **options: Unpack[Options],
    ) -> list[Answer]: ...
    @overload
    async def acomplete(
        self,
        prompt: Prompts,
        *,
        stream: Literal[False] = False,
        n: int,
        suffix: str | None = None,
        **options: Unpack[Options],
    ) -> list[list[Answer]]: ...
    @overload
    async def acomplete(
        self,
        prompt: Prompt,
        *,
        stream: Literal[True],
        n: None = None,
        suffix: str | None = None,
        **options: Unpack[Options],
    ) -> AsyncStream: ...
    @overload
    async def acomplete(
        self, prompt: Prompt, *, stream: bool, n: None = None, suffix: str | None = None, **options: Unpack[Options]
    ) -> Answer | AsyncStream: ...

    async def acomplete(
        self,
        prompt: Prompt | Prompts,
        *,
        stream: bool = False,
        n: int | None = None,
        suffix: str | None = None,
        **options: Unpack[Options],
    ) -> Answer | list[Answer] | list[list[Answer]] | AsyncStream:
        """As `complete`, without blocking the event loop. A task that is cancelled ends its request."""
        bodies, is_batch = self._text_bodies(prompt, stream, n, suffix, options)
        if stream:
            return await self._astream(_TEXT, bodies[0])
        return _shaped(_by_prompt(await self._aask(_TEXT, bodies), n), is_batch, n)

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

    def logits(self, prompt: Prompt) -> NDArray[numpy.float32]:
        """Logits after each token of a text, float32 [number of tokens, vocab_size]. Needs NumPy.

        They are computed by another program than the engine's, with a separate cache, on the CPU unless a backend is
        named; it reads the weights from the same mapped file.
        """
        logits = self.trace(prompt, logits=True, experts=False).logits
        assert logits is not None
        return logits

    def trace(self, prompt: Prompt, *, logits: bool = False, hidden: bool = False, experts: bool = True) -> Trace:
        """What the model computes at each token of a text: the experts with their weights, and on demand logits and
        hidden states. For a prompt with its answer, give both. Computed as `logits` is. Needs NumPy.

        Raises Error where a token is not in the vocabulary, or computing fails.
        """
        import numpy

        ids = self._tokens(prompt)
        step = max(32, _LOGITS_BYTES // (4 * self.vocab_size))
        parts: list[tuple[bytes, bytes, bytes, bytes]] = []
        with self._scoring:
            for start in range(0, len(ids), step):
                chunk = ids[start : start + step]
                parts.append(self._engine.trace(chunk, (start, len(ids)), (logits, hidden, experts)))

        def rows(kind: int, dtype: Any, width: int) -> Any:
            return numpy.frombuffer(b"".join(part[kind] for part in parts), dtype).reshape(len(ids), width)

        routers = self.routers if experts else []
        width = sum(router.n_used for router in routers)
        size = len(parts[0][1]) // (4 * min(step, len(ids))) if parts else 0
        return Trace(
            tokens=ids,
            routers=routers,
            experts=by_layer(rows(2, numpy.uint16, width).astype(numpy.int32), routers, -1),
            weights=by_layer(rows(3, numpy.float32, width), routers, 0) if parts and parts[0][3] else None,
            logits=rows(0, numpy.float32, self.vocab_size) if logits else None,
            hidden=rows(1, numpy.float32, size) if hidden else None,
        )

    def _tokens(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            return [int(token) for token in prompt]
        tokens = self.tokenize(prompt, add_special=True)
        # A rendered conversation begins with the token that begins texts: it would be there twice.
        bare = self.tokenize(prompt)
        return bare if tokens[1:] == bare and tokens[:1] == bare[:1] else tokens

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
        return answer_of(self._call(path, body))

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
        self._workers.shutdown(wait=False)
        self._readers.shutdown(wait=False)

    def __enter__(self) -> Model:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<moebius.Model {self.name}: {self.description}, {self.backend}, context {self.context}>"

    def _call(self, path: str, body: Mapping[str, Any] | None) -> _native.Call:
        text = None if body is None else json.dumps(body, allow_nan=False, separators=(",", ":"))
        return self._engine.call(path, text)

    def _ask(self, path: str, bodies: _Bodies) -> list[Any]:
        """The answers to requests, which the engine computes together."""
        if len(bodies) == 1:
            return [self.request(path, bodies[0])]
        calls = [self._call(path, body) for body in bodies]
        futures = [self._workers.submit(answer_of, call) for call in calls]
        try:
            return [future.result() for future in futures]
        except BaseException:
            # One is refused, or Ctrl-C: the others are of no use.
            for call, future in zip(calls, futures):
                future.cancel()
                call.cancel()
            raise

    async def _aask(self, path: str, bodies: _Bodies) -> list[Any]:
        calls = [self._call(path, body) for body in bodies]
        try:
            return list(await asyncio.gather(*[self._run(self._workers, partial(answer_of, call)) for call in calls]))
        except BaseException:
            for call in calls:
                call.cancel()
            raise

    async def _astream(self, path: str, body: dict[str, Any]) -> AsyncStream:
        call = self._call(path, body)
        run = partial(self._run, self._readers)
        try:
            return AsyncStream(await run(partial(Stream, call, self.routers)), run)
        except BaseException:
            call.cancel()
            raise

    async def _run(self, pool: ThreadPoolExecutor, act: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(pool, act)

    def _chat_bodies(
        self, messages: Any, stream: bool, n: int | None, options: Mapping[str, Any]
    ) -> tuple[_Bodies, bool]:
        chosen = dict(options)
        images = chosen.pop("images", None) or []
        body = _body("chat", ChatOptions, chosen)
        if "logprobs" in body:
            body["top_logprobs"], body["logprobs"] = body["logprobs"], True
        plain = _plain(messages)
        is_batch = isinstance(plain, list) and bool(plain) and isinstance(plain[0], (str, list))
        _complete_body(body, stream, n, is_batch)
        talks = [
            [{"role": "user", "content": talk}] if isinstance(talk, str) else talk
            for talk in (plain if is_batch else [plain])
        ]
        if images:
            if is_batch:
                raise TypeError("images belong to one conversation; of several, messages may have them as parts")
            talks = [_show(talks[0], images)]
        return [body | {"messages": talk} for talk in talks], is_batch

    def _text_bodies(
        self, prompt: Any, stream: bool, n: int | None, suffix: str | None, options: Mapping[str, Any]
    ) -> tuple[_Bodies, bool]:
        body = {"max_tokens": -1} | _body("complete", Options, options)
        if suffix is not None:
            body["suffix"] = suffix
        plain = _plain(prompt)
        is_batch = isinstance(plain, list) and bool(plain) and isinstance(plain[0], (str, list))
        _complete_body(body, stream, n, is_batch)
        if not is_batch:
            return [body | {"prompt": plain}], False
        step = max(1, _MAX_TEXTS // (n or 1))
        return [body | {"prompt": plain[at : at + step]} for at in range(0, len(plain), step)], True


def _show(talk: list[dict[str, Any]], images: Sequence[Image]) -> list[dict[str, Any]]:
    """A conversation whose last message of the user begins with images."""
    at = max((i for i, message in enumerate(talk) if message.get("role") == "user"), default=None)
    if at is None:
        raise TypeError("images require a message of the user")
    if isinstance(images, (str, bytes, bytearray, memoryview)):
        raise TypeError("images is a list")
    said = talk[at].get("content") or []
    parts: list[Any] = [{"type": "image_url", "image_url": {"url": _data_uri(image)}} for image in images]
    parts += [{"type": "text", "text": said}] if isinstance(said, str) else said
    return [*talk[:at], {**talk[at], "content": parts}, *talk[at + 1 :]]


def _data_uri(image: Image) -> str:
    if isinstance(image, str) and image.startswith("data:"):
        return image
    if isinstance(image, (bytes, bytearray, memoryview)):
        file = bytes(image)
    elif isinstance(image, (str, os.PathLike)):
        file = Path(image).read_bytes()
    else:
        file = _png(image)
    return "data:application/octet-stream;base64," + base64.b64encode(file).decode("ascii")


def _png(pixels: Any) -> bytes:
    """The file of an array of pixels, its rows uncompared with each other."""
    shape = tuple(getattr(pixels, "shape", ()))
    kinds = {1: 0, 3: 2, 4: 6}
    depth = shape[2] if len(shape) == 3 else 1
    if len(shape) not in (2, 3) or depth not in kinds or str(pixels.dtype) != "uint8" or 0 in shape:
        what = f"{type(pixels).__name__} {shape}" if shape else type(pixels).__name__
        raise TypeError(f"{what} is no image: uint8 of [height, width] or [height, width, 1, 3 or 4] is")
    height, width = shape[:2]
    raw, row = pixels.tobytes(), width * depth
    lines = b"".join(b"\0" + raw[at : at + row] for at in range(0, height * row, row))

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", width, height, 8, kinds[depth], 0, 0, 0)
    parts = chunk(b"IHDR", head), chunk(b"IDAT", zlib.compress(lines)), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


_CHAT = "/v1/chat/completions"
_TEXT = "/v1/completions"


def _complete_body(body: dict[str, Any], stream: bool, n: int | None, is_batch: bool) -> None:
    """Adds what says how answers come."""
    if stream and (is_batch or n is not None):
        raise TypeError("stream=True gives one answer: it cannot be combined with several prompts or n")
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if n is not None:
        body["n"] = n


def _by_prompt(told: list[Any], n: int | None) -> list[list[Answer]]:
    """Answers of some requests, those of a prompt together."""
    answers = [answer for body in told for answer in text_answers(body)]
    each = n or 1
    return [answers[at : at + each] for at in range(0, len(answers), each)]


def _shaped(answers: list[list[Answer]], is_batch: bool, n: int | None) -> Answer | list[Answer] | list[list[Answer]]:
    """Answers by prompt as they were asked for: one, or a list for several prompts, and for n."""
    if n is None:
        firsts = [of_prompt[0] for of_prompt in answers]
        return firsts if is_batch else firsts[0]
    return answers if is_batch else answers[0]


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
