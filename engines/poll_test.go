// SPDX-License-Identifier: Apache-2.0

package engines_test

import (
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvroute/kvroute/engines"
	"github.com/kvroute/kvroute/indexer"
)

// roundTrip answers requests without a network.
type roundTrip func() (body string)

func (r roundTrip) RoundTrip(*http.Request) (*http.Response, error) {
	return &http.Response{StatusCode: http.StatusOK, Body: io.NopCloser(strings.NewReader(r()))}, nil
}

// An engine whose answers always have events is partial for ten minutes, too. No real time passes here.
func TestABusyPolledEngineIsPartialForSomeTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		id := 5 // another client received the first events
		client := &http.Client{Transport: roundTrip(func() string {
			time.Sleep(time.Second)
			id++
			return "[" + trtStored(id, "null", trtBlock("101", trtTokens(1, 16), "")) + "]"
		})}
		all, _ := follow(t, engines.SourcesConfig{Client: client}, engines.EngineWorker{
			ID: 7, Transport: engines.TransportPoll, Address: "127.0.0.1:1", BlockSize: 16,
		})
		time.Sleep(9 * time.Minute)
		if got := all.State(7); got != indexer.StatePartial {
			t.Errorf("after 9 minutes the worker is known %s, want partial", got)
		}
		time.Sleep(2 * time.Minute)
		if got := all.State(7); got != indexer.StateOK {
			t.Errorf("after 11 minutes the worker is known %s, want ok", got)
		}
	})
}
