// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/chromedp/cdproto/input"
	"github.com/chromedp/chromedp"
)

// A cell is a figure of the page: its raw value, nil if it has none, what a reader sees, and sees on hover.
type cell struct {
	Value       *string
	Text, Title string
}

// figures are the cells of the page by table, key of the row and field. Tiles and charts are tables with one row.
type figures map[string]map[string]map[string]cell

const readFigures = `(() => {
	const cell = (e) => ({ value: e.dataset.value ?? null, text: e.textContent, title: e.title })
	const cells = (root) => Object.fromEntries([...root.querySelectorAll('[data-field]')].map((e) => [e.dataset.field, cell(e)]))
	const rows = (id) => Object.fromEntries([...document.querySelectorAll('#' + id + ' tbody tr')].map((row) => [row.dataset.key, cells(row)]))
	const all = Object.fromEntries(['workers', 'left', 'happened', 'benefit', 'decisions', 'prefixes', 'events', 'models', 'replicas', 'groups'].map((id) => [id, rows(id)]))
	all.tiles = { '': cells(document.querySelector('#tiles')) }
	all.charts = { '': cells(document.querySelector('#charts')) }
	const compared = [...document.querySelectorAll('#holdout figure')]
	all.holdout = Object.fromEntries(compared.map((figure) => [figure.dataset.key, { difference_ms: cell(figure.querySelector('[data-field=difference_ms]')) }]))
	all.sides = Object.fromEntries(compared.flatMap((figure) => [...figure.querySelectorAll('tbody tr')].map((row) => [figure.dataset.key + '/' + row.dataset.key, cells(row)])))
	for (const id of ['ready', 'bus', 'identity', 'moment', 'holdout-note']) all[id] = { '': { '': { value: document.querySelector('#' + id).dataset.value, text: '' } } }
	return all
})()`

// object is a JSON object of the API.
type object = map[string]any

// wanted has the values of the page by the API: strings and numbers, nil for a cell without a figure.
type wanted map[string]map[string]map[string]any

func number(o object, field string) float64 {
	n, _ := o[field].(json.Number)
	f, _ := n.Float64()
	return f
}

func list(o object, field string) (objects []object) {
	all, _ := o[field].([]any)
	for _, v := range all {
		objects = append(objects, v.(object))
	}
	return objects
}

func pick(o object, fields string) map[string]any {
	row := map[string]any{}
	for field := range strings.FieldsSeq(fields) {
		row[field] = o[field]
	}
	return row
}

func name(worker, named any) string {
	w := worker.(object)
	text, _ := named.(string)
	if text == "" {
		text = fmt.Sprint(w["worker_id"])
	}
	if rank := fmt.Sprint(w["dp_rank"]); rank != "0" {
		text += "/" + rank
	}
	return text
}

