// SPDX-License-Identifier: Apache-2.0

package openai_test

import (
	"bytes"
	"encoding/json"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"github.com/kvroute/kvroute/internal/enginesim"
	"github.com/kvroute/kvroute/internal/fixtures"
	"github.com/kvroute/kvroute/internal/openai"
	"github.com/kvroute/kvroute/tokenizer"
)

var noon = time.Date(2026, 8, 22, 12, 0, 0, 0, time.UTC)

// simulated is the model of the simulated engines, with another template if there is
// one.
func simulated(t testing.TB, template string, cache *tokenizer.Cache) *tokenizer.Model {
	t.Helper()
	m, err := tokenizer.LoadModel(enginesim.ModelFiles(), tokenizer.ModelConfig{ChatTemplate: template, Cache: cache})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// begin returns what is known of the prompt of a body that was cut.
func begin(t testing.TB, m *tokenizer.Model, e openai.Endpoint, cut []byte) (tokenizer.Prompt, bool) {
	t.Helper()
	_, rest, err := openai.ParseBeginning(e, cut)
	if err != nil || rest == nil {
		return tokenizer.Prompt{}, false
	}
	return m.EncodeBeginning(t.Context(), nil, rest, noon)
}

// whole returns the prompt of a whole body.
func whole(t testing.TB, m *tokenizer.Model, e openai.Endpoint, body []byte) tokenizer.Prompt {
	t.Helper()
	b, bad := openai.Parse(e, body)
	if bad != nil {
		t.Fatalf("%s: %s", bad.Message, body)
	}
	p, err := m.Encode(t.Context(), nil, b.Request, noon)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// What a cut body tells, by kind: how much of the text that is there is exact, how
// much likely.
func TestBeginnings(t *testing.T) {
	m := simulated(t, "", nil)
	const system = `{"role":"system","content":"You are a helpful assistant who knows the city of Bern."}`
	const tools = `"tools":[{"type":"function","function":{"name":"weather","description":"d","parameters":{}}}],"tool_choice":"auto"`
	long := strings.Repeat("a word and another one, ", 40)
	const user = `{"role":"user","content":"Where is the big fountain that everybody in the whole city talks abou`
	for _, c := range []struct {
		name, path, cut, rest string
		// What the ids' text ends in: the exact ones' and all. It is some bytes short of
		// what is there, since a control token may begin in those.
		exact, likely string
	}{
		{
			"in a text, tools known", "chat", `{"model":"m",` + tools + `,"messages":[` + system + "," + user, `t?"}]}`,
			"that everybody in the", "that everybody in the",
		},
		{
			"in a text, tools to come", "chat", `{"model":"m","messages":[` + system + "," + user, `t?"}],` + tools + `}`,
			"", "that everybody in the",
		},
		{
			"between messages", "chat", `{"model":"m",` + tools + `,"messages":[` + system + "," + user + `t?"},`, `{"role":"assistant","content":"There."}]}`,
			"everybody in the whole", "in the whole city talks about",
		},
		{
			"in what an assistant says", "chat", `{"model":"m",` + tools + `,"messages":[` + system + "," + user + `t?"},{"role":"assistant","content":"A long ans`, `wer"}]}`,
			"everybody in the whole", "in the whole city talks about",
		},
		{
			"in a part", "chat", `{"model":"m",` + tools + `,"messages":[{"role":"user","content":[{"type":"text","text":"Where is"},{"type":"text","text":"the big fountain that everybody talks abou`, `t?"}]}]}`,
			"<|im_end|>", "Where is\nthe big fountain that",
		},
		{
			"behind the messages", "chat", `{"model":"m",` + tools + `,"messages":[` + system + `],"logit_bias":{"1":2,`, `"3":4}}`,
			"assistant who knows", "Bern.<|im_end|>",
		},
		{"a text to complete", "completion", `{"model":"m","prompt":"` + long + `and mo`, `re"}`, ", a word and", ", a word and"},
		{"a whole text to complete", "completion", `{"model":"m","prompt":"` + long + `more","logit_bias":{`, `}}`, ", a word and", ", a word and"},
		{"a list of texts", "completion", `{"model":"m","prompt":["` + long + `","an`, `d more"]}`, "", ""},
		{"lists of ids", "completion", `{"model":"m","prompt":[[1,2,3],[4,5,`, `6,7,8,9]]}`, "", ""},
		{"before the messages", "chat", `{"model":"m",` + tools, `,"messages":[` + system + `]}`, "", ""},
		{"in a name", "chat", `{"model":"m",` + tools + `,"messages":[` + system + `],"mod`, `el":"n"}`, "assistant who knows", "Bern.<|im_end|>"},
		{"in the salt", "chat", `{"model":"m",` + tools + `,"messages":[` + system + `],"cache_salt":"secr`, `et"}`, "", ""},
		{"in hints", "chat", `{"model":"m",` + tools + `,"messages":[` + system + `],"nvext":{"a":1,`, `"cache_salt":"secret"}}`, "", ""},
		{"in a model's name", "chat", `{"messages":[` + system + `],"model":"m`, `odel"}`, "", ""},
		{"with a history elsewhere", "responses", `{"model":"m","input":"` + long, `","previous_response_id":"r"}`, "", ""},
		{"with a system to come", "messages", `{"model":"m","max_tokens":9,"messages":[` + user, `t?"}],"system":"Be brief."}`, "", "that everybody in the"},
		{"with a known system", "messages", `{"model":"m","max_tokens":9,"tools":[],"system":"Be brief.","messages":[` + user, `t?"}]}`, "that everybody in the", "that everybody in the"},
	} {
		t.Run(c.name, func(t *testing.T) {
			e := map[string]openai.Endpoint{"chat": openai.ChatCompletions, "completion": openai.Completions, "responses": openai.Responses, "messages": openai.Messages}[c.path]
			p, ok := begin(t, m, e, []byte(c.cut))
			if ok != (c.likely != "") {
				t.Fatalf("known: %v", ok)
			}
			if !ok {
				return
			}
			exact, likely := string(m.Tokenizer().Decode(nil, p.IDs[:p.Exact])), string(m.Tokenizer().Decode(nil, p.IDs))
			if !strings.HasSuffix(exact, c.exact) || c.exact == "" && exact != "" {
				t.Errorf("exact is %q, want …%q", exact, c.exact)
			}
			if !strings.HasSuffix(likely, c.likely) {
				t.Errorf("likely is %q, want …%q", likely, c.likely)
			}
			if p.Mode != tokenizer.ExactPrefix || p.Reason != tokenizer.Cut {
				t.Errorf("mode %s, reason %s", p.Mode, p.Reason)
			}
			w := whole(t, m, e, []byte(c.cut+c.rest))
			if at := tokenizer.FirstDiff(p.IDs[:p.Exact], w.IDs); at >= 0 && at < p.Exact {
				t.Errorf("position %d of %d is another id: %q, whole %q", at, p.Exact, exact, m.Tokenizer().Decode(nil, w.IDs))
			}
		})
	}
}

// Whatever a body is cut at, the exact ids are those that the whole body's prompt
// begins with, or none: of random requests, with any template.
func TestExactBeginningsAreTheWholeBodys(t *testing.T) {
	own, seen := simulated(t, "", tokenizer.NewCache(1<<20)), 0
	r := rand.New(rand.NewPCG(1, 2))
	for range 3 {
		e, body := randomBody(r)
		seen += checkCuts(t, own, e, body, everywhere(body))
	}
	if seen == 0 {
		t.Error("nothing was told")
	}
	path := fixtures.Path(t, "templates", "templates.json")
	if path == "" {
		return
	}
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var templates map[string]string
	if err := json.Unmarshal(data, &templates); err != nil {
		t.Fatal(err)
	}
	for _, name := range slices.Sorted(maps.Keys(templates)) {
		t.Run(name, func(t *testing.T) {
			m := simulated(t, templates[name], tokenizer.NewCache(1<<20))
			for range 2 {
				e, body := randomBody(r)
				checkCuts(t, m, e, body, somewhere(r, body))
			}
		})
	}
}

// Beginnings of which more was told once than is certain.
func TestBeginningsOfWhichTooMuchWasTold(t *testing.T) {
	const plain = `{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}`
	for name, c := range map[string]struct {
		template string
		endpoint openai.Endpoint
		body     string
	}{
		"a first line for billing goes": {plain, openai.ChatCompletions, `{"model":"m","messages":[{"role":"system","content":"x-anthropic-billing-header: a\nYou are kind to everybody, always and ever."},{"role":"user","content":"a"}]}`},
		"whose result it is, is written first": {
			`{% for m in messages %}[{{ m.role }}{% if m.role == 'tool' %}{% if not m.tool_call_id %}{{ raise_exception('of what?') }}{% endif %}{{ m.tool_call_id }}{% endif %}]{{ m.content }}{% endfor %}`, openai.ChatCompletions,
			`{"model":"m","messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"},{"role":"tool","content":"what was found in the whole city of Bern","tool_call_id":"called"}]}`,
		},
		"results stand before the texts beside them": {plain, openai.Messages, `{"model":"m","system":"s","tools":[],"messages":[{"role":"user","content":[{"type":"text","text":"this is what was found in the whole city"},{"type":"tool_result","tool_use_id":"called","content":"a fountain"}]}]}`},
		"quotes depend on all of the text":           {`{% for m in messages %}{{ [m.content] }}{% endfor %}`, openai.ChatCompletions, `{"model":"m","messages":[{"role":"user","content":"it's what everybody says of the \"fountain\""}]}`},
		"nothing goes without a user": {
			`{% if messages | selectattr('role', 'equalto', 'user') | list | length == 0 %}{{ raise_exception('nobody asks') }}{% endif %}` + plain, openai.ChatCompletions,
			`{"model":"m","messages":[{"role":"system","content":"You are kind to everybody, always and ever."},{"role":"user","content":"a question"}]}`,
		},
		"nothing goes without tools": {
			`{% if not tools %}{{ raise_exception('no tools') }}{% endif %}{{ tools | tojson }}` + plain, openai.ChatCompletions,
			`{"model":"m","messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"},{"role":"user","content":"c"}],"tools":[{"type":"function","function":{"name":"f","description":"finds what there is to be found"}}]}`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			if checkCuts(t, simulated(t, c.template, nil), c.endpoint, []byte(c.body), everywhere([]byte(c.body))) == 0 {
				t.Error("nothing was told")
			}
		})
	}
}

// everywhere are the places to cut a body at, somewhere a few of them.
func everywhere(body []byte) (at []int) {
	for k := range body {
		at = append(at, k)
	}
	return at
}

func somewhere(r *rand.Rand, body []byte) []int { return r.Perm(len(body))[:min(len(body), 12)] }

// FuzzBeginnings looks for a request and a place to cut it at of which too much is told.
func FuzzBeginnings(f *testing.F) {
	models := []*tokenizer.Model{
		simulated(f, "", nil),
		// What templates do: they look at the last messages, take thoughts out, trim, put
		// tools before the last user's message, and refuse orders of roles.
		simulated(f, `{%- if tools %}{{ tools | tojson }}{% endif %}{%- for m in messages %}{%- set c = m.content | trim %}
{%- if m.role == 'assistant' and '</think>' in c %}{% set c = c.split('</think>')[-1] %}{% endif %}{%- if loop.last and c.endswith('</tool_response>') %}LAST {% endif %}{{ m.role + c }}{% endfor %}`, nil),
		simulated(f, `{%- set user = namespace(at=-1) %}{%- for m in messages %}{% if m.role == 'user' %}{% set user.at = loop.index0 %}{% endif %}{% endfor %}{%- if user.at < 0 %}{{ raise_exception('nobody asks') }}{% endif %}
{%- for m in messages %}{%- if loop.index0 == user.at and tools %}{{ tools | tojson }}{% endif %}{{ '[' + m.role + ']' + (m.content or '') }}{% endfor %}{{ enable_thinking }}`, nil),
	}
	for seed := range uint64(8) {
		f.Add(seed, uint16(seed*50), uint8(seed))
	}
	f.Fuzz(func(t *testing.T, seed uint64, at uint16, model uint8) {
		e, body := randomBody(rand.New(rand.NewPCG(seed, 0)))
		checkCuts(t, models[int(model)%len(models)], e, body, []int{int(at) % len(body)})
	})
}

// So it is with any tokenizer, whatever it rewrites and joins, and with prompts that are
// made in code.
func TestExactBeginningsWithAnyTokenizer(t *testing.T) {
	folders := map[string]string{}
	own, err := filepath.Glob("../../tokenizer/testdata/golden/*.json")
	if err != nil || len(own) < 20 {
		t.Fatalf("%d tokenizers: %v", len(own), err)
	}
	for _, file := range own {
		folders[filepath.Base(file)] = file
	}
	folders["mistral"] = "../../tokenizer/testdata/mistral/tekken.json"
	for _, name := range []string{"qwen3", "gpt-oss"} {
		if path := fixtures.Path(t, "tokenizers", name); path != "" {
			folders[name] = path
		}
	}
	const chatML = `{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}`
	for _, name := range slices.Sorted(maps.Keys(folders)) {
		t.Run(name, func(t *testing.T) {
			files, conf := os.DirFS(folders[name]), tokenizer.ModelConfig{Cache: tokenizer.NewCache(1 << 20)}
			if ext := filepath.Ext(name); ext == ".json" || name == "mistral" {
				data, err := os.ReadFile(folders[name])
				if err != nil {
					t.Fatal(err)
				}
				as := "tekken.json"
				if ext == ".json" {
					as, conf.ChatTemplate = "tokenizer.json", chatML
				}
				files = fstest.MapFS{as: {Data: data}}
			}
			m, err := tokenizer.LoadModel(files, conf)
			if err != nil {
				t.Fatal(err)
			}
			r := rand.New(rand.NewPCG(3, 4))
			told := 0
			// An engine refuses most of what is random, if it is strict.
			for n := 0; n < 4 || told == 0 && n < 100; n++ {
				e, body := randomBody(r)
				told += checkCuts(t, m, e, body, somewhere(r, body))
			}
			// A text that is rewritten as a whole may be rewritten in another way as a longer one.
			if rewritten := strings.HasPrefix(name, "unk-"); told == 0 && !rewritten {
				t.Error("nothing was told")
			}
		})
	}
}

// checkCuts compares the beginnings of a body with the whole, if an engine takes that,
// and returns how many of them tell some ids.
func checkCuts(t *testing.T, m *tokenizer.Model, e openai.Endpoint, body []byte, places []int) (told int) {
	t.Helper()
	w := whole(t, m, e, body)
	if w.Mode == tokenizer.Bytes {
		return 0
	}
	for _, at := range places {
		p, ok := begin(t, m, e, body[:at])
		if !ok || p.Mode == tokenizer.Bytes {
			continue
		}
		told++
		n := min(p.Exact, w.Exact)
		if d := tokenizer.FirstDiff(p.IDs[:n], w.IDs[:min(n, len(w.IDs))]); d >= 0 {
			t.Fatalf("cut at %d, position %d of %d is another id\n%s\n…%s\nexact %q\nwhole %q", at, d, p.Exact, body[:at], body[at:],
				m.Tokenizer().Decode(nil, p.IDs[:p.Exact]), m.Tokenizer().Decode(nil, w.IDs[:w.Exact]))
		}
	}
	return told
}

// randomBody makes a request with fields in any order, of everything that has an effect
// on the prompt, short of what [openai.ParseBeginning] says makes it another one.
func randomBody(r *rand.Rand) (openai.Endpoint, []byte) {
	some := func(of ...string) string { return of[r.IntN(len(of))] }
	words := func() string {
		var b strings.Builder
		for range r.IntN(9) {
			b.WriteString(some("word", " ", " the", "\n", "é", "日本", "123", "4", "'s", "</think>", "<think>", "<tool_response>", "</tool_response>", "  ", "{", "\"", "\\", "<|im_end|>", "<|im_st", "😀", "\t", "x-anthropic-billing-header: a"))
		}
		return b.String()
	}
	quoted := func(s string) string {
		b, err := json.Marshal(s)
		if err != nil {
			panic(err) // a string always marshals
		}
		if r.IntN(2) == 0 {
			b = bytes.ReplaceAll(b, []byte("😀"), []byte(`\ud83d\ude00`))
		}
		return string(b)
	}
	member := func(name, value string) string { return quoted(name) + some(":", ": ") + value }
	object := func(members ...string) string {
		r.Shuffle(len(members), func(i, j int) { members[i], members[j] = members[j], members[i] })
		return "{" + strings.Join(members, some(",", ", ")) + "}"
	}
	var fields []string
	var e openai.Endpoint
	switch r.IntN(8) {
	case 0:
		fields = append(fields, member("prompt", some(quoted(words()+words()), "[1,22,333,4]", "["+quoted(words())+","+quoted(words())+"]", "[[1,2],[33,4,5]]")))
		e = openai.Completions
	case 1:
		e = openai.Messages
		if r.IntN(2) == 0 {
			fields = append(fields, member("system", some(quoted(words()), `[{"type":"text","text":`+quoted(words())+`}]`)))
		}
		var messages []string
		for range 1 + r.IntN(3) {
			content := some(quoted(words()), "["+object(member("type", `"text"`), member("text", quoted(words())))+`,{"type":"text","text":`+quoted(words())+"}]")
			messages = append(messages, object(member("role", `"user"`), member("content", content)))
			if r.IntN(2) == 0 {
				messages = append(messages,
					`{"role":"assistant","content":[{"type":"text","text":`+quoted(words())+`},{"type":"tool_use","id":"call12345","name":"f","input":{"a":1}}]}`,
					`{"role":"user","content":[{"type":"text","text":`+quoted(words())+`},{"type":"tool_result","tool_use_id":"call12345","content":`+quoted(words())+`}]}`)
			}
			messages = append(messages, object(member("role", `"assistant"`), member("content", quoted(words()))))
		}
		fields = append(fields, member("messages", "["+strings.Join(messages, ",")+"]"), member("max_tokens", "9"))
	default:
		e = openai.ChatCompletions
		var messages []string
		if r.IntN(2) == 0 {
			messages = append(messages, object(member("role", `"system"`), member("content", quoted(words()))))
		}
		for range 1 + r.IntN(3) {
			content := some(quoted(words()), quoted(words()), "["+object(member("type", `"text"`), member("text", quoted(words())))+","+object(member("type", `"text"`), member("text", quoted(words())))+"]",
				`[{"type":"text","text":`+quoted(words())+`},{"type":"image_url","image_url":{"url":"data:,a"}}]`)
			user := []string{member("role", `"user"`), member("content", content)}
			if r.IntN(4) == 0 {
				user = append(user, member("name", quoted("ann")))
			}
			messages = append(messages, object(user...))
			answer := []string{member("role", `"assistant"`), member("content", quoted(words()))}
			switch r.IntN(4) {
			case 0:
				answer = append(answer, member("tool_calls", `[{"id":"call12345","type":"function","function":{"name":"f","arguments":"{\"a\": 1}"}}]`))
				messages = append(messages, object(answer...), object(member("role", `"tool"`), member("tool_call_id", `"call12345"`), member("content", quoted(words()))))
				if r.IntN(2) == 0 {
					continue
				}
				answer = answer[:0]
				answer = append(answer, member("role", `"assistant"`), member("content", quoted(words())))
			case 1:
				answer = append(answer, member("reasoning_content", quoted(words())))
			}
			messages = append(messages, object(answer...))
		}
		if r.IntN(3) > 0 {
			messages = append(messages, object(member("role", `"user"`), member("content", quoted(words()))))
		}
		fields = append(fields, member("messages", "["+strings.Join(messages, ",")+"]"))
		for _, f := range []string{
			member("tools", `[{"type":"function","function":{"name":"f","description":`+quoted(words())+`,"parameters":{"type":"object","properties":{"a":{"type":"string","description":"d"}}}}}]`),
			member("reasoning_effort", some(`"low"`, `"high"`)), member("documents", `[{"title":"T","text":`+quoted(words())+`}]`),
			member("chat_template_kwargs", some(`{"enable_thinking":false}`, `{"enable_thinking":true}`)), member("add_generation_prompt", "false"), member("tool_choice", `"none"`),
		} {
			if r.IntN(4) == 0 {
				fields = append(fields, f)
			}
		}
	}
	return e, []byte(object(append(fields, member("model", `"m"`), member("stream", "true"))...))
}
