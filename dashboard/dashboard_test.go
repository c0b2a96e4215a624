// SPDX-License-Identifier: Apache-2.0

package dashboard_test

import (
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/kvroute/kvroute/dashboard"
)

func get(t *testing.T, path string) *httptest.ResponseRecorder {
	t.Helper()
	w := httptest.NewRecorder()
	dashboard.Handler().ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, path, nil))
	return w
}

// The page and all files that it refers to are served, with the policy that keeps everything else out.
func TestPageIsWhole(t *testing.T) {
	reference := regexp.MustCompile(`(?:href|src)="(dashboard/[^"]+)"|from '\./([^']+)'`)
	open, seen := []string{"/"}, map[string]bool{}
	for len(open) > 0 {
		path := open[0]
		if open = open[1:]; seen[path] {
			continue
		}
		seen[path] = true
		w := get(t, path)
		if w.Code != http.StatusOK {
			t.Errorf("%s: status %d", path, w.Code)
		}
		for header, want := range map[string]string{"Content-Security-Policy": "default-src 'self'", "X-Content-Type-Options": "nosniff", "Cache-Control": "no-cache"} {
			if got := w.Header().Get(header); !strings.Contains(got, want) {
				t.Errorf("%s: header %s is %q, want %q", path, header, got, want)
			}
		}
		for _, found := range reference.FindAllStringSubmatch(w.Body.String(), -1) {
			if found[1] != "" {
				open = append(open, "/"+found[1])
			} else {
				open = append(open, "/dashboard/"+found[2])
			}
		}
	}
	for _, path := range []string{"/dashboard/style.css", "/dashboard/feed.js", "/dashboard/icon.svg"} {
		if !seen[path] {
			t.Errorf("nothing refers to %s", path)
		}
	}
}

func TestOnlyFilesOfThePageAreServed(t *testing.T) {
	for _, path := range []string{"/dashboard/", "/dashboard/dashboard.go", "/dashboard/nothing.js", "/dashboard/x/main.js", "/index.html", "/v1/workers"} {
		if w := get(t, path); w.Code != http.StatusNotFound {
			t.Errorf("%s: status %d, want 404", path, w.Code)
		}
	}
}

// Text of workers and clients never becomes HTML or script, and nothing is loaded from elsewhere.
func TestFilesAreHarmless(t *testing.T) {
	files, err := os.ReadDir(".")
	if err != nil {
		t.Fatal(err)
	}
	forbidden := regexp.MustCompile(`innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|localStorage|sessionStorage|document\.cookie|\bstyle="|\bon[a-z]+="|https?://`)
	for _, f := range files {
		if strings.HasSuffix(f.Name(), ".go") {
			continue
		}
		text, err := os.ReadFile(f.Name())
		if err != nil {
			t.Fatal(err)
		}
		for n, line := range strings.Split(string(text), "\n") {
			if found := forbidden.FindString(strings.ReplaceAll(line, "http://www.w3.org/2000/svg", "")); found != "" {
				t.Errorf("%s:%d contains %s", f.Name(), n+1, found)
			}
		}
	}
}
