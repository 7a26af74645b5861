"""Tokens, logits, log-probabilities and embeddings, against the command and against each other."""

import json
import pathlib
import struct
import subprocess
import sys
import textwrap

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


def test_traces_hold_experts_with_weights_for_prompt_and_answer(model):
    messages = [{"role": "user", "content": "Tell me a story about a fox"}]
    prompt = model.render(messages)
    answer = model.chat(messages, seed=3, max_tokens=20, routing=True, logprobs=0)
    layers, k = len(model.routers), model.routers[0].n_used
    assert layers == 8 and k == 4 and model.routers[0].n_expert == 16
    assert answer.routing.shape == (20, layers, k)
    trace = model.trace(prompt + answer.text, logits=True, hidden=True)
    n = len(trace.tokens)
    assert trace.experts.shape == trace.weights.shape == (n, layers, k)
    assert trace.experts.dtype == numpy.int32 and trace.weights.dtype == numpy.float32
    assert trace.experts.min() >= 0 and trace.experts.max() < 16
    assert all(len(set(ids)) == k for ids in trace.experts.reshape(-1, k).tolist())
    # Best first, and the chosen ones share all of it.
    assert (numpy.diff(trace.weights, axis=2) <= 0).all()
    assert numpy.allclose(trace.weights.sum(2), 1, atol=1e-5)
    # The engine's own steps chose the same: those of a token's logits are found at the token before it.
    first = answer.usage.prompt_tokens - 1
    assert numpy.array_equal(answer.routing[:15], trace.experts[first : first + 15])
    assert numpy.array_equal(trace.logits, model.logits(trace.tokens))
    assert trace.hidden.shape[0] == n and trace.hidden.shape[1] > 100
    assert numpy.isfinite(trace.hidden).all()
    # The last state, scaled to length 1, is the embedding.
    last = trace.hidden[-1] / numpy.linalg.norm(trace.hidden[-1])
    assert numpy.allclose(model.embed(prompt + answer.text, pooling="last")[0], last, atol=1e-5)
    stream = model.chat(messages, seed=3, max_tokens=20, routing=True, stream=True)
    assert "".join(stream) == answer.text
    assert numpy.array_equal(stream.answer.routing, answer.routing)
    assert model.chat(messages, max_tokens=2).routing is None
    long = model.trace(trace.tokens * 10, experts=False)
    assert long.weights is None and long.experts.size == 0 and long.logits is None and long.hidden is None
    assert model.trace([]).experts.shape == (0, layers, k)
    with pytest.raises(moebius.Error, match="vocabulary"):
        model.trace([model.vocab_size])


def test_logits_need_no_second_copy_of_the_weights(tmp_path):
    """The other program reads the file's pages, also where the engine has copied them."""
    script = """
        import sys, moebius, numpy
        def private():
            with open("/proc/self/smaps_rollup") as file:
                lines = dict(line.split(":", 1) for line in file if ":" in line)
            return int(lines["Private_Dirty"].split()[0]) / 1000
        small = dict(threads=2, context=512, parallel=1, batch=32)
        m = moebius.Model(sys.argv[1], backend="cpu", copy_weights="all", **small)
        m.complete("Once", max_tokens=8)
        before = private()
        m.logits(m.tokenize("Once upon a time"))
        print(private() - before, m.size_bytes / 1e6)
    """
    file = pathlib.Path(__file__).parents[2] / "models" / "fable-29m-a10m-q4_k_m.gguf"
    if not pathlib.Path("/proc/self/smaps_rollup").exists():
        pytest.skip("the system does not tell")
    line = [sys.executable, "-c", textwrap.dedent(script), str(file)]
    grown, weights = map(float, subprocess.run(line, capture_output=True, text=True, check=True).stdout.split())
    assert weights > 15 and grown < weights / 2, (grown, weights)


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
