"""Fields of requests: each that a client can send is honoured, advice, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import pytest
from anthropic import types as anthropic_types
from anthropic.types import beta as beta_types
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_count_tokens_params as beta_count_params
from anthropic.types.beta import message_create_params as beta_create_params
from anthropic.types.beta.beta_content_block_param import BetaContentBlockParam
from anthropic.types.beta.beta_tool_result_block_param import Content as BetaResultContent
from openai.types import chat, completion_create_params, embedding_create_params
from openai.types import responses as response_types
from openai.types.chat import chat_completion_custom_tool_param as custom_tool_param
from openai.types.chat import chat_completion_message_custom_tool_call_param as custom_call_param
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.chat.chat_completion_content_part_text_param import PromptCacheBreakpoint
from openai.types.chat.chat_completion_message_function_tool_call_param import Function
from openai.types.responses import (
    ResponseFunctionShellCallOutputContentParam as Stdout,
)
from openai.types.responses import (
    input_token_count_params,
    response_create_params,
    response_input_item_param,
    response_input_text_param,
    response_reasoning_item_param,
)
from openai.types.shared_params import CustomToolInputFormat, FunctionDefinition, Reasoning

from mainstem.server.apis import embeddings
from mainstem.server.apis.chat.request import ChatRequest, ContentPart, Message
from mainstem.server.apis.chat.tools import (
    CustomCall,
    CustomFormat,
    CustomGrammar,
    CustomSpec,
    FunctionCall,
    FunctionSpec,
    ToolCall,
    ToolChoice,
    ToolSpec,
)
from mainstem.server.apis.completions import CompletionRequest
from mainstem.server.apis.embeddings import EmbeddingRequest
from mainstem.server.apis.messages import blocks as message_blocks
from mainstem.server.apis.messages import request as messages
from mainstem.server.apis.messages.request import CountRequest, MessageRequest
from mainstem.server.apis.responses import items as response_items
from mainstem.server.apis.responses import request as responses
from mainstem.server.apis.responses import tools as response_tools
from mainstem.server.apis.responses.request import InputCountRequest, ResponseRequest
from mainstem.server.errors import ApiError
from mainstem.server.fields.breakpoints import Breakpoint, CacheControl, CacheOptions
from mainstem.server.fields.rules import COMPLETIONS, OF_CHATS, OPENAI, Field, Rules, Unheeded, check_fields
from mainstem.server.fields.sampling import Thinking
from mainstem.server.fields.tools import is_hosted

KINDS: dict[Any, tuple[str, Rules, set[str]]] = {
    CompletionRequest: (
        "/v1/completions",
        COMPLETIONS,
        {*get_type_hints(completion_create_params.CompletionCreateParamsBase), "stream"},
    ),
    ChatRequest: (
        "/v1/chat/completions",
        OPENAI,
        {*get_type_hints(chat_create_params.CompletionCreateParamsBase), "stream"},
    ),
    EmbeddingRequest: (
        "/v1/embeddings",
        embeddings.RULES,
        {*get_type_hints(embedding_create_params.EmbeddingCreateParams)},
    ),
    ResponseRequest: (
        "/v1/responses",
        responses.RULES,
        {*get_type_hints(response_create_params.ResponseCreateParamsBase), "stream"},
    ),
    InputCountRequest: (
        "/v1/responses/input_tokens",
        responses.RULES,
        {*get_type_hints(input_token_count_params.InputTokenCountParams)},
    ),
    MessageRequest: (
        "/v1/messages",
        messages.RULES,
        {*beta_create_params.MessageCreateParamsBase.__annotations__, "stream"}
        | {*get_type_hints(message_create_params.MessageCreateParamsBase)},
    ),
    CountRequest: (
        "/v1/messages/count_tokens",
        messages.RULES,
        {*get_type_hints(message_count_tokens_params.MessageCountTokensParams)}
        | {*beta_count_params.MessageCountTokensParams.__annotations__},
    ),
}
"""The route of each type, its rules, and the fields that the official clients can send."""
RULES = {
    "/v1/completions, /v1/chat/completions": OPENAI,
    "/v1/embeddings": embeddings.RULES,
    "/v1/responses": responses.RULES,
    "/v1/messages, /v1/messages/count_tokens": messages.RULES,
}

CHATS, _, RESPONSES, MESSAGES = RULES
PARTS = (*get_args(chat.ChatCompletionContentPartParam), chat.ChatCompletionContentPartRefusalParam)
CHOICES = (
    chat.ChatCompletionNamedToolChoiceParam,
    chat.ChatCompletionNamedToolChoiceCustomParam,
    chat.ChatCompletionAllowedToolChoiceParam,
)


def types_of(kind: Any) -> tuple[str, ...]:
    """The values of `type` of a client's type."""
    hint = get_type_hints(kind)["type"]
    while get_origin(hint) is not Literal:
        hint = get_args(hint)[0]
    return get_args(hint)