// want computes what the page should show from the answers of the API. moment is the time of the charts' newest figures.
func (s *service) want(t *testing.T, moment string) wanted {
	t.Helper()
	var workers, models, decisions, replica, live object
	for path, into := range map[string]*object{"/v1/workers": &workers, "/v1/models": &models, "/v1/decisions?limit=50": &decisions, "/v1/replica": &replica, "/v1/live": &live} {
		s.read(t, path, into)
	}
	w := wanted{"workers": {}, "left": {}, "happened": {}, "benefit": {}, "decisions": {}, "prefixes": {}, "events": {}, "models": {}, "replicas": {}, "groups": {}, "holdout": {}, "sides": {}}
	tiles := map[string]any{}
	for i, sum := range wantWorkers(w, list(workers, "workers")) {
		tiles[[]string{"workers", "available", "active_requests", "pend_tokens"}[i]] = sum
	}
	for _, l := range list(workers, "left") {
		row := pick(l, "state text last_state requests_failed address")
		row["name"], row["model"] = name(l, l["name"]), l["models"].([]any)[0]
		w["left"][fmt.Sprintf("%s/%s", l["worker_id"], l["left_at"])] = row
	}
	if totals, ok := live["totals"].(object); ok {
		tiles["requests"], tiles["failed"], tiles["prompt_tokens"] = totals["requests"], totals["failed"], totals["prompt_tokens"]
		tiles["cached_share"] = nil
		if prompt := number(totals, "prompt_tokens"); prompt > 0 {
			tiles["cached_share"] = number(totals, "cached_tokens") / prompt
		}
	}
	w["tiles"] = map[string]map[string]any{"": tiles}
	w["charts"] = map[string]map[string]any{"": wantCharts(list(live, "history"), live["replica"].(object), moment)}
	for _, e := range list(live, "events") {
		id := ""
		if e["worker_id"] != nil {
			id = fmt.Sprint(e["worker_id"])
		}
		w["happened"][fmt.Sprintf("%s/%s/%s/%s", e["time"], id, e["what"], e["text"])] = pick(e, "time text model")
	}
	for _, b := range list(live, "benefit") {
		key, err := json.Marshal([]any{b["model"], b["group"]})
		if err != nil {
			t.Fatal(err)
		}
		row := pick(b, "saved_share saved_ms saved_tokens requests")
		row["model"] = b["model"]
		w["benefit"][string(key)] = row
	}
	wantHoldout(w, live["holdout"])
	for _, d := range list(decisions, "decisions") {
		row := pick(d, "id time model reason overlap_blocks prompt_blocks prefill_tokens expected_ttft_ms first_token")
		row["worker"] = name(d["worker"], d["worker_name"])
		w["decisions"][d["id"].(string)] = row
	}
	for _, m := range list(models, "models") {
		w["models"][m["model"].(string)] = pick(m, "model workers token_mode checks")
	}
	for _, r := range append(list(replica, "peers"), replica) {
		row := pick(r, "replica active_requests")
		if row["replica"] == nil {
			row["replica"] = r["router_id"]
		}
		w["replicas"][fmt.Sprint(r["router_id"])] = row
	}
	var prefixes func([]object, int)
	prefixes = func(level []object, depth int) {
		for _, p := range level {
			row := pick(p, "hash model blocks requests workers")
			row["level"] = depth
			w["prefixes"][fmt.Sprintf("%s/%s", p["model"], p["hash"])] = row
			prefixes(list(p, "children"), depth+1)
		}
	}
	prefixes(list(live, "prefixes"), 1)
	w["ready"] = map[string]map[string]any{"": {"": replica["ready"].(object)["status"]}}
	w["bus"] = map[string]map[string]any{"": {"": fmt.Sprint(replica["bus"])}}
	w["identity"] = map[string]map[string]any{"": {"": replica["router_id"]}}
	return w
}

// wantWorkers fills in the tables of workers, events and groups. It returns the numbers of workers and of available
// workers, and the sums of active requests and pending tokens.
func wantWorkers(w wanted, workers []object) (sums [4]float64) {
	for _, o := range workers {
		row := pick(o, "model health active_requests active_blocks ttft_ms pend_tokens cached_blocks guessed_blocks kv_events routed failures")
		row["name"], row["audit"] = name(o, o["name"]), nil
		if audit, ok := o["audit"].(object); ok {
			row["audit"] = audit["responses"]
		}
		w["workers"][fmt.Sprintf("%s/%s/%s", o["worker_id"], o["dp_rank"], o["model"])] = row
		sums[0]++
		if o["health"] == "healthy" && o["draining"] != true && o["failing"] != true && o["avoided_since"] == nil {
			sums[1]++
		}
		sums[2] += number(o, "active_requests")
		sums[3] += number(o, "pend_tokens")
		transport := "not registered"
		if o["event_transport"] != nil {
			transport = o["event_transport"].(string)
		}
		if group, ok := o["group"].(string); ok {
			transport = "group summaries"
			w["groups"][group] = pick(o["summary"].(object), "members busy queued")
			w["groups"][group]["group"] = group
		}
		key := fmt.Sprintf("%s/%s/%v/%s", transport, o["kv_events"], o["never_heard"] == true, o["kv_events_level"])
		kind := w["events"][key]
		if kind == nil {
			kind = map[string]any{"transport": transport, "state": o["kv_events"], "workers": 0., "cached_blocks": 0.}
			w["events"][key] = kind
		}
		kind["workers"] = kind["workers"].(float64) + 1
		kind["cached_blocks"] = kind["cached_blocks"].(float64) + number(o, "cached_blocks")
	}
	return sums
}

