// SPDX-License-Identifier: Apache-2.0

// Package dashboard has the web page that shows a running kvroute: plain HTML, CSS and JavaScript,
// which read GET /v1/live and GET /v1/decisions of package api.
package dashboard

import (
	"bytes"
	"embed"
	"net/http"
	"strings"
	"time"
)

//go:embed *.html *.css *.js *.svg
var files embed.FS

// policy is the Content-Security-Policy of the page. The browser loads nothing from elsewhere, runs no
// inline script, and refuses to turn text into HTML: names of workers and models are not trusted.
const policy = "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'; " +
	"require-trusted-types-for 'script'; trusted-types 'none'"

// Handler serves the page at / and its files at /dashboard/NAME, and 404 at other paths. The files
// contain no secrets and nothing about the running kvroute. Any number of requests may run at once.
func Handler() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		name := strings.TrimPrefix(r.URL.Path, "/dashboard/")
		if r.URL.Path == "/" {
			name = "page.html"
		}
		text, err := files.ReadFile(name)
		switch {
		case err != nil:
			http.NotFound(w, r)
			return
		case r.Method != http.MethodGet && r.Method != http.MethodHead:
			w.Header().Set("Allow", "GET, HEAD")
			http.Error(w, "use GET", http.StatusMethodNotAllowed)
			return
		}
		h := w.Header()
		h.Set("Content-Security-Policy", policy)
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("Referrer-Policy", "no-referrer")
		h.Set("Cross-Origin-Resource-Policy", "same-origin")
		h.Set("Cache-Control", "no-cache")
		http.ServeContent(w, r, name, time.Time{}, bytes.NewReader(text))
	})
}
