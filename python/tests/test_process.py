"""What happens to the process: Ctrl-C, forks, ends, servers, the command."""

import hashlib
import http.server
import json
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import threading
import time
import urllib.error
import urllib.request

import pytest

import moebius


def get(url, body=None, key=None):
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=30) as answer:
        return json.loads(answer.read())


@pytest.mark.skipif(sys.platform == "win32", reason="there are no signals to send")
@pytest.mark.parametrize("how", ["for piece in m.complete(*a, stream=True, **k): pass", "m.complete(*a, **k)"])
def test_ctrl_c_interrupts(how):
    script = f"""
        import moebius, time
        m = moebius.Model(threads=2, context=8192, backend="cpu")
        a, k = ["Once upon a time"], dict(ignore_eos=True, max_tokens=8000)
        try:
            print("ready", flush=True)
            {how}
            print("to the end")
        except KeyboardInterrupt:
            start = time.monotonic()
            while m._engine.busy()[0] and time.monotonic() < start + 5:
                time.sleep(0.01)
            print("interrupted", m._engine.busy()[0], len(m.chat("Hello", max_tokens=3).text) > 0)
    """
    child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "ready\n"
    time.sleep(0.5)
    sent = time.monotonic()
    child.send_signal(signal.SIGINT)
    assert child.stdout.read() == "interrupted 0 True\n"
    assert child.wait(10) == 0 and time.monotonic() - sent < 8


def test_models_are_pulled_when_they_are_asked_for(tmp_path):
    file = pathlib.Path(__file__).parents[2] / "models" / "fable-29m-a10m-q4_k_m.gguf"
    data = file.read_bytes()
    commit = "0123456789abcdef0123456789abcdef01234567"
    entry = {"rfilename": "tiny-Q4_K_M.gguf", "size": len(data)}
    entry["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
    asked = []

    class Hub(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            is_listing = self.path.startswith("/api/models/org/tiny-GGUF/revision/main")
            body = json.dumps({"sha": commit, "siblings": [entry]}).encode() if is_listing else data
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    hub = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    script = """
        import moebius, sys
        try:
            moebius.Model("org/tiny-GGUF:Q4_K_M", backend="cpu")
        except moebius.Error as error:
            print(error)
        for _ in range(2):
            m = moebius.Model("org/tiny-GGUF:Q4_K_M", threads=1, context=256, backend="cpu", pull=True)
            print(m.name, len(m.complete("Once", max_tokens=4).text) > 0)
        try:
            moebius.Model("nowhere.gguf", pull=True)
        except moebius.Error as error:
            print(error)
    """
    endpoint = f"http://127.0.0.1:{hub.server_address[1]}"
    variables = os.environ | {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path), "HF_HUB_CACHE": str(tmp_path / "hub")}
    line = [sys.executable, "-c", textwrap.dedent(script)]
    said = subprocess.run(line, env=variables, capture_output=True, text=True, check=True).stdout.splitlines()
    hub.shutdown()
    assert len(said) == 4 and "downloads it" in said[0], said
    assert said[1] == said[2] == "tiny-Q4_K_M True"
    assert "nowhere.gguf" in said[3]
    assert len([path for path in asked if "/resolve/" in path]) == 1, asked


def test_servers_come_and_go(model):
    with model.serve(port=0) as server:
        assert server.url.startswith("http://127.0.0.1:")
        assert get(server.url + "/v1/models")["data"][0]["id"] == model.name
        body = {"messages": [{"role": "user", "content": "Hello"}], "seed": 4, "max_tokens": 8}
        theirs = get(server.url + "/v1/chat/completions", body)["choices"][0]["message"]["content"]
        assert theirs == model.chat("Hello", seed=4, max_tokens=8).text
        with model.serve(port=0, api_keys=["secret"]) as other:
            assert get(other.url + "/v1/models", key="secret")
            with pytest.raises(urllib.error.HTTPError) as caught:
                get(other.url + "/v1/models", key="guess")
            assert caught.value.code == 401
            with pytest.raises(moebius.Error, match="listen"):
                model.serve(port=int(other.url.rsplit(":")[-1]))
    with pytest.raises(urllib.error.URLError):
        get(server.url + "/v1/models")
    assert model.chat("Hello", max_tokens=2).text
    with pytest.raises(moebius.Error, match="port"):
        model.serve(port=70000)
    dropped = model.serve(port=0)
    url = dropped.url
    del dropped
    with pytest.raises(urllib.error.URLError):
        get(url + "/health")


def test_a_closed_model_says_so():
    model = moebius.Model(threads=1, context=256, backend="cpu")
    stream = model.complete("Once", ignore_eos=True, max_tokens=200, stream=True)
    next(stream)
    model.close()
    model.close()
    with pytest.raises(moebius.Error):
        list(stream)
    for use in (lambda: model.chat("x"), lambda: model.logits([1]), lambda: model.serve(port=0)):
        with pytest.raises(moebius.Error, match="it is closed"):
            use()
    assert model.vocab_size > 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_is_told_that_it_has_no_engine(model):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            model.chat("Hello", max_tokens=1)
            said = "an answer"
        except moebius.Error as error:
            said = str(error)
        os.write(write, said.encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read) as pipe:
        assert "before a fork" in pipe.read()
    assert model.chat("Hello", max_tokens=1)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["no-such-file.gguf"], "no-such-file.gguf"),
        ([__file__], "test_process.py"),
    ],
)
def test_what_cannot_be_loaded_is_named(arguments, says):
    with pytest.raises(moebius.Error, match=says):
        moebius.Model(*arguments)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"threads": 0}, "thread"),
        ({"threads": "many"}, "--threads"),
        ({"memory": "1K"}, "memory"),
        ({"backend": "tpu"}, "tpu"),
        ({"chat_template": "no-such-template"}, "no-such-template"),
    ],
)
def test_wrong_settings_are_named(settings, says):
    with pytest.raises(moebius.Error, match=says):
        moebius.Model(**{"backend": "cpu"} | settings)


def test_the_command(command, tmp_path):
    said = subprocess.run([command, "--version"], capture_output=True, text=True, check=True).stdout
    assert moebius.__version__ in said
    module = subprocess.run([sys.executable, "-m", "moebius", "--version"], capture_output=True, text=True, check=True)
    assert module.stdout == said
    wrong = subprocess.run([command, "run", "--no-such-flag"], capture_output=True, text=True)
    assert wrong.returncode == 2 and "--no-such-flag" in wrong.stderr
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}')
    run = [command, "run", "-t", "2", "--backend", "cpu", "--quiet", "--json-schema", str(schema), "A number, please"]
    assert json.loads(subprocess.run(run, capture_output=True, text=True, check=True).stdout)["a"] in (1, 2)


@pytest.mark.skipif(sys.platform == "win32", reason="there are no signals to send")
def test_ctrl_c_ends_commands_that_do_not_take_it(command):
    child = subprocess.Popen([command, "serve", "--port", "0", "--backend", "cpu"], stdout=subprocess.PIPE, text=True)
    assert "serving" in child.stdout.readline()
    child.send_signal(signal.SIGINT)
    child.stdout.read()
    assert child.wait(20) == 0
    child = subprocess.Popen(
        [command, "perplexity", "--backend", "cpu", "-f", "/dev/stdin"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )
    time.sleep(1)
    assert child.poll() is None
    child.send_signal(signal.SIGINT)
    assert child.wait(10) == -signal.SIGINT
