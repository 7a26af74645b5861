"""Tokens, logits, log-probabilities and embeddings, against the command and against each other."""

import json
import struct
import subprocess

import numpy
import pytest

import moebius


def arrays(path):
    """The arrays of a safetensors file."""
    data = path.read_bytes()
    (n,) = struct.unpack("<Q", data[:8])
    kinds = {"F32": numpy.float32, "I32": numpy.int32}
    return {
        name: numpy.frombuffer(data[8 + n :][slice(*info["data_offsets"])], kinds[info["dtype"]]).reshape(info["shape"])
        for name, info in json.loads(data[8 : 8 + n]).items()
        if name != "__metadata__"
    }


def test_tokens_and_texts(model):
    text = "The fox ran, über alles: 42 times! 🦊"
    ids = model.tokenize(text)
    assert all(isinstance(i, int) and 0 <= i < model.vocab_size for i in ids)
    assert model.detokenize(ids) == text
    assert model.detokenize(numpy.array(ids)) == text
    assert model.tokenize("") == [] and model.detokenize([]) == ""
    with pytest.raises(moebius.Error, match="vocabulary"):
        model.detokenize([model.vocab_size])


def test_logits_are_the_commands_to_the_bit(model, command, tmp_path):
    ids = model.tokenize("Once upon a time there was a fox who had lost his hat", add_special=True)
    out = tmp_path / "logits.safetensors"
    line = [command, "logits", "--tokens", ",".join(map(str, ids)), "-t", "2", "--backend", "cpu", "--out", str(out)]
    subprocess.run(line, check=True)
    ours = model.logits(ids)
    assert ours.dtype == numpy.float32 and ours.shape == (len(ids), model.vocab_size)
    assert numpy.array_equal(ours, arrays(out)["logits"])
    # A second sequence knows nothing of the first, also where it is longer than the program has room for.
    long = numpy.tile(ids, 40)
    assert numpy.array_equal(model.logits(long)[: len(ids)], ours)
    assert numpy.array_equal(model.logits(ids[:5]), ours[:5])
    assert model.logits([]).shape == (0, model.vocab_size)
    with pytest.raises(moebius.Error, match="vocabulary"):
        model.logits([model.vocab_size])
    with pytest.raises(TypeError):
        model.logits(None)


def test_log_probabilities_are_those_of_the_logits(model):
    text = "Once upon a time there was a fox"
    ids = model.tokenize(text, add_special=True)
    logits = model.logits(ids).astype(numpy.float64)
    logsum = numpy.log(numpy.exp(logits - logits.max(1, keepdims=True)).sum(1)) + logits.max(1)
    expected = logits[numpy.arange(len(ids) - 1), ids[1:]] - logsum[:-1]
    assert numpy.allclose(model.logprobs(ids), expected, atol=2e-3)
    assert numpy.array_equal(model.logprobs(text), model.logprobs(ids))


def test_embeddings(model):
    texts = ["A fox.", "A boat on the sea.", "A fox."]
    rows = model.embed(texts)
    assert rows.dtype == numpy.float32 and rows.shape[0] == 3
    assert numpy.allclose(numpy.linalg.norm(rows, axis=1), 1, atol=1e-5)
    assert numpy.array_equal(rows[0], rows[2]) and not numpy.allclose(rows[0], rows[1])
    assert model.embed("A fox.").shape == (1, rows.shape[1])
    assert model.embed(texts, dimensions=8, pooling="mean").shape == (3, 8)
    assert not numpy.allclose(numpy.linalg.norm(model.embed(texts, normalize=False), axis=1), 1)
    many = model.embed(["word"] * 300)
    assert many.shape[0] == 300 and numpy.array_equal(many[0], many[299])
    assert model.embed([]).shape[0] == 0


def test_what_a_model_says_of_itself(model):
    assert model.context == 1024 and model.vocab_size > 1000 and model.parameters > 1e6
    assert model.name and model.architecture and model.file_type == "Q4_K_M" and model.backend.startswith("CPU")
    assert model.name in repr(model) and isinstance(model.notes, list)
