"""Images in conversations, on a tiny random model that sees."""

import asyncio
import base64
import pathlib

import numpy
import pytest

import moebius

DATA = pathlib.Path(__file__).parents[2] / "crates/conformance/tests/data/images/qwen3_vl_moe"


@pytest.fixture(scope="module")
def seeing():
    with moebius.Model(DATA / "hf", threads=2, context=512, backend="cpu", image_tokens=64) as model:
        yield model


def test_files_bytes_uris_and_arrays_are_the_same_image(seeing):
    path = DATA / "images/odd.png"
    file = path.read_bytes()
    uri = "data:image/png;base64," + base64.b64encode(file).decode()
    forms = [path, str(path), file, bytearray(file), memoryview(file), uri]
    answers = [seeing.chat("What?", images=[form], max_tokens=4, temperature=0, logprobs=0) for form in forms]
    text = seeing.chat("What?", max_tokens=4, temperature=0, logprobs=0)
    for answer in answers:
        assert answer.logprobs == answers[0].logprobs
        assert answer.usage.prompt_tokens == answers[0].usage.prompt_tokens > text.usage.prompt_tokens
    assert answers[0].logprobs != text.logprobs
    # Several, in a conversation with earlier turns, and by a coroutine.
    talk = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}, {"role": "user", "content": "?"}]
    two = seeing.chat(talk, images=[file, path], max_tokens=2)
    one = asyncio.run(seeing.achat(talk, images=[file], max_tokens=2))
    assert two.usage.prompt_tokens > one.usage.prompt_tokens
    assert talk[2] == {"role": "user", "content": "?"}


def test_arrays_are_pixels(seeing):
    def shown(pixels):
        return seeing.chat("What?", images=[pixels], max_tokens=2, temperature=0, logprobs=0).logprobs

    gray = numpy.arange(40 * 50, dtype=numpy.uint8).reshape(40, 50)
    rgb = numpy.repeat(gray[:, :, None], 3, axis=2)
    assert shown(gray) == shown(gray[:, :, None]) == shown(rgb)
    # Slices whose rows do not lie together, and an alpha of one.
    assert shown(rgb[::2]) == shown(rgb[::2].copy()) != shown(rgb)
    assert shown(numpy.dstack([rgb, numpy.full((40, 50), 255, numpy.uint8)])) == shown(rgb)
    assert shown(255 - rgb) != shown(rgb)


def test_what_is_no_image_is_named(seeing, model):
    for wrong in (1.5, numpy.zeros((2, 2)), numpy.zeros((2, 2, 2), numpy.uint8), numpy.zeros(4, numpy.uint8)):
        with pytest.raises(TypeError, match="is no image"):
            seeing.chat("What?", images=[wrong])
    with pytest.raises(TypeError, match="a list"):
        seeing.chat("What?", images="a.png")
    with pytest.raises(TypeError, match="one conversation"):
        seeing.chat(["a", "b"], images=[b"x"])
    with pytest.raises(TypeError, match="message of the user"):
        seeing.chat([{"role": "system", "content": "x"}], images=[b"x"])
    with pytest.raises(FileNotFoundError):
        seeing.chat("What?", images=["none.png"])
    with pytest.raises(moebius.Error, match="cannot be used"):
        seeing.chat("What?", images=[b"no image"])
    with pytest.raises(moebius.Error, match="text only"):
        model.chat("What?", images=[DATA / "images/odd.png"])
