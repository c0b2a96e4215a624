// SPDX-License-Identifier: Apache-2.0

package chats

import (
	"encoding/json"
	"fmt"
	"maps"
	"strings"
)

// Any returns the path and the body of a request, without a model, to one of the APIs that clients use: chats, completions, /v1/responses
// and Anthropic's /v1/messages.
func (g Requests) Any() (path string, body map[string]any) {
	switch g.R.IntN(8) {
	case 0, 1, 2:
		return "/v1/chat/completions", g.withEcho(g.Request())
	case 3:
		return "/v1/completions", g.completion()
	case 4, 5:
		return "/v1/responses", g.responses()
	default:
		return "/v1/messages", g.anthropic()
	}
}

// withEcho adds fields of chats that only some clients send.
func (g Requests) withEcho(q map[string]any) map[string]any {
	if g.oneIn(10) {
		q["chat_template_kwargs"] = object{"enable_thinking": g.one(true, false, nil, "auto"), "own": g.text()}
	}
	if tools, _ := q["tools"].([]any); len(tools) > 0 && g.oneIn(4) {
		tools[0].(object)["function"].(object)["defer_loading"] = g.oneIn(2)
		if g.oneIn(2) {
			tools[0].(object)["defer_loading"] = g.oneIn(2)
		}
	}
	return q
}

func (g Requests) completion() map[string]any {
	q := object{"prompt": g.one(g.text()+"a", []any{g.text() + "a"}, []any{1, 2, 300, 17}, []any{1.0, 2.0}, []any{[]any{5, 6, 7}})}
	if g.oneIn(4) {
		q["add_special_tokens"] = g.oneIn(2)
	}
	if g.oneIn(4) {
		q["echo"], q["logprobs"] = true, 1
	}
	return q
}

// anthropic returns a request of /v1/messages.
func (g Requests) anthropic() map[string]any {
	q := object{"max_tokens": 16}
	switch g.R.IntN(4) {
	case 0:
		q["system"] = g.text()
	case 1:
		q["system"] = []any{object{"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=" + g.one("a", "b").(string)}, g.textBlock(), g.textBlock()}
	}
	all := []any{}
	for turn := range 1 + g.R.IntN(4) {
		user := any(g.text())
		if g.oneIn(2) {
			user = g.textBlocks()
		}
		all = append(all, Message("user", user))
		switch g.R.IntN(4) {
		case 0:
			id := fmt.Sprintf("toolu_%d", turn)
			blocks := []any{}
			if g.oneIn(2) {
				blocks = append(blocks, object{"type": "thinking", "thinking": g.text(), "signature": "s"})
			}
			if g.oneIn(2) {
				blocks = append(blocks, g.textBlock())
			}
			input := json.RawMessage(g.one(`{"city":"Zürich","n":1.5,"m":{"b":[1,null,true]}}`, `{}`, `{"a":"\u00e9\n"}`, `{"big":1e5,"i":12345678901234567890}`).(string))
			blocks = append(blocks, object{"type": "tool_use", "id": id, "name": g.one("get_weather", "f"), "input": input})
			result := object{"type": "tool_result", "tool_use_id": id, "content": g.one(g.text(), g.textBlocks(), []any{})}
			if g.oneIn(5) {
				delete(result, "content")
			}
			results := []any{result}
			if g.oneIn(3) {
				results = append(results, g.textBlock())
			}
			all = append(all, Message("assistant", blocks), Message("user", results))
		case 1:
			all = append(all, Message("assistant", g.text()))
		case 2:
			all = append(all, Message("assistant", []any{object{"type": "thinking", "thinking": g.text(), "signature": ""}, g.textBlock()}))
		}
		if g.oneIn(4) { // as agents add reminders
			all = append(all, Message("system", g.one("<total_tokens>5000 tokens left</total_tokens>", g.text(), []any{g.textBlock(), g.textBlock()}, "x-anthropic-billing-header: a")))
		}
	}
	q["messages"] = append(all, Message("user", g.text()))
	if g.oneIn(3) {
		tools := []any{}
		for range 1 + g.R.IntN(2) {
			tool := object{"name": g.one("get_weather", "f", "look_up"), "input_schema": g.inputSchema()}
			for name, values := range map[string][]any{"description": {g.text(), "d"}, "strict": {true, false, nil}, "defer_loading": {true, false, nil}, "cache_control": {object{"type": "ephemeral"}}} {
				if g.oneIn(3) {
					tool[name] = g.one(values...)
				}
			}
			tools = append(tools, tool)
		}
		q["tools"] = tools
		if g.oneIn(2) {
			q["tool_choice"] = object{"type": g.one("auto", "any", "none")}
		}
	}
	if g.oneIn(3) {
		q["thinking"] = g.one(object{"type": "disabled"}, object{"type": "enabled", "budget_tokens": 1024}, object{"type": "adaptive"})
	}
	if g.oneIn(5) {
		q["output_config"] = object{"effort": g.one("low", "high", "max")}
	}
	if g.oneIn(8) {
		q["chat_template_kwargs"] = object{"enable_thinking": g.oneIn(2)}
	}
	return q
}

