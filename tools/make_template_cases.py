#!/usr/bin/env python3
"""Chat-template cases of the project itself: templates written here, expected texts from jinja2 set up as transformers sets it up.

  python tools/make_template_cases.py        (needs jinja2) writes crates/engine/tests/data/templates/*.cases.json
"""
import json
import pathlib
from datetime import datetime

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

NOW = datetime(2026, 1, 15, 12, 30, 5)
OUT = pathlib.Path(__file__).resolve().parent.parent / "crates/engine/tests/data/templates"

CHATML = """{%- for m in messages -%}
{{ '<|im_start|>' + m.role + '\\n' + m['content'] | trim + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""

TOOLS = """{{ bos_token }}
{%- if messages and messages[0].role == 'system' %}
    {%- set system, rest = messages[0].content, messages[1:] %}
{%- else %}
    {%- set system, rest = 'Today is ' ~ strftime_now('%d %b %Y') ~ '.', messages %}
{%- endif %}
[SYSTEM]{{ system }}[/SYSTEM]
{% if tools is not none and tools %}
    {% for tool in tools %}
{{ tool.function | tojson }}
{{ tool | tojson(indent=2) }}
        {% for name, p in tool.function.parameters.properties.items() if name != 'hidden' %}
  {{ loop.index }}. {{ name }}: {{ p.type }}{{ '*' if name in tool.function.parameters.get('required', []) }}
        {% endfor %}
    {% endfor %}
{% endif %}
{% set ns = namespace(last=none, count=0) %}
{% for m in rest %}
    {% if m.role == ns.last %}
        {{ raise_exception('two messages of ' ~ m.role ~ ' in a row at ' ~ loop.index0) }}
    {% endif %}
    {% set ns.last = m.role %}
    {% set ns.count = ns.count + 1 %}
    {% if m.role == 'skip' %}{% continue %}{% endif %}
    {% if m.role == 'stop' %}{% break %}{% endif %}
    {% if m.tool_calls is defined and m.tool_calls %}
        {% for c in m.tool_calls %}