ALL_ITEMS = get_args(response_input_item_param.ResponseInputItemParam)
ITEMS = tuple(each for each in ALL_ITEMS if response_items.ITEMS.keys() & {*types_of(each)})
TOOLS = get_args(response_types.ToolParam)
ITEM_PARTS = (
    response_types.ResponseInputTextParam,
    response_types.ResponseInputImageParam,
    response_types.ResponseOutputTextParam,
    response_types.ResponseOutputRefusalParam,
    response_reasoning_item_param.Content,
)
BLOCKS = (
    anthropic_types.TextBlockParam,
    anthropic_types.ImageBlockParam,
    anthropic_types.ThinkingBlockParam,
    anthropic_types.ToolUseBlockParam,
    anthropic_types.ToolResultBlockParam,
    anthropic_types.DocumentBlockParam,
    anthropic_types.SearchResultBlockParam,
    anthropic_types.ToolReferenceBlockParam,
    beta_types.BetaCompactionBlockParam,
)
INNER: list[tuple[str, str, Any, tuple[Any, ...]]] = [
    (CHATS, "messages", Message, get_args(chat.ChatCompletionMessageParam)),
    (CHATS, "content", ContentPart, PARTS),
    (CHATS, "tool_calls", ToolCall, get_args(chat.ChatCompletionMessageToolCallUnionParam)),
    (CHATS, "function", FunctionCall, (Function,)),
    (CHATS, "custom", CustomCall, (custom_call_param.Custom,)),
    (CHATS, "tools", ToolSpec, get_args(chat.ChatCompletionToolUnionParam)),
    (CHATS, "function", FunctionSpec, (FunctionDefinition,)),
    (CHATS, "custom", CustomSpec, (custom_tool_param.Custom,)),
    (CHATS, "format", CustomFormat, get_args(custom_tool_param.CustomFormat)),
    (CHATS, "grammar", CustomGrammar, (custom_tool_param.CustomFormatGrammarGrammar,)),
    (CHATS, "tool_choice", ToolChoice, CHOICES),
    (CHATS, "prompt_cache_options", CacheOptions, (chat_create_params.PromptCacheOptions,)),
    (CHATS, "cache_control", CacheControl, (anthropic_types.CacheControlEphemeralParam,)),
    (CHATS, "prompt_cache_breakpoint", Breakpoint, (PromptCacheBreakpoint,)),
    (RESPONSES, "input", response_items.Item, ITEMS),
    (RESPONSES, "content", response_items.Part, ITEM_PARTS),
    (RESPONSES, "output", response_items.Part, (response_types.ResponseInputTextContentParam, Stdout)),
    (RESPONSES, "summary", response_items.Part, (response_reasoning_item_param.Summary,)),
    (
        RESPONSES,
        "tools",
        response_tools.Tool,
        (response_types.FunctionToolParam, response_types.CustomToolParam, response_types.NamespaceToolParam),
    ),
    (RESPONSES, "format", response_tools.TextFormat, get_args(CustomToolInputFormat)),
    (
        RESPONSES,
        "tool_choice",
        response_tools.ToolChoice,
        (
            response_types.ToolChoiceFunctionParam,
            response_types.ToolChoiceCustomParam,
            response_types.ToolChoiceAllowedParam,
        ),
    ),
    (RESPONSES, "text", responses.TextOptions, (response_types.ResponseTextConfigParam,)),
    (RESPONSES, "format", responses.Format, get_args(response_types.ResponseFormatTextConfigParam)),
    (RESPONSES, "reasoning", responses.ReasoningOptions, (Reasoning,)),
    (RESPONSES, "stream_options", responses.StreamOptions, (response_create_params.StreamOptions,)),
    (
        RESPONSES,
        "prompt_cache_options",
        responses.ResponseCacheOptions,
        (response_create_params.PromptCacheOptions,),
    ),
    (RESPONSES, "prompt_cache_breakpoint", Breakpoint, (response_input_text_param.PromptCacheBreakpoint,)),
    (MESSAGES, "messages", message_blocks.Message, get_args(anthropic_types.MessageParam)),
    (MESSAGES, "content", message_blocks.ContentBlock, BLOCKS),
    (MESSAGES, "system", message_blocks.ContentBlock, (anthropic_types.TextBlockParam,)),
    (
        MESSAGES,
        "source",
        message_blocks.Source,
        (
            anthropic_types.Base64ImageSourceParam,
            anthropic_types.URLImageSourceParam,
            anthropic_types.PlainTextSourceParam,
            anthropic_types.ContentBlockSourceParam,
        ),
    ),
    (MESSAGES, "tools", messages.Tool, (anthropic_types.ToolParam,)),
    (MESSAGES, "tool_choice", messages.ToolChoice, get_args(anthropic_types.ToolChoiceParam)),
    (CHATS, "thinking", Thinking, get_args(anthropic_types.ThinkingConfigParam)),
    (MESSAGES, "thinking", Thinking, get_args(beta_types.BetaThinkingConfigParam)),
    (MESSAGES, "output_config", messages.OutputConfig, (beta_types.BetaOutputConfigParam,)),
    (MESSAGES, "format", messages.OutputFormat, (anthropic_types.JSONOutputFormatParam,)),
    (MESSAGES, "cache_control", CacheControl, (anthropic_types.CacheControlEphemeralParam,)),
    (MESSAGES, "diagnostics", messages.Diagnostics, (anthropic_types.DiagnosticsParam,)),
]
"""Objects in requests: the routes, the field that they are in, our type, and the client's."""


