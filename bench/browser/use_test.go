// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
)

// faint lists texts whose contrast with their background is below 4.5, or 3 for large text (WCAG AA).
const faint = `(() => {
	const parse = (c) => (c.match(/[\d.]+/g) ?? [0, 0, 0, 0]).map(Number)
	const luminance = ([r, g, b]) => [r, g, b].map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)).reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0)
	const background = (e) => { for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor); if (c.length < 4 || c[3] > 0.99) return c } return [255, 255, 255] }
	const found = new Set()
	for (const e of document.querySelectorAll('body *')) {
		if (![...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()) || !e.checkVisibility() || e.closest('.unseen, .skip, :disabled')) continue
		const style = getComputedStyle(e)
		const behind = e.closest('.bar') ? [background(e), parse(getComputedStyle(document.documentElement).getPropertyValue('--bar').replace(/#(..)(..)(..)/, (_, r, g, b) => [r, g, b].map((x) => parseInt(x, 16)).join(' ')))] : [background(e)]
		const colour = luminance(parse(e instanceof SVGElement ? style.fill : style.color))
		for (const back of behind.map(luminance)) {
			const contrast = (Math.max(colour, back) + 0.05) / (Math.min(colour, back) + 0.05)
			if (contrast < (parseFloat(style.fontSize) >= 24 ? 3 : 4.5)) found.add(contrast.toFixed(2) + ' ' + e.tagName + ' ' + e.textContent.slice(0, 30))
		}
	}
	return [...found]
})()`

// looks checks a state of the page in each scheme at each width.
func (p *page) looks(state string) {
	p.t.Helper()
	for _, scheme := range []string{"dark", "light"} {
		for _, width := range []int64{390, 1280} {
			p.look(state, scheme, width)
		}
	}
}

// look checks the page in a scheme at a width: nothing is wider than the window, all text is legible, and axe-core finds
// no mistake. It writes a picture.
func (p *page) look(state, scheme string, width int64) {
	p.t.Helper()
	p.media(scheme)
	p.do(chromedp.EmulateViewport(width, 900))
	p.wait(fmt.Sprintf("innerWidth === %d", width))
	if got := eval[int64](p, `document.documentElement.scrollWidth`); got > width {
		p.t.Errorf("%s, %s, %d: the page is %d pixels wide", state, scheme, width, got)
	}
	for _, text := range eval[[]string](p, faint) {
		p.t.Errorf("%s, %s, %d: contrast too low: %s", state, scheme, width, text)
	}
	for _, mistake := range p.axe() {
		p.t.Errorf("%s, %s, %d: axe: %s", state, scheme, width, mistake)
	}
	p.picture(fmt.Sprintf("%s-%s-%d", state, scheme, width))
}

// focused describes the element with the focus.
type focused struct{ Tag, Name, Field, Key, Outline string }

const readFocus = `(() => {
	const e = document.activeElement
	const label = e.getAttribute('aria-labelledby')
	return {
		tag: e.tagName, field: e.dataset.field ?? '', key: e.closest('tr')?.dataset.key ?? '', outline: getComputedStyle(e).outlineStyle,
		name: label ? document.getElementById(label).textContent : e.ariaLabel || e.labels?.[0]?.textContent || e.textContent,
	}
})()`

