// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/performance"
	"github.com/chromedp/cdproto/tracing"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
)

// mostTask is the longest processor time of a task, in ms. Other processes of the machine do not count.
const mostTask = 50

// With 512 workers whose loads change all the time the page keeps its rows, writes only cells that have changed, and
// shows a page of the table. It draws the rows in view; scrolling brings the others.
func TestManyWorkersAreShownInPlace(t *testing.T) {
	var config strings.Builder
	config.WriteString("workers:\n")
	for i := range 512 {
		fmt.Fprintf(&config, "- {name: gpu-%d, address: \"10.0.%d.%d:8000\", models: [sim], block_size: 16, total_kv_blocks: 50000}\n", i+1, i/250, i%250+1)
	}
	s := serve(t, config.String())
	p := open(t, s, 1280, 900, "light")
	p.live()
	p.wait(`document.querySelector('#page').dataset.value === '512' && document.querySelector('[data-field=workers]').dataset.value === '512'`)
	const inView = 20
	p.wait(fmt.Sprintf(`document.querySelectorAll('#workers tbody tr').length === %d`, inView))
	if hidden := eval[[]string](p, `[...document.querySelectorAll('.tall, .short')].filter((box) => box.querySelectorAll('tbody tr').length >= 20 && box.scrollHeight <= box.clientHeight).map((box) => box.innerHTML.slice(0, 80))`); len(hidden) > 0 {
		t.Errorf("boxes have room for more than their rows: %q", hidden)
	}
	p.do(chromedp.Evaluate[chromedp.Void](`(() => {
		window.changes = 0
		window.rows = [...document.querySelectorAll('#workers tbody tr')]
		window.long = 0
		new PerformanceObserver((list) => { window.long += list.getEntries().length }).observe({ entryTypes: ['longtask'] })
		new MutationObserver((list) => { window.changes += list.filter((m) => m.type === 'childList' && m.target.dataset?.field).length }).observe(document.querySelector('#workers'), { subtree: true, childList: true })
		performance.clearMeasures()
	})()`))
	before, tasks := p.spent(), p.tasks()
	const rounds = 12
	for round := range rounds {
		for i := range 60 { // new loads at many workers
			s.book(t, fmt.Sprint(round, "-", i), 160)
		}
		p.wait(fmt.Sprintf(`document.querySelector('#decisions tbody tr')?.dataset.key === '%d-59'`, round))
	}
	if !eval[bool](p, `[...document.querySelectorAll('#workers tbody tr')].every((row, i) => row === window.rows[i])`) {
		t.Error("rows were made again")
	}
	cells, changes := inView*13*rounds, eval[int](p, `window.changes`)
	if changes == 0 || changes > cells/2 {
		t.Errorf("%d of %d cells were written", changes, cells)
	}
	after, longest := p.spent(), tasks()
	read, update := eval[[]float64](p, `performance.getEntriesByName('read').map((m) => m.duration)`), eval[[]float64](p, `performance.getEntriesByName('update').map((m) => m.duration)`)
	per := func(metric string) float64 { return (after[metric] - before[metric]) / rounds * 1000 }
	t.Logf("512 workers: processor time of %d rounds with 60 requests each, in ms a round: %.1f, of this script %.1f, layout %.1f, style %.1f; the longest tasks took %.1f ms", rounds, per("TaskDuration"), per("ScriptDuration"), per("LayoutDuration"), per("RecalcStyleDuration"), longest)
	t.Logf("512 workers: script time of a frame: %s; of reading an event: %s; %d tasks above 50 ms by the clock", spread(update), spread(read), eval[int](p, `window.long`))
	if longest[0] > mostTask {
		t.Errorf("with 512 workers a task of the page takes %.1f ms of processor time, want at most %d", longest[0], mostTask)
	}
	s.checkTiles(t, p)
	t.Logf("512 workers: first paint after %.0f ms", eval[float64](p, `performance.getEntriesByName('first-contentful-paint')[0].startTime`))

	// A decision with more workers than are stored says how many are missing.
	p.do(chromedp.Evaluate[chromedp.Void](`document.querySelector('#decisions tbody tr button').click()`))
	p.wait(`document.querySelector('#explain-body').dataset.id`)
	s.checkCandidates(t, p, eval[string](p, `document.querySelector('#explain-body').dataset.id`))
	if !eval[bool](p, `/38[34] more workers/.test(document.querySelector('#explain-body .omitted').textContent)`) {
		t.Error("the page does not say that workers are not stored")
	}
	p.do(chromedp.Click(chromedp.CSS("#close")))
	p.wait(`!document.querySelector('#explain').open`)

	// Sorting, paging and filtering.
	p.do(chromedp.Click(chromedp.CSS("#workers thead th:nth-child(11) button")))
	p.wait(`document.querySelector('#workers thead th:nth-child(11)').ariaSort === 'descending'`)
	until(t, "50 workers, sorted by routed requests", func() (string, bool) {
		p.whole()
		routed := eval[[]int](p, `[...document.querySelectorAll('#workers tbody [data-field=routed]')].map((e) => +e.dataset.value)`)
		return fmt.Sprint(routed), len(routed) == 50 && slices.IsSortedFunc(routed, func(a, b int) int { return b - a })
	})
	p.do(chromedp.Click(chromedp.CSS("#workers thead th:nth-child(1) button")), chromedp.Click(chromedp.CSS("#pager button[value='1']")))
	p.wait(`document.querySelector('#workers tbody th').textContent === 'gpu-51'`)
	p.picture("many-1280")
	p.do(chromedp.Click(chromedp.CSS("#filter")), chromedp.KeyEvent("GPU-512"))
	p.wait(`document.querySelectorAll('#workers tbody tr').length === 1 && document.querySelector('#workers tbody th').textContent === 'gpu-512' && document.querySelector('#pager').hidden`)
	p.do(chromedp.KeyEvent("no such worker"), chromedp.KeyEvent(kb.Tab))
	p.wait(`document.querySelector('#workers').hidden && document.querySelector('#workers + p').textContent.includes('No worker matches')`)
}

