// SPDX-License-Identifier: Apache-2.0

package chat

import (
	"slices"
	"strings"

	"github.com/kvroute/kvroute/tokenizer/jinja"
)

// deepSeek makes prompts of DeepSeek V3.2 and V4 as the encoders of vLLM 0.33 and SGLang 0.5.23 do. It takes the
// place of a chat template: the engine reads the request in the same way, and passes its messages to the encoder.
type deepSeek struct {
	profile Profile
	v4      bool
}

// Texts of the prompts. The encoders write the control tokens as text.
const (
	deepSeekBegin     = "<｜begin▁of▁sentence｜>"
	deepSeekEnd       = "<｜end▁of▁sentence｜>"
	deepSeekUser      = "<｜User｜>"
	deepSeekAssistant = "<｜Assistant｜>"
	deepSeekReminder  = "<｜latest_reminder｜>"
	deepSeekImage     = "<｜deepseek_image｜>"
	thinkStart        = "<think>"
	thinkEnd          = "</think>"
)

// deepSeekTasks are the values of a message's task that V4 knows.
//
//nolint:gochecknoglobals // a table
var deepSeekTasks = strings.Fields("action query authority domain title read_url")

// deepSeekTools is the text around the tools of V3.2, deepSeekTools4 that of V4.
const (
	deepSeekTools = "## Tools\nYou have access to a set of tools you can use to answer the user's question.\n" +
		"You can invoke functions by writing a \"<｜DSML｜function_calls>\" block like the following as part of your reply to the user:\n" +
		"<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"$FUNCTION_NAME\">\n" +
		"<｜DSML｜parameter name=\"$PARAMETER_NAME\" string=\"true|false\">$PARAMETER_VALUE</｜DSML｜parameter>\n...\n</｜DSML｜invoke>\n" +
		"<｜DSML｜invoke name=\"$FUNCTION_NAME2\">\n...\n</｜DSML｜invoke>\n</｜DSML｜function_calls>\n" +
		"String and scalar parameters should be specified as is without any escaping or quotes, while lists and objects should use JSON format. " +
		"The \"string\" attribute should be set to \"true\" for string type parameters and \"false\" for other types (numbers, booleans, arrays, objects).\n" +
		"If the thinking_mode is enabled, then after function results you should strongly consider outputting a thinking block. Here is an example:\n" +
		"<｜DSML｜function_calls>\n...\n</｜DSML｜function_calls>\n<function_results>\n...\n</function_results>\n" +
		"<think>...thinking about results</think>\nHere are the functions available in JSONSchema format:\n<functions>\n$tools\n</functions>\n"
	deepSeekTools4 = "## Tools\n\nYou have access to a set of tools to help answer the user's question. " +
		"You can invoke tools by writing a \"<｜DSML｜tool_calls>\" block like the following:\n\n<｜DSML｜tool_calls>\n" +
		"<｜DSML｜invoke name=\"$TOOL_NAME\">\n" +
		"<｜DSML｜parameter name=\"$PARAMETER_NAME\" string=\"true|false\">$PARAMETER_VALUE</｜DSML｜parameter>\n...\n</｜DSML｜invoke>\n" +
		"<｜DSML｜invoke name=\"$TOOL_NAME2\">\n...\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>\n\n" +
		"String parameters should be specified as is and set `string=\"true\"`. For all other types (numbers, booleans, arrays, objects), " +
		"pass the value in JSON format and set `string=\"false\"`.\n\nIf thinking_mode is enabled (triggered by <think>), " +
		"you MUST output your complete reasoning inside <think>...</think> BEFORE any tool calls or final response.\n\n" +
		"Otherwise, output directly after </think> with tool calls or final response.\n\n### Available Tool Schemas\n\n$tools\n\n" +
		"You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.\n"
)

// deepSeekEfforts are the first texts of V4's prompts by reasoning effort, in thinking mode.
//
//nolint:gochecknoglobals // a table
var deepSeekEfforts = map[string]string{
	"low": "",
	"high": "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n" +
		"You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, " +
		"rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.\n" +
		"Explicitly write out your entire deliberation process, documenting every intermediate step, considered alternative, " +
		"and rejected hypothesis to ensure absolutely no assumption is left unchecked.\n\n",
	"max": "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n" +
		"You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively decompose the problem into " +
		"its most fundamental components, trace every causal chain to its root, and resolve the underlying cause rather than any surface symptom.\n" +
		"Do not stop reasoning until you have independently verified the solution from multiple angles and are certain that no assumption " +
		"remains unchecked and no error remains undiscovered.\n\n",
}

