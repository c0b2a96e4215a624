// SPDX-License-Identifier: Apache-2.0

package api_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/netip"

	"github.com/kvroute/kvroute/api"
	"github.com/kvroute/kvroute/router"
)

// ExampleDispatch is a program that routes a request, sends its token ids to the worker and
// streams the answer.
func ExampleDispatch() {
	worker := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, "data: {\"text\":\"Hello\"}\n\ndata: [DONE]\n\n")
	}))
	defer worker.Close()
	r, err := router.New(router.Config{})
	if err != nil {
		fmt.Println(err)
		return
	}
	if err := r.SetWorker(router.WorkerInfo{ID: 1, Models: []string{"llama"}, BlockSize: 16, Address: netip.MustParseAddrPort(worker.Listener.Addr().String())}); err != nil {
		fmt.Println(err)
		return
	}

	send, err := api.Dispatch(nil, map[string]json.RawMessage{"max_tokens": json.RawMessage("8")})
	if err != nil {
		fmt.Println(err)
		return
	}
	for event, err := range r.Generate(context.Background(), router.Request{ID: "r1", Model: "llama", Tokens: []uint32{1, 2, 3}}, send) {
		if err != nil {
			fmt.Println(err)
			return
		}
		fmt.Printf("%s", event.Data)
	}
	// Output:
	// data: {"text":"Hello"}
	//
	// data: [DONE]
}