// A decision can be opened, read and closed without a pointer. Every stop of the Tab key has a name and a visible focus.
func TestKeyboardOpensADecision(t *testing.T) {
	s := serve(t, "")
	s.engines(t, 2)
	for i := range 5 {
		s.chat(t, fmt.Sprint("chat-", i), 0, i)
	}
	p := open(t, s, 1280, 900, "light")
	p.live()
	p.wait(`document.querySelectorAll('#decisions tbody tr').length === 5`)
	var at focused
	for i := 0; at.Field != "id"; i++ {
		if i == 100 {
			t.Fatalf("100 times Tab reach no decision, but %+v", at)
		}
		p.do(chromedp.KeyEvent(kb.Tab))
		at = eval[focused](p, readFocus)
		if at.Outline == "none" || strings.TrimSpace(at.Name) == "" {
			t.Errorf("stop %d has no name or no visible focus: %+v", i, at)
		}
	}
	p.do(chromedp.KeyEvent(kb.Tab)) // the second decision
	at = eval[focused](p, readFocus)
	s.chat(t, "later", 1, 1) // its row must not move now
	p.do(chromedp.KeyEvent(kb.Enter))
	p.wait(`document.querySelector('#explain').open && document.querySelector('#explain-body').dataset.id`)
	if id := eval[string](p, `document.querySelector('#explain-body').dataset.id`); id != at.Key || id != "chat-3" {
		t.Errorf("decision %s is open, want %s", id, at.Key)
	}
	s.checkCandidates(t, p, "chat-3")
	p.do(chromedp.KeyEvent(kb.Escape))
	p.wait(`!document.querySelector('#explain').open`)
	if back := eval[focused](p, readFocus); back.Key != "chat-3" {
		t.Errorf("after Escape the focus is on %+v", back)
	}
	p.do(chromedp.KeyEvent(kb.Escape), chromedp.Evaluate[chromedp.Void](`document.activeElement.blur()`))
	p.wait(`document.querySelector('#decisions tbody tr').dataset.key === 'later'`)
}

// checkCandidates compares the open decision with GET /v1/decisions.
func (s *service) checkCandidates(t *testing.T, p *page, id string) {
	t.Helper()
	var d object
	s.read(t, "/v1/decisions?id="+id, &d)
	candidates := list(d, "candidates")
	p.wait(fmt.Sprintf(`document.querySelectorAll('#explain-body tbody tr').length === %d`, len(candidates)))
	shown := eval[map[string]map[string]cell](p, `Object.fromEntries([...document.querySelectorAll('#explain-body tbody tr')].map((row) =>
		[row.dataset.key, Object.fromEntries([...row.querySelectorAll('[data-field]')].map((e) => [e.dataset.field, { value: e.dataset.value ?? null, text: e.textContent }]))]))`)
	if len(shown) != len(candidates) || len(candidates) == 0 {
		t.Errorf("%d candidates, want %d", len(shown), len(candidates))
	}
	chosen := 0
	for _, c := range candidates {
		w := c["worker"].(object)
		row := shown[fmt.Sprintf("%s/%s", w["worker_id"], w["dp_rank"])]
		for field := range strings.FieldsSeq("overlap_blocks pending_blocks host_blocks disk_blocks pend_tokens waiting_requests active_requests decode_tokens waiting_tokens active_blocks additional_blocks kv_use max_requests speed taint_weight decode_delay_tokens cost") {
			want := "0"
			if c[field] != nil {
				want = fmt.Sprint(c[field])
			}
			if got := row[field]; got.Value == nil || !same(*got.Value, want) || !near(got.Text, want) {
				t.Errorf("%s of %s: %+v, want %s", field, name(w, c["worker_name"]), got, want)
			}
		}
		verdict, _ := c["verdict_text"].(string)
		if shown := row["verdict"].Text; shown != verdict {
			t.Errorf("the verdict of %s is %q, want %q", name(w, c["worker_name"]), shown, verdict)
		}
		if strings.HasPrefix(verdict, "chosen") {
			chosen++
		}
	}
	pairs := eval[map[string]string](p, `Object.fromEntries([...document.querySelectorAll('#explain-body > dl:first-of-type dt')].map((e) => [e.textContent, e.nextSibling.textContent]))`)
	for line, want := range map[string]string{
		"kind of reason": fmt.Sprint(d["reason"]), "settings": fmt.Sprint(d["settings_text"]), "mode": fmt.Sprint(d["mode_text"]),
	} {
		if pairs[line] != want {
			t.Errorf("%s is %q, want %q", line, pairs[line], want)
		}
	}
	if lead := eval[string](p, `document.querySelector('#explain-body .lead').textContent`); lead != d["reason_text"] {
		t.Errorf("the reason is %q, want %q", lead, d["reason_text"])
	}
	if by, ok := d["first_token_text"].(string); ok && !strings.HasSuffix(pairs["first token"], by) {
		t.Errorf("the first token is %q, want %q", pairs["first token"], by)
	}
	omitted := eval[string](p, `document.querySelector('#explain-body .omitted')?.textContent ?? ''`)
	if n, some := d["candidates_omitted"]; some != strings.Contains(omitted, fmt.Sprint(n, " more workers")) {
		t.Errorf("%v candidates are not stored, and the page says %q", n, omitted)
	}
	if chosen != 1 {
		t.Errorf("%d candidates are marked as chosen", chosen)
	}
}

