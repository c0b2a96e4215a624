// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"math"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
)

// The page answers: does routing help, which worker is bad, and what shall I do? A worker dies while requests come.
func TestPageAnswersThreeQuestions(t *testing.T) {
	s := serve(t, "")
	engines := s.engines(t, 3)
	p := open(t, s, 1440, 900, "light")
	p.live()
	p.wait(`document.querySelector('#attention').hidden`)
	for i := range 24 {
		s.chat(t, fmt.Sprint("chat-", i), i%3, i)
	}

	// Does it help? The headline of the model, with its meaning.
	p.wait(`/^\d+\.\d %$/.test(document.querySelector('#benefit [data-field=saved_share]')?.textContent)`)
	if meaning := eval[string](p, `document.querySelector('#benefit [data-field=saved_share]').title`); !strings.Contains(meaning, "An estimate") {
		t.Errorf("the estimate is explained as %q", meaning)
	}

	// Which worker is bad, since when, and what shall I do?
	victim := s.workerOf(t, engines[1])
	p.do(chromedp.Evaluate[chromedp.Void](fmt.Sprintf(`(() => {
		new MutationObserver(() => {
			const li = [...document.querySelectorAll('#attention li')].find((li) => li.textContent.includes(%q))
			const whole = li && li.querySelector('.since').dataset.value && li.querySelector('[data-field=advice]').textContent && li.textContent.includes('refused')
			if (whole) window.named ??= Date.now()
		}).observe(document.querySelector('#attention'), { subtree: true, childList: true, characterData: true, attributes: true })
	})()`, victim)))
	_ = engines[1].cmd.Process.Kill() // an error: it has ended, and the test fails below
	<-engines[1].exit
	var failed time.Time
	next := 0
	until(t, "a failed request", func() (string, bool) { // it is repeated on another worker
		next++
		failed = time.Now()
		status, text := s.tryChat(t, fmt.Sprint("dead-", next), 10+next, next)
		var listed object
		s.read(t, "/v1/workers", &listed)
		for _, w := range list(listed, "workers") {
			if w["name"] == victim && number(w, "failures") > 0 {
				return "", true
			}
		}
		return fmt.Sprintf("request %d: %d %s", next, status, text[:min(len(text), 200)]), false
	})
	p.wait(`window.named`)
	named := time.UnixMilli(eval[int64](p, `window.named`)).Sub(failed)
	t.Logf("the page names a dead worker, with cause, time and advice, %v after its first failed request", named.Round(10*time.Millisecond))
	if named > 3*time.Second {
		t.Errorf("the page names a dead worker %v after its first failed request, want at most 3s", named)
	}
	item := eval[struct{ Text, Since, Advice, Docs string }](p, fmt.Sprintf(`(() => {
		const li = [...document.querySelectorAll('#attention li')].find((li) => li.textContent.includes(%q))
		return { text: li.querySelector('[data-field=text]').textContent, since: li.querySelector('.since').dataset.value ?? '', advice: li.querySelector('[data-field=advice]').textContent, docs: li.querySelector('a').href }
	})()`, victim))
	since, err := time.Parse(time.RFC3339, item.Since)
	if err != nil || since.Sub(failed) > 3*time.Second || since.Before(failed.Add(-patience)) {
		t.Errorf("the first failed request was at %v, and the page says since %s", failed.UTC(), item.Since)
	}
	if item.Advice == "" || !strings.Contains(item.Docs, "/docs/") {
		t.Errorf("the item is %+v, without an advice or a link", item)
	}
	p.wait(`document.querySelector('[data-field=available]').dataset.value === '2'`)
	s.checkAttention(t, p)
	// The worker falls silent. Until then and afterwards it has one item, with all causes.
	of := fmt.Sprintf(`[...document.querySelectorAll('#attention li')].filter((li) => li.textContent.includes(%q))`, victim)
	until(t, "one item with all causes", func() (string, bool) {
		items := eval[[]string](p, of+`.map((li) => li.textContent)`)
		if len(items) != 1 {
			t.Fatalf("a dead worker has %d items: %q", len(items), items)
		}
		return items[0], strings.Contains(items[0], "silent") && eval[int](p, of+`[0].querySelectorAll('.also').length`) > 0
	})
	s.checkAttention(t, p)
	s.checkRows(t, p)
	p.wait(fmt.Sprintf(`document.querySelector('#workers tbody th').textContent === %q`, victim)) // the worst one first
	p.wait(fmt.Sprintf(`[...document.querySelectorAll('#happened [data-field=text]')].some((e) => e.textContent.includes(%q) && e.textContent.includes('refused'))`, victim))

	// The item filters the tables.
	p.do(chromedp.Evaluate[chromedp.Void](fmt.Sprintf(`[...document.querySelectorAll('#attention button.text')].find((b) => b.textContent.includes(%q)).click()`, victim)))
	p.wait(fmt.Sprintf(`document.activeElement.id === 'filter' && [...document.querySelectorAll('#workers tbody th')].map((e) => e.textContent).join() === %q && [...document.querySelectorAll('#happened [data-field=text]')].map((e) => e.textContent.includes(%[1]q)).join().match(/^(true,?)+$/)`, victim))
	p.do(chromedp.Evaluate[chromedp.Void](`(() => { const f = document.querySelector('#filter'); f.value = ''; f.dispatchEvent(new Event('input')) })()`))
	p.looks("dead")
	p.checkNameStays()
}