// wantHoldout fills in the comparisons of --holdout-share. Without it the page has none.
func wantHoldout(w wanted, of any) {
	holdout, _ := of.(object)
	w["holdout-note"] = map[string]map[string]any{"": {"": holdout["share"]}}
	for _, m := range list(holdout, "models") {
		model := m["model"].(string)
		w["holdout"][model] = pick(m, "difference_ms")
		for _, side := range []string{"routed", "round_robin"} {
			w["sides"][model+"/"+side] = pick(m[side].(object), "requests mean_ms p50_ms p90_ms p99_ms")
		}
	}
}

// wantCharts returns the figures of the sample of a moment. Times without requests have no sample. The moment must be now.
func wantCharts(history []object, replica object, moment string) map[string]any {
	at, err := strconv.ParseFloat(moment, 64)
	if now := number(replica, "now_ms"); err != nil || at > now || at < now-10_000 {
		return map[string]any{"moment " + moment: fmt.Sprint("should be about ", now)}
	}
	return wantSample(history, at, 2)
}

// wantSample returns the figures of the charts at a time in ms.
func wantSample(history []object, at, step float64) map[string]any {
	row := map[string]any{"rate": 0., "ttft_ms": nil, "ttft_p90_ms": nil, "cached_share": nil, "mean_share": nil}
	for _, sample := range history {
		if number(sample, "time_ms") != at {
			continue
		}
		row["rate"] = number(sample, "requests") / step
		for _, field := range []string{"ttft_ms", "ttft_p90_ms"} {
			if number(sample, field) > 0 {
				row[field] = sample[field]
			}
		}
		if prompt := number(sample, "prompt_tokens"); prompt > 0 {
			row["cached_share"], row["mean_share"] = number(sample, "cached_tokens")/prompt, number(sample, "mean_cached_tokens")/prompt
		}
	}
	return row
}

// differences says where the page shows something else than the API, and counts the compared cells.
func differences(got figures, want wanted) (differences []string, compared int) {
	for table, rows := range want {
		if table != "tiles" && table != "charts" && len(got[table]) != len(rows) {
			differences = append(differences, fmt.Sprintf("%s has %d rows, want %d", table, len(got[table]), len(rows)))
		}
		for key, fields := range rows {
			for field, value := range fields {
				compared++
				c, shown := got[table][key][field]
				switch {
				case !shown:
					differences = append(differences, fmt.Sprintf("%s %s %s is missing", table, key, field))
				case (value == nil) != (c.Value == nil), value != nil && !same(*c.Value, fmt.Sprint(value)):
					differences = append(differences, fmt.Sprintf("%s %s %s is %s, want %v", table, key, field, text(c.Value), value))
				case strings.HasSuffix(field, "_ms") && table != "holdout" && value != nil && !nearTime(c.Text, *c.Value):
					differences = append(differences, fmt.Sprintf("%s %s %s is shown as %q, want %s ms", table, key, field, c.Text, *c.Value))
				case counts[field] && value != nil && !exactly(c):
					differences = append(differences, fmt.Sprintf("%s %s %s is %s, and neither its text %q nor its title %q says so", table, key, field, *c.Value, c.Text, c.Title))
				case table == "tiles" && counts[field] && value != nil && !near(inWords(c.Text), *c.Value):
					differences = append(differences, fmt.Sprintf("the tile %s is shown as %q, want %s", field, c.Text, *c.Value))
				case counts[field] && table != "tiles" && value != nil && !near(c.Text, *c.Value):
					differences = append(differences, fmt.Sprintf("%s %s %s is shown as %q, want %s", table, key, field, c.Text, *c.Value))
				}
			}
		}
	}
	slices.Sort(differences)
	return differences, compared
}

// exactly reports whether the text or the title of a whole number has all of its digits.
func exactly(c cell) bool {
	figure, err := strconv.ParseFloat(*c.Value, 64)
	whole := err == nil && figure == math.Trunc(figure)
	return !whole || strings.Contains(strings.ReplaceAll(c.Text+" "+c.Title, ",", ""), *c.Value)
}