// deepSeekTurn is a message of a prompt.
type deepSeekTurn struct {
	role, content string
	blocks        []deepSeekBlock // of V4's user turns
	tools         []jinja.Value
	calls         []jinja.Value
	reasoning     string
	callID        string
	task          string
	hasTask       bool
}

// deepSeekBlock is a text or the result of a tool in a user turn of V4.
type deepSeekBlock struct {
	text   string
	result bool
	callID string
}

// deepSeekWriter writes one prompt.
type deepSeekWriter struct {
	*deepSeek
	b        []byte
	turns    []deepSeekTurn
	thinking bool
	drop     bool // thoughts before the last user turn
	effort   string
	lastUser int // index of the last turn of a user or developer, -1 if there is none
}

// render appends the prompt of a request whose variables are vars.
func (d *deepSeek) render(dst []byte, vars *jinja.Dict) []byte {
	get := func(name string) jinja.Value {
		v, _ := vars.Get(name)
		return v
	}
	w := deepSeekWriter{deepSeek: d, b: append(dst, deepSeekBegin...), thinking: get("thinking").Truth() || get("enable_thinking").Truth()}
	for _, m := range get("messages").Items() {
		w.turns = append(w.turns, d.turn(m))
	}
	tools := get("tools").Items()
	if d.profile == SGLang {
		w.thinking = get("thinking").Truth()
		w.prepareSGLang(tools)
		tools = nil
	}
	if d.v4 {
		w.plan4(tools, vars)
	} else {
		w.plan32(tools)
	}
	for i := range w.turns {
		if d.v4 {
			w.turn4(i)
		} else {
			w.turn32(i)
		}
	}
	return w.b
}

// turn reads one message.
func (d *deepSeek) turn(m jinja.Value) deepSeekTurn {
	t := deepSeekTurn{role: textAt(m, "role"), callID: textAt(m, "tool_call_id"), tools: m.Get("tools").Items()}
	t.calls = m.Get("tool_calls").Items()
	t.reasoning = textAt(m, "reasoning")
	t.task, t.hasTask = m.Get("task").Text()
	content := m.Get("content")
	if text, ok := content.Text(); ok {
		t.content = text
		return t
	}
	var parts []string
	for _, p := range content.Items() {
		switch kind := textAt(p, "type"); {
		case kind == "text" && t.role != "tool" || kind == "text":
			parts = append(parts, textAt(p, "text"))
		case t.role == "tool":
			parts = append(parts, "[Unsupported "+kind+"]")
		case kind == "image":
			parts = append(parts, deepSeekImage)
		default:
			refuse("DeepSeek's models read no content of type %.40q", kind)
		}
	}
	t.content = strings.Join(parts, "\n\n")
	return t
}

func (w *deepSeekWriter) findLastUser() {
	w.lastUser = -1
	for i, t := range w.turns {
		if t.role == "user" || t.role == "developer" {
			w.lastUser = i
		}
	}
}

// dropThoughts removes the thoughts before the last user turn. It returns false if it also removed turns: those of
// roles whose turns only count from there on.
func (w *deepSeekWriter) dropThoughts(keep ...string) (kept bool) {
	w.findLastUser()
	n := len(w.turns)
	var out []deepSeekTurn
	for i, t := range w.turns {
		switch {
		case i >= w.lastUser || slices.Contains(keep, t.role):
		case t.role == "assistant":
			t.reasoning = ""
		default:
			continue
		}
		out = append(out, t)
	}
	w.turns = out
	return len(out) == n
}

// plan32 prepares the turns for V3.2.
func (w *deepSeekWriter) plan32(tools []jinja.Value) {
	if len(tools) > 0 {
		w.turns = slices.Insert(w.turns, 0, deepSeekTurn{role: "system", tools: tools})
	}
	drop := w.profile == SGLang || w.turns[len(w.turns)-1].role == "user"
	if w.thinking && drop && !w.dropThoughts("user", "system", "tool") {
		refuse("a message of the developer before the last message of the user")
	}
	w.findLastUser()
}

// prepareSGLang makes the changes that SGLang makes before it calls the encoder of V3.2.
func (w *deepSeekWriter) prepareSGLang(tools []jinja.Value) {
	if last := &w.turns[len(w.turns)-1]; last.role == "assistant" {
		*last = deepSeekTurn{role: "user", content: last.content}
	}
	if w.turns[0].role != "system" {
		w.turns = slices.Insert(w.turns, 0, deepSeekTurn{role: "system"})
	}
	if len(tools) > 0 {
		w.turns[0].tools = tools
	}
}

