// SPDX-License-Identifier: Apache-2.0

package top

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/url"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unicode/utf8"

	tea "charm.land/bubbletea/v2"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// within is a deadline that only a fault exceeds.
const within = time.Minute

// sections are what a kvroute with three workers and one decision sends. %s is a worker's name.
const (
	replicaJSON = `{"replica":"a","version":"1.2.3","now_ms":100000,"ready":{"status":"degraded","checks":{"nats":false,"workers":true}},
		"active_requests":3,"peers":[{"router_id":7,"active_requests":5,"whole":true}]}`
	workersJSON = `[
		{"worker_id":1,"dp_rank":0,"name":"gpu-1","address":"10.0.0.1:8000","model":"llama","health":"healthy","kv_events":"ok","audit":{"responses":8,"rule":"drop"},"cached_blocks":10,"guessed_blocks":1,"active_requests":2,"pend_tokens":900,"routed":41},
		{"worker_id":1,"dp_rank":1,"name":"gpu-1","address":"10.0.0.1:8000","model":"llama","health":"degraded","failing":true,"kv_events":"ok","pend_tokens":1200,"routed":2,"failures":6,"audit":{"requests":9,"departs":true}},
		{"worker_id":2,"dp_rank":0,"name":"\u001b[31mevil\n","address":"10.0.0.2:8000","model":"llama","health":"unhealthy","kv_events":"none","never_heard":true,"routed":77}]`
	decisionsJSON = `[{"id":"r-1","time":"2026-11-23T17:00:00Z","model":"llama","reason":"kv","worker":{"worker_id":1,"dp_rank":1},"worker_name":"gpu-1",
		"address":"10.0.0.1:8000","prompt_tokens":200,"cached_tokens":150,"mean_cached_tokens":60.5,"first_token":"2026-11-23T17:00:00.25Z"}]`
	historyJSON = `[{"time_ms":80000,"requests":900},{"time_ms":96000,"requests":12,"ttft_ms":80,"ttft_p90_ms":140,"prompt_tokens":1000,"cached_tokens":250},
		{"time_ms":98000,"requests":13,"failed":2,"prompt_tokens":1000,"cached_tokens":250}]`
	benefitJSON = `[{"model":"llama","requests":9,"saved_share":0.654,"rated_requests":8,"saved_ms":41.5}]`
)

// section is a part of the feed.
type section struct {
	name string
	data []byte
}

func (s section) object() []byte { return fmt.Appendf(nil, "{%q:%s}", s.name, s.data) }

func sections() []section {
	return []section{
		{"replica", []byte(replicaJSON)},
		{"workers", []byte(workersJSON)},
		{"decisions", []byte(decisionsJSON)},
		{"history", []byte(historyJSON)},
		{"benefit", []byte(benefitJSON)},
		{"prefixes", []byte(`[]`)},
		{"new in a later version", []byte(`1`)},
	}
}

// filled returns a screen that shows the sections, and sends it more messages.
func filled(t *testing.T, width, height int, messages ...tea.Msg) *screen {
	t.Helper()
	s := &screen{}
	s.Update(tea.WindowSizeMsg{Width: width, Height: height})
	for _, part := range sections() {
		s.Update(part.object())
	}
	for _, m := range messages {
		s.Update(m)
	}
	return s
}

func key(name rune) tea.KeyPressMsg { return tea.KeyPressMsg{Code: name, Text: string(name)} }

// text returns what a terminal without styles shows.
func text(s *screen) string {
	return strings.NewReplacer(bold, "", red, "", yellow, "", plain, "").Replace(s.View().Content)
}

