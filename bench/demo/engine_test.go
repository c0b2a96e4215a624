// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"flag"
	"io"
	"strings"
	"testing"

	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/internal/enginesim"
)

// A simulated worker that serves copies of its blocks registers where, and needs events that name host memory.
func TestEnginesThatServeCopies(t *testing.T) {
	for _, c := range []struct{ flags, source, want string }{
		{"", "", ""},
		{"-kv-pulls", "127.0.0.1:8000", ""},
		{"-kv-pulls -kv-events zmq", "", "want nats"},
		{"-kv-pulls -hybrid window=64", "", "--hybrid"},
	} {
		var cmd EngineCommand
		fs := flag.NewFlagSet("engine", flag.ContinueOnError)
		cmd.Flags(fs)
		if err := fs.Parse(strings.Fields(c.flags)); err != nil {
			t.Fatal(err)
		}
		if c.want != "" {
			if err := cmd.Run(t.Context(), fs, nil, io.Discard); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%s: %v, want %s", c.flags, err, c.want)
			}
			continue
		}
		e, err := enginesim.New(cmd.sim)
		if err != nil {
			t.Fatal(err)
		}
		if got := cmd.record(e, "127.0.0.1:8000", fleet.Events{}).KVSource; got != c.source {
			t.Errorf("%s: kv_source is %q, want %q", c.flags, got, c.source)
		}
	}
}
