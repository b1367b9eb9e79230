"""Templates that would compute or make too much are given up, whatever they do it by; others are as they were."""

from __future__ import annotations

import json
import threading
import time
from contextlib import suppress
from typing import Any

import pytest

from inflight.errors import DeploymentError, InvalidRequest
from inflight.text import template_budget
from inflight.text.chat import ChatTemplate
from inflight.text.template_budget import TakesLonger, at_once

MESSAGES = [{"role": "user", "content": "a\n" * 1000}]
DOUBLED = "{% set ns = namespace(s='aaaaaaaa') %}{% for _ in range(60) %}{% set ns.s = OPERATION %}{% endfor %}"
TWINS = "{% set a = 'a' * 10**6 %}{% set b = 'a' * 999999 + 'b' %}{% set c = b.replace('b', 'a') %}"
LONG_NUMBER = "{% set n = ('f' * 3500) | int(base=16) %}"
HOSTILE = {
    "text times a number": "{{ 'a' * 10**10 }}",
    "a number times text": "{{ 10**10 * 'a' }}",
    "list times a number": "{{ ([1] * 10**9) | length }}",
    "list of a list": "{{ [[0] * 1000000] * 1000000 }}",
    "power": "{{ 9**(9**9) }}",
    "negative power": "{{ 9**(-9**9) }}",
    "powers in steps": "{% set ns = namespace(n=9) %}{% for _ in range(60) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "center": "{{ 'a'.center(10**10) }}",
    "filter center": "{{ 'a' | center(10**10) }}",
    "constant": "{{ 'a' | center(10000000000) }}",
    "ljust": "{{ 'a'.ljust(10**10) }}",
    "zfill": "{{ 'a'.zfill(10**10) }}",
    "expandtabs": "{{ ('\t' * 10**6).expandtabs(10**6) }}",
    "percent": "{{ '%1000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (10**9, 1) }}",
    "format": "{{ '{:>1000000000}'.format(1) }}",
    "nested format": "{{ '{:>{}}'.format(1, 10**9) }}",
    "filter format": "{{ '%1000000000d' | format(1) }}",
    "format of a list": "{% set l = ['a' * 10**6] * 10**5 %}{{ '%s' | format(l) }}",
    "replace": "{{ ('a' * 10**6).replace('a', 'b' * 10**6) }}",
    "replace nothing": "{{ ('a' * 10**6) | replace('', 'b' * 10**6) }}",
    "join": "{{ ('a' * 10**6).join(['b'] * 10**6) }}",
    "filter join": "{{ (['a' * 10**6] * 10**6) | join }}",
    "join of a map": "{{ range(100000) | map('center', 100000) | join }}",
    "indent": "{{ messages[0].content | indent(10**6) }}",
    "indent by text": "{{ messages[0].content | indent('a' * 10**6) }}",
    "plus": DOUBLED.replace("OPERATION", "ns.s + ns.s"),
    "tilde": DOUBLED.replace("OPERATION", "ns.s ~ ns.s"),
    "lists of lists": DOUBLED.replace("OPERATION", "[ns.s, ns.s]"),
    "objects of objects": DOUBLED.replace("OPERATION", "dict(a=ns.s, b=ns.s)"),
    "block": "{% set x %}{% for _ in range(99999) %}{{ 'a' * 10**6 }}{% endfor %}{% endset %}",
    "macro": "{% macro m() %}{% for _ in range(99999) %}{{ 'a' * 10**6 }}{% endfor %}{% endmacro %}{{ m() }}",
    "output": "{% set s = 'a' * 10**6 %}{% for _ in range(99999) %}{{ s }}{% endfor %}",
    "list as text": "{{ ['a' * 10**6] * 100000 }}",
    "string of a list": "{{ (['a' * 10**6] * 100000) | string }}",
    "tojson": "{{ (['a' * 10**6] * 100000) | tojson }}",
    "tojson indented": "{{ ([[1]] * 100000) | tojson(indent=10**6) }}",
    "two loops": "{% for _ in range(99999) %}{% for _ in range(99999) %}{% endfor %}{% endfor %}",
    "recursive loops": "{% for _ in range(99999) recursive %}{{ loop(range(99999)) if loop.depth < 9 }}{% endfor %}",
    "macros": "{% macro m(n) %}{% for _ in range(99) %}{{ m(n - 1) if n }}{% endfor %}{% endmacro %}{{ m(9) }}",
    "maps": "{% for _ in range(99999) %}{{ range(99999) | map('string') | list | length }}{% endfor %}",
    "lipsum": "{{ lipsum(10**9) }}",
    "translate": "{{ 'a'.translate({97: 'b' * 10**6}) }}",
    "bytes": "{{ (1).to_bytes(10**10, 'big') }}",
    "sum of lists": "{{ ([[1]] * 10**6) | sum(start=[]) | length }}",
    "sort": "{{ (['A' * 10**6] * 10**6) | sort | length }}",
    "sort by attribute": "{{ ([{'a': 'A' * 10**6}] * 10**6) | sort(attribute='a') | length }}",
    "groupby": "{{ ([{'a': 'A' * 10**6}] * 10**6) | groupby('a') | length }}",
    "unique": "{{ (['A' * 10**6] * 10**6) | unique | list | length }}",
    "max": "{{ (['A' * 10**6] * 10**6) | max | length }}",
    "in": f"{TWINS}{{{{ b in [a] * 10**6 }}}}",
    "equal": f"{TWINS}{{{{ [a] * 10**6 == [c] * 10**6 }}}}",
    "test in": f"{TWINS}{{{{ b is in([a] * 10**6) }}}}",
    "test equal": f"{TWINS}{{{{ ([a] * 10**6) is eq([c] * 10**6) }}}}",
    "count in a list": f"{TWINS}{{{{ ([a] * 10**6).count(b) }}}}",
    "slices": "{% set s = 'a' * 10**6 %}{% for _ in range(99999) %}{% set t = s[1:] %}{% endfor %}",
    "quotients": f"{LONG_NUMBER}{{% for _ in range(99999) %}}{{{{ n // (n - 1) }}}}{{% endfor %}}",
    "remainders": f"{LONG_NUMBER}{{% for _ in range(99999) %}}{{{{ n % (n - 1) }}}}{{% endfor %}}",
    "number of a text": "{{ ('f' * 10**6) | int(base=16) }}",
    "sum of long numbers": "{% set n = ('f' * 10**4) | int(base=16) %}{{ [n, n] | sum }}",
    "rounded": "{{ 5 | round(-10**6) }}",
    "rounded up": "{{ 5 | round(10**6, 'ceil') }}",
    "key in a format": "{{ '%(a)2000000000d' % {'a': 1} }}",
    "key with a bracket": "{{ '%((a))2000000000d' % {'(a)': 1} }}",
    "key with a percent": "{{ '%(a%b)2000000000d' % {'a%b': 1} }}",
    "precision": "{{ '%.2000000000d' % 1 }}",
    "many widths": "{{ ('%1000000d' * 99) % (range(99) | list) }}",
    "precision of a field": "{{ '{:.2000000000f}'.format(1.5) }}",
    "nested width of a field": "{{ '{:{a}}'.format(1, a='>2000000000') }}",
    "format of a map": "{{ '{a:>2000000000}'.format_map({'a': 1}) }}",
    "converted field": "{% set l = ['a' * 10**6] * 10**5 %}{{ '{!r:.1}'.format(l) }}",
    "fields of a list": "{% set l = ['a' * 10**6] * 10**5 %}{{ '{}'.format(l) }}",
    "long format": "{{ ('{}' * 10**5).format(*range(10**5)) }}",
    "separators": "{{ ([1] * 10**5) | tojson(separators=('a' * 10**6, ':')) }}",
    "separators by place": "{{ ([1] * 10**5) | tojson(false, none, ('a' * 10**6, ':')) }}",
    "indented by text": "{{ ([1] * 10**5) | tojson(indent='a' * 10**6) }}",
    "options of the encoder": "{{ [1] | tojson(default=namespace) }}",
    "join of a text": "{{ ('a' * 10**6) | join('b' * 10**6) }}",
    "join of keys": "{{ {'a': 1, 'b': 2}.keys() | join('b' * 10**7) }}",
    "join of values": "{{ (['a' * 10**6] * 10**5) | batch(1) | list | join }}",
    "keys from a list": "{{ ('a' * 10**6).join({}.fromkeys(range(10**5) | map('string'))) }}",
    "join of an iterator": "{{ ('a' * 10**6).join(range(10**5) | map('string')) }}",
    "replace by name": "{{ ('a' * 10**6) | replace(new='b' * 10**6, old='') }}",
    "center a text": "{{ 'a'.center(10**9, 'b') }}",
    "indent by many": "{{ ('\n' * 10**6) | indent(width=10**4, first=true, blank=true) }}",
    "search from the right": "{{ ('a' * 10**6).rfind('a' + 'b' + 'a' * 5 * 10**5) }}",
    "split from the right": "{{ ('a' * 10**6).rsplit('a' + 'b' + 'a' * 5 * 10**5) }}",
    "strip": "{{ ('a' * 10**6).strip('b' * 10**6 + 'a') }}",
    "filter trim": "{{ ('a' * 10**6) | trim('b' * 10**6 + 'a') }}",
    "parts": "{% for _ in range(99) %}{{ ('a ' * 10**6).split(' ') | length }}{% endfor %}",
    "groups": "{{ [1] | batch(10**9, 1) | list | length }}",
    "bytes of a text": "{{ ('a' * 10**6).encode().center(10**10) }}",
    "bytes of a text by name": "{{ ('a' * 10**6)['encode']().hex() }}",
    "bytes by a filter": "{{ (('a' * 10**6) | attr('encode'))() }}",
    "methods of numbers": "{{ (5).to_bytes(10**9, 'big') }}",
    "methods of markup": "{{ ('<!--' * 10**6) | escape | attr('striptags') | length }}{{ ('<' | safe).striptags() }}",
    "namespace as text": "{% set ns = namespace(l=['a' * 10**6] * 10**5) %}{{ ns }}",
    "values as text": "{{ {'a': ['a' * 10**6] * 10**5}.values() }}",
    "values compared": f"{TWINS}{{{{ b in dict(a=[a] * 10**6).values() | first }}}}",
    "change of a loop": f"{TWINS}{{% for x in [[a] * 10**6, [c] * 10**6] %}}{{{{ loop.changed(x) }}}}{{% endfor %}}",
    "keys that collide": "{{ dict(range(0, 10**5 * (2**61 - 1), 2**61 - 1) | batch(2)) | length }}",
    "values that collide": "{{ range(0, 10**5 * (2**61 - 1), 2**61 - 1) | unique | list | length }}",
    "range that collides": "{{ range(0, 230584300921369395100000, 2305843009213693951) | list | length }}",
    "long numbers that are unique": "{{ [123456789012345678901, 1] | unique | list }}",
    "long numbers as keys": "{{ dict([[123456789012345678901, 1]]) }}",
    "sort of many": "{{ range(10**5) | sort | length }}",
    "capitals": "{{ ('ß' * 8 * 10**6).upper() | length }}",
    "list of characters": "{{ ('a' * 8 * 10**6) | list | length }}",
    "escaped": "{% for _ in range(999) %}{{ ('<' * 10**6) | escape | length }}{% endfor %}",
    "long reason": "{{ raise_exception('a' * 10**6) }}{{ 1 // 0 }}",
}
REASONS = (
    r".*(more than [\d.]+|a width above|width of a format from the values|is unsafe|too big|is undefined|"
    r"unexpected keyword|a{500}$)"
)
MOST_S = 2
"""Seconds of the thread's processor time: several times what any case takes, and much less than each took unbounded."""