func TestScreen(t *testing.T) {
	got := text(filled(t, 84, 24))
	at := time.Date(2026, 11, 23, 17, 0, 0, 0, time.UTC).Local().Format(time.TimeOnly)
	want := `kvroute a  1.2.3  degraded  check failed: nats
requests/s  2.5  failed/s  0.2  TTFT  mean 80 ms, p90 140 ms  cached  25 %
llama  saves 65 % of the prefill by estimate, 42 ms of each first token
active requests of replicas  3 here  5 of 7

worker      health       active  pending   cached   routed  failed  events
?[31mevil?  ✕ unhealthy       0        0        0       77       0  never heard
gpu-1/1     ▲ degraded        0     1200        0        2       6  ok, departs
gpu-1       ● healthy         2      900       11       41       0  ok, rule drop

time      worker    prompt  cached  TTFT ms  reason  model  request
` + at + `  gpu-1/1      200    75 %      250  kv      llama  r-1
` + strings.Repeat("\n", 11) + "3 workers by health  up/down scroll  s sort  m model  ? help  q quit"
	if got != want {
		t.Errorf("the screen is\n%s\n\nwant\n%s", got, want)
	}
	if styled := filled(t, 84, 24).View(); !styled.AltScreen || !strings.Contains(styled.Content, red+"?[31mevil?") || !strings.Contains(styled.Content, yellow+"gpu-1/1") {
		t.Errorf("styles are missing: %q", styled.Content)
	}
}

// Workers whose events are incomplete are marked as the server says, whatever the state is called.
func TestIncompleteEventsAreMarked(t *testing.T) {
	s := &screen{}
	s.Update(tea.WindowSizeMsg{Width: 120, Height: 24})
	s.Update([]byte(`{"workers":[
		{"name":"gpu-1","health":"healthy","kv_events":"block_size_mismatch","kv_events_level":"fault"},
		{"name":"gpu-2","health":"healthy","kv_events":"new_state","kv_events_level":"off"}]}`))
	got := s.View().Content
	if !strings.Contains(got, "! block_size_mismatch") || !strings.Contains(got, yellow+"gpu-1") || strings.Contains(got, yellow+"gpu-2") {
		t.Errorf("the screen is %q", got)
	}
}

// A worker that an item names is not shown as healthy: its row has the words of the dashboard, and the worst rows are first.
func TestRowsHaveTheWordsOfTheItems(t *testing.T) {
	var p picture
	err := p.apply([]byte(`{"workers":[
		{"worker_id":1,"name":"a","health":"healthy"},{"worker_id":2,"name":"b","health":"not_ready"},{"worker_id":3,"name":"c","health":"healthy","failing":true},
		{"worker_id":4,"name":"d","health":"healthy","faults":[{"what":"block_size"}]},{"worker_id":5,"name":"e","health":"unhealthy","faults":[{"what":"silent"}]},
		{"worker_id":6,"name":"f","health":"healthy","draining":true},{"worker_id":6,"dp_rank":1,"name":"f","health":"healthy"}],
		"attention":[
		{"level":"fault","kind":"worker","what":"silent","worker_id":5,"dp_rank":0,"also":[{"level":"note","kind":"worker","what":"avoided","worker_id":5,"dp_rank":0}]},
		{"level":"fault","kind":"worker","what":"block_size","worker_id":4,"dp_rank":0},{"level":"note","kind":"worker","what":"avoided","worker_id":3,"dp_rank":0},
		{"level":"note","kind":"worker","what":"health","worker_id":2,"dp_rank":0},{"level":"fault","kind":"left","what":"left","worker_id":1,"dp_rank":0},
		{"level":"note","kind":"worker","what":"departs","worker_id":6,"dp_rank":1},{"level":"fault","kind":"replica","what":"bus"}]}`))
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, r := range p.rows(0) {
		got = append(got, r.label+" "+r.health)
	}
	want := []string{"d ✕ healthy, block_size", "e ✕ unhealthy, silent, avoided", "b ▲ not ready", "c ▲ healthy, avoided", "f/1 ▲ healthy, departs", "f ◌ healthy, draining", "a ● healthy"}
	if !slices.Equal(got, want) {
		t.Errorf("the rows are %q, want %q", got, want)
	}
}