func (g Requests) inputSchema() map[string]any {
	s := object{"properties": g.properties(0)}
	if !g.oneIn(4) {
		s["type"] = "object"
	}
	return s
}

func (g Requests) textBlock() any { return object{"type": "text", "text": g.text()} }

func (g Requests) textBlocks() []any {
	blocks := []any{}
	for range g.R.IntN(4) {
		blocks = append(blocks, g.textBlock())
	}
	return blocks
}

// responses returns a request of /v1/responses.
func (g Requests) responses() map[string]any {
	q := object{"input": g.text() + "x"}
	if g.oneIn(3) {
		q["instructions"] = g.text()
	}
	if !g.oneIn(4) {
		q["input"] = g.items()
	}
	if g.oneIn(3) {
		tools := []any{}
		for range 1 + g.R.IntN(2) {
			tool := object{"type": "function"}
			maps.Copy(tool, g.tool().(object)["function"].(object))
			if tool["parameters"] == nil {
				tool["parameters"] = object{"type": "object", "properties": object{}}
			}
			if g.oneIn(4) {
				tool["defer_loading"] = g.oneIn(2)
			}
			tools = append(tools, tool)
		}
		if g.strange() {
			tools = append(tools, g.one(object{"type": "custom", "name": "apply_patch", "description": "d"}, object{"type": "web_search"},
				object{"type": "namespace", "name": "n", "description": "d", "tools": []any{object{"type": "function", "name": "f", "parameters": object{"type": "object"}}}}))
		}
		q["tools"] = tools
		if g.oneIn(3) {
			q["tool_choice"] = g.one("auto", "none")
		}
	}
	if g.oneIn(3) {
		q["reasoning"] = object{"effort": g.one("low", "medium", "high")}
	}
	if g.oneIn(8) {
		q["chat_template_kwargs"] = object{"enable_thinking": g.oneIn(2)}
	}
	return q
}

func (g Requests) items() (all []any) {
	if g.oneIn(3) {
		all = append(all, Message(g.one("system", "developer").(string), g.inputContent()))
	}
	for turn := range 1 + g.R.IntN(4) {
		all = append(all, Message("user", g.inputContent()))
		if g.oneIn(3) {
			thought := object{"type": "reasoning", "id": "rs_1", "summary": []any{}}
			if g.oneIn(3) {
				thought["summary"] = []any{object{"type": "summary_text", "text": g.text()}}
			} else {
				thought["content"] = []any{object{"type": "reasoning_text", "text": g.text()}}
			}
			all = append(all, thought)
		}
		switch g.R.IntN(4) {
		case 0, 1:
			for k := range 1 + g.R.IntN(2) {
				id := fmt.Sprintf("call_%d_%d", turn, k)
				all = append(all, object{"type": "function_call", "call_id": id, "name": g.one("get_weather", "f"), "arguments": g.one(`{"city":"Zürich"}`, `{}`, `{"a":`)})
				output := any(g.text())
				if g.oneIn(5) {
					output = []any{object{"type": "input_text", "text": g.text()}, object{"type": "input_text", "text": g.text()}}
				}
				all = append(all, object{"type": "function_call_output", "call_id": id, "output": output})
			}
		case 2:
			all = append(all, Message("assistant", g.text()))
		case 3:
			all = append(all, object{"type": "message", "role": "assistant", "id": "msg_1", "status": g.one("completed", "completed", "incomplete"), "content": []any{
				object{"type": "output_text", "text": g.text(), "annotations": []any{}}, object{"type": "output_text", "text": g.text(), "annotations": []any{}},
			}[:1+g.R.IntN(2)]})
		}
		if g.strange() {
			all = append(all, Message(g.one("system", "developer").(string), g.inputContent()))
		}
	}
	if g.strange() {
		return all
	}
	return append(all, Message("user", strings.TrimSpace(g.text())+"?"))
}

func (g Requests) inputContent() any {
	if g.oneIn(2) {
		return g.text()
	}
	parts := []any{}
	for range 1 + g.R.IntN(2) {
		parts = append(parts, object{"type": "input_text", "text": g.text()})
	}
	return parts
}