@pytest.mark.parametrize("name", HOSTILE)
def test_a_template_that_does_too_much_is_given_up(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_budget, "RENDER_S", 0.2)
    began = time.thread_time()
    with pytest.raises(InvalidRequest, match=f"^messages: the chat template refuses them: {REASONS}") as refused:
        ChatTemplate(HOSTILE[name], {}).render(MESSAGES)
    assert len(str(refused.value)) < 600
    assert time.thread_time() - began < MOST_S


@pytest.mark.parametrize("operation", ["text.format()", "text % ()", "text | format"])
@pytest.mark.parametrize("text", ["'{' + ':' * n", "'{' + '!' * n + '}'", "'%' + '(' * n", "'%' + '1 ' * n", "'{' * n"])
def test_the_time_for_a_long_format_grows_with_its_length_only(text: str, operation: str) -> None:
    """No thread runs while one expression is searched for."""
    template = ChatTemplate(f"{{% set n = 50000 %}}{{% set text = {text} %}}{{{{ {operation} }}}}", {})
    began = time.thread_time()
    with suppress(InvalidRequest):  # most are no formats
        template.render(MESSAGES)
    assert time.thread_time() - began < MOST_S


@pytest.mark.parametrize(
    "template",
    [
        "{% if true %}" * 500 + "{% endif %}" * 500,
        "{% for _ in [1] %}" * 500 + "{% endfor %}" * 500,
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ " + "not " * 5000 + "1 }}",
    ],
    ids=["if", "for", "brackets", "not"],
)
def test_a_template_that_is_nested_too_deep_stops_the_start(template: str) -> None:
    with pytest.raises(DeploymentError, match="^chat template: it is nested too deep$"):
        ChatTemplate(template, {})