// checkNameStays scrolls the table of workers on a telephone: the name stays in view, and covers what passes below it.
func (p *page) checkNameStays() {
	p.t.Helper()
	p.do(chromedp.EmulateViewport(390, 844))
	p.wait("innerWidth === 390")
	got := eval[struct{ Scrolled, Name, Head, Next, Box float64 }](p, `(() => {
		const table = document.querySelector('#workers')
		const box = table.closest('.scroll, .tall, .short')
		box.scrollLeft = 150
		const left = (e) => e.getBoundingClientRect().left
		const row = table.tBodies[0].rows[0]
		return { scrolled: box.scrollLeft, name: left(row.cells[0]), head: left(table.tHead.rows[0].cells[0]), next: left(row.cells[1]), box: left(box) + box.clientLeft }
	})()`)
	if got.Scrolled != 150 || math.Abs(got.Name-got.Box) > 1 || math.Abs(got.Head-got.Box) > 1 || got.Next >= got.Name+150 {
		p.t.Errorf("the table is scrolled by %v: the name is at %v, its title at %v, the box at %v, the next cell at %v", got.Scrolled, got.Name, got.Head, got.Box, got.Next)
	}
}

// checkRows compares the words of the rows of workers with the API: health, and what needs attention.
func (s *service) checkRows(t *testing.T, p *page) {
	t.Helper()
	until(t, "the words of the rows", func() (string, bool) {
		var live object
		s.read(t, "/v1/live", &live)
		whats, levels := map[any][]string{}, map[any]string{}
		for _, item := range list(live, "attention") {
			if item["kind"] != "worker" {
				continue
			}
			for _, i := range append([]object{item}, list(item, "also")...) {
				whats[item["worker_id"]] = append(whats[item["worker_id"]], i["what"].(string))
				if level := i["level"].(string); levels[item["worker_id"]] != "fault" {
					levels[item["worker_id"]] = level
				}
			}
		}
		shown := eval[map[string]cell](p, `Object.fromEntries([...document.querySelectorAll('#workers tbody tr')].map((row) => {
			const e = row.querySelector('[data-field=health]')
			return [row.dataset.key.split('/')[0], { value: e.dataset.tone ?? '', text: e.textContent, title: e.title }]
		}))`)
		bad := 0 // a worker that has left the list meanwhile shows nothing
		for _, w := range list(live, "workers") {
			words, tone := []string{strings.ReplaceAll(w["health"].(string), "_", " ")}, "good"
			for _, what := range whats[w["worker_id"]] {
				if what != "health" && !slices.Contains(words, what) {
					words = append(words, what)
				}
			}
			if level := levels[w["worker_id"]]; level != "" {
				tone = map[string]string{"fault": "bad", "note": "warn"}[level]
			}
			if tone == "bad" {
				bad++
			}
			row := shown[fmt.Sprint(w["worker_id"])]
			want := map[string]string{"good": "● ", "warn": "▲ ", "bad": "✕ "}[tone] + strings.Join(words, ", ")
			if row.Text != want || text(row.Value) != tone || (tone == "good") != (row.Title == "") {
				return fmt.Sprintf("%v is shown as %q (%s, on hover %q), want %q (%s)", w["name"], row.Text, text(row.Value), row.Title, want, tone), false
			}
		}
		return fmt.Sprintf("%d of %d rows are of workers with faults", bad, len(shown)), bad > 0 && len(shown) == len(list(live, "workers"))
	})
}