class Nothing(msgspec.Struct):
    """A body of which no field is honoured."""


def check(kind: Any = CompletionRequest, tolerant: Any = False, rules: Any = COMPLETIONS, **fields: Any) -> Unheeded:
    unheeded = Unheeded(tolerant)
    check_fields(json.dumps(fields).encode(), kind, rules, unheeded)
    return unheeded


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_field_of_the_official_clients_is_classified(kind: Any) -> None:
    """A new version of a client with a new field fails here."""
    _, rules, fields = KINDS[kind]
    assert len(fields) > 4
    assert not fields - {*kind.__struct_fields__} - rules.advice.keys() - rules.refused.keys()


def test_every_block_of_the_official_client_is_shown_left_out_or_refused() -> None:
    """A new version of a client with a new type fails here."""
    refused = {"container_upload", "browser_state", "tool_addition", "tool_removal"}
    shown = {"text", "image", "document", "search_result", "thinking", "tool_use", "tool_result", "tool_reference"}
    for union in (BetaContentBlockParam, BetaResultContent):
        types = {kind for each in get_args(union) if isinstance(each, type) for kind in types_of(each)}
        assert len(types) > 5 and not types - shown - {"compaction"} - message_blocks.LEFT_OUT - refused


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_no_field_is_in_two_classes(kind: Any) -> None:
    _, rules, _ = KINDS[kind]
    honoured = {*kind.__struct_fields__}
    assert not honoured & rules.advice.keys() and not honoured & rules.refused.keys()
    assert not rules.advice.keys() & rules.refused.keys()


