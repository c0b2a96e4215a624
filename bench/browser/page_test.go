// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
)

// A page is an open tab of a browser. At the end of its test it has written nothing to the console, and has
// requested nothing from another origin.
type page struct {
	ctx     context.Context //nolint:containedctx // the tab of the browser
	t       *testing.T
	allowed string // part of messages that the console may have

	mu sync.Mutex
	// mu guards the fields below.
	console, requests []string
}

func open(t *testing.T, s *service, width, height int64, scheme string) *page {
	t.Helper()
	ctx, cancel := newBrowser(t.Context())
	t.Cleanup(cancel)
	p := &page{ctx: ctx, t: t}
	if err := chromedp.Listen(ctx, p.hear); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		for _, message := range p.console {
			if p.allowed == "" || !strings.Contains(message, p.allowed) {
				t.Errorf("console: %s", message)
			}
		}
		for _, address := range p.requests {
			if u, err := url.Parse(address); err != nil || "http://"+u.Host != s.url {
				t.Errorf("the page requested %s", address)
			}
		}
	})
	p.media(scheme)
	p.do(chromedp.EmulateViewport(width, height), chromedp.Navigate(s.url+"/"))
	return p
}

// hear collects messages of the console and requests.
func (p *page) hear(event any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch e := event.(type) {
	case *runtime.EventConsoleAPICalled:
		p.console = append(p.console, fmt.Sprintf("%s %+v", e.Type, e.Args))
	case *runtime.EventExceptionThrown:
		p.console = append(p.console, fmt.Sprintf("%+v %+v", e.ExceptionDetails, e.ExceptionDetails.Exception))
	case *log.EventEntryAdded:
		p.console = append(p.console, fmt.Sprintf("%s %s %s", e.Entry.Level, e.Entry.Text, e.Entry.URL))
	case *network.EventRequestWillBeSent:
		p.requests = append(p.requests, e.Request.URL)
	}
}

func (p *page) media(scheme string) {
	p.t.Helper()
	if err := setScheme(p.ctx, scheme); err != nil {
		p.t.Fatal(err)
	}
}

func (p *page) do(steps ...chromedp.Action[chromedp.Void]) {
	p.t.Helper()
	if err := chromedp.Do(p.ctx, steps...); err != nil {
		p.t.Fatal(err)
	}
}

// eval returns the JSON of an expression's value.
func eval[T any](p *page, expression string) (value T) {
	p.t.Helper()
	text, err := chromedp.Run(p.ctx, chromedp.Evaluate[string]("JSON.stringify(("+expression+") ?? null)"))
	if err == nil {
		err = json.Unmarshal([]byte(text), &value)
	}
	if err != nil {
		p.t.Fatalf("%s: %v", expression, err)
	}
	return value
}

// wait waits until an expression is true.
func (p *page) wait(expression string) {
	p.t.Helper()
	until(p.t, expression, func() (string, bool) { return "", eval[bool](p, "Boolean("+expression+")") })
}

// live waits until the page shows all sections.
func (p *page) live() {
	p.t.Helper()
	p.wait(`document.querySelector('#connection').dataset.value === 'live' && document.querySelector('#workers tbody tr') && document.querySelector('#ready').dataset.value`)
}

// whole scrolls the boxes of tables a little: they then have all rows, also those out of view.
func (p *page) whole() {
	p.t.Helper()
	p.do(chromedp.Evaluate[chromedp.Void](`document.querySelectorAll('.tall, .short').forEach((box) => box.scrollTo(0, 1))`))
}

// picture writes a screenshot of the whole page into .cache/browser.
func (p *page) picture(name string) {
	p.t.Helper()
	image, err := chromedp.Run(p.ctx, chromedp.FullScreenshot(100))
	if err != nil {
		p.t.Fatal(err)
	}
	folder := "../../.cache/browser"
	if err := os.MkdirAll(folder, 0o755); err != nil {
		p.t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(folder, name+".png"), image, 0o644); err != nil {
		p.t.Fatal(err)
	}
}