// The time of a first token that nobody saw is marked.
func TestFirstTokensThatNobodySawAreMarked(t *testing.T) {
	var p picture
	const at = `{"time":"2026-11-23T17:00:00Z","first_token":"2026-11-23T17:00:00.003Z","first_token_by":"`
	if err := p.apply([]byte(`{"decisions":[` + at + `observer"},` + at + `rate"},` + at + `order"},` + at + `end"},{"first_token_by":"end"}]}`)); err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, line := range p.decisionTable(0)[1:] {
		got = append(got, strings.Fields(line)[4])
	}
	if want := []string{"3", "~3", "~3", "<3", "-"}; !slices.Equal(got, want) {
		t.Errorf("the times are %q, want %q", got, want)
	}
}

// A text that is cut ends with a sign of it, in cells and at the end of the screen.
func TestACutTextHasASign(t *testing.T) {
	long := strings.Repeat("worker", 20)
	lines := table([][]string{{"name", "request"}, {long, long}}, 0)
	if want := long[:maxCell-1] + "…  " + long[:maxID-1] + "…"; lines[1] != want {
		t.Errorf("%q, want %q", lines[1], want)
	}
	if got := clip("twenty-one characters", 20); got != "twenty-one characte…" || clip("twenty", 6) != "twenty" {
		t.Errorf("%q", got)
	}
}

// Workers of one order are sorted by name, with numbers as numbers.
func TestNamesAreSortedByTheirNumbers(t *testing.T) {
	want := []string{"", "a", "gpu-02", "gpu-2", "gpu-2/1", "gpu-2b", "gpu-10", "gpu-10/2", "gpu-10/11", "gpu-18446744073709551616", "gpu-a"}
	got := slices.Clone(want)
	rand.Shuffle(len(got), func(i, j int) { got[i], got[j] = got[j], got[i] })
	if slices.SortFunc(got, compareNames); !slices.Equal(got, want) {
		t.Errorf("sorted %q, want %q", got, want)
	}
	var p picture
	if err := p.apply([]byte(`{"workers":[{"worker_id":1,"name":"worker-10","health":"healthy"},{"worker_id":2,"name":"worker-2","health":"healthy"}]}`)); err != nil {
		t.Fatal(err)
	}
	if rows := p.rows(1); rows[0].label != "worker-2" {
		t.Errorf("%s comes first", rows[0].label)
	}
}

// What needs attention is named above the tables, with its time and what to do.
func TestAttentionIsNamed(t *testing.T) {
	s := &screen{}
	s.Update(tea.WindowSizeMsg{Width: 120, Height: 40})
	s.Update([]byte(`{"workers":[{"name":"gpu-1","health":"unhealthy","faults":[{"what":"silent","text":"connection refused"}]}],
		"attention":[{"level":"fault","what":"silent","text":"worker gpu-1 has the fault silent: connection refused","advice":"start it","since":"2026-11-23T17:00:00Z",
			"also":[{"text":"worker gpu-1 failed","since":"2026-11-23T16:59:50Z"},{"text":"b"},{"text":"c"},{"text":"d"},{"text":"e"}]},{"level":"note","what":"tokens","text":"\u202emodel"}]}`))
	got := s.View().Content
	at := time.Date(2026, 11, 23, 17, 0, 0, 0, time.UTC).Local()
	before := at.Add(-10 * time.Second).Format(time.TimeOnly)
	for _, want := range []string{
		red + "! " + at.Format(time.TimeOnly) + " worker gpu-1 has the fault silent: connection refused; start it" + plain + "\n" +
			red + "!   also " + before + " worker gpu-1 failed" + plain + "\n" + red + "!   also b" + plain + "\n" + red + "!   also c" + plain + "\n" + red + "!   and 2 more" + plain,
		red + "! ?model" + plain, "✕ unhealthy, silent",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("no %q in %q", want, got)
		}
	}
	var items []string
	for i := range 9 {
		items = append(items, fmt.Sprintf(`{"text":"item %d"}`, i))
	}
	s.Update([]byte(`{"attention":[` + strings.Join(items, ",") + `]}`))
	if got := s.View().Content; !strings.Contains(got, "! and 3 more") || strings.Contains(got, "item 6") {
		t.Errorf("nine items: %q", got)
	}
}

