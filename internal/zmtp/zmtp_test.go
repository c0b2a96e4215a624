// SPDX-License-Identifier: Apache-2.0

package zmtp_test

import (
	"bytes"
	"encoding/hex"
	"errors"
	"io"
	"net"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/kvroute/kvroute/internal/zmtp"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// Recorded bytes of libzmq 4.3 as a subscriber and as a publisher.
const (
	libzmqGreeting = "ff00000000000000017f0301" + "4e554c4c00000000000000000000000000000000" + "00" + "00000000000000000000000000000000000000000000000000000000000000"
	libzmqReadySub = "04190552454144590b536f636b65742d5479706500000003535542"
	libzmqReadyPub = "04190552454144590b536f636b65742d5479706500000003505542"
)

func unhex(t testing.TB, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(s)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// talk makes a peer send bytes and close. It returns the results of NewConn and Read, and the
// bytes that the peer received.
func talk(t testing.TB, own zmtp.Role, said []byte) (frames [][]byte, heard []byte, err error) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	theirs, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer theirs.Close()
	ours, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	all := make(chan []byte, 1)
	go func() {
		data, _ := io.ReadAll(theirs)
		all <- data
	}()
	if _, err := theirs.Write(said); err != nil {
		t.Fatal(err)
	}
	_ = theirs.(*net.TCPConn).CloseWrite()
	c, err := zmtp.NewConn(ours, own)
	if err == nil {
		frames, err = c.Read()
		c.Close()
	}
	return frames, <-all, err
}

func TestWhatLibzmqSays(t *testing.T) {
	frames, heard, err := talk(t, zmtp.Pub, unhex(t, libzmqGreeting+libzmqReadySub+"0004016b762d"))
	if err != nil || len(frames) != 1 || string(frames[0]) != "\x01kv-" {
		t.Errorf("a subscription: %q, %v", frames, err)
	}
	want := "ff00000000000000017f0300" + libzmqGreeting[24:] +
		"04260552454144590b536f636b65742d547970650000000350554208" + "4964656e7469747900000000"
	if hex.EncodeToString(heard) != want {
		t.Errorf("we said\n%x, want\n%s", heard, want)
	}
	// ZMTP 3.1 uses commands for subscriptions.
	frames, _, err = talk(t, zmtp.Pub, unhex(t, libzmqGreeting+libzmqReadySub+"040d09"+hex.EncodeToString([]byte("SUBSCRIBE"))+"6b762d"))
	if err != nil || len(frames) != 1 || string(frames[0]) != "\x01kv-" {
		t.Errorf("a command to subscribe: %q, %v", frames, err)
	}
	frames, heard, err = talk(t, zmtp.Sub, unhex(t, libzmqGreeting+libzmqReadyPub+
		"040b0450494e4700646b766b76"+ // PING, ttl 100, context kvkv, must be answered
		"01026b76"+"0100"+"030000000000000003616263"+"000178"))
	if diff := cmp.Diff([][]byte{[]byte("kv"), {}, []byte("abc"), []byte("x")}, frames); err != nil || diff != "" {
		t.Errorf("%v\n%s", err, diff)
	}
	if !bytes.HasSuffix(heard, []byte("\x04\x09\x04PONGkvkv")) {
		t.Errorf("PING is answered by %q", heard[max(0, len(heard)-20):])
	}
}

func TestBadPeers(t *testing.T) {
	greeting := unhex(t, libzmqGreeting)
	with := func(at int, b byte) []byte {
		g := bytes.Clone(greeting)
		g[at] = b
		return g
	}
	ready := unhex(t, libzmqReadyPub)
	for name, said := range map[string][]byte{
		"nothing":            {},
		"HTTP":               []byte("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + strings.Repeat("x", 64)),
		"an old version":     with(10, 1),
		"another mechanism":  with(12, 'P'),
		"no READY":           append(bytes.Clone(greeting), 0, 1, 'x'),
		"a READY cut short":  append(bytes.Clone(greeting), unhex(t, "040d0552454144590b536f636b6574")...),
		"a value cut short":  append(bytes.Clone(greeting), unhex(t, "04170552454144590b536f636b65742d54797065ffffffff50")...),
		"a wrong role":       append(bytes.Clone(greeting), unhex(t, libzmqReadySub)...),
		"a refusal":          append(bytes.Clone(greeting), unhex(t, "0409054552524f52026e6f")...),
		"a long command":     append(append(bytes.Clone(greeting), ready...), unhex(t, "060000000000100000")...),
		"a nameless command": append(append(bytes.Clone(greeting), ready...), unhex(t, "0402ff00")...),
		"flags of nobody":    append(append(bytes.Clone(greeting), ready...), unhex(t, "4001ff")...),
		"a message too long": append(append(bytes.Clone(greeting), ready...), unhex(t, "027fffffffffffffff")...),
		// Two frames, each of which is short enough alone.
		"frames too long":       append(append(bytes.Clone(greeting), ready...), unhex(t, "010178"+"020000000004000000")...),
		"too many frames":       append(append(bytes.Clone(greeting), ready...), bytes.Repeat([]byte{1, 0}, 65)...),
		"a short PING":          append(append(bytes.Clone(greeting), ready...), unhex(t, "04060450494e4700")...),
		"a message without end": append(append(bytes.Clone(greeting), ready...), unhex(t, "0102")...),
	} {
		t.Run(name, func(t *testing.T) {
			_, _, err := talk(t, zmtp.Sub, said)
			if err == nil {
				t.Error("the invalid bytes are accepted")
			}
			if cut := strings.Contains(name, "nothing") || strings.Contains(name, "end"); cut == errors.Is(err, zmtp.ErrProtocol) {
				t.Errorf("error %v", err)
			}
		})
	}
}

func TestEndpoints(t *testing.T) {
	for _, c := range []struct {
		text       string
		base, rank int
		want       string
	}{
		{"tcp://10.0.0.7:5557", 0, 0, "tcp://10.0.0.7:5557"},
		{"tcp://10.0.0.7:5557", 0, 3, "tcp://10.0.0.7:5560"},
		{"tcp://*:5557", 0, 1, "tcp://*:5558"},
		{"tcp://[::1]:5557", 0, 1, "tcp://[::1]:5558"},
		{"tcp://w:{rank}", 5557, 2, "tcp://w:5559"},
		{"tcp://w-{rank}:80", 5557, 2, "tcp://w-2:80"},
		{"tcp://h:0", 0, 2, "tcp://h:0"},
		{"ipc:///run/kv", 0, 0, "ipc:///run/kv"},
		{"ipc:///run/kv-{rank}", 0, 4, "ipc:///run/kv-4"},
		{"ipc://@kv", 0, 0, "ipc://@kv"},
		{"ipc:///run/kv", 0, 1, "{rank} in the path"},
		{"ipc://", 0, 0, "want ipc://"},
		{"ipc://" + strings.Repeat("x", 101), 0, 0, "100 bytes"},
		{"10.0.0.7:5557", 0, 0, "want tcp://"},
		{"tcp://10.0.0.7", 0, 0, "want tcp://"},
		{"tcp://:5557", 0, 0, "want tcp://"},
		{"tcp://h:65535", 0, 1, "no port"},
		{"tcp://h:65536", 0, 0, "want tcp://"},
		{"", 0, 0, "want tcp://"},
	} {
		e, err := zmtp.ParseEndpoint(c.text, c.base, c.rank)
		if err != nil && !strings.Contains(err.Error(), c.want) || err == nil && e.String() != c.want {
			t.Errorf("%s, rank %d: %s, %v; want %s", c.text, c.rank, e, err, c.want)
		}
	}
	for text, want := range map[string]string{"tcp://*:1": "tcp://h:1", "tcp://0.0.0.0:1": "tcp://h:1", "tcp://[::]:1": "tcp://h:1", "tcp://g:1": "tcp://g:1", "ipc:///a": "ipc:///a"} {
		e, err := zmtp.ParseEndpoint(text, 0, 0)
		if got := e.At("h").String(); err != nil || got != want {
			t.Errorf("%s is reached at %s, %v; want %s", text, got, err, want)
		}
	}
}

func FuzzRead(f *testing.F) {
	f.Add([]byte{0, 1, 'x'})
	f.Add(unhex(f, "040b0450494e4700646b766b76"+"01026b76"+"0000"))
	f.Add(unhex(f, "027fffffffffffffff"))
	start := append(unhex(f, libzmqGreeting), unhex(f, libzmqReadyPub)...)
	f.Fuzz(func(t *testing.T, said []byte) {
		frames, _, err := talk(t, zmtp.Sub, append(bytes.Clone(start), said...))
		if err == nil && len(bytes.Join(frames, nil)) > len(said) {
			t.Fatalf("%d frames of %d bytes", len(frames), len(said))
		}
	})
}
