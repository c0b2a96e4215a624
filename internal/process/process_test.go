// SPDX-License-Identifier: Apache-2.0

package process_test

import (
	"context"
	"errors"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/kvroute/kvroute/internal/process"
)

// child runs a shell script, whose last arguments are the flag --ready-file and its value.
func child(t *testing.T, script string) (*process.Child, error) {
	t.Helper()
	return process.StartChild(t.Context(), t.TempDir(), "child", "sh", "-c", script, "child")
}

func TestAChildGivesItsAddresses(t *testing.T) {
	c, err := child(t, `echo hello; echo '{"http": "127.0.0.1:1"}' > "$2"; sleep 1000`)
	if err != nil {
		t.Fatal(err)
	}
	if c.At.HTTP != "127.0.0.1:1" || !strings.Contains(c.LastLines(), "hello") {
		t.Errorf("addresses %+v, log %q", c.At, c.LastLines())
	}
	c.Stop()
	c.Stop()
	if err := c.Err(); err == nil {
		t.Error("a child that was killed has ended well")
	}
	(*process.Child)(nil).Stop()
}

func TestAChildThatEndsSaysWhy(t *testing.T) {
	if _, err := child(t, "echo no port is free >&2"); err == nil || !strings.Contains(err.Error(), "no port is free") {
		t.Errorf("error %v, want the log's end", err)
	}
}

// Stop also ends the children of a program.
func TestStopEndsTheGroup(t *testing.T) {
	p, err := process.Start(t.TempDir(), "group", exec.Command("sh", "-c", `trap "" TERM; sleep 1000 & echo $!; wait`))
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Await(t.Context(), process.Patience, "it starts", func(context.Context) bool { return p.LastLines() != "" }); err != nil {
		t.Fatal(err)
	}
	pid := strings.TrimSpace(p.LastLines())
	p.Kill()
	if err := process.Until(t.Context(), process.Patience, "its child ends", func(context.Context) bool {
		return exec.Command("sh", "-c", "kill -0 "+pid+" && ! grep -q '^State:.Z' /proc/"+pid+"/status").Run() != nil
	}); err != nil {
		t.Error(err)
	}
}

func TestUntilEnds(t *testing.T) {
	no := func(context.Context) bool { return false }
	if err := process.Until(t.Context(), 50*time.Millisecond, "rain", no); err == nil || !strings.Contains(err.Error(), "rain: not in 50ms") {
		t.Errorf("after the limit: %v", err)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	over := errors.New("over")
	cancel(over)
	if err := process.Until(ctx, time.Hour, "rain", no); !errors.Is(err, over) {
		t.Errorf("after the context: %v", err)
	}
}

func TestLinesAnswer(t *testing.T) {
	l, err := process.StartLines(exec.Command("sh", "-c", `while read line; do case $line in quiet) ;; *) echo "[\"$line\"]" ;; esac; done`))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Stop()
	if err := l.Ask("quiet", nil); err != nil {
		t.Fatal(err)
	}
	for _, question := range []string{"one", "two"} {
		var answer []string
		if err := l.Ask(question, &answer); err != nil || len(answer) != 1 || answer[0] != question {
			t.Errorf("%s: %q, %v", question, answer, err)
		}
	}
}
