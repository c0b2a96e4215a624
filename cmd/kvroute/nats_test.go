// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/kvroute/kvroute/bench/demo"
)

// A client without the password cannot register on the bus of a kvroute. The password is in a file
// that only its user can read, and stays the same after a restart.
func TestTheOwnBusWantsItsPassword(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	start := func() *demo.Child {
		return spawn(t, "kvroute", "serve", "--state-dir", dir, "--extproc-address", "127.0.0.1:0", "--http-address", "127.0.0.1:0", "--nats-listen", "127.0.0.1:0")
	}
	c := start()
	at, err := url.Parse(c.At.NATS)
	if err != nil {
		t.Fatal(err)
	}
	for _, anonymous := range []string{"nats://" + at.Host, "nats://kvroute@" + at.Host, "nats://kvroute:guess@" + at.Host} {
		nc, err := nats.Connect(anonymous)
		if !errors.Is(err, nats.ErrAuthorization) {
			t.Errorf("%s: error %v, want a refusal", anonymous, err)
		}
		if err == nil {
			nc.Close()
		}
	}
	file := filepath.Join(dir, "nats-url")
	info, err := os.Stat(file)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Fatalf("%v, %v", info, err)
	}
	registers := func(c *demo.Child, name string) {
		t.Helper()
		e := spawn(t, name, "engine", "--name", name, "--listen", "127.0.0.1:0", "--nats-url", "file:"+file)
		eventually(t, name+" is not registered", func() bool { return strings.Contains(workersText(t, c), `"name":"`+name+`"`) })
		e.Stop()
	}
	registers(c, "a")
	c.Stop()
	c = start()
	again, err := url.Parse(c.At.NATS)
	if err != nil || again.User.String() != at.User.String() {
		t.Errorf("after a restart the user is another one: %v", err)
	}
	registers(c, "b")
}

// The folder of --state-dir belongs to one process: a second one refuses to start, and after the
// first was killed another one uses the folder. The URL of a bus that no longer listens is removed.
func TestAStateFolderHasOneProcess(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	flags := []string{"serve", "--state-dir", dir, "--extproc-address", "127.0.0.1:0", "--http-address", "127.0.0.1:0"}
	c := spawn(t, "kvroute", append(flags, "--nats-listen", "127.0.0.1:0")...)
	status, _, stderr := runs(t, flags...)
	if want := fmt.Sprintf("another kvroute (process %d) uses %s", c.Cmd.Process.Pid, dir); status != 1 || !strings.Contains(stderr, want) {
		t.Errorf("the second process: status %d, %s; want %q", status, stderr, want)
	}
	file := filepath.Join(dir, "nats-url")
	if _, err := os.Stat(file); err != nil {
		t.Error(err)
	}
	kill(t, c)
	spawn(t, "kvroute", flags...)
	if _, err := os.Stat(file); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the URL of the first process is still there: %v", err)
	}
}

// A bus that no other process needs has no port: any number of kvroutes can run on one machine.
// Workers can still register over HTTP.
func TestABusThatNobodyNeedsDoesNotListen(t *testing.T) {
	t.Parallel()
	for range 2 {
		c := spawn(t, "kvroute", "serve", "--extproc-address", "127.0.0.1:0", "--http-address", "127.0.0.1:0")
		if c.At.NATS != "" {
			t.Errorf("a bus listens at %s", c.At.NATS)
		}
		eventually(t, "a worker cannot register", func() bool {
			resp, _ := whole(t, "POST", "http://"+c.At.HTTP+"/v1/workers", `{"name":"a","address":"127.0.0.1:9001","models":["m"]}`, nil)
			return resp.StatusCode == http.StatusCreated
		})
	}
}
