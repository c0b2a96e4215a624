// SPDX-License-Identifier: Apache-2.0

package process

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
)

// Lines is a program that reads questions from its input, a line each, and answers with a
// line of JSON. It may be used by any number of goroutines.
type Lines struct {
	cmd *exec.Cmd

	mu  sync.Mutex // held from a question to its answer
	in  io.WriteCloser
	out *bufio.Reader
}

// StartLines starts a program. Its errors go to the standard error.
func StartLines(cmd *exec.Cmd) (*Lines, error) {
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	return &Lines{cmd: cmd, in: in, out: bufio.NewReaderSize(out, 1<<20)}, nil
}

// Pid is the program's process number.
func (l *Lines) Pid() int { return l.cmd.Process.Pid }

// Ask writes a line and decodes the answer. A line without an answer has nil as its answer.
func (l *Lines) Ask(question string, answer any) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if _, err := io.WriteString(l.in, question+"\n"); err != nil || answer == nil {
		return err
	}
	line, err := l.out.ReadBytes('\n')
	if err != nil {
		return fmt.Errorf("%s ended: %w", l.cmd.Path, err)
	}
	return json.Unmarshal(line, answer)
}

// Stop closes the input, which ends the program, and waits for its end.
func (l *Lines) Stop() {
	_ = l.in.Close()
	_ = l.cmd.Wait() // how it ended does not matter
}
