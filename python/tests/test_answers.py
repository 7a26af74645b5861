"""Conversations and texts: what is asked reaches the engine, what is wrong is said."""

import json
import pathlib
import re
import subprocess
import sys
import threading

import pytest

import moebius
from conftest import idle

FOX = [{"role": "user", "content": "Tell me a story about a fox"}]


def test_answers_are_those_of_the_command(model, command):
    ask = FOX[0]["content"]
    said = subprocess.run(
        [command, "run", "--seed", "7", "-n", "24", "-t", "2", "--ctx", "1024", "--backend", "cpu", "--quiet", ask],
        capture_output=True, text=True, check=True,
    )
    assert model.chat(ask, seed=7, max_tokens=24).text.strip() == said.stdout.strip()


def test_a_stream_is_the_answer_in_pieces(model):
    whole = model.chat(FOX, seed=3, max_tokens=40)
    stream = model.chat(FOX, seed=3, max_tokens=40, stream=True)
    pieces = list(stream)
    assert len(pieces) > 10
    assert "".join(pieces) == whole.text == stream.answer.text
    assert stream.answer.finish_reason == whole.finish_reason == "length"
    assert stream.answer.usage.completion_tokens == whole.usage.completion_tokens == 40
    assert whole.usage.prompt_tokens > 5
    events = list(model.chat(FOX, seed=3, max_tokens=40, stream=True).events())
    assert "".join(text for kind, text in events if kind == "text") == whole.text


def test_an_interrupt_while_an_answer_is_read_ends_its_request(model, monkeypatch):
    def interrupt(_):
        raise KeyboardInterrupt

    stream = model.complete("Once upon a time", stream=True, ignore_eos=True, max_tokens=1000)
    next(stream)
    monkeypatch.setattr("moebius._answers.json.loads", interrupt)
    for read in (lambda: list(stream), lambda: model.complete("Once upon a time", max_tokens=8)):
        with pytest.raises(KeyboardInterrupt) as held:
            read()
        # The traceback holds what was read, as it does in an `except` clause.
        assert held.traceback
        idle(model, 2)


def test_texts_go_on(model):
    tokens = model.tokenize("Once upon a time", add_special=True)
    whole = model.complete("Once upon a time", temperature=0, max_tokens=12)
    assert whole.text
    assert model.complete(tokens, temperature=0, max_tokens=12).text == whole.text
    assert "".join(model.complete("Once upon a time", temperature=0, max_tokens=12, stream=True)) == whole.text
    again = model.complete("Once upon a time", temperature=0, max_tokens=12, stop=[whole.text.split()[1]])
    assert again.finish_reason == "stop" and len(again.text) < len(whole.text)


def test_messages_go_on(model):
    first = model.chat(FOX, seed=1, max_tokens=8)
    assert first.message() == {"role": "assistant", "content": first.text}
    assert model.chat([*FOX, first.message(), {"role": "user", "content": "And then?"}], max_tokens=4).text
    assert "fox" in model.render(FOX)


@pytest.mark.parametrize(
    ("options", "fits"),
    [
        ({"regex": "[a-f]{4} [0-9]{3}"}, lambda text: re.fullmatch("[a-f]{4} [0-9]{3}", text)),
        ({"choices": ["yes", "no"]}, lambda text: text in ("yes", "no")),
        ({"grammar": 'start: "a" ("b" | "d") "c"'}, lambda text: re.fullmatch("a[bd]c", text)),
        ({"grammar": 'root ::= "x" [0-3] "y"'}, lambda text: re.fullmatch("x[0-3]y", text)),
        (
            {"schema": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}},
            lambda text: list(json.loads(text)) == ["n"],
        ),
        ({"response_format": {"type": "json_object"}, "max_tokens": 200}, lambda text: text.startswith("{")),
    ],
)
def test_forms_are_kept(model, options, fits):
    for answer in (model.chat(FOX, seed=5, **options), model.complete("Say: ", seed=5, **options)):
        assert fits(answer.text), answer


def test_tools_are_called(model):
    tool = {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]},
        },
    }
    options = {"tools": [tool], "tool_choice": "required", "seed": 2, "max_tokens": 80}
    whole = model.chat("What is the weather in Rome?", **options)
    assert whole.finish_reason == "tool_calls" and whole.tool_calls[0].name == "weather"
    assert whole.tool_calls[0].parsed()["city"] in ("Rome", "Oslo")
    assert whole.message()["tool_calls"][0]["function"]["name"] == "weather"
    stream = model.chat("What is the weather in Rome?", stream=True, **options)
    assert list(stream) == [] and [c.arguments for c in stream.answer.tool_calls] == [
        c.arguments for c in whole.tool_calls
    ]