@pytest.mark.parametrize(("routes", "name", "kind", "clients"), INNER, ids=lambda value: getattr(value, "__name__", ""))
def test_every_field_inside_is_in_one_class(routes: str, name: str, kind: Any, clients: tuple[Any, ...]) -> None:
    others = RULES[routes].inside.get(name, Rules())
    known = {field for client in clients for field in get_type_hints(client)}
    assert known and not known - {*kind.__struct_fields__} - others.advice.keys() - others.refused.keys()
    assert not {*kind.__struct_fields__} & (others.advice.keys() | others.refused.keys())
    assert not others.advice.keys() & others.refused.keys()


def test_fields_inside_are_checked_wherever_they_are() -> None:
    call = {"id": "c", "function": {"name": "f", "arguments": "{}", "output": 1}, "index": 0}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
    with pytest.raises(ApiError, match=r"^messages\[1\].tool_calls\[0\].function.output: unknown field$"):
        check(ChatRequest, messages=messages)
    tools = [{"function": {"name": "f", "parameters": {"any": 1}}, "new": 1}]
    found = check(ChatRequest, True, messages=messages, tools=tools)
    assert found.unknown == ["messages[1].tool_calls[0].function.output", "tools[0].new"]
    assert found.ignored == ["messages[1].tool_calls[0].index"]
    with pytest.raises(ApiError, match=r"did you mean content\?"):
        check(ChatRequest, messages=[{"contents": "x"}])
    with pytest.raises(ApiError, match=r"^messages\[0\].function_call: not supported; omit it \("):
        check(ChatRequest, messages=[{"function_call": {"name": "f"}}])
    check(ChatRequest, messages=[{"function_call": None, "annotations": [1]}], chat_template_kwargs={"any": {"x": 1}})


def rows(routes: str, rules: Rules) -> list[str]:
    def values(field: Field) -> str:
        return ", ".join(f"`{json.dumps(value)}`" for value in (None, *field.neutral))

    advice = [f"| {routes} | `{name}` | ignored: {field.why} |" for name, field in rules.advice.items()]
    return advice + [
        f"| {routes} | `{name}` | refused, except {values(field)}: {field.why} |"
        for name, field in rules.refused.items()
    ]


def named(kind: Any) -> str:
    """The fields of a type."""
    return ", ".join(f"`{name}`" for name in sorted(kind.__struct_fields__))


def table() -> str:
    """The documentation's table of fields."""
    honoured = [f"| {route} | {named(kind)} | honoured |" for kind, (route, _, _) in KINDS.items()]
    inner = [f"| in `{name}` of {routes} | {named(kind)} | honoured |" for routes, name, kind, _ in INNER]
    inside = [
        row
        for routes, rules in RULES.items()
        for name, each in rules.inside.items()
        for row in rows(f"in `{name}` of {routes}", each)
    ]
    others = [row for routes, rules in RULES.items() for row in rows(routes, rules)]
    others += rows("/v1/completions", Rules(OF_CHATS))
    return "\n".join(["| route | field | |", "|---|---|---|", *honoured, *others, *inner, *inside])