// inWords returns the last figure of a text with words.
func inWords(text string) string {
	all := regexp.MustCompile(`[\d.,]+( [kMG]\b)?`).FindAllString(text, -1)
	if len(all) == 0 {
		return ""
	}
	return all[len(all)-1]
}

// near reports whether a text shows a figure with at most four significant digits: a whole number below 10,000 exactly.
func near(text, value string) bool {
	number, unit, _ := strings.Cut(strings.ReplaceAll(text, ",", ""), " ")
	shown, errShown := strconv.ParseFloat(number, 64)
	figure, err := strconv.ParseFloat(value, 64)
	if err != nil || errShown != nil || len(strings.Trim(strings.ReplaceAll(number, ".", ""), "-0")) > 4 {
		return false
	}
	if math.Abs(figure) < 1e4 && figure == math.Trunc(figure) {
		return unit == "" && shown == figure
	}
	return math.Abs(shown*map[string]float64{"": 1, "k": 1e3, "M": 1e6, "G": 1e9}[unit]-figure) <= 0.00501*math.Abs(figure)
}

// nearTime reports whether a text shows a time, whose value is in ms, with three significant digits.
func nearTime(text, value string) bool {
	number, unit, _ := strings.Cut(strings.ReplaceAll(text, ",", ""), " ")
	shown, errShown := strconv.ParseFloat(number, 64)
	ms, err := strconv.ParseFloat(value, 64)
	factor := map[string]float64{"µs": 1e-3, "ms": 1, "s": 1e3}[unit]
	return err == nil && errShown == nil && factor > 0 && math.Abs(shown*factor-ms) <= 0.00501*math.Abs(ms)
}

// counts are the fields that tables and tiles show as numbers.
var counts = map[string]bool{
	"available": true, "failed": true, "prompt_tokens": true, "active_requests": true, "saved_tokens": true, "pend_tokens": true, "cached_blocks": true, "guessed_blocks": true, "routed": true, "failures": true,
	"overlap_blocks": true, "prompt_blocks": true, "prefill_tokens": true, "blocks": true, "requests": true, "workers": true, "requests_failed": true, "level": true, "members": true,
}

func text(s *string) string {
	if s == nil {
		return "nothing"
	}
	return *s
}

// same compares two numbers, or two texts.
func same(a, b string) bool {
	x, errA := strconv.ParseFloat(a, 64)
	y, errB := strconv.ParseFloat(b, 64)
	return a == b || errA == nil && errB == nil && x == y && len(a) < 17
}

// agree waits until every figure of the page is that of the API, and returns the number of figures.
func (s *service) agree(t *testing.T, p *page) (compared int) {
	t.Helper()
	until(t, "the figures", func() (string, bool) {
		p.whole()
		got := eval[figures](p, readFigures)
		want := s.want(t, text(got["moment"][""][""].Value))
		var wrong []string
		wrong, compared = differences(got, want)
		return strings.Join(wrong[:min(len(wrong), 20)], "\n"), len(wrong) == 0
	})
	return compared
}