def test_log_probabilities_are_reported(model):
    for answer in (
        model.chat(FOX, seed=1, max_tokens=6, logprobs=3),
        model.complete("Once", seed=1, max_tokens=6, logprobs=3),
    ):
        assert len(answer.logprobs) == 6
        for one in answer.logprobs:
            assert one.logprob <= 0 and len(one.top) >= 3
            assert sorted((value for _, value in one.top), reverse=True) == [value for _, value in one.top]
        assert "".join(one.token for one in answer.logprobs).startswith(answer.text[:4])
    stream = model.chat(FOX, seed=1, max_tokens=6, logprobs=0, stream=True)
    assert "".join(stream) and len(stream.answer.logprobs) == 6


def test_every_field_of_a_request_has_a_keyword(model):
    """The routes' own tables: what is added there fails here until it has a keyword, or is listed as another's name."""
    paths = model.request("/openapi.json")["paths"]
    others = {
        # Names of other servers for what has a keyword.
        "max_completion_tokens", "n_predict", "repetition_penalty", "temp", "typical", "json_schema", "guided_json",
        "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "format", "reasoning_budget",
        # What is no option of an answer, or has a method of its own.
        "messages", "prompt", "suffix", "model", "stream", "stream_options", "n", "best_of", "top_logprobs", "echo",
        "prompt_logprobs", "user", "modalities",
    }
    for path, known in (("/v1/chat/completions", moebius.ChatOptions), ("/v1/completions", moebius.Options)):
        body = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]["properties"]
        keywords = set(known.__annotations__) | set(moebius.Options.__annotations__)
        # Those of other servers are refused.
        offered = {name for name, schema in body.items() if "deprecated" not in schema}
        assert offered - others <= keywords
        assert keywords - {"schema", "choices", "images"} <= set(body)


def test_wrong_keywords_and_values_are_named(model):
    with pytest.raises(TypeError, match="chat.. got an unexpected keyword argument 'temprature'"):
        model.chat(FOX, temprature=1)
    with pytest.raises(TypeError, match="'tools'"):
        model.complete("x", tools=[])
    with pytest.raises(TypeError):
        moebius.Model(n_ctx=5)
    with pytest.raises(moebius.Error, match="`temperature` must be a number from 0 to 100") as caught:
        model.chat(FOX, temperature=-1)
    assert caught.value.field == "temperature" and caught.value.status == 400
    with pytest.raises(moebius.Error, match="`top_k`"):
        model.chat(FOX, top_k="many", stream=True)
    with pytest.raises(moebius.Error, match="another constraint"):
        model.chat(FOX, regex="a", choices=["b"])
    with pytest.raises(moebius.Error):
        model.chat([])
    with pytest.raises(moebius.Error, match="role"):
        model.chat([{"role": "nobody", "content": "x"}])
    with pytest.raises(moebius.Error, match="unknown route"):
        model.request("/v1/nothing")
    with pytest.raises((TypeError, ValueError)):
        model.chat(FOX, temperature=float("nan"))
    with pytest.raises(TypeError):
        model.chat(FOX, stop=object())


def test_grammars_are_tried_in_a_process_of_their_own(model):
    # What tries them is this package in another process: without it they would be compiled here, whatever they take.
    native = moebius._native.__file__
    child = pathlib.Path(native).with_name("_child.py")
    line = [sys.executable, "-I", "-S", str(child), native, "try-grammar"]
    assert subprocess.run(line, input="{}", capture_output=True, text=True).stdout.startswith("setup\n")
    one = lambda i, j: {"type": "object", "properties": {f"k{i}": {"const": j}}}
    choices = [{"anyOf": [one(i, j) for j in range(4)]} for i in range(400)]
    with pytest.raises(moebius.Error, match="too large") as caught:
        model.chat(FOX, schema={"allOf": choices})
    assert caught.value.status == 400
    assert model.chat(FOX, max_tokens=2).text


def test_prompts_that_do_not_fit_are_refused(model):
    with pytest.raises(moebius.Error, match="context|positions|tokens"):
        model.complete([5] * 2000, max_tokens=1)


def test_a_dropped_stream_frees_its_sequence(model):
    for leave in ("drop", "close", "with"):
        stream = model.complete("Once upon a time", ignore_eos=True, max_tokens=900, stream=True)
        next(stream)
        assert model._engine.busy()[0] == 1
        if leave == "close":
            stream.close()
            assert list(stream) == []
        elif leave == "with":
            with stream:
                pass
        del stream
        idle(model, 2.0)


def test_threads_share_the_engine(model):
    prompts = ["Once upon a time", "The fox", "A small boat", "In the garden"]
    alone = [model.complete(prompt, temperature=0, max_tokens=24).text for prompt in prompts]
    together = [""] * len(prompts)
    most = 0

    def run(i):
        nonlocal most
        for piece in model.complete(prompts[i], temperature=0, max_tokens=24, stream=True):
            together[i] += piece
            most = max(most, model._engine.busy()[0])

    threads = [threading.Thread(target=run, args=[i]) for i in range(len(prompts))]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert together == alone
    assert most > 1, "they waited for each other"
