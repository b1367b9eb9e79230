"""Fields of OpenAI's endpoints: each that is known is served, refused by its name, or accepted for a reason."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import inflight.gateway
from inflight.gateway.errors import ApiError
from inflight.gateway.field_tables import CHAT, CHAT_READER, COMPLETION_READER, COMPLETIONS
from inflight.gateway.fields import IGNORED_HEADER, Field, Reader
from inflight.gateway.values import Kind, integer, number, same
from tests.support.tables import each_row

OPENAI_CHAT = """
    messages model audio frequency_penalty function_call functions logit_bias logprobs max_completion_tokens max_tokens
    metadata modalities moderation n parallel_tool_calls prediction presence_penalty prompt_cache_key
    prompt_cache_options prompt_cache_retention reasoning_effort response_format safety_identifier seed service_tier
    stop store stream stream_options temperature tool_choice tools top_logprobs top_p user verbosity web_search_options
""".split()
OPENAI_COMPLETIONS = """
    model prompt best_of echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream
    stream_options suffix temperature top_p user
""".split()
VLLM = """
    use_beam_search top_k min_p repetition_penalty length_penalty stop_token_ids include_stop_str_in_output ignore_eos
    min_tokens skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens prompt_logprobs
    allowed_token_ids bad_words add_special_tokens structured_outputs priority request_id return_tokens_as_token_ids
    return_token_ids cache_salt kv_transfer_params vllm_xargs guided_json guided_regex guided_choice guided_grammar
    guided_decoding_backend guided_whitespace_pattern logprob_token_ids truncation_side watermarking session_id
    return_weight_versions routed_experts_prompt_start return_token_offsets mm_payload return_mm_kwargs
    ec_transfer_params stream_interval
""".split()
SGLANG = """
    rid extra_key no_stop_trim stop_regex ebnf regex lora_path session_params custom_logit_processor custom_params
    custom_labels return_hidden_states return_routed_experts routed_experts_start_len return_cached_tokens_details
    bootstrap_host bootstrap_port bootstrap_room disagg_prefill_dp_rank routed_dp_rank data_parallel_rank
""".split()
SGLANG_CHAT = """
    separate_reasoning stream_reasoning return_prompt_token_ids return_meta_info task max_dynamic_patch
    min_dynamic_patch use_audio_in_video input_ids
""".split()
LLAMA_CPP = """
    n_predict repeat_penalty repeat_last_n samplers min_keep n_probs grammar json_schema cache_prompt id_slot typical_p
    top_n_sigma mirostat dynatemp_range xtc_probability dry_multiplier
""".split()
VLLM_CHAT = """
    echo add_generation_prompt continue_final_message documents chat_template chat_template_kwargs include_reasoning
    mm_processor_kwargs best_of return_prompt_text