// workerOf returns the name of a simulated worker.
func (s *service) workerOf(t *testing.T, of *process) string {
	t.Helper()
	for i, arg := range of.cmd.Args {
		if arg == "--name" {
			return of.cmd.Args[i+1]
		}
	}
	t.Fatalf("%v has no name", of.cmd.Args)
	return ""
}

// checkAttention compares what needs attention with the API: each item alone, or with the others of its cause.
func (s *service) checkAttention(t *testing.T, p *page) {
	t.Helper()
	until(t, "the items that need attention", func() (string, bool) {
		var live object
		s.read(t, "/v1/live", &live)
		items := map[string][]object{}
		for _, item := range list(live, "attention") {
			cause := item["cause"]
			if cause == nil || item["kind"] == "replica" {
				cause = item["text"]
			}
			key := fmt.Sprint(item["kind"], "/", item["what"], "/", cause, "/", item["advice"])
			items[key] = append(items[key], item)
		}
		shown := eval[[]struct {
			Text, Title, Advice, Docs string
			Also                      []string
		}](p, `[...document.querySelectorAll('#attention li')].map((li) => ({
			text: li.querySelector('[data-field=text]').textContent, title: li.querySelector('[data-field=text]').title,
			advice: li.querySelector('[data-field=advice]').textContent, docs: li.querySelector('a').getAttribute('href') ?? '',
			also: [...li.querySelectorAll('.also span:first-child')].map((e) => e.textContent) }))`)
		found := 0
		for _, same := range items {
			for _, li := range shown {
				text, _ := same[0]["text"].(string)
				advice, _ := same[0]["advice"].(string)
				docs, _ := same[0]["docs"].(string)
				one := len(same) == 1 && li.Text == text
				many := len(same) > 1 && strings.HasPrefix(li.Text, fmt.Sprint(len(same), " ")) && strings.Contains(li.Title, text)
				var further []string
				for _, also := range list(same[0], "also") {
					further = append(further, fmt.Sprint("Also: ", also["text"]))
				}
				if one = one && slices.Equal(li.Also, further); (one || many) && strings.Contains(li.Advice, advice) && li.Docs == docs {
					found++
					break
				}
			}
		}
		return fmt.Sprintf("%d of %d items are shown: %+v", found, len(items), shown), found == len(items) && len(shown) == len(items)
	})
}

// axe returns the mistakes of accessibility that axe-core finds. The browser gets it past the page's policy.
func (p *page) axe() []string {
	p.t.Helper()
	script, err := os.ReadFile(os.Getenv("AXE"))
	if err != nil {
		p.t.Fatalf("the variable AXE names no axe-core: %v", err)
	}
	p.do(chromedp.Evaluate[chromedp.Void](string(script) + "\n;undefined"))
	p.do(chromedp.Evaluate[chromedp.Void](`(() => { window.axeFound = undefined; axe.run().then((r) => { window.axeFound = r.violations.flatMap((v) => v.nodes.map((n) => v.id + ': ' + n.html.slice(0, 200))) }) })()`))
	p.wait(`window.axeFound`)
	return eval[[]string](p, `window.axeFound`)
}

