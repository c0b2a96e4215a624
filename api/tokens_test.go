// SPDX-License-Identifier: Apache-2.0

package api_test

import (
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/kvroute/kvroute/api"
)

func tokenFile(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "tokens")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

const (
	tokenA = "AAAAAAAAAAAAAAAAAAAAAAAA"
	tokenB = "BBBBBBBBBBBBBBBBBBBBBBBB"
)

// patterns returns the method and path of every handler.
func patterns(t testing.TB) (list [][2]string) {
	t.Helper()
	source, err := os.ReadFile("api.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range regexp.MustCompile(`mux\.Handle(?:Func)?\("(GET|POST|DELETE) ([^"]+)"`).FindAllStringSubmatch(string(source), -1) {
		list = append(list, [2]string{m[1], m[2]})
	}
	if len(list) < 15 {
		t.Fatalf("only %d handlers are found", len(list))
	}
	return list
}

// With tokens configured, only the probes and the metrics answer a client without a token.
func TestTheAPIWantsAToken(t *testing.T) {
	tokens, err := api.OpenTokens(tokenFile(t, "\n"+tokenA+"\r\n\n  "+tokenB+"  \n"))
	if err != nil {
		t.Fatal(err)
	}
	metrics := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "metrics") })
	h := api.New(api.Config{Router: newRouter(t, 1), Metrics: metrics, Tokens: tokens})
	send := func(method, path, authorization string) *httptest.ResponseRecorder {
		w := httptest.NewRecorder()
		r := httptest.NewRequestWithContext(t.Context(), method, path, strings.NewReader("{}"))
		r.Header.Set("Content-Type", "application/json")
		if authorization != "" {
			r.Header.Set("Authorization", authorization)
		}
		h.ServeHTTP(w, r)
		return w
	}
	open := map[string]bool{"/healthz": true, "/readyz": true, "/metrics": true, "/openapi.yaml": true}
	all := append(patterns(t), [2]string{"GET", "/v1/nothing"}, [2]string{"DELETE", "/v1/workers"}, [2]string{"GET", "/healthz/../v1/workers"}, [2]string{"GET", "//v1/workers"})
	for _, p := range all {
		method, path := p[0], p[1]
		for authorization, what := range map[string]string{
			"":                              "no header Authorization",
			"Basic " + tokenA:               "not of the form Bearer",
			tokenA:                          "not of the form Bearer",
			"Bearer":                        "not one of",
			"Bearer " + tokenA[1:]:          "not one of",
			"Bearer " + tokenA + "A":        "not one of",
			"Bearer " + tokenA + " " + "x":  "not one of",
			"Bearer " + tokenA + "," + "B":  "not one of",
			"Bearer " + tokenB[:8] + tokenA: "not one of",
		} {
			w := send(method, path, authorization)
			if open[path] {
				if w.Code != 200 {
					t.Errorf("%s %s with %q: status %d, want 200", method, path, authorization, w.Code)
				}
				continue
			}
			var e struct {
				Error struct{ Message, Type, Param, Code string }
			}
			if err := json.Unmarshal(w.Body.Bytes(), &e); err != nil || w.Code != http.StatusUnauthorized || !strings.Contains(e.Error.Message, what) || e.Error.Param != "Authorization" || e.Error.Code != "unauthorized" || !strings.HasPrefix(w.Header().Get("WWW-Authenticate"), "Bearer") {
				t.Errorf("%s %s with %q: status %d, %s", method, path, authorization, w.Code, w.Body)
			}
			if strings.Contains(w.Body.String(), tokenA) || strings.Contains(w.Body.String(), tokenB) {
				t.Errorf("the answer tells a token: %s", w.Body)
			}
		}
		for _, authorization := range []string{"Bearer " + tokenA, "bearer  " + tokenB, "BEARER " + tokenB} {
			if w := send(method, path, authorization); w.Code == http.StatusUnauthorized {
				t.Errorf("%s %s with %q: status %d: %s", method, path, authorization, w.Code, w.Body)
			}
		}
	}
}

// An invalid file is refused with an error that names the line, and the old tokens stay valid.
func TestTokenFiles(t *testing.T) {
	for text, want := range map[string]string{
		"":                         "holds no token",
		"\n \n":                    "holds no token",
		"short":                    ":1 is no token",
		tokenA + "\nshort\n":       ":2 is no token",
		tokenA + " " + tokenB:      ":1 is no token",
		tokenA + "é":               ":1 is no token",
		strings.Repeat("a", 1<<17): "has more than 65536 bytes",
	} {
		path := tokenFile(t, text)
		if _, err := api.OpenTokens(path); err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), path) {
			t.Errorf("%.40q: %v, want %q", text, err, want)
		} else if strings.Contains(err.Error(), tokenA) {
			t.Errorf("the error tells a token: %v", err)
		}
	}
	if _, err := api.OpenTokens("/nowhere/at"); err == nil || !strings.Contains(err.Error(), "/nowhere/at") {
		t.Errorf("no file: %v", err)
	}

	path := tokenFile(t, tokenA)
	tokens, err := api.OpenTokens(path)
	if err != nil {
		t.Fatal(err)
	}
	h := api.New(api.Config{Router: newRouter(t, 1), Metrics: http.NotFoundHandler(), Tokens: tokens})
	opens := func(token string) bool {
		w := httptest.NewRecorder()
		r := httptest.NewRequestWithContext(t.Context(), "GET", "/v1/workers", nil)
		r.Header.Set("Authorization", "Bearer "+token)
		h.ServeHTTP(w, r)
		return w.Code == 200
	}
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := tokens.Read(); err == nil || !opens(tokenA) {
		t.Errorf("an empty file: %v; the old token opens: %v", err, opens(tokenA))
	}
	if err := os.WriteFile(path, []byte(tokenB), 0o600); err != nil {
		t.Fatal(err)
	}
	commit, err := tokens.Read()
	if err != nil || !opens(tokenA) || opens(tokenB) {
		t.Fatalf("before the new file counts: %v, %v, %v", err, opens(tokenA), opens(tokenB))
	}
	if commit(); opens(tokenA) || !opens(tokenB) {
		t.Error("the new file does not count")
	}
}

// A client that does not send the announced body cannot keep its connection for long, with or
// without a token. A client that reads its answer more slowly than bodies may take still gets the
// answer.
func TestBodiesHaveATime(t *testing.T) {
	tokens, err := api.OpenTokens(tokenFile(t, tokenA))
	if err != nil {
		t.Fatal(err)
	}
	const limit = 200 * time.Millisecond
	metrics := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body) // the complete body arrives
		select {
		case <-r.Context().Done():
		case <-time.After(3 * limit):
			_, _ = io.WriteString(w, "metrics") // the test reads it
		}
	})
	server := httptest.NewServer(api.New(api.Config{Router: newRouter(t, 1), Metrics: metrics, Tokens: tokens, BodyTime: limit}))
	defer server.Close()
	for _, c := range []struct{ request, want string }{
		{"POST /v1/free HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n", "401"},
		{"POST /v1/free HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + tokenA + "\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n{", "408"},
		{"GET /healthz HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n", "200"},
		{"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}", "metrics"},
	} {
		conn, err := net.Dial("tcp", server.Listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		if err := conn.SetDeadline(time.Now().Add(time.Minute)); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(conn, c.request); err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(conn)
		if err != nil || !strings.Contains(string(got), c.want) {
			t.Errorf("%q: %q, %v; want %s and the connection's end", c.request, got, err, c.want)
		}
		_ = conn.Close() // the server has already closed the connection
	}
}