// Every figure on the page is that of the API, while requests come and after them. Names of workers are text, whatever
// they contain.
func TestEveryFigureIsThatOfTheAPI(t *testing.T) {
	s := serve(t, `workers:
- {name: "<img src=x onerror=document.title='broken'>", address: "10.0.0.1:8000", models: [sim], block_size: 16, draining: true}
- {name: "\"><script>document.title='broken'</script>", address: "10.0.0.2:8000", models: ["<b>other</b>"], block_size: 32}
groups:
- {name: far, address: "10.0.0.9:8080", models: [sim], block_size: 16, members: 2}
`, "--no-router-track-output-blocks", "--replica", "first")
	s.engines(t, 3)
	serve(t, "", "--nats-url", s.bus(), "--replica", "second")
	s.leave(t, "gone")
	p := open(t, s, 1280, 900, "light")
	p.live()
	s.agree(t, p)
	for i := range 30 {
		s.chat(t, fmt.Sprint("chat-", i), i%3, i)
	}
	for i := range 4 {
		s.book(t, fmt.Sprint("book-", i), 1000+100*i)
	}
	compared := s.agree(t, p)
	s.checkTexts(t, p)
	s.checkHistory(t, p, "/v1/live", "history", 2, 120_000)
	shown := eval[figures](p, readFigures)
	if len(shown["workers"]) != 6 || len(shown["replicas"]) != 2 || len(shown["groups"]) != 1 || len(shown["decisions"]) != 34 || len(shown["prefixes"]) < 3 {
		t.Errorf("the page has %d workers, %d replicas, %d groups, %d decisions and %d prefixes", len(shown["workers"]), len(shown["replicas"]), len(shown["groups"]), len(shown["decisions"]), len(shown["prefixes"]))
	}
	t.Logf("%d figures of the page equal the API's", compared)
	names := slices.Collect(maps.Keys(shown["workers"]))
	if texts := eval[[]string](p, `[...document.querySelectorAll('#workers tbody th')].map((e) => e.textContent)`); !slices.Contains(texts, "<img src=x onerror=document.title='broken'>") {
		t.Errorf("workers are shown as %q, keys %q", texts, names)
	}
	if n := eval[int](p, `document.querySelectorAll('main img, main script, main b:not(.legend b)').length`); n > 0 {
		t.Errorf("names became %d elements", n)
	}
	if title := eval[string](p, `document.title`); title != "kvroute" {
		t.Errorf("the title is %q", title)
	}
	p.wait(`document.querySelector('#charts [data-field=rate]').dataset.value === '0'`)
	p.looks("idle")
}

// checkTexts compares the texts of the tables that the API has in words: why a worker was chosen, and the judgement of
// its events.
func (s *service) checkTexts(t *testing.T, p *page) {
	t.Helper()
	var live object
	s.read(t, "/v1/live", &live)
	titles := func(table, field string) map[string]string {
		return eval[map[string]string](p, fmt.Sprintf(`Object.fromEntries([...document.querySelectorAll('#%s tbody tr')].map((row) =>
			[row.dataset.key, row.querySelector('[data-field=%s]').title]))`, table, field))
	}
	reasons, events := titles("decisions", "reason"), titles("workers", "kv_events")
	for _, d := range list(live, "decisions") {
		if id := d["id"].(string); d["reason_text"] == "" || reasons[id] != d["reason_text"] {
			t.Errorf("the reason of %s is %q, want %q", id, reasons[id], d["reason_text"])
		}
	}
	tones := eval[map[string]string](p, `Object.fromEntries([...document.querySelectorAll('#workers tbody tr')].map((row) =>
		[row.dataset.key, row.querySelector('[data-field=kv_events]').dataset.tone]))`)
	attention := eval[string](p, `document.querySelector('#attention').textContent`)
	faults := 0
	for _, w := range list(live, "workers") {
		key := fmt.Sprintf("%s/%s/%s", w["worker_id"], w["dp_rank"], w["model"])
		level, said := w["kv_events_level"].(string), w["kv_events_text"].(string)
		if want := map[string]string{"ok": "good", "fault": "warn", "off": "quiet"}[level]; tones[key] != want || events[key] != said {
			t.Errorf("the events of %s are %s, %q; want %s, %q", key, tones[key], events[key], want, said)
		}
		if level == "fault" {
			if faults++; !strings.Contains(attention, said) {
				t.Errorf("the problems are %q, want %q", attention, said)
			}
		}
	}
	if faults == 0 {
		t.Error("no worker's events are at fault")
	}
}

// checkHistory points at the last sample in a chart and compares the figures of all charts with those of a field of the
// API. A sample is of step seconds, and the charts show span ms.
func (s *service) checkHistory(t *testing.T, p *page, path, field string, step, span float64) {
	t.Helper()
	var history []object
	until(t, "a sample", func() (string, bool) {
		var from object
		s.read(t, path, &from)
		history = list(from, field)
		return "", len(history) > 0
	})
	at := number(history[len(history)-1], "time_ms")
	until(t, "the figures of the last sample", func() (string, bool) {
		place := eval[struct{ X, Y, Width, Newest float64 }](p, `(() => {
			const grid = document.querySelector('#charts svg .grid').getBoundingClientRect()
			return { x: grid.x, y: grid.y - 20, width: grid.width, newest: +document.querySelector('#moment').dataset.newest }
		})()`)
		p.do(chromedp.MouseEvent(input.DispatchMouseEventTypeMouseMoved, place.X+place.Width*(1-(place.Newest-at)/span), place.Y))
		got := eval[figures](p, readFigures)
		wrong, _ := differences(got, wanted{"charts": {"": wantSample(history, at, step)}, "moment": {"": {"": at}}})
		return strings.Join(wrong, "\n"), len(wrong) == 0
	})
	if lines := eval[[]string](p, `[...document.querySelectorAll('#charts .path:not(.none)')].map((e) => e.getAttribute('d'))`); len(lines) != 5 || slices.Contains(lines, "") {
		t.Errorf("the lines of the charts are %q", lines)
	}
	p.do(chromedp.MouseEvent(input.DispatchMouseEventTypeMouseMoved, 1, 1))
}