// checkTiles compares the tiles with sums over the API, which need more digits than a tile shows.
func (s *service) checkTiles(t *testing.T, p *page) {
	t.Helper()
	until(t, "the tiles", func() (string, bool) {
		got := eval[figures](p, readFigures)
		wrong, _ := differences(got, wanted{"tiles": s.want(t, text(got["moment"][""][""].Value))["tiles"]})
		pending := got["tiles"][""]["pend_tokens"]
		if pending.Value == nil || number(object{"n": json.Number(*pending.Value)}, "n") < 10_000 || !strings.Contains(pending.Title, ",") {
			wrong = append(wrong, fmt.Sprintf("too few tokens to test: %+v", pending))
		}
		return strings.Join(wrong, "\n"), len(wrong) == 0
	})
}

// More models than kvroute keeps figures of are counted below those that are shown.
func TestModelsLeftOutAreCounted(t *testing.T) {
	const most, models = 40, 43
	var config strings.Builder
	config.WriteString("workers:\n")
	for i := range models {
		fmt.Fprintf(&config, "- {name: gpu-%d, address: \"10.0.0.%d:8000\", models: [m%d], block_size: 16}\n", i, i+1, i)
	}
	s := serve(t, config.String())
	p := open(t, s, 1280, 900, "light")
	p.live()
	request := func(i int) {
		body := map[string]any{"model": fmt.Sprint("m", i), "request_id": fmt.Sprint("r", i), "token_ids": []int{1, 2, 3}}
		if status, text := s.send(t, http.MethodPost, "/v1/best_worker", body); status != http.StatusOK {
			t.Fatalf("best_worker: status %d: %s", status, text)
		}
		if status, text := s.send(t, http.MethodPost, "/v1/free", map[string]any{"request_id": fmt.Sprint("r", i)}); status != http.StatusOK {
			t.Fatalf("free: status %d: %s", status, text)
		}
	}
	for i := range most - 1 {
		request(i)
	}
	p.wait(fmt.Sprintf(`document.querySelectorAll('#benefit tbody tr').length === %d && document.querySelector('#benefit-more').hidden`, most-1))
	for i := most - 1; i < models; i++ {
		request(i)
	}
	p.wait(fmt.Sprintf(`document.querySelectorAll('#benefit tbody tr').length === %d && document.querySelector('#benefit-more').dataset.value === '%d'`, most, models-most))
	if note := eval[string](p, `document.querySelector('#benefit-more').textContent`); !strings.HasPrefix(note, "3 more models left out") {
		t.Errorf("the page says %q", note)
	}
}