def test_the_documentation_lists_every_field() -> None:
    text = (Path(__file__).parents[3] / "docs" / "serving.md").read_text()
    assert text.partition("<!-- fields -->\n")[2].partition("\n<!-- /fields -->")[0] == table()


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_every_field_in_a_table_says_why_and_has_one_class_by_what_asks_for_nothing(rules: Rules) -> None:
    """Each row of each table: what asks for nothing passes in silence, any other value is named, or refused by name."""
    for within in (rules, *rules.inside.values()):
        alone = within._replace(inside={})
        for name, field in {**within.advice, **within.refused}.items():
            assert field.why and field.neutral.count(None) == 0
            for neutral in (None, *field.neutral):
                assert check(Nothing, rules=alone, **{name: neutral}) == Unheeded()
            for value in ({"something": 1}, "something", 7, [1]):
                for tolerant in (False, True):
                    if name in within.advice:
                        assert check(Nothing, tolerant, alone, **{name: value}).ignored == [name]
                        continue
                    with pytest.raises(ApiError, match=f"^{name}: not supported; omit it") as caught:
                        check(Nothing, tolerant, alone, **{name: value})
                    assert (caught.value.detail.param, caught.value.detail.code) == (name, field.code)


def items_table() -> str:
    """The documentation's table of items."""
    ran = [kind for kind in response_items.ITEMS if "shell" in kind or "patch" in kind]
    taken = [kind for kind in response_items.ITEMS if kind not in ran]
    classes = [
        ("taken", taken),
        ("what the client ran: shown as calls of functions, with their results", ran),
        ("what OpenAI ran, or alone can read: left out, and named in `X-Mainstem-Ignored`", response_items.LEFT_OUT),
        ("refused: the answer would be another thing", response_items.REFUSED),
    ]
    rows = [f"| {what} | {', '.join(f'`{kind}`' for kind in sorted(kinds))} |" for what, kinds in classes]
    return "\n".join(["| | items |", "|---|---|", *rows])


def test_the_documentation_lists_every_item() -> None:
    text = (Path(__file__).parents[3] / "docs" / "serving.md").read_text()
    assert text.partition("<!-- items -->\n")[2].partition("\n<!-- /items -->")[0] == items_table()


def test_every_type_of_item_is_taken_left_out_or_refused() -> None:
    """A new version of the client with a new type of item fails here."""
    classes = (response_items.ITEMS.keys(), response_items.LEFT_OUT, response_items.REFUSED.keys())
    for each in ALL_ITEMS:
        for kind in types_of(each):
            assert sum(kind in known for known in classes) == 1, kind


def test_every_type_of_tool_is_offered_or_left_out() -> None:
    for kind in (kind for each in TOOLS for kind in types_of(each)):
        assert (kind in ("function", "custom", "namespace")) != is_hosted(kind), kind
    for kind in (kind for each in get_args(beta_types.BetaToolUnionParam) for kind in types_of(each)):
        assert (kind == "custom") != is_hosted(kind), kind


def test_false_is_not_zero() -> None:
    with pytest.raises(ApiError, match="use_beam_search: not supported; omit it or use false"):
        check(use_beam_search=0)
    with pytest.raises(ApiError, match="length_penalty"):
        check(length_penalty=True)
    check(length_penalty=1.0)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("tempreature", "temperature"),
        ("max_token", "max_tokens"),
        ("respons_format", "response_format"),
        ("meta_data", "metadata"),
        ("xyzzy", None),
    ],
)
def test_an_unknown_field_is_refused_with_the_nearest_name(name: str, nearest: str | None) -> None:
    with pytest.raises(ApiError) as caught:
        check(**{name: 1})
    assert str(caught.value) == f"{name}: unknown field" + (f"; did you mean {nearest}?" if nearest else "")
    assert (caught.value.detail.param, caught.value.detail.code) == (name, "unknown_field")


