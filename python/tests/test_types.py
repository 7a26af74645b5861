"""The types of the package: strictly right inside, and useful to those who call it."""

import subprocess
import sys

import pytest

RIGHT = """
import numpy as np
import moebius

m = moebius.Model("x.gguf", backend="cpu", memory="4G")
text: str = m.chat("Hello", temperature=0.5, top_k=40).text
texts: list[str] = [answer.text for answer in m.complete(["a", "b"], max_tokens=3)]
some: list[moebius.Answer] = m.complete("a", n=3)
more: list[list[moebius.Answer]] = m.complete([[1, 2], [3]], n=2)
talks: list[moebius.Answer] = m.chat([[{"role": "user", "content": "x"}], [{"role": "user", "content": "y"}]])
stream: moebius.Stream = m.complete([1, 2], stream=True)
experts: np.typing.NDArray[np.int32] = m.trace("x").experts
async def later() -> str:
    text = (await m.achat("x", routing=True)).text
    async for piece in await m.acomplete("x", stream=True):
        text += piece
    return text + (await m.acomplete(["x", "y"]))[0].text
for piece in m.chat([{"role": "user", "content": "x"}], stream=True, schema={"type": "object"}):
    text += piece
rows: np.typing.NDArray[np.float32] = m.logits(m.tokenize("x"))
with m.serve(port=0) as server:
    url: str = server.url
"""
WRONG = {
    "m.chat('x', temprature=1)": "temprature",
    "m.chat('x', top_k='many')": "top_k",
    "m.chat('x').tokens": "tokens",
    "moebius.Model(threads='two')": "threads",
    "m.complete('x', tools=[])": "tools",
    "m.complete(['x']).text": "text",
    "m.complete('x', n=2, stream=True)": "complete",
}


def check(*arguments, **more):
    line = [sys.executable, "-m", "mypy", "--strict", *arguments]
    return subprocess.run(line, capture_output=True, text=True, **more)


@pytest.fixture(autouse=True)
def mypy():
    pytest.importorskip("mypy")


def test_types_are_strict(tmp_path):
    (tmp_path / "right.py").write_text(RIGHT)
    (tmp_path / "wrong.py").write_text("import moebius\nm = moebius.Model()\n" + "\n".join(WRONG) + "\n")
    said = check("right.py", "wrong.py", cwd=tmp_path)
    lines = said.stdout.splitlines()
    inside = check("-p", "moebius", cwd=tmp_path)
    assert inside.returncode == 0, inside.stdout
    assert not [line for line in lines if "error" in line and not line.startswith(("wrong.py", "Found"))], said.stdout
    for i, (line, name) in enumerate(WRONG.items()):
        assert any(found.startswith(f"wrong.py:{i + 3}:") and name in found for found in lines), (line, said.stdout)