func TestDifferencesCanFail(t *testing.T) {
	value, many := "12", "12345"
	for _, c := range []struct {
		got  figures
		want wanted
		says string
	}{
		{figures{"workers": {"1": {"routed": {&value, "12", ""}}}}, wanted{"workers": {"1": {"routed": json.Number("12")}}}, ""},
		{figures{"workers": {"1": {"routed": {&value, "12", ""}}}}, wanted{"workers": {"1": {"routed": json.Number("13")}}}, "routed is 12, want 13"},
		{figures{"workers": {"1": {"routed": {&many, "12.3 k", "12,345"}}}}, wanted{"workers": {"1": {"routed": 12345}}}, ""},
		{figures{"workers": {"1": {"routed": {&many, "12.3 k", ""}}}}, wanted{"workers": {"1": {"routed": 12345}}}, "nor its title"},
		{figures{"tiles": {"": {"prompt_tokens": {&many, "1,200 of 12.3 k prompt tokens", ""}}}}, wanted{"tiles": {"": {"prompt_tokens": 12345}}}, "nor its title"},
		{figures{"tiles": {"": {"prompt_tokens": {&many, "1,200 of 12.3 k prompt tokens", "1,200 of 12,345"}}}}, wanted{"tiles": {"": {"prompt_tokens": 12345}}}, ""},
		{figures{"tiles": {"": {"prompt_tokens": {&many, "12.3 k of 12.9 k prompt tokens", "12,345"}}}}, wanted{"tiles": {"": {"prompt_tokens": 12345}}}, "the tile prompt_tokens"},
		{figures{"tiles": {"": {"failed": {&value, "13 failed", "12"}}}}, wanted{"tiles": {"": {"failed": 12}}}, "the tile failed"},
		{figures{"workers": {"1": {"routed": {&many, "12.5 k", "12,345"}}}}, wanted{"workers": {"1": {"routed": 12345}}}, `shown as "12.5 k"`},
		{figures{"workers": {"1": {"routed": {&many, "12,345", ""}}}}, wanted{"workers": {"1": {"routed": 12345}}}, `shown as "12,345"`},
		{figures{"workers": {"1": {"routed": {&value, "13", "12"}}}}, wanted{"workers": {"1": {"routed": 12}}}, `shown as "13"`},
		{figures{"workers": {"1": {"ttft_ms": {&many, "12.3 s", ""}}}}, wanted{"workers": {"1": {"ttft_ms": json.Number("12345")}}}, ""},
		{figures{"workers": {"1": {"ttft_ms": {&many, "12.3 ms", ""}}}}, wanted{"workers": {"1": {"ttft_ms": json.Number("12345")}}}, `shown as "12.3 ms"`},
		{figures{"workers": {"1": {"routed": {nil, "–", ""}}}}, wanted{"workers": {"1": {"routed": 12}}}, "routed is nothing, want 12"},
		{figures{"workers": {"1": {}}}, wanted{"workers": {"1": {"routed": 12}}}, "is missing"},
		{figures{"workers": {"1": {}, "2": {}}}, wanted{"workers": {"1": {}}}, "has 2 rows, want 1"},
	} {
		found, _ := differences(c.got, c.want)
		if says := strings.Join(found, "; "); (says == "") != (c.says == "") || !strings.Contains(says, c.says) {
			t.Errorf("%v, %v: %q, want %q", c.got, c.want, says, c.says)
		}
	}
}