// Each model has a line of its own, with the measured difference from round robin if there is one. Ids of requests are whole.
func TestModelsAndIds(t *testing.T) {
	s := &screen{}
	s.Update(tea.WindowSizeMsg{Width: 200, Height: 40})
	id := strings.Repeat("0123456789abcdef", 4)
	s.Update([]byte(`{"benefit":[{"model":"a","saved_share":0.5},{"model":"b","group":"g","saved_share":0.25,"rated_requests":1,"saved_ms":7},{"model":"c","why":"router mode random does not look for cached prompts"},{"model":"d"},{"model":"e"},{"model":"f"}],
		"holdout":{"share":0.1,"confidence":0.95,"models":[
			{"model":"a","routed":{"mean_ms":84.2},"round_robin":{"mean_ms":204.6},"difference_ms":120.4,"low_ms":80.2,"high_ms":160.6},
			{"model":"b","routed":{"mean_ms":1},"round_robin":{"mean_ms":2},"why":"each side needs the first tokens of 30 requests"}]},
		"decisions":[{"id":"` + id + `","worker":{"worker_id":1}}]}`))
	got := text(s)
	for _, want := range []string{
		"a  saves 50 % of the prefill by estimate\n", "b on group g  saves 25 % of the prefill by estimate, 7 ms of each first token\n", "and 1 more model\n", "c  no estimate of what is saved: router mode random does not look for cached prompts\n",
		"a  mean TTFT 84 ms, of round-robin requests 205 ms: 120 ms more, 80 to 161 with 95 % confidence\n",
		"b  mean TTFT 1 ms, of round-robin requests 2 ms (each side needs the first tokens of 30 requests)\n", id,
	} {
		if !strings.Contains(got, want) {
			t.Errorf("no %q in\n%s", want, got)
		}
	}
}

// A key selects the traffic of a model, and of each of its router groups.
func TestModelsAndGroupsAreSelected(t *testing.T) {
	s := &screen{}
	s.Update(tea.WindowSizeMsg{Width: 160, Height: 40})
	s.Update([]byte(`{"workers":[{"worker_id":1,"name":"gpu-1","model":"a","health":"healthy"},{"worker_id":2,"group":"far","model":"a","health":"healthy"},{"worker_id":3,"name":"gpu-3","model":"b","health":"healthy"}],
		"benefit":[{"model":"a","saved_share":0.1},{"model":"a","group":"far","saved_share":0.2},{"model":"a","group":"left\u202e","saved_share":0.3},{"model":"b","saved_share":0.4}],
		"holdout":{"share":0.1,"models":[{"model":"a","why":"few"},{"model":"b","why":"few"}]},
		"attention":[{"text":"worker gpu-3 is unhealthy"}],
		"decisions":[{"id":"r-1","model":"a","worker":{"worker_id":1}},{"id":"r-2","model":"a","group":"far","worker":{"worker_id":2}},{"id":"r-3","model":"b","worker":{"worker_id":3}}]}`))
	all := []string{"gpu-1 ", "group far ", "gpu-3 ", "r-1", "r-2", "r-3", "a  saves 10 %", "a on group far  saves 20 %", "a on group left?  saves 30 %", "b  saves 40 %", "a  mean TTFT", "b  mean TTFT"}
	for _, c := range []struct{ title, shown string }{
		{"3 workers by health", "0 1 2 3 4 5 6 7 8 9 10 11"},
		{"2 workers of a by health", "0 1 3 4 6 7 8 10"},
		{"1 worker of a without a group by health", "0 3 6 10"},
		{"1 worker of a on group far by health", "1 4 7 10"},
		{"0 workers of a on group left? by health", "8 10"},
		{"1 worker of b by health", "2 5 9 11"},
		{"3 workers by health", "0 1 2 3 4 5 6 7 8 9 10 11"},
	} {
		got := text(s)
		var shown []string
		for i, part := range all {
			if strings.Contains(got, "\n"+part) || strings.Contains(got, "  "+part+"\n") {
				shown = append(shown, fmt.Sprint(i))
			}
		}
		if list := strings.Join(shown, " "); list != c.shown || !strings.Contains(got, "\n"+c.title+"  up/down") || !strings.Contains(got, "! worker gpu-3") {
			t.Errorf("%s: shows %s, want %s:\n%s", c.title, list, c.shown, got)
		}
		s.Update(key('m'))
	}
	s.Update(key('m'))
	s.Update([]byte(`{"workers":[],"benefit":[]}`)) // the selected model is gone
	s.Update(key('m'))
	if got := text(s); !strings.Contains(got, "0 workers by health") {
		t.Errorf("after a model is gone:\n%s", got)
	}
}

