"""Several answers at a time: lists of prompts, n, and event loops."""

import asyncio
import threading
import time

import pytest

import moebius
from conftest import idle

PROMPTS = ["Once upon a time", "The fox", "A small boat", "In the garden", "My dog", "It was cold"]
OPTIONS = {"temperature": 0.8, "seed": 5, "max_tokens": 24}


class Watch:
    """The most sequences that the engine computes or keeps waiting meanwhile."""

    def __init__(self, model):
        self.model, self.most, self.ends = model, 0, False
        self.thread = threading.Thread(target=self.look)

    def look(self):
        while not self.ends:
            self.most = max(self.most, self.model._engine.busy()[0])
            time.sleep(0.001)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.ends = True
        self.thread.join()


def test_lists_of_prompts_are_computed_together(model):
    alone = [model.complete(prompt, **OPTIONS) for prompt in PROMPTS]
    with Watch(model) as watch:
        together = model.complete(PROMPTS, **OPTIONS)
    assert [answer.text for answer in together] == [answer.text for answer in alone]
    assert [answer.finish_reason for answer in together] == ["length"] * len(PROMPTS)
    assert watch.most > 1, "they waited for each other"
    ids = [model.tokenize(prompt, add_special=True) for prompt in PROMPTS]
    assert [answer.text for answer in model.complete(ids, **OPTIONS)] == [answer.text for answer in alone]
    assert [answer.text for answer in model.complete(tuple(PROMPTS[:2]), **OPTIONS)] == [a.text for a in alone[:2]]
    # A list of one is a list, and a list of tokens is a prompt.
    assert [answer.text for answer in model.complete(PROMPTS[:1], **OPTIONS)] == [alone[0].text]
    assert model.complete(ids[0], **OPTIONS).text == alone[0].text
    # More than a request takes.
    many = model.complete(["A"] * 600, temperature=0, max_tokens=1)
    assert len(many) == 600 and len({answer.text for answer in many}) == 1


def test_lists_of_conversations_are_computed_together(model):
    alone = [model.chat(prompt, **OPTIONS).text for prompt in PROMPTS]
    with Watch(model) as watch:
        assert [answer.text for answer in model.chat(PROMPTS, **OPTIONS)] == alone
    assert watch.most > 1, "they waited for each other"
    talks = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    assert [answer.text for answer in model.chat(talks, **OPTIONS)] == alone
    assert model.chat(talks[0], **OPTIONS).text == alone[0]


def test_n_answers_use_the_seeds_that_follow(model):
    seeds = [{**OPTIONS, "seed": 5 + i} for i in range(3)]
    alone = [model.complete(PROMPTS[0], **options).text for options in seeds]
    assert len(set(alone)) == 3
    assert [answer.text for answer in model.complete(PROMPTS[0], n=3, **OPTIONS)] == alone
    assert [answer.text for answer in model.complete(PROMPTS[0], n=1, **OPTIONS)] == alone[:1]
    nested = model.complete(PROMPTS[:2], n=3, **OPTIONS)
    assert [answer.text for answer in nested[0]] == alone
    assert [answer.text for answer in nested[1]] == [model.complete(PROMPTS[1], **options).text for options in seeds]
    talks = model.chat(PROMPTS[:2], n=3, **OPTIONS)
    assert [[answer.text for answer in of_one] for of_one in talks] == [
        [model.chat(prompt, **options).text for options in seeds] for prompt in PROMPTS[:2]
    ]
    with pytest.raises(moebius.Error, match="`n`"):
        model.complete("x", n=0)


def test_what_is_wrong_with_one_ends_all(model):
    with pytest.raises(moebius.Error, match="context|tokens"):
        model.chat(["Hello", "fox " * 3000, *PROMPTS], ignore_eos=True, max_tokens=900)
    idle(model, 2.0)
    for more in ({"n": 2}, {}):
        with pytest.raises(TypeError, match="stream"):
            model.complete(PROMPTS if not more else "x", stream=True, **more)
    with pytest.raises(TypeError, match="stream"):
        model.chat(PROMPTS, stream=True)


def test_event_loops_wait_without_blocking(model):
    alone = [model.complete(prompt, **OPTIONS).text for prompt in PROMPTS]
    said = [model.chat(prompt, **OPTIONS).text for prompt in PROMPTS]

    async def run():
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.001)

        ticking = asyncio.create_task(tick())
        answers = await asyncio.gather(*[model.acomplete(prompt, **OPTIONS) for prompt in PROMPTS])
        assert [answer.text for answer in answers] == alone
        assert [answer.text for answer in await model.acomplete(PROMPTS, **OPTIONS)] == alone
        assert [answer.text for answer in await model.achat(PROMPTS, **OPTIONS)] == said
        assert (await model.achat(PROMPTS[0], **OPTIONS)).text == said[0]
        assert len(await model.acomplete(PROMPTS[0], n=2, **OPTIONS)) == 2
        # More at a time than the engine computes and lets wait.
        many = await asyncio.gather(*[model.acomplete("A", temperature=0, max_tokens=1) for _ in range(200)])
        assert len({answer.text for answer in many}) == 1
        ticking.cancel()
        assert ticks > 20

    asyncio.run(run())


def test_streams_are_read_by_event_loops(model):
    whole = [model.chat(prompt, **OPTIONS).text for prompt in PROMPTS]

    async def read(prompt):
        stream = await model.achat(prompt, stream=True, **OPTIONS)
        pieces = [piece async for piece in stream]
        assert len(pieces) > 5 and "".join(pieces) == stream.answer.text
        assert 5 < stream.answer.usage.completion_tokens <= OPTIONS["max_tokens"]
        return stream.answer.text

    async def run():
        with Watch(model) as watch:
            assert await asyncio.gather(*map(read, PROMPTS)) == whole
        assert watch.most > 1, "they waited for each other"
        stream = await model.acomplete(PROMPTS[0], stream=True, **OPTIONS)
        events = [event async for event in stream.events()]
        assert {kind for kind, _ in events} == {"text"}
        async with await model.acomplete(PROMPTS[0], stream=True, ignore_eos=True, max_tokens=900) as stream:
            assert await stream.__anext__()
        assert [piece async for piece in stream] == []

    asyncio.run(run())
    idle(model, 2.0)


def test_cancelled_tasks_end_their_requests(model):
    forever = {"ignore_eos": True, "max_tokens": 900}

    async def read():
        async for _ in await model.achat("Hello", stream=True, **forever):
            pass

    async def run():
        for begin in (
            lambda: model.acomplete("Once", **forever),
            lambda: model.acomplete(PROMPTS[:3], **forever),
            lambda: model.achat(PROMPTS[:3], **forever),
            read,
        ):
            task = asyncio.ensure_future(begin())
            while not model._engine.busy()[0]:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            end = time.monotonic() + 2
            while model._engine.busy()[0]:
                assert time.monotonic() < end, "it runs on"
                await asyncio.sleep(0.01)
        with pytest.raises(moebius.Error):
            await model.achat([{"role": "stranger", "content": "x"}])

    asyncio.run(run())
