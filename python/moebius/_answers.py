"""What models answer, whole and as it comes. Knows the server's JSON and no model."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ._native import Error
from ._trace import Router, by_layer

if TYPE_CHECKING:
    from types import TracebackType

    import numpy
    from numpy.typing import NDArray

    from ._native import Call


@dataclass
class Usage:
    """What a request took, in tokens: that of all answers together where it has several."""

    prompt_tokens: int = 0
    #: Those of the prompt that were computed before, for another answer.
    cached_tokens: int = 0
    completion_tokens: int = 0


@dataclass
class ToolCall:
    """A call of a tool that the model wants made."""

    id: str
    name: str
    #: JSON, as the model wrote it.
    arguments: str

    def parsed(self) -> dict[str, Any]:
        """The arguments as Python's values."""
        values = json.loads(self.arguments or "{}")
        if not isinstance(values, dict):
            raise ValueError(f"the arguments of {self.name} are no object: {self.arguments}")
        return values


@dataclass
class Logprob:
    """A token of the answer with the natural logarithm of its probability."""

    token: str
    logprob: float
    #: The likeliest tokens in its place with theirs, as many as were asked for.
    top: list[tuple[str, float]] = field(default_factory=list)


@dataclass
class Answer:
    """An answer, or as much of it as has come."""

    text: str = ""
    #: What the model thought first, where it marks its thoughts.
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    #: `stop`, `length` or `tool_calls`; None while it comes.
    finish_reason: str | None = None
    #: A token each, where they were asked for.
    logprobs: list[Logprob] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)
    #: Experts of each token as the server reports them, and the routers that chose them.
    _experts: list[list[int]] = field(default_factory=list, repr=False, compare=False)
    _routers: Sequence[Router] = field(default=(), repr=False, compare=False)

    def __str__(self) -> str:
        return self.text

    @property
    def routing(self) -> NDArray[numpy.int32] | None:
        """Ids of the experts that computed each token's logits, best first, int32 [tokens, layers, k]; None unless
        `routing=True` asked for them. `Model.trace` also covers the prompt, with the experts' weights. Needs NumPy."""
        import numpy

        if not self._experts:
            return None
        flat = numpy.array(self._experts, numpy.int32)
        routed: NDArray[numpy.int32] = by_layer(flat, self._routers, -1)
        return routed

    def message(self) -> dict[str, Any]:
        """The answer as a message, to go on with the conversation."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return message


class Stream(Iterator[str]):
    """An answer as it comes: iterating gives pieces of its text.

    `answer` is what has come so far. A stream that is closed or dropped ends its request: leave the loop whenever you
    like. `events()` also gives thoughts.
    """

    def __init__(self, call: Call, routers: Sequence[Router] = ()) -> None:
        self._call = call
        self._rest = b""
        self._waiting: list[tuple[str, str]] = []
        self._ended = False
        #: What has come so far.
        self.answer = Answer(_routers=routers)
        open_call(call)

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> str:
        while True:
            kind, text = self._next()
            if kind == "text":
                return text

    def events(self) -> Iterator[tuple[str, str]]:
        """Pieces with their kind: `text`, `reasoning`, or `tool` (pieces of a call's arguments)."""
        while True:
            try:
                yield self._next()
            except StopIteration:
                return

    def close(self) -> None:
        """Ends the request; what has come stays."""
        self._ended = True
        self._call.cancel()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _next(self) -> tuple[str, str]:
        try:
            while not self._waiting and not self._ended:
                self._read()
        except BaseException:
            # On Ctrl-C the rest is not read, but the error's traceback keeps this stream alive.
            self.close()
            raise
        if not self._waiting:
            raise StopIteration
        return self._waiting.pop(0)

    def _read(self) -> None:
        """Takes what has come: events that end with an empty line, `data: ` before their JSON."""
        piece = self._call.piece()
        if piece is None:
            self._ended = True
            return
        *events, self._rest = (self._rest + piece).split(b"\n\n")
        for event in events:
            if event.startswith(b"data: ") and event != b"data: [DONE]":
                self._take(json.loads(event[len(b"data: ") :]))

    def _take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            raise failure(None, event)
        if event.get("usage"):
            self.answer.usage = usage(event["usage"])
        for choice in event["choices"]:
            if "text" in choice:
                self._add("text", choice["text"])
                self.answer.logprobs += list_logprobs(choice.get("logprobs"))
            self.answer._experts += choice.get("routing") or []
            delta = choice.get("delta") or {}
            self._add("reasoning", delta.get("reasoning_content") or "")
            self._add("text", delta.get("content") or "")
            for part in delta.get("tool_calls") or []:
                self._add_call(part)
            if "delta" in choice:
                self.answer.logprobs += chat_logprobs(choice.get("logprobs"))
            self.answer.finish_reason = choice["finish_reason"] or self.answer.finish_reason

    def _add(self, kind: str, text: str) -> None:
        if text:
            setattr(self.answer, kind, getattr(self.answer, kind) + text)
            self._waiting.append((kind, text))

    def _add_call(self, part: dict[str, Any]) -> None:
        function = part.get("function") or {}
        if "id" in part:
            self.answer.tool_calls.append(ToolCall(part["id"], function["name"], ""))
        arguments = function.get("arguments") or ""
        self.answer.tool_calls[part["index"]].arguments += arguments
        if arguments:
            self._waiting.append(("tool", arguments))


class AsyncStream(AsyncIterator[str]):
    """An answer as it comes, for `async for`: a [`Stream`] that blocks no event loop."""

    def __init__(self, stream: Stream, run: Callable[[Callable[[], Any]], Awaitable[Any]]) -> None:
        self._stream = stream
        self._run = run

    @property
    def answer(self) -> Answer:
        """What has come so far."""
        return self._stream.answer

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> str:
        while (event := await self._read()) is not None:
            kind, text = event
            if kind == "text":
                return text
        raise StopAsyncIteration

    async def events(self) -> AsyncIterator[tuple[str, str]]:
        """Pieces with their kind: `text`, `reasoning`, or `tool` (pieces of a call's arguments)."""
        while (event := await self._read()) is not None:
            yield event

    async def aclose(self) -> None:
        """Ends the request; what has come stays."""
        self._stream.close()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _read(self) -> tuple[str, str] | None:
        try:
            event: tuple[str, str] | None = await self._run(self._next)
        except BaseException:
            # The task was cancelled, say: nothing reads the rest.
            self._stream.close()
            raise
        return event

    def _next(self) -> tuple[str, str] | None:
        # A future cannot carry StopIteration.
        return next(self._stream.events(), None)


def answer_of(call: Call) -> Any:
    """A whole answer, as values of JSON."""
    try:
        open_call(call)
        return json.loads(read(call))
    except BaseException:
        # On Ctrl-C the error's traceback keeps the call alive.
        call.cancel()
        raise


def open_call(call: Call) -> None:
    """Waits for the head of an answer.

    Raises Error where the request is refused or fails.
    """
    status, ignored = call.head()
    if status != 200:
        raise failure(status, json.loads(read(call)))
    if ignored is not None:
        raise TypeError(f"the model's server knows no field {ignored}")


def read(call: Call) -> bytes:
    """The body of an answer."""
    pieces = []
    while (piece := call.piece()) is not None:
        pieces.append(piece)
    return b"".join(pieces)


def failure(status: int | None, body: dict[str, Any]) -> Error:
    """The error that an answer tells of."""
    told = body["error"]
    error = Error(told["message"])
    error.status, error.field = status, told.get("param")
    return error


def chat_answers(body: dict[str, Any], routers: Sequence[Router]) -> list[Answer]:
    """Of a conversation."""
    return [_chat_answer(choice, usage(body["usage"]), routers) for choice in body["choices"]]


def _chat_answer(choice: dict[str, Any], taken: Usage, routers: Sequence[Router]) -> Answer:
    message = choice["message"]
    calls = [
        ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls") or []
    ]
    return Answer(
        text=message["content"] or "",
        reasoning=message.get("reasoning_content") or "",
        tool_calls=calls,
        finish_reason=choice["finish_reason"],
        logprobs=chat_logprobs(choice.get("logprobs")),
        usage=taken,
        _experts=choice.get("routing") or [],
        _routers=routers,
    )


def text_answers(body: dict[str, Any]) -> list[Answer]:
    """Of texts that go on, those of the first prompt first."""
    return [
        Answer(
            text=choice["text"],
            finish_reason=choice["finish_reason"],
            logprobs=list_logprobs(choice.get("logprobs")),
            usage=usage(body["usage"]),
        )
        for choice in sorted(body["choices"], key=lambda choice: int(choice["index"]))
    ]


def usage(told: dict[str, Any]) -> Usage:
    """What an answer took."""
    details = told.get("prompt_tokens_details") or {}
    return Usage(told["prompt_tokens"], details.get("cached_tokens", 0), told["completion_tokens"])


def chat_logprobs(told: dict[str, Any] | None) -> list[Logprob]:
    """From the form of conversations."""
    content = (told or {}).get("content") or []
    return [
        Logprob(one["token"], one["logprob"], [(top["token"], top["logprob"]) for top in one["top_logprobs"]])
        for one in content
    ]


def list_logprobs(told: dict[str, Any] | None) -> list[Logprob]:
    """From the form of texts: a list for each thing."""
    if not told:
        return []
    tops = told.get("top_logprobs") or [{}] * len(told["tokens"])
    return [
        Logprob(token, logprob, sorted((top or {}).items(), key=lambda pair: -pair[1]))
        for token, logprob, top in zip(told["tokens"], told["token_logprobs"], tops)
    ]