// A page without requests says what to send, and what will appear. The chosen candidate of a decision is the first
// row, and no verdict is cut off. A decision is found by the id that a client gave it.
func TestFirstRequestsAndTheirDecisions(t *testing.T) {
	s := serve(t, "workers:\n- {name: \"\u202eeman \u200f\", address: \"10.0.0.1:8000\", models: [\"it's <b>$(sim)</b>\"], block_size: 16, draining: true}\n")
	p := open(t, s, 1440, 900, "light")
	p.live()
	p.wait(`!document.querySelector('#first').hidden && document.querySelector('#first-a').textContent.includes('/v1/chat/completions')`)
	const model = `it\u0027s <b>$(sim)</b>`
	if command := eval[string](p, `document.querySelector('#first-b').textContent`); !strings.Contains(command, model) || strings.Count(command, "'") != 4 {
		t.Errorf("the second request is %s", command)
	}
	p.wait(`document.querySelector('#workers tbody th').textContent === '\\u{202e}eman \\u{200f}'`)
	if lines := eval[int](p, `document.querySelectorAll('#charts .path.none').length`); lines != 4 {
		t.Errorf("%d lines of charts without figures are at zero, want 4", lines)
	}
	p.looks("empty")
	p.do(chromedp.EmulateViewport(1440, 900))
	s.engines(t, 3)
	for i := range 6 {
		s.chat(t, fmt.Sprint("mine-", i), i%2, i)
	}
	p.wait(`document.querySelector('#first').hidden && document.querySelectorAll('#decisions tbody tr').length === 6`)
	p.do(chromedp.Click(chromedp.CSS("#decision-id")), chromedp.KeyEvent("mine-3"), chromedp.KeyEvent(kb.Enter))
	p.wait(`document.querySelector('#explain-body').dataset.id === 'mine-3'`)
	s.checkCandidates(t, p, "mine-3")
	cut := eval[[]string](p, `[...document.querySelectorAll('#explain-body [data-field=verdict]')].filter((e) => {
		const [cell, box] = [e.parentElement.getBoundingClientRect(), e.closest('.scroll').getBoundingClientRect()]
		return cell.right > box.right || cell.right > innerWidth || e.scrollWidth > e.parentElement.clientWidth
	}).map((e) => e.textContent)`)
	if len(cut) > 0 {
		t.Errorf("verdicts are cut off: %q", cut)
	}
	if first := eval[string](p, `(() => { const row = document.querySelector('#explain-body tbody tr'); return row.querySelector('[data-field=verdict]').textContent + ' ' + getComputedStyle(row.cells[2]).fontWeight })()`); !strings.HasPrefix(first, "chosen") || !strings.HasSuffix(first, " 650") {
		t.Errorf("the first candidate is %q, want the chosen one in bold", first)
	}
	p.looks("decision")
	p.do(chromedp.KeyEvent(kb.Escape))
	p.wait(`!document.querySelector('#explain').open`)
	p.allowed = "404" // the browser itself reports it
	p.do(chromedp.Evaluate[chromedp.Void](`document.querySelector('#decision-id').value = 'unknown'`), chromedp.Click(chromedp.CSS("#search button")))
	p.wait(`document.querySelector('#explain-error').textContent.startsWith('No decision with the id unknown')`)
}

// The charts show the history of the selected time and model, as GET /v1/history has it.
func TestSelectionShowsItsHistory(t *testing.T) {
	s := serve(t, "")
	s.engines(t, 2)
	for i := range 4 {
		s.chat(t, fmt.Sprint("chat-", i), 0, i)
	}
	p := open(t, s, 1280, 900, "light")
	p.live()
	p.wait(`document.querySelectorAll('#series option').length === 2`)
	p.do(chromedp.Evaluate[chromedp.Void](`for (const [id, value] of [['series', '["sim"]'], ['span', '1h']]) { const e = document.getElementById(id); e.value = value; e.dispatchEvent(new Event('change')) }`))
	s.checkHistory(t, p, "/v1/history?span=1h&model=sim", "samples", 15, 720_000)
	if rows := eval[int](p, `document.querySelectorAll('#workers tbody tr').length`); rows != 2 {
		t.Errorf("%d workers of the model, want 2", rows)
	}
}

