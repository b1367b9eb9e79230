"""Fields of chat completions in the tables of the Responses and the Messages API: what chats know, these know too."""

from __future__ import annotations

from inflight.gateway.field_tables import CHAT
from inflight.gateway.fields import Table, refused, table

PASSED_ON = (
    "temperature top_p top_k min_p presence_penalty frequency_penalty repetition_penalty seed logit_bias "
    "stop_token_ids ignore_eos min_tokens bad_words allowed_token_ids include_stop_str_in_output skip_special_tokens "
    "truncate_prompt_tokens truncation_side add_special_tokens chat_template_kwargs documents structured_outputs "
    "guided_json guided_regex guided_choice guided_grammar regex ebnf priority deadline_ms client_id"
).split()
"""Fields that mean what they mean in chat completions."""
_ELSEWHERE = "use /v1/chat/completions"
_ONE_ANSWER = "there is one answer"

AGENTS: Table = table(
    [field for field in CHAT.values() if field.state != "served"],
    [CHAT[name] for name in ("model", "stream", *PASSED_ON)],
    refused("return_tokens_as_token_ids return_token_ids continue_final_message", _ELSEWHERE, False),
    refused("include_reasoning add_generation_prompt", _ELSEWHERE, True),
    refused("request_id rid", "use the header x-request-id"),
    refused("n best_of num_return_sequences", _ONE_ANSWER, 1),
    refused("echo", "use /v1/completions", False),
    refused("prompt_logprobs", _ELSEWHERE),
    refused("guided_whitespace_pattern grammar json_schema", "use `guided_json` or `guided_grammar`"),
)
"""What both APIs do with the fields of chats. Each has fields of its own besides, some in the place of one of these."""