// With a token the page asks for it, refuses a wrong one, and forgets the right one when it is loaded again.
func TestTokenIsAskedForAndKeptInMemory(t *testing.T) {
	const token = "a-token-of-the-browser-test"
	file := filepath.Join(t.TempDir(), "tokens")
	if err := os.WriteFile(file, []byte(token+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	s := serve(t, `workers: [{name: gpu-1, address: "10.0.0.1:8000", models: [sim], block_size: 16}]`, "--api-token-file", file)
	s.token = token
	p := open(t, s, 390, 844, "dark")
	p.allowed = "status of 401" // the browser itself reports it
	enter := func(text string) {
		t.Helper()
		p.wait(`document.activeElement.id === 'token'`)
		p.do(chromedp.KeyEvent(text), chromedp.KeyEvent(kb.Enter))
	}
	p.wait(`!document.querySelector('#login').hidden && document.querySelector('#main').hidden`)
	p.look("login", "dark", 390)
	p.wait(`document.activeElement.id === 'token'`)
	if wrong := eval[string](p, `document.querySelector('#login-error').textContent`); wrong != "" {
		t.Errorf("before a token was given: %s", wrong)
	}
	enter("some-other-token-that-is-wrong")
	p.wait(`document.querySelector('#login-error').textContent`)
	enter(token)
	p.live()
	s.agree(t, p)
	if kept := eval[[]string](p, `[location.href, document.cookie, JSON.stringify(localStorage), JSON.stringify(sessionStorage), document.documentElement.outerHTML, document.querySelector('#token').value]`); strings.Contains(strings.Join(kept, "\n"), token) {
		t.Errorf("the token is kept in %q", kept)
	}
	p.mu.Lock()
	if slices.ContainsFunc(p.requests, func(u string) bool { return strings.Contains(u, token) }) {
		t.Errorf("the token is in an address: %q", p.requests)
	}
	p.mu.Unlock()
	p.do(chromedp.Click(chromedp.CSS("#forget")))
	p.wait(`document.querySelector('#login') && !document.querySelector('#login').hidden && !document.querySelector('#workers tbody tr')`)
}

// While kvroute is away the page says so, and goes on when kvroute is back.
func TestPageConnectsAgain(t *testing.T) {
	const config = `workers: [{name: gpu-1, address: "10.0.0.1:8000", models: [sim], block_size: 16}]`
	s := serve(t, config)
	p := open(t, s, 1280, 900, "light")
	p.allowed = "net::ERR_" // the browser itself reports failed connections
	p.live()
	s.stop(t)
	p.wait(`document.querySelector('#connection').dataset.value === 'waiting' && document.querySelector('#connection').textContent.includes('next attempt')`)
	p.looks("away")
	first := eval[string](p, `document.querySelector('#identity').dataset.value`)
	again := serve(t, config, "--http-address", strings.TrimPrefix(s.url, "http://"))
	p.live()
	p.wait(fmt.Sprintf(`document.querySelector('#identity').dataset.value !== %q`, first))
	again.agree(t, p)
}