// schemas returns the text about tools.
func (w *deepSeekWriter) schemas(tools []jinja.Value) string {
	var all []byte
	for i, tool := range tools {
		if i > 0 {
			all = append(all, '\n')
		}
		all = append(all, toJSON(tool.Get("function"))...)
	}
	text := deepSeekTools
	if w.v4 {
		text = deepSeekTools4
	}
	return strings.Replace(text, "$tools", string(all), 1)
}

func (w *deepSeekWriter) add(texts ...string) {
	for _, t := range texts {
		w.b = append(w.b, t...)
	}
}

// think adds the token that opens a thought, or the token that closes it.
func (w *deepSeekWriter) think(opens bool) {
	if opens && w.thinking {
		w.add(thinkStart)
	} else {
		w.add(thinkEnd)
	}
}

// calls adds the calls of an answer in a block with the given name.
func (w *deepSeekWriter) calls(calls []jinja.Value, block string) {
	if len(calls) == 0 {
		return
	}
	w.add("\n\n<｜DSML｜", block, ">\n")
	for _, c := range calls {
		f := c.Get("function")
		w.add("<｜DSML｜invoke name=\"", textAt(f, "name"), "\">\n")
		between := ""
		arguments := f.Get("arguments").Dict()
		if arguments == nil {
			refuse("the arguments of a call are not an object")
		}
		for key, v := range arguments.All() {
			text, isText := v.Text()
			is := "true"
			if !isText {
				text, is = string(toJSON(v)), "false"
			}
			w.add(between, "<｜DSML｜parameter name=\"", key, "\" string=\"", is, "\">", text, "</｜DSML｜parameter>")
			between = "\n"
		}
		w.add("\n</｜DSML｜invoke>\n")
	}
	w.add("</｜DSML｜", block, ">")
}

// turn32 adds turn i of a prompt of V3.2.
func (w *deepSeekWriter) turn32(i int) {
	t := w.turns[i]
	switch t.role {
	case "system":
		w.add(t.content)
		if len(t.tools) > 0 {
			w.add("\n\n", w.schemas(t.tools))
		}
	case "developer":
		if t.content == "" {
			refuse("an empty message of the developer")
		}
		w.add(deepSeekUser)
		if len(t.tools) > 0 {
			w.add("\n\n", w.schemas(t.tools))
		}
		w.add("\n\n# The user's message is: ", t.content, deepSeekAssistant)
		w.think(i == w.lastUser)
	case "user":
		w.add(deepSeekUser, t.content, deepSeekAssistant)
		w.think(i == w.lastUser)
	case "tool":
		w.result32(i)
	case "assistant":
		if w.thinking && i > w.lastUser {
			if t.reasoning == "" && len(t.calls) == 0 {
				refuse("an answer without thoughts and calls")
			}
			w.add(t.reasoning, thinkEnd)
		}
		w.add(t.content)
		w.calls(t.calls, "function_calls")
		w.add(deepSeekEnd)
	default:
		refuse("DeepSeek V3.2 has no role %.40q", t.role)
	}
}

// result32 adds the result of a tool, which is turn i.
func (w *deepSeekWriter) result32(i int) {
	from := i - 1
	for from >= 0 && w.turns[from].role == "tool" {
		from--
	}
	if from < 0 || w.turns[from].role != "assistant" || i-from > len(w.turns[from].calls) {
		refuse("messages[%d] is the result of no call", i)
	}
	if i-from == 1 {
		w.add("\n\n<function_results>")
	}
	w.add("\n<result>", w.turns[i].content, "</result>")
	if i-from == len(w.turns[from].calls) {
		w.add("\n</function_results>\n\n")
		w.think(i >= w.lastUser)
	}
}

// plan4 prepares the turns for V4.
func (w *deepSeekWriter) plan4(tools []jinja.Value, vars *jinja.Dict) {
	_, given := vars.Get("thinking")
	_, enabled := vars.Get("enable_thinking")
	w.thinking = w.thinking || !given && !enabled
	effort, _ := vars.Get("reasoning_effort")
	switch text, ok := effort.Text(); {
	case !ok && w.thinking:
		w.effort = "high"
	case !ok:
	case text == "none":
		w.thinking = false
	case text == "max":
		w.effort = "max"
	case slices.Contains([]string{"low", "minimal", "medium"}, text):
		w.effort = "low"
	default:
		w.effort = "high"
	}
	if len(tools) > 0 {
		at := slices.IndexFunc(w.turns, func(t deepSeekTurn) bool { return t.role == "system" })
		if at < 0 {
			w.turns, at = slices.Insert(w.turns, 0, deepSeekTurn{role: "system"}), 0
		}
		w.turns[at].tools = tools
	}
	w.mergeResults()
	w.sortResults()
	drop, given := vars.Get("drop_thinking")
	w.drop = (!given || drop.Truth()) && !slices.ContainsFunc(w.turns, func(t deepSeekTurn) bool { return len(t.tools) > 0 })
	if w.thinking && w.drop {
		w.dropThoughts("user", "system", "tool", "latest_reminder", "direct_search_results")
	}
	w.findLastUser()
}