[CALL]{{ c.function.name }} {{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}
        {% endfor %}
    {% elif m.content is string %}
        {% generation %}
[{{ m.role | upper }}]{{ m.content.split('</think>')[-1].strip() }}
        {% endgeneration %}
    {% elif m.content is iterable and m.content is not mapping %}
[{{ m.role | capitalize }}]{% for part in m.content %}{{ part.text if part.type == 'text' else '<' ~ part.type ~ '>' }}{% endfor %}

    {% endif %}
{% endfor %}
{% if add_generation_prompt %}[ASSISTANT]{{ '<think>' if enable_thinking is defined and enable_thinking else '' }}{% endif %}
{{- ns.count }}{{ eos_token }}
"""

# Expressions on which Python's answer is not the obvious one.
EXPRESSIONS = r"""
1.0 | 1e16 | 1e15 | 1e-5 | 0.0001 | 2.5 | 1 / 2 | 7 // 2 | -7 // 2 | -7 % 3 | 2 ** 10 | 1e300 * 1e10 | 10 % 4.5 | -0.0
none | true | false | undefined_name | [1, 2.0, none, true, 'a', "it's", 'say "hi"', '\\', 'a\nb'] | {'a': [1, {'b': none}], 'c': 'd'} | (1,) | (1, 'a') | [] | {}
'a' ~ 1 ~ none ~ true ~ 1.0 ~ [1] ~ {'k': 'v'} | 'ab' * 3 | [1] * 2 + [3] | 'a' + 'b' | true + 1 | '%s and %d' % ('x', 3) | 'x: %s' % 5
'abcdef'[1:3] | 'abcdef'[-2:] | 'abcdef'[::-1] | 'abcdef'[5:0:-1] | 'abcdef'[::2] | 'abcdef'[-100:2] | [1, 2, 3][::-1] | [1, 2, 3][1:] | [1, 2, 3][:-1] | 'abc'[0] | 'abc'[-1] | [1, 2, 3][-1] | messages[5:] | (1, 2, 3)[1:]
1 is number | true is number | true is integer | 1 is integer | 1.0 is float | 'a' is sequence | {} is sequence | {} is mapping | [] is mapping | 'a' is iterable | 1 is iterable | none is none | undefined_name is defined | undefined_name is none | true is boolean | true is true | [] is sequence | 'a' is string | undefined_name is iterable | none is iterable | 3 is odd | 'a' in 'abc' | 'k' in {'k': 1} | 2 not in [1, 2] | 'x' in undefined_name | 1 == 1.0 | 1 < 2 < 3 | 3 > 2 > 2 | 'a' < 'b' | none == false | [1, 2] == [1, 2] | 1 is sameas 1 | 4 is divisibleby 2 | 'x' is in ['x', 'y'] | [] == none | true == 1
{'b': 1, 'a': 'é"<>&\u2028'} | tojson || {'b': 1, 'a': 2} | tojson(sort_keys=true) || [1, 2.0, none, true] | tojson || {'a': [1, []], 'b': {}} | tojson(indent=2) || [1, {'a': 2}] | tojson(separators=(',', ':')) || 'é😀\t' | tojson(ensure_ascii=true) || 1e16 | tojson || {1: 2, none: 3} | tojson || [1] | tojson(indent=none) || messages | tojson || messages[0] | tojson(indent=4) || 'a\x7fb\x1f' | tojson
'  a b  ' | trim || 'xxaxx' | trim('x') || 'a b c' | replace(' ', '-') || 'aaa' | replace('a', 'b', 2) || [1, 2, none] | join(', ') || messages | map(attribute='role') | join('/') || messages | join('+', attribute='role') || 'a\nb\n\nc' | indent || 'a\nb' | indent(2, true) || 'a\n\nb' | indent(width=1, blank=true) || '42' | int || 'x' | int || 'x' | int(7) || '3.9' | int || '2.5' | float || 3 | string || none | string || 'abc' | length || 'héllo wORLD' | title || 'hELLO' | capitalize || undefined_name | default('d') || '' | default('d', true) || none | default('d') || [3, 1, 2] | sort || [3, 1, 2] | sort(reverse=true) || {'b': 1, 'a': 2} | dictsort || [1, 1, 2] | unique | list || 'abc' | list || [1, 2, 3] | first || [1, 2, 3] | last || [1, 2, 3] | sum || [1, 2, 3] | reverse | list || messages | selectattr('role', 'equalto', 'user') | list | length || messages | rejectattr('role', 'equalto', 'user') | map(attribute='content') | list || [1, 2, 3, 4] | select('even') | list || [0, 1, '', 'a'] | reject('equalto', 0) | list || {'a': 1} | items | list || [1, 2, 3] | batch(2) | list || '%s-%s' | format('a', 1) || 'abc' | upper || 'ABC' | lower || [1, 5, 2] | max || -3 | abs || {'a': 1} | list || 'a<b' | e || 2.567 | round(2) || [[1, 2], [3]] | map('length') | list || ['a', 'B'] | sort || range(3) | list || range(5, 0, -2) | list || {'a': 1, 'b': 2} | length || 'x' | safe || dict(a=1) || {'a': 1}.items() | list
' a  b '.split() || 'a,b,,c'.split(',') || 'a,b,c'.split(',', 1) || 'a b c'.split(none, 1) || 'a,b,c'.rsplit(',', 1) || ' a b  c '.rsplit(none, 1) || ''.split() || ''.split(',') || '\x1fa\xa0'.strip() || 'xxaxx'.lstrip('x') || 'abcab'.rstrip('ab') || 'a\r\nb\nc\x0bd'.splitlines() || 'a\nb\n'.splitlines(true) || 'aXbX'.replace('X', '-', 1) || 'ab'.replace('', '-') || '-'.join(['a', 'b']) || 'Hello'.startswith('He') || 'Hello'.startswith(('x', 'H')) || 'Hello'.endswith('lo') || 'Hello'.find('l') || 'Hello'.find('z') || 'Hello'.rfind('l') || 'Hello'.index('l') || 'hello'.count('l') || 'hello'.upper() || 'HELLO'.lower() || 'hello world'.title() || 'hELLO'.capitalize() || 'Abc'.swapcase() || 'abc'.isalpha() || 'ab1'.isalnum() || '12'.isdigit() || ' '.isspace() || 'abc'.islower() || 'ABC'.isupper() || 'prefix-x'.removeprefix('prefix-') || 'x-suffix'.removesuffix('-suffix') || 'a=b=c'.partition('=') || 'a=b=c'.rpartition('=') || 'ab'.partition('=') || 'ab'.ljust(5, '.') || 'ab'.rjust(5) || 'ab'.center(5, '*') || 'abc'.center(6, '*') || '-7'.zfill(4) || '{} {}'.format(1, 'a') || '{0}{1}{0}'.format('a', 'b') || '{x:>4}|'.format(x='a') || '{:.2f}'.format(1.239) || '{} {}'.format([1, 'a'], none)
{'a': 1}.get('a') || {'a': 1}.get('b') || {'a': 1}.get('b', 2) || {'b': 1, 'a': 2}.keys() | list || {'b': 1, 'a': 2}.values() | list || {'items': 5, 'a': 1}.items() | list || {'items': 5}['items'] || {'a': {'b': 3}}.a.b || {'a': 1}.zzz || {'a': 1}['zzz'] is defined || [1, 2, 1].count(1) || [1, 2].index(2) || messages[0].role || messages[0]['content'] || messages[-1].role || messages[99] is defined
strftime_now('%Y-%m-%d') || strftime_now('%d %b %Y') || strftime_now('%A, %B %d, %Y at %H:%M:%S') || strftime_now('%y %j %I %p %e %%')
'yes' if 1 else 'no' || 'yes' if 0 || not none || 1 and 2 || 0 or 'x' || (1, 2) | length || 'a' if [] else 'b' || [1, 2, 3] | map('string') | join || (messages | first).role
""".strip()

MORE = [
    "{% macro f(a, b='B', c=none) %}{{ a }}{{ b }}{{ c }}{% endmacro %}{{ f(1) }}|{{ f(1, c=3) }}|{{ f(b=2, a=1) }}",
    "{% macro box() %}[{{ caller() }}]{% endmacro %}{% call box() %}in {{ 1 + 1 }}{% endcall %}",
    "{% set x = 1 %}{% for i in [1, 2] %}{% set x = x + i %}{{ x }}{% endfor %}{{ x }}",
    "{% set x = 1 %}{% if true %}{% set x = 2 %}{% endif %}{{ x }}",
    "{% set n = namespace(a=1) %}{% for i in range(3) %}{% set n.a = n.a * 2 %}{% endfor %}{{ n.a }}",
    "{% set t %}  <{{ 1 }}>\n{% endset %}{{ t | trim }}{{ t | length }}",
    "{% for i in [] %}x{% else %}none{% endfor %}",
    "{% for i in [1, 2, 3] %}{{ loop.index }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.revindex }}{{ loop.previtem }}{{ loop.nextitem }};{% endfor %}",
    "{% for a, b in [[1, 2], (3, 4)] %}{{ a }}-{{ b }},{% endfor %}{% for k, v in {'x': 1, 'y': 2}.items() %}{{ k }}={{ v }},{% endfor %}{% for k in {'x': 1} %}{{ k }}{% endfor %}",
    "{% for t in [{'n': 1, 'c': [{'n': 2, 'c': []}]}] recursive %}{{ t.n }}({{ loop(t.c) }}){% endfor %}",
    "{% for c in 'héy' %}{{ c }}.{% endfor %}",
    "  {% if true %}\n    kept\n  {% endif %}\n\nend\n\n",
    "a\n  {#- comment #}\n  {%- if true -%}\n  b  \n{%+ if true +%}\n c{% endif %}{% endif %}",
    "{% raw %}{{ x }} {% generation %}{% endraw %}{{ '{% generation %}' }}",
    "{%- generation -%}  x  {%- endgeneration -%}\n y",
    "{% with a = 1, b = 2 %}{{ a + b }}{% endwith %}{% filter upper %}abc{% endfilter %}",
    "{% for i in range(10) if i is even %}{% if i == 6 %}{% break %}{% endif %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}",
    "{{ raise_exception('no, ' ~ messages[0].role) }}", "{% if messages | length > 1 %}{{ raise_exception('line\ntwo') }}{% endif %}",
    "{% set a, b = 1, 2 %}{{ b }}{{ a }}{{ [a, b] }}", "{{ '\\n' }}{{ \"a\\tb\" }}{{ 'it\\'s' }}", "{% set j = joiner(',') %}{% for i in [1, 2] %}{{ j() }}{{ i }}{% endfor %}",
    "{% for m in messages %}{{ m.role if m.role in ('user', 'assistant') else '?' }}{{ '' if loop.last else '>' }}{% endfor %}",
    "{{ messages[0].get('name', 'anon') }}{{ messages[0].name is defined }}{{ messages[0].n }}{{ messages[0].f }}{{ messages[0].big }}{{ messages[0].t }}{{ messages[0].l }}",
    "a\n{% raw %}\n{{ x }}\n{% raw %}\n{% endraw %}\nb{% raw -%}\n c{% endraw %}",
    "{% for m in messages %}\r\n{{ m.role }}\r\n{% endfor %}{{ 'a\r\nb\rc' }}\rd",
]


class Raised(jinja2.exceptions.TemplateError):
    """raise_exception called by the template"""


class Generation(Extension):
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller):
        return caller()


def environment():
    def raise_exception(m):
        raise Raised(m)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    e = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    e.filters["tojson"] = tojson
    e.globals.update(raise_exception=raise_exception, strftime_now=lambda f: NOW.strftime(f))
    return e


def u(text, **more):
    return {"role": "user", "content": text, **more}


def chats():
    tool = {"type": "function", "function": {"name": "weather", "description": "Wetter für <eine> Stadt & 'mehr'.", "parameters": {"type": "object", "properties": {
        "city": {"type": "string"}, "hidden": {"type": "null"}, "days": {"type": "integer"}}, "required": ["city"]}}}
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Köln", "days": 2, "f": 1.5}}}, {"function": {"name": "x", "arguments": "{}"}}]}
    a = {"role": "assistant", "content": "<think>hm</think>\n\n yes "}
    return [("plain", [u("Hi \n")], None, True, {}), ("system", [{"role": "system", "content": "Be brief."}, u("Hi"), a, u("More")], None, True, {"enable_thinking": True}),
            ("tools", [u("Köln?"), call, {"role": "tool", "content": "{\"t\": 1}"}], [tool], True, {}), ("two_users", [u("a"), u("b")], None, False, {}), ("none", [], None, False, {}),
            ("parts", [u([{"type": "text", "text": "see"}, {"type": "image"}])], None, True, {}), ("controls", [u("a"), {"role": "skip", "content": "x"}, u("b"), {"role": "stop", "content": "y"}, u("c")], None, False, {})]


def main():
    env = environment()
    OUT.mkdir(parents=True, exist_ok=True)
    lines = []
    for line in EXPRESSIONS.splitlines():
        lines += [x.strip() for x in (line.split(" || ") if " || " in line else line.split(" | "))]
    facts = [u("q", n=3, f=0.5, big=12345678901234567890, t=True, l=[1, {"a": None}]), {"role": "assistant", "content": "a"}]
    small = ["{{ " + x + " }}" for x in lines] + MORE
    sets = {"chatml": (CHATML, chats()), "tools": (TOOLS, chats())}
    sets |= {f"small-{i:03}": (t, [("facts", facts, None, False, {})]) for i, t in enumerate(small)}
    out = []
    for name, (source, cases) in sets.items():
        t = env.from_string(source)
        done = []
        for case, messages, tools, gen, kwargs in cases:
            c = {"name": case, "messages": messages, "tools": tools, "add_generation_prompt": gen, "kwargs": kwargs}
            try:
                c["expected"] = t.render(messages=messages, tools=tools, documents=None, add_generation_prompt=gen, bos_token="<s>", eos_token="</s>", **kwargs)
            except Raised as x:
                c["expected_error"] = str(x)
            except Exception as x:  # not a form this template takes
                print(f"left out {name} {case}: {source[:60]!r}: {x}")
                continue
            done.append(c)
        out.append({"name": name, "source": source, "cases": done})
    (OUT / "own.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>", "now": NOW.strftime("%Y-%m-%dT%H:%M:%S"), "templates": out}, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    print(len(out), "templates,", sum(len(t["cases"]) for t in out), "cases")


if __name__ == "__main__":
    main()