""".split()
ENDPOINTS: dict[str, tuple[Reader, dict[str, Any]]] = {
    "chat": (CHAT_READER, {"model": "m", "messages": []}),
    "completions": (COMPLETION_READER, {"model": "m", "prompt": "a"}),
}


def rows() -> Iterator[tuple[str, Field]]:
    for endpoint, (reader, _) in ENDPOINTS.items():
        yield from ((endpoint, field) for field in reader.fields.values())


ROWS = list(rows())


@pytest.mark.parametrize(
    ("table", "names"),
    [
        (CHAT, OPENAI_CHAT + VLLM + VLLM_CHAT + SGLANG + SGLANG_CHAT + LLAMA_CPP),
        (COMPLETIONS, OPENAI_COMPLETIONS + VLLM + SGLANG + LLAMA_CPP),
    ],
    ids=list(ENDPOINTS),
)
def test_what_clients_are_known_to_send_is_in_the_tables(table: dict[str, Field], names: list[str]) -> None:
    assert not [name for name in names if name not in table]


@each_row("row", ROWS, ids=lambda row: f"{row[0]}-{row[1].name}")
def test_each_field_is_checked_or_refused_by_its_name(row: tuple[str, Field]) -> None:
    endpoint, field = row
    reader, body = ENDPOINTS[endpoint]
    assert field.doc
    if field.name not in body:
        assert field.name not in reader.read({**body, field.name: None})
    if field.state == "refused":
        with pytest.raises(ApiError) as caught:
            reader.read({**body, field.name: {"strange": [1]}})
        assert caught.value.code == "unsupported_parameter"
        for value in field.neutral:
            assert field.name not in reader.read({**body, field.name: value})
    elif field.kind.wanted == "any value":  # the endpoint itself reads it
        return
    else:
        wrong = [] if field.kind.wanted == "an object" else {"strange": [1]}
        with pytest.raises(ApiError) as caught:
            reader.read({**body, field.name: wrong})
        assert caught.value.code == "invalid_request_error"
    assert caught.value.status == 400
    assert str(caught.value.param).split(".")[0].split("[")[0] == field.name
    assert field.name in caught.value.message


def test_what_is_served_is_read_somewhere() -> None:
    """A table cannot say so of a field that no code looks at."""
    folder = Path(inflight.gateway.__file__).parent
    sources = "".join(path.read_text() for path in folder.glob("*.py") if path.name != "field_tables.py")
    served = {field.name for _, field in ROWS if field.state == "served"}
    assert not [name for name in sorted(served) if f'"{name}"' not in sources]


def test_fields_that_are_not_known_are_let_through_and_named() -> None:
    fields = CHAT_READER.read({"model": "m", "messages": [], "foo": 1, "bär\n,": 2, "bar": None})

    assert fields.ignored == ("foo", "bär\n,")
    assert fields.headers() == {IGNORED_HEADER: r"foo, b\xe4r??"}


def test_many_unknown_fields_make_a_short_header() -> None:
    body = {f"field_{index}_{'x' * 100}": 1 for index in range(1000)}
    header = CHAT_READER.read({"model": "m", "messages": [], **body}).headers()[IGNORED_HEADER]

    assert len(header) < 2000
    assert header.endswith("and 980 more")


def test_where_fields_are_strict_an_unknown_one_is_refused_with_the_one_that_is_meant() -> None:
    with pytest.raises(ApiError, match="temprature is not a known field .*'temperature'") as caught:
        CHAT_READER.read({"model": "m", "messages": [], "temprature": 1}, strict=True)
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, "temprature", "unknown_parameter")


@pytest.mark.parametrize("absent", [{}, {"messages": None}])
def test_what_is_required_is_asked_for_by_name(absent: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as caught:
        CHAT_READER.read({"model": "m", **absent})
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_beams", True),
        ("return_hidden_states", 0),
        ("length_penalty", False),
        ("top_a", 1),
        ("function_call", []),
        ("functions", "none"),
    ],
)
def test_a_value_that_only_looks_like_one_that_asks_for_nothing_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ApiError) as caught:
        CHAT_READER.read({"model": "m", "messages": [], field: value})
    assert (caught.value.param, caught.value.code) == (field, "unsupported_parameter")


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (1, 1.0, True),
        (True, 1, False),
        ([0], [False], False),
        ({"a": [1]}, {"a": [True]}, False),
        ({"a": [1]}, {"a": [1.0]}, True),
        ("1", 1, False),
    ],
)
def test_values_are_the_same_as_in_json(one: Any, other: Any, expected: bool) -> None:
    assert same(one, other) is same(other, one) is expected


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("temperature", -0.1, "temperature"),
        ("temperature", True, "temperature"),
        ("top_p", 1.1, "top_p"),
        ("n", 0, "n"),
        ("n", 1.5, "n"),
        ("stop", ["a", 1], "stop[1]"),
        ("stop", "\ud800", "stop"),
        ("logit_bias", {"5": "x"}, "logit_bias.5"),
        ("logit_bias", {"5": 101}, "logit_bias.5"),
        ("stream_options", {"include_usage": 1}, "stream_options.include_usage"),
        ("stream_options", {"usage": True}, "stream_options.usage"),
        ("structured_outputs", {"regex": ""}, "structured_outputs.regex"),
        ("service_tier", 5, "service_tier"),
        ("cache_prompt", 1, "cache_prompt"),
        ("modalities", ["text", "audio"], "modalities"),
        ("max_tokens", 0, "max_tokens"),
        ("seed", 2**64, "seed"),
    ],
)
def test_a_wrong_value_is_named_by_its_path(field: str, value: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        CHAT_READER.read({"model": "m", "messages": [], field: value})
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_tokens", 64.0), ("seed", -1), ("seed", 2**64 - 1), ("top_k", -1), ("stop", None), ("best_of", 1), ("n", 2)],
)
def test_what_clients_send_is_taken(field: str, value: Any) -> None:
    CHAT_READER.read({"model": "m", "messages": [], field: value})


@each_row(
    "kind, value, read",
    [
        (integer(1, 8), 8, 8),
        (integer(1, 8), 2.0, 2),
        *[(integer(0, 8), value, None) for value in (True, False, "1", 1.5, -1, 9, None, [1])],
        (number(0, 2), 1, 1.0),
        *[(number(0, 2), value, None) for value in (True, False, "1", -0.1, 2.1, None)],
        (number(0, 2, above=True), 0, None),
    ],
)
def test_only_numbers_are_numbers(kind: Kind, value: Any, read: float | None) -> None:
    """`read`: as what, or None where it is refused."""
    if read is None:
        with pytest.raises(ApiError, match="a is .*; it must be a "):
            kind.read(value, "a")
    else:
        assert kind.read(value, "a") == read