@pytest.mark.parametrize(
    ("kind", "name", "meant"),
    [
        (ResponseRequest, "max_tokens", "max_output_tokens"),
        (ResponseRequest, "max_completion_tokens", "max_output_tokens"),
        (ResponseRequest, "messages", "input"),
        (ResponseRequest, "system", "instructions"),
        (ResponseRequest, "response_format", "text"),
        (ChatRequest, "max_output_tokens", "max_tokens"),
        (ChatRequest, "input", "messages"),
        (ChatRequest, "stop_sequences", "stop"),
        (ChatRequest, "output_config", "response_format"),
        (CompletionRequest, "max_new_tokens", "max_tokens"),
        (MessageRequest, "max_output_tokens", "max_tokens"),
        (MessageRequest, "instructions", "system"),
        (MessageRequest, "stop", "stop_sequences"),
    ],
)
def test_the_name_of_another_api_leads_to_the_field(kind: Any, name: str, meant: str) -> None:
    with pytest.raises(ApiError, match=f"^{name}: unknown field; did you mean {meant}[?]$"):
        check(kind, rules=KINDS[kind][1], **{name: 1})


def test_unknown_fields_are_listed_in_order_where_they_are_tolerated() -> None:
    found = check(tolerant=True, new=1, model="m", prompt="p", old={}, user="u")
    assert (found.unknown, found.ignored) == (["new", "old"], ["user"])
    with pytest.raises(ApiError, match="functions"):
        check(tolerant=True, functions=[{}])


def test_headers_name_what_does_nothing_the_whole_request_first_and_never_more_than_fits() -> None:
    assert Unheeded().headers == {}
    found = Unheeded(ignored=["tools[0].defer_loading", "tools[12].defer_loading", "user"], unknown=["a\r\nb"])
    assert found.headers == {
        "X-Mainstem-Ignored": "user, tools[0].defer_loading, tools[12].defer_loading",
        "X-Mainstem-Unknown-Fields": "a%0D%0Ab",
    }
    assert found.kinds == {"user", "tools[].defer_loading"}
    many = [f"tools[{i}].defer_loading" for i in range(500)]
    named = Unheeded(ignored=[*many, "user"]).headers["X-Mainstem-Ignored"]
    assert 990 < len(named) <= 1024
    first, *others, last = named.split(", ")
    assert (first, last) == ("user", "...") and others == many[: len(others)]
    assert Unheeded(unknown=["x" * 2000]).headers == {"X-Mainstem-Unknown-Fields": "..."}


@pytest.mark.parametrize(
    ("lengths", "shown"),
    [((1024,), 1), ((1025,), 0), ((500, 522), 2), ((500, 523), 1), ((1019, 9), 1), ((1020, 9), 0), ((9, 1008, 9), 2)],
)
def test_a_header_has_1024_characters_at_most(lengths: tuple[int, ...], shown: int) -> None:
    names = [letter * length for letter, length in zip("abc", lengths, strict=False)]
    (header,) = Unheeded(unknown=names).headers.values()
    assert header == ", ".join([*names[:shown], *(["..."] if shown < len(names) else [])])
    assert len(header) <= 1024


class Part(msgspec.Struct):
    """A part of a body with names of its own."""

    text: str
    anything: Any = None


class Whole(msgspec.Struct):
    """A body with parts."""

    parts: str | list[Part]
    only: Part | None = None


def test_names_inside_of_fields_are_checked_with_their_paths_and_rules() -> None:
    rules = Rules(inside={"parts": Rules({"idle": Field("of no use")}, {"odd": Field("another kind")})})
    check(Whole, rules=rules, parts="a text")
    check(Whole, rules=rules, parts=[{"text": "a"}, {"text": "b", "anything": {"goes": [{"here": 1}]}}], only=None)
    assert check(Whole, rules=rules, parts=[{"text": "a", "idle": 1, "odd": None}]).ignored == ["parts[0].idle"]
    problems = (("txet", "unknown field; did you mean text?"), ("odd", "not supported; omit it (another kind)"))
    for wrong, problem in problems:
        with pytest.raises(ApiError) as caught:
            check(Whole, rules=rules, parts=[{"text": "a"}, {"text": "b", wrong: 1}])
        assert str(caught.value) == f"parts[1].{wrong}: {problem}"
    found = check(Whole, True, rules, parts=[{"text": "a", "one": []}], only={"text": "c", "idle": False})
    assert found.unknown == ["parts[0].one", "only.idle"]