// spent returns the processor time in s that the page has spent so far, by kind of work.
func (p *page) spent() map[string]float64 {
	p.t.Helper()
	if _, err := chromedp.Call(p.ctx, performance.Enable, performance.EnableParams{TimeDomain: performance.EnableTimeDomainThreadTicks}); err != nil {
		p.t.Fatal(err)
	}
	answer, err := chromedp.Call(p.ctx, performance.GetMetrics, cdp.Empty{})
	if err != nil {
		p.t.Fatal(err)
	}
	spent := map[string]float64{}
	for _, m := range answer.Metrics {
		spent[m.Name] = m.Value
	}
	return spent
}

// tasks notes the tasks of the page until stop is called, which returns the processor times of the five
// longest ones in ms. Other processes of the machine do not count.
func (p *page) tasks() (stop func() []float64) {
	p.t.Helper()
	var notes []json.RawMessage // belongs to the browser's events until done is closed
	done := make(chan struct{})
	hear := func(event any) {
		switch e := event.(type) {
		case *tracing.EventDataCollected:
			for _, note := range e.Value {
				notes = append(notes, json.RawMessage(note))
			}
		case *tracing.EventTracingComplete:
			close(done)
		}
	}
	if err := chromedp.Listen(p.ctx, hear); err != nil {
		p.t.Fatal(err)
	}
	if _, err := chromedp.Call(p.ctx, tracing.Start, tracing.StartParams{TraceConfig: &tracing.TraceConfig{IncludedCategories: []string{"toplevel"}}}); err != nil {
		p.t.Fatal(err)
	}
	return func() (longest []float64) {
		p.t.Helper()
		if _, err := chromedp.Call(p.ctx, tracing.End, cdp.Empty{}); err != nil {
			p.t.Fatal(err)
		}
		<-done
		type thread struct{ Pid, Tid int }
		mains, times := map[thread]bool{}, map[thread][]float64{}
		for _, note := range notes {
			var n struct {
				thread
				Name string
				Tdur float64 // processor time in µs
				Args json.RawMessage
			}
			if err := json.Unmarshal(note, &n); err != nil {
				p.t.Fatal(err)
			}
			if n.Name == "thread_name" && strings.Contains(string(n.Args), "CrRendererMain") {
				mains[n.thread] = true
			}
			if strings.HasSuffix(n.Name, "RunTask") {
				times[n.thread] = append(times[n.thread], n.Tdur/1000)
			}
		}
		for main := range mains {
			longest = append(longest, times[main]...)
		}
		slices.Sort(longest)
		slices.Reverse(longest)
		if len(longest) < 5 {
			p.t.Fatalf("the browser noted %d tasks of the page among %d notes", len(longest), len(notes))
		}
		return longest[:5]
	}
}

// spread is the median and the 95th percentile of times in ms.
func spread(ms []float64) string {
	if len(ms) == 0 {
		return "none"
	}
	slices.Sort(ms)
	return fmt.Sprintf("median %.1f ms, p95 %.1f ms", ms[len(ms)/2], ms[len(ms)*95/100])
}
