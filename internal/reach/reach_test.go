// SPDX-License-Identifier: Apache-2.0

package reach_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log" //nolint:depguard // net/http takes no other logger
	"math/big"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

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

// With authorities every call uses TLS, whatever the URL says. A certificate of another authority, or
// for another name, is refused, and the error names the settings. The file is read for each connection.
func TestTheClientChecksCertificates(t *testing.T) {
	worker := httptest.NewUnstartedServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	worker.Config.ErrorLog = log.New(io.Discard, "", 0)
	worker.StartTLS() // with a certificate for example.com and 127.0.0.1
	defer worker.Close()
	plain := httptest.NewServer(http.NotFoundHandler())
	defer plain.Close()
	dir := t.TempDir()
	write := func(name string, text []byte) string {
		t.Helper()
		file := filepath.Join(dir, name)
		if err := os.WriteFile(file, text, 0o600); err != nil {
			t.Fatal(err)
		}
		return file
	}
	right := write("right.pem", pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: worker.Certificate().Raw}))
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	stranger := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true}
	der, err := x509.CreateCertificate(rand.Reader, stranger, stranger, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	wrong := write("wrong.pem", pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
	at := strings.TrimPrefix(worker.URL, "https://")
	for _, c := range []struct{ authorities, name, url, want string }{
		{right, "", "http://" + at, ""},
		{right, "", "https://" + at, ""},
		{right, "example.com", "http://" + at, ""},
		{right, "worker.internal", "http://" + at, "worker-tls-ca is " + right + `, worker-tls-name is "worker.internal"`},
		{wrong, "", "http://" + at, "worker-tls-ca is " + wrong},
		{wrong, "example.com", "https://" + at, "worker-tls-ca is " + wrong},
		{right, "", plain.URL, "HTTP response to HTTPS client"},
		{"", "", "http://" + at, "status 400"},
	} {
		networks := parse(t, "")
		if err := networks.Secure(c.authorities, c.name); err != nil {
			t.Fatal(err)
		}
		client := networks.Client()
		_, err := reach.Get(t.Context(), client, "", c.url, 1000)
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: error %v", c, err)
		}
		client.CloseIdleConnections()
	}

	networks := parse(t, "10.0.0.0/8")
	if err := networks.Secure(right, ""); err != nil {
		t.Fatal(err)
	}
	if _, err := reach.Get(t.Context(), networks.Client(), "", "http://"+at, 1000); err == nil || !strings.Contains(err.Error(), "worker networks") {
		t.Errorf("an address outside the networks: error %v", err)
	}
	networks = parse(t, "")
	file := write("changes.pem", []byte("no certificate"))
	if err := networks.Secure(file, ""); err == nil || !strings.Contains(err.Error(), `worker-tls-ca is "`+file+`", want a PEM file`) {
		t.Errorf("a file without certificates: error %v", err)
	}
	if err := networks.Secure("", "name"); err == nil || !strings.Contains(err.Error(), "needs worker-tls-ca") {
		t.Errorf("a name without authorities: error %v", err)
	}
	if err := networks.Secure(file, ""); err == nil {
		t.Fatal("a file without certificates is accepted")
	}
	client := networks.Client()
	for _, from := range []string{wrong, right, wrong} {
		text, err := os.ReadFile(from)
		if err != nil {
			t.Fatal(err)
		}
		write("changes.pem", text)
		if _, err := reach.Get(t.Context(), client, "", "http://"+at, 1000); (err == nil) != (from == right) {
			t.Errorf("with %s: error %v", from, err)
		}
		client.CloseIdleConnections() // so that the next call opens a connection
	}
}

// An answer is read whole, or not at all.
func TestAnswersHaveALimit(t *testing.T) {
	worker := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/busy" {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
		_, _ = w.Write([]byte("12345"))
	}))
	defer worker.Close()
	client := parse(t, "").Client()
	defer client.CloseIdleConnections()
	if body, err := reach.Get(t.Context(), client, "", worker.URL, 5); err != nil || string(body) != "12345" {
		t.Errorf("%q, %v", body, err)
	}
	if _, err := reach.Get(t.Context(), client, "", worker.URL, 4); err == nil || !strings.Contains(err.Error(), worker.URL) || !strings.Contains(err.Error(), "more than 4 bytes") {
		t.Errorf("an answer of 5 bytes: %v", err)
	}
	_, err := reach.Get(t.Context(), client, "", worker.URL+"/busy", 5)
	if e, ok := errors.AsType[reach.StatusError](err); !ok || e.Status != http.StatusServiceUnavailable || e.Text != "12345" {
		t.Errorf("a status: %v", err)
	}
}

// The client keeps nothing of addresses that it cannot connect to, and goes on to connect to others.
func TestTheClientForgetsAddresses(t *testing.T) {
	worker := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	defer worker.Close()
	address := netip.MustParseAddrPort(strings.TrimPrefix(worker.URL, "http://"))
	client := parse(t, fmt.Sprintf("127.0.0.1/32:%d", address.Port())).Client()
	inUse := func() uint64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.GC() // for pools
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	before := inUse()
	for i := range 12_000 {
		url := fmt.Sprintf("http://127.1.%d.%d:9/", i/250, i%250)
		if _, err := reach.Get(t.Context(), client, "", url, 1); err == nil {
			t.Fatalf("a call to %s", url)
		}
		if i%4000 > 0 {
			continue
		}
		if _, err := reach.Get(t.Context(), client, "", worker.URL, 1); err != nil {
			t.Fatal(err)
		}
	}
	if after := inUse(); after > before+4<<20 {
		t.Errorf("%d bytes for 12,000 addresses", after-before)
	}
	if _, err := reach.Get(t.Context(), client, "", worker.URL, 1); err != nil {
		t.Error(err)
	}
}
