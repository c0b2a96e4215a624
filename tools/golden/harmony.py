# SPDX-License-Identifier: Apache-2.0
"""Prompts of gpt-oss models as vLLM 0.32 makes them, from the package that it uses for that (oss-harmony, the
vocabulary inside).

What happens to a request before the package sees it is written here anew, since vLLM itself is too large to have at
hand; `make test-interop` compares with the real one.
"""
from openai_harmony import (
    Author,
    Conversation,
    DeveloperContent,
    Message,
    ReasoningEffort,
    RenderConversationConfig,
    Role,
    SystemContent,
    TextContent,
    ToolDescription,
    load_harmony_encoding,
)

ENCODING = load_harmony_encoding("HarmonyGptOss")
CONTROL = {ENCODING.encode(t, allowed_special="all")[0]: t for t in ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|constrain|>")}
START, CHANNEL, MESSAGE, CONSTRAIN = (next(i for i, t in CONTROL.items() if t == f"<|{name}|>") for name in ("start", "channel", "message", "constrain"))


class Refused(ValueError):
    pass


def joined(content):
    """All texts of a content, None if it has none."""
    if content is None or isinstance(content, str):
        return content
    texts = [p["text"] for p in content if p.get("text") is not None]
    return "".join(texts) if texts else None


def history(messages):
    names = {c.get("id"): c["function"]["name"] for m in messages for c in m.get("tool_calls") or []}
    out = []
    for m in messages:
        role, content = m["role"], m.get("content")
        thought = m.get("reasoning") or m.get("reasoning_content")
        analysis = [Message.from_role_and_content(Role.ASSISTANT, thought).with_channel("analysis")] if role == "assistant" and thought else []
        parts = [content] if isinstance(content, str) else [p.get("text", "") for p in content] if content else [""]
        if role == "assistant" and m.get("tool_calls"):
            if joined(content):
                out.append(Message.from_role_and_content(Role.ASSISTANT, joined(content)).with_channel("commentary"))
            out += analysis
            for c in m["tool_calls"]:
                call = Message.from_role_and_content(Role.ASSISTANT, c["function"]["arguments"])
                out.append(call.with_channel("commentary").with_recipient("functions." + c["function"]["name"]).with_content_type("json"))
        elif role == "assistant":
            out += analysis
            if parts[0]:
                out.append(Message.from_role_and_contents(Role.ASSISTANT, [TextContent(text=t) for t in parts]).with_channel("final"))
        elif role == "tool":
            author = Author.new(Role.TOOL, "functions." + names.get(m.get("tool_call_id", ""), ""))
            out.append(Message.from_author_and_content(author, joined(content) or "").with_channel("commentary").with_recipient("assistant"))
        elif role in ("system", "developer"):
            if joined(content) is not None:
                out.append(Message.from_role_and_content(Role.DEVELOPER, DeveloperContent.new().with_instructions(joined(content))))
        elif role == "user":
            out.append(Message.from_role_and_contents(Role.USER, [TextContent(text=t) for t in parts]))
        else:
            raise Refused(role)
    return out


def early_headers(ids):
    """Calls have their recipient before the channel, as older versions of the package wrote them."""
    out, i = [], 0
    while i < len(ids):
        end = ids.index(MESSAGE, i) if ids[i] == START and MESSAGE in ids[i:] else -1
        header = ids[i + 1 : end] if end > 0 else []
        if CHANNEL in header and CONSTRAIN in header:
            c, k = header.index(CHANNEL), header.index(CONSTRAIN)
            channel, recipient = ENCODING.decode(header[c + 1 : k])[:-1].split(" to=", 1)
            kind = ENCODING.decode(header[k + 1 :])
            out += [START, *ENCODING.encode(f"assistant to={recipient}"), CHANNEL, *ENCODING.encode(f"{channel} {kind}"), MESSAGE]
            i = end + 1
        else:
            out.append(ids[i])
            i += 1
    return out


def render(request, date):
    """The ids of a chat request's prompt."""
    messages, tools, effort = request["messages"], request.get("tools") or [], request.get("reasoning_effort")
    instructions = None
    if messages[0]["role"] in ("system", "developer"):
        instructions, messages = joined(messages[0].get("content")), messages[1:]
    system = SystemContent.new().with_conversation_start_date(date)
    if effort is not None:
        if effort not in ("low", "medium", "high"):
            raise Refused(effort)
        system = system.with_reasoning_effort(ReasoningEffort[effort.upper()])
    prompt = [Message.from_role_and_content(Role.SYSTEM, system)]
    if instructions or tools:
        developer = DeveloperContent.new()
        if instructions is not None:
            developer = developer.with_instructions(instructions)
        if tools:
            functions = [t["function"] for t in tools]
            developer = developer.with_function_tools([ToolDescription.new(f["name"], f.get("description") or "", f.get("parameters")) for f in functions])
        prompt.append(Message.from_role_and_content(Role.DEVELOPER, developer))
    prompt += history(messages)
    finals = [i for i, m in enumerate(prompt) if m.author.role == Role.ASSISTANT and m.channel == "final"]
    if finals:
        prompt = [m for i, m in enumerate(prompt) if i > finals[-1] or m.channel != "analysis"]
    conversation = Conversation.from_messages(prompt)
    config = RenderConversationConfig(auto_drop_analysis=False)
    return early_headers(ENCODING.render_conversation_for_completion(conversation, Role.ASSISTANT, config=config))


def pieces(ids):
    """The prompt as control tokens (by their texts, in a list of their own) and the texts between them."""
    out, run = [], []
    for i in [*ids, None]:
        if i is not None and i not in CONTROL:
            run.append(i)
            continue
        if run:
            out.append(ENCODING.decode(run))
            run = []
        if i is not None:
            out.append([CONTROL[i]])
    return out