@pytest.mark.parametrize("name", ["wordwrap", "urlize", "pprint", "striptags", "xmlattr"])
def test_a_filter_that_is_not_bounded_stops_the_start(name: str) -> None:
    with pytest.raises(DeploymentError, match=f"^chat template, line 1: No filter named '{name}'"):
        ChatTemplate(f"{{{{ messages[0].content | {name} }}}}", {})


def test_a_template_that_is_too_long_stops_the_start() -> None:
    with pytest.raises(DeploymentError, match="^chat template: it has 1000000 bytes; the most is 131072$"):
        ChatTemplate("{{ a }}   " * 100_000, {})


def test_constants_of_a_template_are_bounded_together() -> None:
    began = time.thread_time()
    ChatTemplate("{{ range(9999) | list | string | length }}" * 3000, {})
    assert time.thread_time() - began < 30


def test_where_others_wait_it_is_given_up_sooner_and_is_no_error() -> None:
    template = ChatTemplate(HOSTILE["two loops"], {})
    with pytest.raises(TakesLonger), at_once():
        template.render(MESSAGES)
    short = ChatTemplate("{{ messages[0].content }}", {})
    with at_once():
        assert short.render(MESSAGES) == MESSAGES[0]["content"]


def test_each_rendering_has_its_own_budget() -> None:
    large = "{% for _ in range(20) %}{% set s = 'a' * 5 * 10**6 %}{% endfor %}done"
    template = ChatTemplate(large, {})
    results: list[str] = []
    threads = [threading.Thread(target=lambda: results.append(template.render(MESSAGES))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == ["done"] * 3


COMMON = [
    "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}{{ loop.revindex }}{% endfor %}",
    "{% for k, v in messages[0].items() %}{{ k }}={{ v | length }}{% else %}none{% endfor %}",
    "{% for m in nothing %}x{% else %}none{% endfor %}",
    "{{ '<|' ~ messages[0].role ~ '|>' ~ none ~ 1 ~ [1, 'a'] ~ {'a': 1} }}",
    "{{ messages[0].content.split('\n')[0].strip() + 'b' }}{{ 'a,b'.split(',') | join('-') }}{{ ['a'] * 3 }}",
    "{{ '%s has %d' % ('a', 3) }}{{ '%s' | format('b') }}{{ '{} {:>4}'.format('a', 1) }}{{ 7 % 4 }}{{ 2**10 }}",
    "{{ 'Cutting Knowledge Date: 20231201123456' ~ ('%s' % '100%') }}{{ 1700000000 | default(1800000000) }}",
    "{% set ns = namespace(created=1700000000, l=[]) %}{% set ns.l = ns.l + [1] %}{{ ns.created }}{{ ns.l }}",
    "{{ messages | map(attribute='role') | list }}{{ messages | selectattr('role', 'eq', 'user') | list | length }}",
    "{{ {'a': [1, 2.5, none, true]} | tojson(indent=4) }}{{ messages | tojson }}{{ 'a\nb' | indent(4, true) }}",
    "{% macro m(a, b=2) %}{{ a }}{{ b }}{{ caller() if caller }}{% endmacro %}{% call m(1) %}c{% endcall %}{{ m(3) }}",
    "{% for x in [[1, [2]], [3]] recursive %}{{ x if x is not iterable else loop(x) }}{% endfor %}",
    "{{ 123456789012345678901234567890 }}{{ [123456789012345678901] | first }}{{ 10**18 // 7 }}{{ -(2**62) }}",
    "{% set a, b = 1, 2 %}{{ a }}{{ b }}{{ (1, 2) }}{{ messages[::-1][0].role }}{% if 'a' in ['a'] %}yes{% endif %}",
]


@pytest.mark.parametrize("source", COMMON)
def test_common_templates_render_as_transformers_does(source: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    messages: Any = json.loads(json.dumps(MESSAGES))
    [expected], _ = render_jinja_template([messages], chat_template=source, add_generation_prompt=True)
    assert ChatTemplate(source, {}).render(messages) == expected