// The screen fits every terminal.
func TestScreenFits(t *testing.T) {
	for width := 1; width < 160; width += 3 {
		for height := 1; height < 60; height++ {
			for _, s := range []*screen{filled(t, width, height), filled(t, width, height, key('?')), filled(t, width, height, io.EOF)} {
				lines := strings.Split(text(s), "\n")
				if len(lines) != height {
					t.Fatalf("%dx%d: %d lines", width, height, len(lines))
				}
				for _, l := range lines {
					if utf8.RuneCountInString(l) > width {
						t.Fatalf("%dx%d: %q is wider", width, height, l)
					}
				}
			}
		}
	}
	if got := filled(t, 0, 0).View().Content; got != "" {
		t.Errorf("before the size is known: %q", got)
	}
}

func TestKeys(t *testing.T) {
	// Of a screen of 10 lines the workers get one.
	down, up := tea.KeyPressMsg{Code: tea.KeyDown}, tea.KeyPressMsg{Code: tea.KeyUp}
	for _, c := range []struct {
		want string
		keys []tea.Msg
	}{
		{"?[31mevil?", nil}, // health
		{"gpu-1/1", []tea.Msg{down}},
		{"gpu-1", []tea.Msg{down, down}},
		{"gpu-1", []tea.Msg{tea.KeyPressMsg{Code: tea.KeyPgDown}}},
		{"?[31mevil?", []tea.Msg{tea.KeyPressMsg{Code: tea.KeyPgDown}, tea.KeyPressMsg{Code: tea.KeyPgUp}}},
		{"gpu-1/1", []tea.Msg{down, up, up, down}},
		{"?[31mevil?", []tea.Msg{down, key('s')}},                                                       // name
		{"gpu-1", []tea.Msg{key('s'), key('s')}},                                                        // active
		{"gpu-1/1", []tea.Msg{key('s'), key('s'), key('s')}},                                            // pending
		{"gpu-1", []tea.Msg{key('s'), key('s'), key('s'), key('s')}},                                    // cached
		{"?[31mevil?", []tea.Msg{key('s'), key('s'), key('s'), key('s'), key('s')}},                     // routed
		{"gpu-1/1", []tea.Msg{key('s'), key('s'), key('s'), key('s'), key('s'), key('s')}},              // failures
		{"?[31mevil?", []tea.Msg{key('s'), key('s'), key('s'), key('s'), key('s'), key('s'), key('s')}}, // health
	} {
		// View clamps the offset after each key, as in a terminal.
		s := filled(t, 80, 10)
		for _, k := range c.keys {
			s.Update(k)
			s.View()
		}
		if got := strings.Fields(strings.Split(text(s), "\n")[6])[0]; got != c.want {
			t.Errorf("after %v: %s, want %s", c.keys, got, c.want)
		}
	}
	if help := text(filled(t, 80, 24, key('?'))); !strings.Contains(help, "page up, page down   scroll") || !strings.HasSuffix(help, "? back  q quit") {
		t.Errorf("help: %s", help)
	}
	if back := text(filled(t, 80, 24, key('?'), key('?'))); back != text(filled(t, 80, 24)) {
		t.Errorf("after the help: %s", back)
	}
	for _, k := range []tea.KeyPressMsg{key('q'), {Code: 'c', Mod: tea.ModCtrl}} {
		if _, then := filled(t, 80, 24).Update(k); then == nil || then() != tea.Quit() {
			t.Errorf("%v does not quit", k)
		}
	}
}

