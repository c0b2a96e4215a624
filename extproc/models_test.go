// SPDX-License-Identifier: Apache-2.0

package extproc_test

import (
	"testing"
	"time"

	"github.com/kvroute/kvroute/extproc"
	"github.com/kvroute/kvroute/internal/envoytest"
	"github.com/kvroute/kvroute/router"
)

// kvroute answers what models there are: an engine would list its own only. Before it knows the fleet, and for other
// methods and paths, a worker answers.
func TestListOfModels(t *testing.T) {
	known := false
	models := []router.ServedModel{
		{Name: "llama", Model: "llama", Since: time.Unix(100, 0), MaxModelLen: 4096},
		{Name: "org/tuned", Model: "llama", Adapter: true, Since: time.Unix(100, 0), MaxModelLen: 4096},
		{Name: "qwen", Model: "qwen", Since: time.Unix(200, 0)},
	}
	h := newHarness(t, extproc.Config{
		Started: func() bool { return known },
		Models:  func() []router.ServedModel { return models },
	})
	const (
		llama = `{"id":"llama","object":"model","created":100,"owned_by":"kvroute","root":"llama","parent":null,"max_model_len":4096}`
		tuned = `{"id":"org/tuned","object":"model","created":100,"owned_by":"kvroute","root":"org/tuned","parent":"llama","max_model_len":4096}`
		qwen  = `{"id":"qwen","object":"model","created":200,"owned_by":"kvroute","root":"qwen","parent":null}`
	)
	check := func(method, path, want string, status int) {
		t.Helper()
		x := h.Do(envoytest.Request{Method: method, Path: path})
		got := envoytest.Refusal{}
		if x.Refusal != nil {
			got = *x.Refusal
		}
		if got.Status != status || got.Body != want {
			t.Errorf("%s %s: kvroute answers %d %s, want %d %s", method, path, got.Status, got.Body, status, want)
		}
		x.End()
	}
	check("GET", "/v1/models", "", 0)
	known = true
	check("GET", "/v1/models", `{"data":[`+llama+`,`+tuned+`,`+qwen+`],"object":"list"}`, 200)
	check("GET", "/v1//models/?x=1", `{"data":[`+llama+`,`+tuned+`,`+qwen+`],"object":"list"}`, 200)
	check("GET", "/v1/models/org/tuned", tuned, 200)
	check("GET", "/v1/models/org%2Ftuned", tuned, 200)
	check("GET", "/v1/models/nobody", `{"error":{"message":"the model \"nobody\" does not exist","type":"not_found_error","param":"model","code":"model_not_found"}}`, 404)
	check("OPTIONS", "/v1/models", "", 0)
	check("GET", "/v1/modelsx", "", 0)
	models = nil
	check("GET", "/v1/models", "", 0)
	if n := h.count(t, "kvroute.extproc.lists"); n != 4 {
		t.Errorf("%d lists are counted, want 4", n)
	}
}
