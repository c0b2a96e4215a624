// SPDX-License-Identifier: Apache-2.0

package reach_test

import (
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/kvroute/kvroute/internal/reach"
)

func parse(t *testing.T, list string) reach.Networks {
	t.Helper()
	n, err := reach.Parse(list)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func TestNetworksMayNamePorts(t *testing.T) {
	n := parse(t, "10.0.0.0/8:8000-8002, 192.168.1.1/32:80,fd00::/8:9000,172.16.0.0/12")
	for address, want := range map[string]bool{
		"10.1.2.3:8000": true, "10.1.2.3:8002": true, "10.1.2.3:7999": false, "10.1.2.3:8003": false, "10.1.2.3:0": true,
		"[::ffff:10.1.2.3]:8001": true, "192.168.1.1:80": true, "192.168.1.2:80": false,
		"[fd00::1]:9000": true, "[fd00::1]:9001": false, "172.16.0.1:1": true, "8.8.8.8:8000": false,
	} {
		if err := n.Check(netip.MustParseAddrPort(address)); (err == nil) != want {
			t.Errorf("%s: %v, want it allowed: %v", address, err, want)
		}
	}
	for _, list := range []string{"10.0.0.0", "10.0.0.0/33", "10.0.0.0/8:", "10.0.0.0/8:0", "10.0.0.0/8:9-8", "10.0.0.0/8:1-70000", "10.0.0.0/8:a", "worker/8"} {
		if _, err := reach.Parse(list); err == nil || !strings.Contains(err.Error(), list) {
			t.Errorf("%s: error %v", list, err)
		}
	}
}

// Calls to workers go to the named address if it is allowed, and nowhere else.
func TestTheClientGoesNowhereElse(t *testing.T) {
	var calls atomic.Int32
	worker := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		calls.Add(1)
		if r.URL.Path == "/away" {
			http.Redirect(w, r, "/", http.StatusTemporaryRedirect)
		}
	}))
	defer worker.Close()
	port := worker.URL[strings.LastIndexByte(worker.URL, ':'):]
	// A proxy of the environment would receive requests to addresses that are not loopback.
	t.Setenv("HTTP_PROXY", worker.URL)
	t.Setenv("http_proxy", worker.URL)
	for name, c := range map[string]struct {
		networks, url string
		status        int // 0 stands for an error
	}{
		"a worker":                  {"", worker.URL, http.StatusOK},
		"a worker by name":          {"127.0.0.0/8,::1/128", "http://localhost" + port, http.StatusOK},
		"a worker outside":          {"10.0.0.0/8", worker.URL, 0},
		"a name that leads outside": {"10.0.0.0/8", "http://localhost" + port, 0},
		"another port":              {"127.0.0.0/8:1", worker.URL, 0},
		"a redirect":                {"", worker.URL + "/away", http.StatusTemporaryRedirect},
		"a proxy":                   {"127.0.0.0/8", "http://10.255.255.1:1/", 0},
	} {
		before := calls.Load()
		client := parse(t, c.networks).Client()
		resp, err := client.Get(c.url)
		status, want := 0, int32(1)
		if err == nil {
			status = resp.StatusCode
			_ = resp.Body.Close()
		}
		if c.status == 0 {
			want = 0
		}
		if got := calls.Load() - before; status != c.status || got != want {
			t.Errorf("%s: status %d, error %v, %d calls arrived; want status %d and %d", name, status, err, got, c.status, want)
		}
		client.CloseIdleConnections()
	}
}