// mergeResults makes one user turn of consecutive results of tools and texts of the user.
func (w *deepSeekWriter) mergeResults() {
	var out []deepSeekTurn
	for _, t := range w.turns {
		block := deepSeekBlock{text: t.content, result: t.role == "tool", callID: t.callID}
		switch open := len(out) > 0 && out[len(out)-1].role == "user"; {
		case t.role != "tool" && t.role != "user":
			out = append(out, t)
		case open && (block.result || !out[len(out)-1].hasTask):
			last := &out[len(out)-1]
			last.blocks = append(last.blocks, block)
		case block.result:
			out = append(out, deepSeekTurn{role: "user", blocks: []deepSeekBlock{block}})
		default:
			t.blocks = []deepSeekBlock{block}
			out = append(out, t)
		}
	}
	w.turns = out
}

// sortResults puts the results of tools of each user turn into the order of the calls before it.
func (w *deepSeekWriter) sortResults() {
	place := map[string]int{}
	for _, t := range w.turns {
		if t.role == "assistant" && len(t.calls) > 0 {
			clear(place)
			for i, c := range t.calls {
				id := textAt(c, "id")
				if id == "" {
					id = textAt(c.Get("function"), "id")
				}
				if id != "" {
					place[id] = i
				}
			}
		}
		var results []deepSeekBlock
		for _, b := range t.blocks {
			if b.result {
				results = append(results, b)
			}
		}
		slices.SortStableFunc(results, func(a, b deepSeekBlock) int { return place[a.callID] - place[b.callID] })
		for i, b := range t.blocks {
			if b.result {
				t.blocks[i], results = results[0], results[1:]
			}
		}
	}
}

// turn4 adds turn i of a prompt of V4.
func (w *deepSeekWriter) turn4(i int) {
	t := w.turns[i]
	if i == 0 && w.thinking {
		w.add(deepSeekEfforts[w.effort])
	}
	switch t.role {
	case "system", "developer":
		if t.role == "developer" {
			if t.content == "" {
				refuse("an empty message of the developer")
			}
			w.add(deepSeekUser)
		}
		w.add(t.content)
		if len(t.tools) > 0 {
			w.add("\n\n", w.schemas(t.tools))
		}
	case "user":
		w.add(deepSeekUser)
		for k, b := range t.blocks {
			if k > 0 {
				w.add("\n\n")
			}
			if b.result {
				w.add("<tool_result>", b.text, "</tool_result>")
			} else {
				w.add(b.text)
			}
		}
	case "latest_reminder":
		w.add(deepSeekReminder, t.content)
	case "assistant":
		if w.thinking && (i == 0 || !w.turns[i-1].hasTask) && (!w.drop || i > w.lastUser) {
			w.add(t.reasoning, thinkEnd)
		}
		w.add(t.content)
		w.calls(t.calls, "tool_calls")
		w.add(deepSeekEnd)
	default:
		refuse("DeepSeek V4 has no role %.40q", t.role)
	}
	w.after4(i)
}

// after4 adds the tokens that open an answer behind turn i of V4.
func (w *deepSeekWriter) after4(i int) {
	t := w.turns[i]
	last := i == len(w.turns)-1
	if !last && w.turns[i+1].role != "assistant" && w.turns[i+1].role != "latest_reminder" {
		return
	}
	if t.hasTask {
		if !slices.Contains(deepSeekTasks, t.task) {
			refuse("DeepSeek V4 has no task %.40q", t.task)
		}
		if t.task == "action" {
			w.add(deepSeekAssistant)
			w.think(true)
		}
		w.add("<｜", t.task, "｜>")
		return
	}
	opens := t.role == "user" || t.role == "developer" || t.role == "system" && (last || w.turns[i+1].role == "assistant")
	if opens {
		w.add(deepSeekAssistant)
		w.think(!w.drop || i >= w.lastUser)
	}
}