// A router group can be selected, as soon as it has had a request: then the charts and tables show its requests only.
func TestARouterGroupIsSelected(t *testing.T) {
	far := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		fmt.Fprint(w, "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"a\"},\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n")
	}))
	t.Cleanup(far.Close)
	s := serve(t, fmt.Sprintf("groups: [{name: \"far <b>\", address: %q, models: [sim], block_size: 16, members: 2}]\n", strings.TrimPrefix(far.URL, "http://")))
	for i := range 3 {
		s.chat(t, fmt.Sprint("far-", i), 0, i)
	}
	s.engines(t, 2)
	p := open(t, s, 1280, 900, "light")
	p.live()
	p.wait(`[...document.querySelectorAll('#series option')].some((o) => o.textContent === 'sim, group far <b>')`)
	near := 0
	until(t, "a request to a worker", func() (string, bool) { // workers without load are better than a group without a summary
		s.chat(t, fmt.Sprint("near-", near), 1, near)
		near++
		var live object
		s.read(t, "/v1/live", &live)
		return fmt.Sprint(live["benefit"]), len(list(live, "benefit")) == 2
	})
	p.wait(`document.querySelectorAll('#series option').length === 4 && document.querySelectorAll('#workers tbody tr').length === 3`)
	p.do(chromedp.Evaluate[chromedp.Void](`(() => { const e = document.querySelector('#series'); e.value = JSON.stringify(['sim', 'far <b>']); e.dispatchEvent(new Event('change')) })()`))
	p.wait(`document.querySelectorAll('#workers tbody tr').length === 1 && document.querySelectorAll('#benefit tbody tr').length === 1`)
	p.wait(`document.querySelectorAll('#decisions tbody tr').length >= 3 && [...document.querySelectorAll('#decisions tbody tr')].every((e) => e.dataset.key.startsWith('far-') || e.dataset.key.startsWith('near-'))`)
	if workers := eval[string](p, `document.querySelector('#decisions').textContent`); strings.Contains(workers, "worker-1") || strings.Contains(workers, "worker-2") {
		t.Errorf("decisions of the group: %s", workers)
	}
	s.checkHistory(t, p, "/v1/history?span=10m&model=sim&group=far+%3Cb%3E", "samples", 2, 120_000)
	p.do(chromedp.Evaluate[chromedp.Void](`(() => { const e = document.querySelector('#series'); e.value = JSON.stringify(['sim', '']); e.dispatchEvent(new Event('change')) })()`))
	p.wait(`document.querySelectorAll('#workers tbody tr').length === 2`)
}

// Ids of clients and names of workers are text of bounded width, whatever they contain.
func TestHostileNamesStayText(t *testing.T) {
	const evil = "<img src=x onerror=document.title='broken'>\x1b[2J\u202e\u2028\r\n"
	id := evil + strings.Repeat("i", 900)
	long := "<b>\u202e" + strings.Repeat("w", 240)
	s := serve(t, fmt.Sprintf("workers: [{name: \"%s\", address: \"10.0.0.1:8000\", models: [\"%s\", sim], block_size: 16}]\n", long, long))
	s.book(t, id, 100)
	if status, text := s.send(t, http.MethodPost, "/v1/best_worker", map[string]any{"model": "sim", "request_id": strings.Repeat(evil, 100), "token_ids": []int{1}}); status != http.StatusBadRequest {
		t.Errorf("an id of 6 KB: status %d: %.200s", status, text)
	}
	p := open(t, s, 1280, 900, "light")
	p.live()
	p.wait(`document.querySelectorAll('#decisions tbody tr').length === 1 && document.querySelector('#workers tbody th').textContent.startsWith('<b>\\u{202e}www')`)
	p.looks("names")
	p.do(chromedp.Evaluate[chromedp.Void](`document.querySelector('#decisions tbody tr').click()`))
	p.wait(`document.querySelector('#explain').open && document.querySelector('#explain-body').dataset.id`)
	p.look("names-decision", "light", 390)
	text := eval[string](p, `document.documentElement.textContent + [...document.querySelectorAll('[title]')].map((e) => e.title).join('')`)
	for _, c := range []string{"\x1b", "\u202e", "\u2028", "\r"} {
		if strings.Contains(text, c) {
			t.Errorf("the page contains %q", c)
		}
	}
	if n := eval[int](p, `document.querySelectorAll('main img, dialog img, main script, main b:not(.legend b)').length`); n > 0 || eval[string](p, `document.title`) != "kvroute" {
		t.Errorf("names became %d elements", n)
	}
}