// A problem stays visible until the next section.
func TestProblems(t *testing.T) {
	s := filled(t, 80, 24, &url.Error{Op: "Get", URL: "http://127.0.0.1:9003/v1/live", Err: errors.New("connection refused")})
	if got := text(s); !strings.HasSuffix(got, "\nnot connected, retrying: connection refused") || !strings.Contains(got, "gpu-1") {
		t.Errorf("the screen is %s", got)
	}
	s.Update(sections()[0].object())
	if got := text(s); !strings.HasSuffix(got, "q quit") {
		t.Errorf("after a section: %s", got)
	}
	s.Update([]byte(`{"workers":[{"worker_id":"a"}]}`))
	if got := text(s); !strings.Contains(got, "this version of kvroute top cannot read /v1/live") || !strings.Contains(got, "gpu-1") {
		t.Errorf("after a section that cannot be read: %s", got)
	}
}

// Without sections that an older or younger kvroute lacks, the figures are unknown, not zero.
func TestMissingSections(t *testing.T) {
	var p picture
	if err := p.apply(sections()[0].object()); err != nil {
		t.Fatal(err)
	}
	all := p.text()
	if !strings.Contains(all, "requests/s  -  TTFT  -  cached  -") || strings.Contains(all, "round robin") {
		t.Errorf("the picture is %s", all)
	}
}

// A source of streams for tests.
type source struct {
	opened  atomic.Int64
	streams []func(ctx context.Context) (io.ReadCloser, error) // the last one again and again
}

func (s *source) open(ctx context.Context, stream bool) (io.ReadCloser, error) {
	n := int(s.opened.Add(1))
	return s.streams[min(n, len(s.streams))-1](ctx)
}

func events(list ...section) string {
	var text strings.Builder
	for _, s := range list {
		fmt.Fprintf(&text, "event: %s\ndata: %s\n\n", s.name, bytes.ReplaceAll(s.data, []byte("\n"), nil))
	}
	return text.String()
}

// sends returns a stream that ends after a text.
func sends(text string) func(context.Context) (io.ReadCloser, error) {
	return func(context.Context) (io.ReadCloser, error) { return io.NopCloser(strings.NewReader(text)), nil }
}

// fails returns a stream that cannot be opened.
func fails(err error) func(context.Context) (io.ReadCloser, error) {
	return func(context.Context) (io.ReadCloser, error) { return nil, err }
}

// silent returns a stream that sends a text and then nothing, like a request of net/http.
func silent(text string) func(context.Context) (io.ReadCloser, error) {
	return func(ctx context.Context) (io.ReadCloser, error) {
		r, w := io.Pipe()
		go func() {
			_, _ = io.WriteString(w, text) // an error: the reader has left
			<-ctx.Done()
			_ = w.CloseWithError(ctx.Err()) // never fails
		}()
		return r, nil
	}
}

func TestFollow(t *testing.T) {
	broken := errors.New("broken")
	follow := func(t *testing.T, silence time.Duration, until string, streams ...func(context.Context) (io.ReadCloser, error)) (got string) {
		from := &source{streams: streams}
		ctx, cancel := context.WithTimeout(t.Context(), within)
		defer cancel()
		first, err := from.open(ctx, true)
		if err != nil {
			t.Fatal(err)
		}
		add := func(what string) {
			if got += what + "|"; what == until {
				cancel()
			}
		}
		follower{open: from.open, silence: silence, changed: func(section []byte) { add(string(section)) }, ended: func(err error) { add(err.Error()) }}.follow(ctx, first)
		return got
	}
	t.Run("opens again", func(t *testing.T) {
		got := follow(t, within, `{"b":2}`, sends(events(section{"a", []byte("1")})), fails(broken), silent(": a comment\n\n"+events(section{"b", []byte("2")})))
		if want := `{"a":1}|kvroute ended the stream|broken|{"b":2}|`; got != want {
			t.Errorf("%s, want %s", got, want)
		}
	})
	t.Run("nothing comes", func(t *testing.T) {
		const want = "kvroute sent nothing for 10ms"
		if got := follow(t, 10*time.Millisecond, want, silent("")); got != want+"|" {
			t.Errorf("%s, want %s", got, want)
		}
	})
	t.Run("the first attempt fails", func(t *testing.T) {
		err := Stream(t.Context(), (&source{streams: []func(context.Context) (io.ReadCloser, error){fails(broken)}}).open, io.Discard, io.Discard)
		if !errors.Is(err, broken) {
			t.Errorf("%v, want %v", err, broken)
		}
	})
	t.Run("nothing can be written", func(t *testing.T) {
		r, w := io.Pipe()
		_ = r.CloseWithError(broken) // never fails
		err := Stream(t.Context(), (&source{streams: []func(context.Context) (io.ReadCloser, error){silent(events(sections()...))}}).open, w, io.Discard)
		if !errors.Is(err, broken) {
			t.Errorf("%v, want %v", err, broken)
		}
	})
}

// The program shows the picture, shows that the stream ended, and ends with q.
func TestShow(t *testing.T) {
	from := &source{streams: []func(context.Context) (io.ReadCloser, error){sends(events(sections()...)), fails(errors.New("refused"))}}
	keys, press := io.Pipe()
	defer keys.Close()
	shown := make(chan string, 1000)
	ended := make(chan error, 1)
	go func() {
		ended <- show(t.Context(), follower{open: from.open, silence: within, pause: 10 * time.Millisecond},
			tea.WithInput(keys), tea.WithOutput(writer(func(b []byte) { shown <- string(b) })), tea.WithWindowSize(100, 30), tea.WithEnvironment([]string{"TERM=xterm"}))
	}()
	var all string
	for deadline := time.After(within); !strings.Contains(all, "gpu-1/1") || !strings.Contains(all, "refused"); {
		select {
		case part := <-shown:
			all += part
		case err := <-ended:
			t.Fatalf("the program ends: %v\n%q", err, all)
		case <-deadline:
			t.Fatalf("the screen got %q", all)
		}
	}
	if _, err := io.WriteString(press, "q"); err != nil {
		t.Fatal(err)
	}
	for {
		select {
		case <-shown:
		case err := <-ended:
			if err != nil {
				t.Error(err)
			}
			return
		}
	}
}

type writer func([]byte)

func (w writer) Write(b []byte) (int, error) { w(b); return len(b), nil }

// Ctrl-C of the process, and a kvroute that is not there, end the program.
func TestShowEnds(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	from := &source{streams: []func(context.Context) (io.ReadCloser, error){func(ctx context.Context) (io.ReadCloser, error) {
		time.AfterFunc(10*time.Millisecond, cancel)
		return silent(events(sections()...))(ctx)
	}}}
	if err := Show(ctx, from.open, strings.NewReader(""), io.Discard); !errors.Is(err, context.Canceled) {
		t.Errorf("canceled: %v", err)
	}
	broken := errors.New("broken")
	var out bytes.Buffer
	if err := Show(t.Context(), (&source{streams: []func(context.Context) (io.ReadCloser, error){fails(broken)}}).open, nil, &out); !errors.Is(err, broken) || out.Len() > 0 {
		t.Errorf("%v and %q, want %v", err, out.String(), broken)
	}
}

func TestOnce(t *testing.T) {
	all := map[string]json.RawMessage{}
	for _, s := range sections() {
		all[s.name] = s.data
	}
	object, err := json.Marshal(all)
	if err != nil {
		t.Fatal(err)
	}
	from := &source{streams: []func(context.Context) (io.ReadCloser, error){sends(string(object))}}
	var out bytes.Buffer
	if err := Once(t.Context(), from.open, &out, false); err != nil || strings.ContainsRune(out.String(), '\x1b') || !strings.Contains(out.String(), "gpu-1/1") || !strings.Contains(out.String(), "10.0.0.2:8000") {
		t.Errorf("%v: %q", err, out.String())
	}
	out.Reset()
	if err := Once(t.Context(), from.open, &out, true); err != nil || out.String() != string(object) {
		t.Errorf("%v: %s, want %s", err, out.String(), object)
	}
	from.streams = append(from.streams, sends("<html>"))
	from.opened.Store(1)
	if err := Once(t.Context(), from.open, &out, true); err == nil || !strings.Contains(err.Error(), "cannot read /v1/live") {
		t.Errorf("no JSON: %v", err)
	}
}
